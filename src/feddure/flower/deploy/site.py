"""`feddure federate site`: a site's SuperNode, after a look at what it needs."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddure.data.sources.images import FULL_DEPTH
from feddure.errors import RunError
from feddure.flower.deploy import allowlist as guard
from feddure.flower.deploy import certificates, commands
from feddure.flower.deploy import pidfile as running
from feddure.flower.deploy import preflight as trial
from feddure.flower.deploy.check import check
from feddure.flower.deploy.connection import clock_problem, reach
from feddure.flower.deploy.control import Show
from feddure.flower.deploy.layout import Bundle, Connection, read_connection
from feddure.flower.deploy.log_filter import Narration
from feddure.flower.deploy.processes import Ended, Process, Together, free_port

_PATIENCE_SECONDS, _PAUSE_SECONDS = 120.0, 15.0
"""After a crash the server counts a site as connected for a minute, and turns its next start away that long."""
_LOG_BYTES = 10_000_000
_NAMED_FILES = 10


def join(bundle: Bundle, site: str, data: Path, options: Mapping[str, Any], show: Show, verbose: bool = False) -> None:
    """Take part in the federation until told to end; comes back after a crash.

    Flower's logs go to files, and what they mean to `show`; with `verbose` they are shown too.
    """
    bundle = Bundle(bundle.root.resolve())
    _make_private(bundle.state)
    with running.alone(bundle.running, f"site {site}"):
        try:
            _join(bundle, site, data, options, show, verbose)
        except Ended:
            show("left the federation")
            raise


def _join(bundle: Bundle, site: str, data: Path, options: Mapping[str, Any], show: Show, verbose: bool) -> None:
    address = read_connection(bundle).address
    logs = bundle.supernode_log, bundle.superexec_log
    for log in logs:
        _keep_short(log)
    show(f"site {site}; Flower's own logs: {' and '.join(map(str, logs))}")
    failing_since = time.monotonic()
    while True:
        began = time.monotonic()
        told = Narration(*logs, address, show, verbose)
        with start(bundle, site, data, options, show, show_command=verbose) as processes:
            ended = processes.wait(told.look)
        now = time.monotonic()
        reason = _why(bundle, site, ended, told)
        if now - began > _PATIENCE_SECONDS:
            failing_since = now  # it had joined before it ended
        if now - failing_since > _PATIENCE_SECONDS:
            raise RunError(f"site {site} does not stay in the federation: {reason}\n{ended.last_words()}".rstrip())
        show(f"{reason}; again in {_PAUSE_SECONDS:.0f} seconds")
        time.sleep(_PAUSE_SECONDS)


def _why(bundle: Bundle, site: str, ended: Process, told: Narration) -> str:
    """What the end of a site's process means; an error where another start would end in the same way."""
    connection = read_connection(bundle)
    # Flower's SuperNode ends as if it had been asked to where a server answers 401, and says nothing of it.
    quietly = ended.name == "flower-supernode" and ended.code == 0 and not told.joined
    if connection.secure and quietly and reach(connection, bundle.authority).outcome == "ok":
        wrong_clock = clock_problem(connection, bundle.authority)
        if not wrong_clock:
            raise RunError(_unknown_key(bundle, site, connection))
        return f"the server at {connection.address} turned this site away: {wrong_clock}"
    if told.activation_failed:
        return (
            f"the server at {connection.address} counts {site} as connected already: an earlier start may still count "
            f"for a minute, or the site runs on another machine (end it there)"
        )
    return f"{ended.name} ended by itself (exit code {ended.code})"


def _unknown_key(bundle: Bundle, site: str, connection: Connection) -> str:
    key = certificates.fingerprint(certificates.read_private_key(bundle.key).public_key())
    return (
        f"site {site}: the server at {connection.address} turned this site away: it does not know its key.\n"
        f"given:    {bundle.key}, {key}\n"
        f"expected: the key that is registered for {site} at the server\n"
        f"to do:    ask the server's operator to compare it with `ssh-keygen -lf server/nodes/{site}.pub` there. "
        f"Where they differ, use the node.key of the latest bundle, or let the operator put {bundle.public_key} at "
        f"that place and start the server again. A key that was unregistered once is of no more use: make a new one"
    )


def _keep_short(log: Path) -> None:
    """Begin a log anew before it fills the disk; the one before stays."""
    if log.exists() and log.stat().st_size > _LOG_BYTES:
        log.replace(log.with_suffix(".old.log"))


def start(
    bundle: Bundle,
    site: str,
    data: Path,
    options: Mapping[str, Any],
    show: Show,
    environment: Mapping[str, str] | None = None,
    show_command: bool = True,
) -> Together:
    """A site's SuperNode, with the options of its ClientApp, and its SuperExec, both started; the caller ends them.

    A SuperNode cannot go on with another SuperExec: it would wait for ever for the answer to a message at which the
    first one was at work. So both end with either.
    """
    bundle = Bundle(bundle.root.resolve())  # the SuperNode starts in another folder
    trial.try_site(options)
    _make_private(bundle.state)
    depth = int(options.get("depth", FULL_DEPTH))
    found = check(bundle, site, data, connect=False, cache=bundle.cache, depth=depth)
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
    bundle.flower_home.mkdir(exist_ok=True)
    programs = guard.write_programs(bundle.programs)
    surroundings = commands.environment(bundle.flower_home, programs) | dict(environment or {})
    if os.name == "nt":
        show("note: the guard does not work on Windows: a run could bring code of the server's choice here")
    else:
        guard.expect_first(programs, surroundings["PATH"])
    port = free_port()
    command = commands.supernode(bundle, connection, data.resolve(), port, options)
    if show_command:
        show("$ " + commands.shown(command))
    # A run's options may name modules, and those of the current folder count: not the operator's own.
    supernode = Process(command, surroundings, bundle.supernode_log, bundle.flower_home)
    try:
        # Flower does not encrypt what these two say to each other on the loopback address.
        command = commands.superexec(port, supernode.popen.pid, authority=None)
        superexec = Process(command, surroundings, bundle.superexec_log, bundle.flower_home)
        running.note(bundle.running, supernode, superexec)
    except BaseException:
        supernode.end()  # and with it the SuperExec
        raise
    return Together(supernode, superexec)


def _make_private(folder: Path) -> None:
    """Make a folder that only its owner looks into: it will hold the site's pixels."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)  # of an earlier version, or unpacked with another mode
    except OSError as problem:
        raise RunError(f"{folder}: cannot be made private ({problem.strerror}); unpack the bundle elsewhere") from None
