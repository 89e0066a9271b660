"""What a site's operator says to runs: `approve` in a node's configuration is `always`, `ask` or the hash of a run.

A run's hash is that of its experiment, without the batch that the server settles once it knows the sites. Under `ask`
the site takes no part before its operator approved, in whatever the server asks of it.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from feddure.errors import ConfigError, RunError
from feddure.files import parse_yaml, write_json
from feddure.flower.app.audit import AuditLog
from feddure.flower.app.policy import relays_uploads, uploads_class_counts
from feddure.flower.app.private_files import make_private_folder
from feddure.flower.app.sanitize import disclosed, one_line

FILE = "approvals.json"
LEAVES = "the trained parameters, numbers of images, mean losses, and accuracy on the site's own test images if any"

MOST_WAITING = 20
"""Runs without an answer; more than these are refused and not noted."""


def run_hash(experiment: str) -> str:
    """The hash by which a run is approved; `experiment` is YAML."""
    tree = {key: value for key, value in (parse_yaml(experiment) or {}).items() if key != "unlabelled_batch"}
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()[:32]


def check_approval(node: Mapping[str, Any], experiment: str) -> None:
    """Refuse a run that the site's operator has not approved; one that is new is noted as asked for."""
    wanted, found = str(node.get("approve", "always")), run_hash(experiment)
    if wanted in ("always", found):
        return
    if wanted != "ask":
        raise disclosed(
            ConfigError(f"this site's operator approved run {one_line(wanted, 16)}, and this is run {found}")
        )
    answers = Answers(Path(str(node["state"])))
    answer = answers.ask(found, _describe(experiment))
    if answer is None:
        raise disclosed(
            ConfigError(
                f"run {found} waits for your approval: {_describe(experiment)}. Answer y or n here, or: "
                f"feddure federate approve DIR {node.get('site')} {found}"
            ),
            f"its operator has not approved run {found} yet",
        )
    if not answer:
        raise disclosed(ConfigError(f"its operator refused run {found}"))


class Answers:
    """A site's file of runs that asked, and what was answered."""

    def __init__(self, state: Path):
        self._state = state
        self._path = state / FILE

    def read(self) -> dict[str, dict[str, Any]]:
        """By hash: what a run `asks`, and the `answer`: true, false, or null before there is one."""
        try:
            return json.loads(self._path.read_bytes()) if self._path.exists() else {}
        except (OSError, ValueError):
            raise RunError(f"{self._path}: cannot be read; remove it, and runs ask again") from None

    def waiting(self) -> list[str]:
        """The runs without an answer."""
        return [found for found, entry in self.read().items() if entry["answer"] is None]

    def ask(self, found: str, asks: str) -> bool | None:
        """The answer to a run; None where there is none yet."""
        known = self.read()
        if found not in known:
            if len(self.waiting()) >= MOST_WAITING:
                return None  # a server that asks for ever does not fill the disk
            make_private_folder(self._state, RunError)
            self._write(found, asks, None)
            AuditLog(self._state).write("run asks for approval", run=found, asks=asks)
            return None
        return known[found]["answer"]

    def answer(self, found: str, approved: bool) -> None:
        """What the site's operator says to a run."""
        known = self.read()
        if found not in known:
            raise ConfigError(f"run {found}: has not asked; there are: {', '.join(known) or 'none'}")
        self._write(found, known[found]["asks"], approved)
        AuditLog(self._state).write("run approved" if approved else "run refused", run=found)

    def _write(self, found: str, asks: str, answer: bool | None) -> None:
        with FileLock(self._path.with_name(f".{FILE}.lock")):
            entry = {found: {"asks": asks, "answer": answer}}
            write_json(self._path, self.read() | entry, RunError, durable=True)


def _describe(experiment: str) -> str:
    tree = parse_yaml(experiment) or {}
    method = one_line(tree.get("method"), 60)
    relays = "; the server hands the parameters to other sites" if relays_uploads(method) else ""
    counts = ", how many images of each class it learnt from" if uploads_class_counts(method) else ""
    model, rounds = one_line(tree.get("model"), 60), one_line(tree.get("rounds"), 20)
    return f"{method}, {model}, {rounds} rounds; what leaves the site: {LEAVES}{counts}{relays}"
