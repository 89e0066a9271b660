"""`feddure federate site`: a site's SuperNode, after a look at what it needs."""

import os
import re
import secrets
import select
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from feddure import experiments
from feddure.config import Experiment
from feddure.data.sources.images import FULL_DEPTH
from feddure.errors import RunError
from feddure.files import Tail
from feddure.flower.app.client import read_experiment
from feddure.flower.app.ledger import Ledger
from feddure.flower.app.policy import Answers
from feddure.flower.app.privacy import Protection
from feddure.flower.app.private_files import make_private_folder
from feddure.flower.app.sanitize import LOG_MARK, log_prefix, printable
from feddure.flower.app.site_data import ImageFolder
from feddure.flower.deploy import certificates
from feddure.flower.deploy.allowlist import check_path, write_wrappers
from feddure.flower.deploy.check import check, clock_problem, reach
from feddure.flower.deploy.control import (
    LOOPBACK,
    OWN_SUPEREXEC,
    Show,
    environment,
    shown,
    superexec_command,
    timed,
    toml_pairs,
)
from feddure.flower.deploy.layout import Bundle, Connection, read_connection
from feddure.flower.deploy.processes import Process, ProcessGroup, Terminated, free_port, pidfile, write_pidfile
from feddure.simulation.engine import Engine

Options = Mapping[str, Any]
_RETRY_SECONDS, _PAUSE_SECONDS = 120.0, 15.0
"""After a crash the server counts a site as connected for a minute, and turns its next start away that long."""
_NAMED_FILES = 10
_LEVEL = re.compile(r"(INFO|WARNING|ERROR)\s*:\s+(.*)")
_JOINED = "SuperNode ID: "
_LOST = "Connection attempt failed"
_FOUND_AGAIN = "Connection successful"
_NOT_ACTIVATED = "Failed to activate SuperNode"
_NOT_RECEIVED, _NOT_SENT = "Failed to receive message", "Failed to send message"
_EXPLAINED_AT_THE_END = ("Exit Code:", "SSL/TLS handshake error")
"""Errors with which a SuperNode ends; whoever waits for its end says what that means."""


def join(bundle: Bundle, site: str, images: ImageFolder, options: Options, show: Show, verbose: bool = False) -> None:
    """Take part in the federation until told to end; comes back after a crash.

    Flower's logs go to files, and what they mean to `show`; with `verbose` they are shown too.
    """
    bundle = Bundle(bundle.root.resolve())
    make_private_folder(bundle.state, RunError)
    with pidfile(bundle.pidfile, f"site {site}"):
        try:
            _join(bundle, site, images, options, show, verbose)
        except Terminated:
            show("left the federation")
            raise


def _join(bundle: Bundle, site: str, images: ImageFolder, options: Options, show: Show, verbose: bool) -> None:
    address = read_connection(bundle).address
    logs = bundle.supernode_log, bundle.superexec_log
    show(f"site {site}; Flower's own logs: {' and '.join(map(str, logs))}")
    failing_since = time.monotonic()
    while True:
        began = time.monotonic()
        seen = LogFilter(*logs, address, show, verbose)
        mark = {LOG_MARK: seen.mark}
        with start(bundle, site, images, options, show, mark, show_command=verbose) as processes:
            ended = processes.wait(seen.update, partial(_answer_at_terminal, bundle, show))
        now = time.monotonic()
        reason = _reason(bundle, site, ended, seen)
        if now - began > _RETRY_SECONDS:
            failing_since = now  # it had joined before it ended
        if now - failing_since > _RETRY_SECONDS:
            raise RunError(f"site {site} does not stay in the federation: {reason}\n{ended.log_tail()}".rstrip())
        show(f"{reason}; again in {_PAUSE_SECONDS:.0f} seconds")
        time.sleep(_PAUSE_SECONDS)


def _answer_at_terminal(bundle: Bundle, show: Show) -> None:
    """Hear what the person at the terminal says to a run that waits for approval."""
    if not (sys.stdin and sys.stdin.isatty()) or os.name == "nt" or not select.select([sys.stdin], [], [], 0)[0]:
        return
    answer_waiting(sys.stdin.readline().strip().lower(), Answers(bundle.state), show)


def answer_waiting(said: str, answers: Answers, show: Show) -> None:
    """Take y or n for the run that waits; of several, a server may have slipped one in before the other was read."""
    waiting = answers.waiting() if said in ("y", "yes", "n", "no") else []
    if len(waiting) > 1:
        show(f"{len(waiting)} runs wait; answer one by its hash: feddure federate approve DIR NAME HASH")
        for run in waiting:
            show(f"  {run}: {answers.read()[run]['asks']}")
    elif waiting:
        answers.answer(waiting[0], approved=said[0] == "y")
        word = "approved" if said[0] == "y" else "refused"
        show(f"run {waiting[0]} is {word}; the server hears of it within a minute")


def _reason(bundle: Bundle, site: str, ended: Process, seen: "LogFilter") -> str:
    """What the end of a site's process means; an error where another start would end in the same way."""
    connection = read_connection(bundle)
    # Flower's SuperNode ends as if it had been asked to where a server answers 401, and says nothing of it.
    quietly = ended.name == "flower-supernode" and ended.code == 0 and not seen.joined
    if quietly and reach(connection, bundle.authority).outcome == "ok":
        wrong_clock = clock_problem(connection, bundle.authority)
        if not wrong_clock:
            raise RunError(_unknown_key(bundle, site, connection))
        return f"the server at {connection.address} turned this site away: {wrong_clock}"
    if seen.activation_failed:
        return (
            f"the server at {connection.address} counts {site} as connected already: an earlier start may still count "
            f"for a minute, or the site runs on another machine (end it there)"
        )
    return f"{ended.name} ended by itself (exit code {ended.code})"


def _unknown_key(bundle: Bundle, site: str, connection: Connection) -> str:
    key = certificates.fingerprint(certificates.read_private_key(bundle.key).public_key())
    return (
        f"site {site}: the server at {connection.address} turned this site away: it does not know its key.\n"
        f"given: {bundle.key}, {key}\n"
        f"to do: ask the server's operator to compare it with `ssh-keygen -lf server/nodes/{site}.pub` there. Where "
        f"they differ, use the node.key of the latest bundle, or make a new key (one that was unregistered is of no "
        "more use) and send its .pub to the operator, who runs "
        f"`feddure federate sites rotate DIR {site} --public-key FILE`"
    )


def start(
    bundle: Bundle,
    site: str,
    images: ImageFolder,
    options: Options,
    show: Show,
    more_environment: Mapping[str, str] | None = None,
    show_command: bool = True,
) -> ProcessGroup:
    """A site's SuperNode, with the options of its ClientApp, and its SuperExec, both started; the caller ends them.

    A SuperNode cannot go on with another SuperExec: it would wait for ever for the answer to a message at which the
    first one was at work. So both end with either.
    """
    bundle = Bundle(bundle.root.resolve())  # the SuperNode starts in another folder
    connection = _preflight(bundle, site, images, options, show)
    bundle.flower_home.mkdir(exist_ok=True)
    programs = write_wrappers(bundle.programs)
    surroundings = environment(bundle.flower_home, programs) | dict(more_environment or {})
    if os.name == "nt":
        show("note: the allowlist does not work on Windows: a run could bring code of the server's choice here")
    else:
        check_path(programs, surroundings["PATH"])
    port = free_port()
    command = supernode_command(bundle, connection, images.resolve(), port, options)
    if show_command:
        show("$ " + shown(command))
    # A run's options may name modules, and those of the current folder count: not the operator's own.
    supernode = Process(command, surroundings, bundle.supernode_log, bundle.flower_home, "flower-supernode")
    try:
        # Flower does not encrypt what these two say to each other on the loopback address.
        command = superexec_command(port, supernode.popen.pid, authority=None)
        superexec = Process(command, surroundings, bundle.superexec_log, bundle.flower_home, "flower-superexec")
        write_pidfile(bundle.pidfile, supernode, superexec)
    except BaseException:
        supernode.stop()  # and with it the SuperExec
        raise
    return ProcessGroup(supernode, superexec)


def _preflight(bundle: Bundle, site: str, images: ImageFolder, options: Options, show: Show) -> Connection:
    """Refuse what would fail in every round, and a server that is not this federation's; how to reach the right one."""
    # Options with which the ClientApp could not train are refused here: they would fail there in every round.
    protection = Protection.of_node(options)
    Engine(read_experiment(experiments.to_yaml(Experiment()), str(options.get("device", ""))).engine)
    make_private_folder(bundle.state, RunError)
    ledger = Ledger(bundle.state)
    if ledger.exists:
        show(
            f"privacy: {ledger.account(protection.delta, protection.budget)}: what all runs may have told of this site"
        )
        if not (protection.noise or protection.budget):
            show("note: without --dp-noise or --dp-budget this site answers only runs that ask for noise themselves")
    found = check(bundle, site, images, connect=False, cache=bundle.cache)
    for finding in found.findings:
        if finding.level == "note":
            show(f"note: {finding.text}")
    for file, problem in found.unreadable[:_NAMED_FILES]:
        show(f"  {file}: {problem}")
    if len(found.unreadable) > _NAMED_FILES:
        show(f"  ... and {len(found.unreadable) - _NAMED_FILES:,} more (`feddure federate check --json` names all)")
    if not found.passed:
        problems = "\n".join(finding.text for finding in found.findings if finding.level == "problem")
        raise RunError(f"site {site} cannot join:\n{problems}")
    connection = read_connection(bundle)
    reached = reach(connection, bundle.authority)
    if reached.outcome == "untrusted":
        raise RunError(f"site {site} cannot join:\n{reached.text}")
    if reached.outcome == "unreachable":
        show(f"note: {reached.text} The site keeps trying.")
    return connection


def supernode_command(
    bundle: Bundle, connection: Connection, images: ImageFolder, port: int, options: Mapping[str, Any] | None = None
) -> list[str]:
    """A site's SuperNode; `port` is for the site's own processes, `options` are those of its ClientApp."""
    config: dict[str, Any] = {
        "site": connection.site,
        "data": str(images.path),
        "state": str(bundle.state),
        "description": str(bundle.description),
        **({} if images.depth == FULL_DEPTH else {"depth": images.depth}),
        **(options or {}),
    }
    return [
        *(sys.executable, "-P", "-m", "feddure.flower.deploy.supernode", str(bundle.state)),
        *("--superlink", connection.address),
        *("--root-certificates", str(bundle.authority), "--auth-supernode-private-key", str(bundle.key)),
        *("--host", LOOPBACK, "--port", str(port)),
        *OWN_SUPEREXEC,
        *("--node-config", toml_pairs(config)),
    ]


# --- Flower's logs in plain lines --------------------------------------------------------------------
class LogFilter:
    """What the person at a site sees of one start: Flower's logs, which go to files, in a few plain lines.

    Errors repeat texts of the server's, line by line, so feddure's own lines have a mark that the server does not know:
    none of its texts is to look like the question for approval.
    """

    def __init__(self, supernode: Path, superexec: Path, server: str, show: Show, verbose: bool = False):
        self.mark = secrets.token_hex(4)
        self.joined = False
        self.activation_failed = False
        self._supernode, self._superexec = Tail(supernode, skip=True), Tail(superexec, skip=True)
        self._server = server
        self._show, self._tell = show, timed(show)
        self._verbose = verbose
        self._connected = True  # until an attempt fails
        self._last = ""

    def update(self) -> None:
        """Show what was logged since the last update."""
        for line in _new_lines(self._supernode):
            self._raw(line)
            self._connection_line(line)
        for line in _new_lines(self._superexec):
            self._raw(line)
            self._work_line(line)

    def _connection_line(self, line: str) -> None:
        level, text = _split_level(line)
        if text.startswith(_JOINED):
            self.joined = self._connected = True
            self._tell(f"connected to {self._server}; waiting for a run (Ctrl-C leaves the federation)")
        elif text.startswith(_LOST):
            if self._connected:
                self._tell(f"no connection to {self._server}; trying again until there is one")
            self._connected = False
        elif text.startswith(_FOUND_AGAIN):
            if self.joined and not self._connected:
                self._tell(f"connected to {self._server} again")
            self._connected = True
        elif _NOT_ACTIVATED in line:
            self.activation_failed = True
        elif text.startswith((_NOT_RECEIVED, _NOT_SENT)):
            done = "received from" if text.startswith(_NOT_RECEIVED) else "sent to"
            reason = text.partition(": ")[2] or "no reason given"
            self._tell(f"warning: a message could not be {done} the server ({reason}); the round goes on without it")
        elif level == "ERROR" and not text.startswith(_EXPLAINED_AT_THE_END):
            self._tell(f"Flower reports an error: {text}")

    def _work_line(self, line: str) -> None:
        level, text = _split_level(line)
        if line.startswith(own := log_prefix(self.mark)):
            if line != self._last:  # a run that refuses this site asks it again and again
                self._tell(line.removeprefix(own))
            self._last = line
        elif level == "ERROR":
            self._tell(f"Flower reports an error: {text}")

    def _raw(self, line: str) -> None:
        if self._verbose and line:
            self._show(f"  | {line}")


def _new_lines(log: Tail) -> list[str]:
    return [printable(line.decode(errors="replace")).strip() for line in log.new()[1]]


def _split_level(line: str) -> tuple[str, str]:
    """The level of a line of Flower's, and what it says; no level where another program wrote it."""
    found = _LEVEL.fullmatch(line)
    return (found[1], found[2]) if found else ("", line)
