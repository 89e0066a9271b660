"""Files that are there whole or not at all."""

import errno
import json
import os
import stat
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from feddure.errors import FeddureError

_DEEPEST = 100
_MOST_YAML = 2**20  # characters: its readers are slow
_MOST_BYTES = 2**30  # of a file that is read whole: a few bytes of an archive can become a file of any length
_MOST_AT_ONCE = 2**26  # bytes of a file that grows


def write_whole(path: Path, content: bytes | memoryview, error: type[FeddureError], durable: bool = False) -> None:
    """Write a file aside and rename it: a kill at any moment leaves the old file or the new one.

    `durable` also survives a loss of power. A file that cannot be written raises `error`, which names it.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.unlink(missing_ok=True)  # of a killed process; or a link that somebody laid, and that leads elsewhere
        with aside.open("xb") as file:
            file.write(content)
        if durable:
            _sync(aside)
        aside.replace(path)
        if durable:
            _sync_folder(path.parent)
    except OSError as problem:
        with suppress(OSError):  # a disk that can only be read leaves nothing to remove
            aside.unlink(missing_ok=True)
        raise error(f"{path}: cannot be written ({problem.strerror})") from None


def expect_free(folder: Path, error: type[FeddureError], text: str, hidden: bool = False) -> None:
    """Refuse a file, or a folder with visible things in it, or `hidden` ones too; `text` goes on from "not empty"."""
    if folder.exists() and not folder.is_dir():
        raise error(f"{folder}: a file is there; choose another folder")
    if folder.exists() and any(hidden or not entry.name.startswith(".") for entry in folder.iterdir()):
        raise error(f"{folder}: the folder is not empty{text}")


def open_regular(path: str | PathLike[str]) -> BinaryIO:
    """A regular file to read; a folder, or a pipe or a device, which may have no end, is an OSError."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(number, "rb")


def read_regular(path: Path, most: int = _MOST_BYTES) -> bytes:
    """All of a regular file; a larger one is an OSError."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most / 2**30:g} GiB")
        return file.read()


class Tail:
    """The lines of a file that grows; one that was replaced or begun anew is read from its start."""

    def __init__(self, path: Path, skip: bool = False):
        """With `skip`, lines that are there already count as read."""
        self._path = path
        self._read, self._inode, self._rest = 0, -1, b""
        while skip and self.new()[1]:
            pass

    def new(self) -> tuple[bool, list[bytes]]:
        """Whether it starts over, and the whole lines since the last call; one under way comes with a later call.

        Of very much, some comes with later calls, too; a line that is longer than any is dropped.
        """
        try:
            with open_regular(self._path) as file:
                about = os.fstat(file.fileno())
                over = about.st_ino != self._inode or about.st_size < self._read
                if over:
                    self._read, self._inode, self._rest = 0, about.st_ino, b""
                file.seek(self._read)
                text = file.read(_MOST_AT_ONCE)
        except OSError:
            return False, []
        self._read += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        if len(self._rest) > _MOST_AT_ONCE:
            self._rest = b""
        return over, lines


def write_json(path: Path, content: Any, error: type[FeddureError], durable: bool = False) -> None:
    """Write plain values as JSON, whole or not at all."""
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode(), error, durable)


def parse_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Plain values; whatever is wrong with the text is a YAMLError."""
    if len(text) > _MOST_YAML:
        raise yaml.YAMLError(f"{len(text):,} characters, expected at most {_MOST_YAML:,}")
    try:
        depth = 0
        for event in yaml.parse(text, loader):
            # With aliases a few lines can stand for any number of values.
            if isinstance(event, yaml.AliasEvent):
                raise yaml.YAMLError("aliases, such as *name, are not read: write out what they stand for")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:  # libyaml's loader would leave the stack, and end the process with it
                raise yaml.YAMLError(f"lists and mappings are nested more than {_DEEPEST} deep")
        return yaml.load(text, loader)
    except (ValueError, ArithmeticError, RecursionError) as problem:  # numbers and dates that there are none of
        raise yaml.YAMLError(str(problem)) from None


def is_text(name: str | Path) -> bool:
    """Whether a file's name is UTF-8."""
    return str(name).isascii() or readable(name) == str(name)


def readable(name: str | Path) -> str:
    """A file's name as a text that can be written anywhere; bytes that are no UTF-8 are read as Latin-1."""
    try:
        return os.fsencode(name).decode("utf-8")
    except UnicodeDecodeError:
        return os.fsencode(name).decode("latin-1")


def shown(path: str | Path) -> str:
    """A path in one line that any terminal and file can hold."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in readable(path))


def make_durable(path: Path) -> None:
    """Wait until a file, if it is there, and its name would survive a loss of power."""
    if path.exists():
        _sync(path)
        _sync_folder(path.parent)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system opens a folder, nor every file system syncs one
        _sync(folder)
