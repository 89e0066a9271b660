"""What a site's noisy updates have told about its images so far: a file at the site that only grows.

One file for a site and federation, over all runs: a line for each update, written *before* the update leaves, so that
a kill at any moment counts too much rather than too little. Each line holds the hash of the line before, and a second
file that of the last one: lines that were changed, cut off or lost are noticed, and the site then sends nothing.
"""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from feddure.errors import RunError
from feddure.flower.app.private_files import make_private_folder, write_private_file
from feddure.flower.app.sanitize import disclosed
from feddure.simulation import dp

FILE, LAST = "privacy.jsonl", "privacy.last"


@dataclass(frozen=True)
class Account:
    """What all updates together cost; `budget` 0 is none."""

    updates: int
    epsilon: float
    delta: float
    budget: float

    def __str__(self) -> str:
        of = f" of {self.budget:g}" if self.budget else ""
        return f"ε {self.epsilon:.2f}{of} used at δ {self.delta:g}, {self.updates:,} updates"


class Ledger:
    """The ledger in a site's folder of state."""

    def __init__(self, state: Path):
        self._state = state
        self._path, self._last = state / FILE, state / LAST

    @property
    def exists(self) -> bool:
        return self._path.exists() or self._last.exists()

    def account(self, delta: float, budget: float = 0.0, noise: float = 0.0) -> Account:
        """Of what was sent, and of an update with this noise besides; an error where that is over the budget."""
        return _account(self._entries()[0], delta, budget, noise)

    def spend(self, delta: float, budget: float, noise: float, **about: Any) -> Account:
        """Write down an update that is about to leave; an error where it may not."""
        make_private_folder(self._state, RunError)
        with FileLock(self._state / "privacy.lock", mode=0o600):
            noises, size, last = self._entries()
            found = _account(noises, delta, budget, noise)
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            line = json.dumps({"time": when, "noise": noise, **about, "previous": last}).encode()
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.ftruncate(file, size)  # a line that a kill cut short was of an update that never left
                os.lseek(file, size, os.SEEK_SET)
                if os.write(file, line + b"\n") != len(line) + 1:
                    raise OSError(None, "the disk is full")
                os.fsync(file)
            except OSError as problem:
                raise disclosed(
                    RunError(f"{self._path}: cannot be written ({problem.strerror}); no update is sent without it"),
                    "the site's privacy ledger cannot be written",
                ) from None
            finally:
                os.close(file)
            write_private_file(self._last, _hash(line).encode(), RunError, durable=True)
        return found

    def _entries(self) -> tuple[Counter[float], int, str]:
        """How many updates had which noise, how many bytes the whole lines take, and the hash of the last."""
        try:
            content = self._path.read_bytes() if self._path.exists() else b""
            last = self._last.read_text() if self._last.exists() else ""
            lines = content.split(b"\n")[:-1]
            hashes = ["", *map(_hash, lines)]
            entries = [json.loads(line) for line in lines]
            whole = all(entry["previous"] == before for entry, before in zip(entries, hashes, strict=False))
            # A kill between the two files leaves the second one line behind.
            if not whole or last not in hashes[-2:] or not all(entry["noise"] > 0 for entry in entries):
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError):
            raise disclosed(
                RunError(
                    f"{self._path} and {self._last.name}: the privacy ledger is damaged or a part of it is missing, so "
                    "nobody knows what was told; restore both files from a copy. (Without both a new account begins: "
                    "only where you know that nothing was sent.)"
                ),
                "the site's privacy ledger is damaged; the site sends nothing until it is restored",
            ) from None
        return Counter(entry["noise"] for entry in entries), sum(len(line) + 1 for line in lines), hashes[-1]


def epsilon_of(updates: Mapping[float, int], delta: float) -> float:
    """What a site's updates cost together: how many there were of each noise, in units of clip-norm.

    All other images in place of the site's own move a clipped update by up to twice the norm, hence z / 2.
    """
    return dp.epsilon([(noise / 2, 1.0, times) for noise, times in updates.items()], delta)


def _account(noises: Counter[float], delta: float, budget: float, more: float) -> Account:
    """The account after one more update, where that has any noise."""
    now = Account(noises.total(), epsilon_of(noises, delta), delta, budget)
    if not more:
        return now
    then = Account(now.updates + 1, epsilon_of(noises + Counter([more]), delta), delta, budget)
    if budget and not then.epsilon <= budget:
        raise disclosed(
            RunError(
                f"this site's privacy budget does not allow another update: {now}, {then.epsilon:.2f} with one "
                "more; the site takes no further part unless its operator raises the budget"
            )
        )
    return then


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
