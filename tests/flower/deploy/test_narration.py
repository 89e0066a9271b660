"""Flower's logs in plain words, as the person at a site reads them."""

import re
from pathlib import Path

import pytest

from feddure.flower.deploy.log_filter import Narration


class Told:
    """A narration with its two logs, and what it said."""

    def __init__(self, folder: Path, verbose: bool = False) -> None:
        self.supernode, self.superexec = folder / "supernode.log", folder / "superexec.log"
        self.raw: list[str] = []
        self.narration = Narration(self.supernode, self.superexec, "fed.example.org:9092", self.raw.append, verbose)

    def log(self, supernode: str = "", superexec: str = "") -> list[str]:
        """Write to the logs; returns what is said of it, without the time."""
        before = len(self.raw)
        for path, text in ((self.supernode, supernode), (self.superexec, superexec)):
            with path.open("ab") as file:
                file.write(text.encode())
        self.narration.look()
        return [re.sub(r"^\d\d:\d\d:\d\d  ", "", line) for line in self.raw[before:]]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def info(text: str) -> str:
    return f"\x1b[92mINFO \x1b[0m:      {text}\n"


def error(text: str) -> str:
    return f"\x1b[91mERROR\x1b[0m :     {text}\n"


LOST = "\x1b[93mWARNING\x1b[0m :   Connection attempt failed, retrying in 0.46 seconds\n"
FOUND = info("Connection successful after 0.47 seconds and 2 tries.")


def test_a_site_is_told_when_it_is_connected(told: Told) -> None:
    said = told.log(info("Starting Flower SuperNode") + info("SuperNode ID: 77"))
    assert said == ["connected to fed.example.org:9092; waiting for a run (Ctrl-C leaves the federation)"]
    assert told.narration.joined


def test_what_was_logged_before_is_not_told_again(tmp_path: Path) -> None:
    (tmp_path / "supernode.log").write_text(info("SuperNode ID: 77"))
    told = Told(tmp_path)
    assert told.log() == []
    assert not told.narration.joined


def test_a_lost_connection_is_told_once_and_so_is_its_return(told: Told) -> None:
    told.log(info("SuperNode ID: 77"))
    assert told.log(LOST + LOST) == ["no connection to fed.example.org:9092; trying again until there is one"]
    assert told.log(LOST) == []
    assert told.log(FOUND) == ["connected to fed.example.org:9092 again"]
    assert told.log(LOST) == ["no connection to fed.example.org:9092; trying again until there is one"]


def test_the_sites_own_processes_looking_for_each_other_are_not_told(told: Told) -> None:
    assert told.log(superexec=LOST + FOUND) == []


def test_lines_of_the_client_app_are_told_and_the_rest_is_not(told: Told) -> None:
    said = told.log(
        info("[RUN 7]") + info("Receiving: train message (ID: abc)"),
        "Successfully installed feddure-federation.\nfeddure: round 1/3: loss 2.5\nleft out: jane-doe.png: broken\n",
    )
    assert said == ["round 1/3: loss 2.5"]


def test_a_line_that_comes_again_is_told_once(told: Told) -> None:
    line = "feddure: problem: refused\n"
    assert told.log(superexec=line) == ["problem: refused"]
    assert told.log(superexec=line + line) == []
    assert told.log(superexec="feddure: round 1/3\n" + line) == ["round 1/3", "problem: refused"]


def test_half_a_line_is_told_when_it_is_whole(told: Told) -> None:
    assert told.log(superexec="feddure: round 1/3: lo") == []
    assert told.log(superexec="ss 2.5\nfeddure: rou") == ["round 1/3: loss 2.5"]


def test_a_failed_activation_is_noticed(told: Told) -> None:
    text = error("Exit Code: 305\nFailed to initialize.\n[code: 9] Failed to activate SuperNode.")
    assert told.log(text) == []  # its meaning follows with the end
    assert told.narration.activation_failed


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("Failed to receive message abc: timed out", "a message could not be received from the server (timed out)"),
        ("Failed to send message abc: full", "a message could not be sent to the server (full)"),
        ("Something else broke", "Flower reports an error: Something else broke"),
    ],
)
def test_errors_are_told(told: Told, text: str, meaning: str) -> None:
    (said,) = told.log(error(text))
    assert meaning in said


def test_logs_cannot_reach_into_the_terminal(told: Told) -> None:
    (said,) = told.log(superexec="feddure: problem \x1b]0;title\x07\x1b[2J\n")
    assert said == "problem"


def test_verbose_shows_every_line(tmp_path: Path) -> None:
    said = Told(tmp_path, verbose=True).log(info("SuperNode ID: 77"), "Successfully installed\n")
    assert said[0] == "  | INFO :      SuperNode ID: 77"
    assert said[1].startswith("connected to")
    assert said[2] == "  | Successfully installed"
