"""`feddure federate site`: a site's SuperNode, after a look at what it needs."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddure.deployment import commands, guard, running, trial
from feddure.deployment.check import check
from feddure.deployment.connection import reach
from feddure.deployment.control import Show
from feddure.deployment.layout import Bundle, read_connection
from feddure.deployment.processes import Process, Together, free_port
from feddure.errors import RunError

_PATIENCE_SECONDS, _PAUSE_SECONDS = 120.0, 15.0
"""After a crash the server counts a site as connected for a minute, and turns its next start away that long."""


def join(bundle: Bundle, site: str, data: Path, options: Mapping[str, Any], show: Show) -> None:
    """Take part in the federation until told to end; comes back after a crash."""
    _make_private(bundle.state)
    with running.alone(bundle.running, f"site {site}"):
        _join(bundle, site, data, options, show)


def _join(bundle: Bundle, site: str, data: Path, options: Mapping[str, Any], show: Show) -> None:
    failing_since = time.monotonic()
    while True:
        began = time.monotonic()
        with start(bundle, site, data, options, show) as processes:
            show("running; Ctrl-C leaves the federation")
            ended = processes.wait()
        now = time.monotonic()
        if now - began > _PATIENCE_SECONDS:
            failing_since = now  # it had joined before it ended
        if now - failing_since > _PATIENCE_SECONDS:
            break
        show(
            f"{ended.name} ended (exit code {ended.code}); an earlier start may still count: "
            f"again in {_PAUSE_SECONDS:.0f} seconds"
        )
        time.sleep(_PAUSE_SECONDS)
    raise RunError(
        f"site {site}: {ended.name} ended by itself (exit code {ended.code}), again and again; what it said is above. "
        f"Where it failed to activate, the server does not know the key {bundle.public_key}, the site runs elsewhere "
        f"already, or this machine's clock is wrong."
    )


def start(
    bundle: Bundle,
    site: str,
    data: Path,
    options: Mapping[str, Any],
    show: Show,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Together:
    """A site's SuperNode, with the options of its ClientApp, and its SuperExec, both started; the caller ends them.

    A SuperNode cannot go on with another SuperExec: it would wait for ever for the answer to a message at which the
    first one was at work. So both end with either.
    """
    bundle = Bundle(bundle.root.resolve())  # the SuperNode starts in another folder
    trial.try_site(options)
    _make_private(bundle.state)
    found = check(bundle, site, data, connect=False, cache=bundle.cache)
    for finding in found.findings:
        if finding.level == "note":
            show(f"note: {finding.text}")
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
    show("$ " + commands.shown(command))
    # A run's options may name modules, and those of the current folder count: not the operator's own.
    supernode = Process(command, surroundings, log, bundle.flower_home)
    try:
        # Flower does not encrypt what these two say to each other on the loopback address.
        command = commands.superexec(port, supernode.popen.pid, authority=None)
        superexec = Process(command, surroundings, log, bundle.flower_home)
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
