"""Files that are there whole or not at all."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from feddure.errors import RunError
from feddure.files import Tail, make_durable, parse_yaml, read_regular, write_whole


def refuse(number):
    def act(*_, **__):
        raise OSError(number, os.strerror(number))

    return act


def test_links_that_somebody_laid_lead_nowhere(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / f".report.html.{os.getpid()}").symlink_to(victim)
    write_whole(tmp_path / "report.html", b"new", RunError)
    assert victim.read_bytes() == b"mine"
    assert (tmp_path / "report.html").read_bytes() == b"new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_or_a_device_is_no_file_to_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_regular(path)


def test_a_folder_is_not_left_open(tmp_path):
    def lowest_free():
        os.close(found := os.dup(0))
        return found

    before = lowest_free()
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(tmp_path)
    assert lowest_free() == before


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be opened here")
def test_a_durable_file_keeps_its_name_too(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append((os.fstat(number).st_ino, path.exists())))
    path = tmp_path / "file"
    write_whole(path, b"new", RunError, durable=True)
    assert synced == [(path.stat().st_ino, False), (tmp_path.stat().st_ino, True)]
    synced.clear()
    make_durable(path)
    assert synced == [(path.stat().st_ino, True), (tmp_path.stat().st_ino, True)]


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, b"old", RunError)
    monkeypatch.setattr(Path, "replace", refuse(errno.ENOSPC))
    with pytest.raises(RunError, match=rf"^{path}: cannot be written \(No space left on device\)$"):
        write_whole(path, b"new", RunError)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_can_only_be_read_is_said_in_the_same_words(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "open", refuse(errno.EROFS))
    monkeypatch.setattr(Path, "unlink", refuse(errno.EROFS))  # which it refuses even for a file that is not there
    with pytest.raises(RunError, match=r"file: cannot be written \(Read-only file system\)$"):
        write_whole(tmp_path / "file", b"new", RunError)


@pytest.mark.parametrize("skip", [False, True])
def test_a_growing_file_is_read_line_by_line_and_anew_where_it_begins_anew(tmp_path, skip):
    path = tmp_path / "log"
    path.write_text("one\ntw")
    tail = Tail(path, skip)
    if not skip:
        assert tail.new() == (True, [b"one"])
    with path.open("a") as file:
        file.write("o\nthr")
    assert tail.new() == (False, [b"two"])
    os.truncate(path, 0)
    path.write_text("1\n")
    assert tail.new() == (True, [b"1"])
    path.unlink()
    assert tail.new() == (False, [])


_PARSE = """
import sys, yaml
from feddure.files import parse_yaml
try:
    parse_yaml(sys.argv[1] * 40_000 + "a", getattr(yaml, sys.argv[2], yaml.SafeLoader))
except yaml.YAMLError as problem:
    print(problem)
"""


@pytest.mark.parametrize("loader", ["SafeLoader", "CSafeLoader"])
@pytest.mark.parametrize("opening", ["[", "{", "- ", "? "])
def test_text_nested_beyond_all_measure_is_an_error(loader, opening):
    """libyaml's loader calls itself for each level without a limit: the process would be gone."""
    done = subprocess.run([sys.executable, "-c", _PARSE, opening, loader], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "nested" in done.stdout) == (0, True), done.stderr


def test_a_file_without_end_is_not_read_into_memory(tmp_path):
    """An archive of a few bytes can hold one: tar writes holes as holes."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"one\n")
    os.truncate(path, 2**40)
    with pytest.raises(OSError, match="larger than 1 GiB"):
        read_regular(path)
    tail = Tail(path)
    assert tail.new() == (True, [b"one"])
    assert tail.new() == (False, [])
    with pytest.raises(yaml.YAMLError, match="characters"):
        parse_yaml("a" * 2**21)


def test_brackets_in_a_text_are_no_nesting():
    assert parse_yaml(f"note: '{'[' * 200}'") == {"note": "[" * 200}
    with pytest.raises(yaml.YAMLError, match="aliases"):
        parse_yaml("a: &b [1]\nc: *b")
