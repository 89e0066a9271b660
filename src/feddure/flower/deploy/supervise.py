"""A program that becomes another one, which Linux asks to end when the process that started it is gone.

That holds however the process ended, kill -9 included, and nothing in between can be missed. It is a program of its
own because nothing but exec is safe in a child of a process with threads; it imports little, to start fast.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tethered(command: list[str]) -> list[str]:
    """The command line under which a command ends with this process; only Linux can do that."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    """Become the command, unless the parent is gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == parent:
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
