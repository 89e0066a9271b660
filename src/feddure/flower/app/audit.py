"""The audit log of a server or a site: append-only lines, each with the hash of the line before.

Whoever changes, adds or removes a line breaks the chain there; whoever cuts off the end must also change the copies of
the last hash that `feddure federate audit` printed and that sites wrote down in their own logs, round by round. A line
that was being written at a kill is left as it is, and the next one vouches for it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock
from flwr.app import RecordDict

from feddure.errors import RunError

FILE = "audit.jsonl"
_START = "0" * 64
_TORN = "a line was torn"
_TAIL_BYTES = 1 << 20
"""Of a file's end, at first: more than an entry has; of a longer one, more is read."""
_MOST_DIMENSIONS = 8


class AuditLog:
    """Appends entries to a file, from any number of processes; without a folder it does nothing."""

    def __init__(self, folder: Path | None):
        self._path = folder / FILE if folder is not None else None

    def write(self, event: str, **facts: Any) -> str:
        """Add an entry that survives a kill and a loss of power; returns its hash."""
        if self._path is None:
            return ""
        try:
            with FileLock(self._path.with_name(f".{FILE}.lock")):
                descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
                try:
                    before, torn, whole = _end(descriptor)
                    added = b"" if whole else b"\n"
                    if torn:
                        line = _line(_TORN, before, {"sha256": _hash(torn)})
                        added, before = added + line + b"\n", _hash(line)
                    line = _line(event, before, facts)
                    added += line + b"\n"
                    if os.write(descriptor, added) != len(added):
                        raise OSError(None, "the disk is full")
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except OSError as problem:
            raise RunError(f"{self._path}: the audit log cannot be written ({problem.strerror})") from None
        return _hash(line)


@dataclass(frozen=True)
class Audit:
    """What an audit log says, up to where its chain is broken."""

    entries: list[dict[str, Any]]
    head: str  # hash of the last entry
    problem: str  # where the chain is broken, or nothing
    torn: bool  # whether the last line was being written when its process ended


def read(path: Path) -> Audit:
    """Read and verify an audit log."""
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise RunError(f"{path}: cannot be read ({problem.strerror})") from None
    entries: list[dict[str, Any]] = []
    head, torn = _START, []
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n") if content else (), start=1):
        entry = _parse(line)
        if entry is None:
            torn.append(line)
            continue
        vouched = not torn or (entry["event"], entry.get("sha256")) == (_TORN, _hash(b"\n".join(torn)))
        if entry["before"] != head or not vouched:
            return Audit(entries, head, f"line {number} does not follow the one before: something was changed", False)
        entries.append(entry)
        head, torn = _hash(line), []
    changed = "its last line is not an entry: it was changed" if torn and content.endswith(b"\n") else ""
    return Audit(entries, head, changed, bool(torn) and not changed)


def compare(server: Audit, site: Audit) -> list[str]:
    """Where the logs of a server and of a site disagree on what travelled between them, and when."""
    try:
        return list(_disagreements(server, site))
    except (KeyError, TypeError):
        raise RunError("not the audit log of a site and that of its server, both of this version") from None


def _disagreements(server: Audit, site: Audit) -> Iterator[str]:
    kept = {entry["before"] for entry in server.entries} | {server.head}
    own = [entry for entry in site.entries if "servers_log" in entry]
    if not own:
        raise KeyError
    told: dict[str, list[dict[str, Any]]] = {}  # by run and round, as often as that was done: of a resumed run twice
    for entry in server.entries:
        for about in entry["sites"] if entry["event"] == "round" else ():
            if about["site"] == own[0]["site"] and "sent" in about:
                told.setdefault(f"run {entry['run']}, round {entry['round']}", []).append(about)
    for entry in own:
        which = f"run {entry['run']}, round {entry['round']}"
        if entry["servers_log"] not in kept:
            yield f"{which}: the server's log ended with another entry then: {entry['servers_log'][:12]}"
        if which not in told:
            yield f"{which}: the server's log has no such round with this site; one that ended in it writes none"
            continue
        for ours, theirs in (("received", "sent"), ("sent", "received")):
            known = {about[theirs]["sha256"] for about in told[which] if theirs in about}
            if ours in entry and known and entry[ours]["sha256"] not in known:
                names = ", ".join(name[:12] for name in sorted(known))
                yield f"{which}: the site {ours} {entry[ours]['sha256'][:12]}, and the server's log has {names}"
    sent = {(f"run {e['run']}, round {e['round']}", e["sent"]["sha256"]) for e in own if "sent" in e}
    for which, abouts in told.items():
        for received in (about["received"] for about in abouts if "received" in about):
            if received["bytes"] and (which, received["sha256"]) not in sent:
                yield f"{which}: the server received {received['sha256'][:12]}, and the site's log has nothing of it"


def describe_arrays(content: RecordDict) -> dict[str, Any]:
    """What a message carries: names, shapes, bytes and a hash, the same at server and site."""
    arrays = {
        f"{record}.{name}": array
        for record, found in sorted(content.array_records.items())
        for name, array in sorted(found.items())
    }
    found = hashlib.sha256()
    for name, array in arrays.items():
        found.update(f"{name} {len(array.data)}\n".encode(errors="surrogatepass"))  # a sender may name it anything
        found.update(array.data)
    return {
        "arrays": {name[:100]: _shape(array.shape) for name, array in list(arrays.items())[:100]},
        "bytes": sum(len(array.data) for array in arrays.values()),
        "sha256": found.hexdigest(),
    }


def _shape(shape: Sequence[Any]) -> list[Any]:
    """What an array says of its shape, which a sender may make anything, of any length."""
    return [size if type(size) is int and abs(size) < 2**63 else None for size in shape[:_MOST_DIMENSIONS]]


def _line(event: str, before: str, facts: Mapping[str, Any]) -> bytes:
    entry = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **facts, "before": before}
    return json.dumps(entry).encode()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        return entry if isinstance(entry["event"], str) and isinstance(entry["before"], str) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _end(descriptor: int) -> tuple[str, bytes, bool]:
    """The hash of a file's last entry, what was torn after it, and whether the file ends with a whole line."""
    size = os.fstat(descriptor).st_size
    wanted = _TAIL_BYTES
    while True:
        start = max(size - wanted, 0)
        *lines, rest = os.pread(descriptor, size - start, start).split(b"\n")
        lines += [rest] if rest else []
        torn: list[bytes] = []
        while len(lines) > bool(start) and _parse(lines[-1]) is None:  # the first may be the end of a line
            torn.insert(0, lines.pop())
        if len(lines) > bool(start):
            return _hash(lines[-1]), b"\n".join(torn), not rest
        if not start:
            return _START, b"\n".join(torn), not rest
        wanted *= 4


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
