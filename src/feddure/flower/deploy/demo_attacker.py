"""The hostile site of `feddure federate demo --attacker`: an insider with a valid key whose program is not feddure's.

No option makes a real site hostile. The demo puts this program in the place of the one that a site's SuperNode finds,
as somebody would who owns the machine; all the rest of the site is as it was.
"""

import shlex
import sys
from functools import wraps
from typing import Any

from feddure.config import AttackOptions
from feddure.flower.app.client import Worker
from feddure.flower.app.messages import Task
from feddure.flower.deploy import allowlist
from feddure.flower.deploy.layout import Bundle
from feddure.methods.base import State
from feddure.simulation.attacks import poison_upload

ATTACK = AttackOptions(kind="sign-flip", factor=10)
_MODULE = "feddure.flower.deploy.demo_attacker"  # `__name__` is another where this file is the program


def replace_program(bundle: Bundle) -> None:
    """Let a site that was started answer with poisoned updates from its next message on."""
    program = bundle.programs / allowlist.CLIENT_PROGRAM
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m {_MODULE} "$@"\n')


def main() -> None:
    """The site's own program, but for what training returns."""
    honest = Worker.train

    @wraps(honest)
    def train(self: Worker, site: Any, task: Task, received: State, memory: Any) -> tuple[State, dict[str, Any]]:
        upload, answer = honest(self, site, task, received, memory)
        assignment = task.assignment
        key = (assignment.seed, assignment.round, assignment.client)
        return poison_upload(ATTACK, received, upload, key), answer

    Worker.train = train  # type: ignore[method-assign]
    allowlist.main()


if __name__ == "__main__":
    main()
