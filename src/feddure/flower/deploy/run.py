"""`feddure federate run`: a run of the federation's app, watched to its real end."""

import itertools
import shlex
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddure.errors import RunError
from feddure.flower.app import run_config
from feddure.flower.app.location import Place
from feddure.flower.deploy import commands
from feddure.flower.deploy import preflight as trial
from feddure.flower.deploy import run_index as ledger
from feddure.flower.deploy.control import Control, RunState, Show
from feddure.flower.deploy.layout import ServerFolder, join_address, read_settings
from feddure.flower.deploy.processes import Ended, is_listening
from feddure.flower.deploy.terminal import printable
from feddure.tracking import records

_FLOWER_SAYS = ("INFO ", "Using SuperLink", "Successfully installed")
"""How lines begin that say nothing about the run."""
_IN_OUR_WORDS = {
    "Task failed with unknown error.": "its program was ended; the server's terminal says why",
    "No heartbeat received from the task": "its program was ended or hangs: is the server's machine out of memory?",
}
"""What Flower notes of a run, where that says too little."""
_PATIENCE_SECONDS = 30.0
"""A run begins within a few seconds."""


@dataclass(frozen=True)
class Options:
    """What a run is asked for; None means the app's default."""

    method: str | None = None
    rounds: int | None = None
    seed: int | None = None
    preset: str | None = None
    sets: tuple[str, ...] = ()
    tests: Place | None = None
    resume: bool = False
    minimum_sites: int | None = None
    wait_seconds: float | None = None
    clip_norm: float | None = None
    dp_epsilon: float | None = None
    dp_delta: float | None = None

    def run_config(self) -> dict[str, Any]:
        """The options as the app's run configuration, without those that say where the run lies."""
        given = {
            "preset": self.preset,
            "method": self.method,
            "rounds": self.rounds,
            "seed": self.seed,
            "settings": shlex.join(self.sets) or None,
            "test-folder": str(self.tests.resolve()) if self.tests is not None else None,
            "minimum-sites": self.minimum_sites,
            "wait-seconds": self.wait_seconds,
            "clipping-norm": self.clip_norm,
            "dp-epsilon": self.dp_epsilon,
            "dp-delta": self.dp_delta,
        }
        return {key: value for key, value in given.items() if value is not None}


class _ServerGone(Exception):
    """The server does not answer any more."""


def run(folder: ServerFolder, options: Options, run_folder: Path, show: Show) -> records.Run:
    """Start a run, show its log, and return its records; an error where it did not complete."""
    description = folder.read()
    run_folder = run_folder.resolve()
    _expect_server(folder)
    if options.resume and not _is_begun(run_folder):
        raise RunError(f"{run_folder}: no run is there to resume; name its folder with --out")
    earlier = ledger.last_options(folder, run_folder) if options.resume else {}
    wanted = earlier | options.run_config()
    here = {"run-folder": str(run_folder), "resume": options.resume}
    # A mistake is told before a run is started, and before it is noted as what the run was asked for.
    trial.try_run(run_config.read(wanted | here | {"description": description.to_yaml()}), description)
    control = Control(folder, show)
    before = control.runs()
    _expect_over(folder, run_folder, before)
    go_on = f"go on with: feddure federate run {folder.root} --out {run_folder} --resume"
    number: str | None = None
    try:
        done = ledger.rounds_done(run_folder)
        number = control.start(wanted | here)
        ledger.note(folder, ledger.Entry(number, str(run_folder), wanted, done))
        with _telling_what_it_waits_for(control, number, folder, show):
            state = _watch(control, number, show)
    except Ended:  # Ctrl-C here is meant for the run at the SuperLink
        if number is None:
            _stop(control, _nobodys(control, folder, {each.run for each in before}, show), show)
        else:
            _stop(control, [number], show)
            if _is_begun(run_folder):
                show(go_on)
        raise
    except _ServerGone as gone:
        look = f"see whether the run begins by itself: feddure federate status {folder.root}"
        next_step = go_on if _is_begun(run_folder) else look
        raise RunError(f"run {number}: the server went away; once it is back, {next_step}\n{gone}") from None
    if not state.completed:
        details = _IN_OUR_WORDS.get(state.details, state.details)
        reason = f": {details}" if details else ""
        raise RunError(
            f"run {number} did not complete ({state.status}{reason}). Its log is above, and again with "
            f"`FLWR_HOME={folder.flower_home} flwr log {number} {commands.CONNECTION} --show`"
            + (f"\n{go_on}" if _is_begun(run_folder) else "")
        )
    return records.read_run(run_folder)


def default_run_folder(folder: ServerFolder, method: str) -> Path:
    """A new place under the federation's runs/."""
    numbered = (folder.runs / (method if number == 1 else f"{method}-{number}") for number in itertools.count(1))
    return next(place for place in numbered if not place.exists())


def _expect_server(folder: ServerFolder) -> None:
    port = read_settings(folder).control_port
    if not is_listening(commands.LOOPBACK, port):
        raise RunError(
            f"{join_address(commands.LOOPBACK, port)}: no server runs on this machine; "
            f"start it in another terminal: feddure federate server {folder.root}"
        )


def _is_begun(run_folder: Path) -> bool:
    """Whether a folder holds a run that can be resumed."""
    return (run_folder / records.CONFIG).exists()


def _expect_over(folder: ServerFolder, run_folder: Path, states: Iterable[RunState]) -> None:
    last = ledger.last(folder, run_folder)
    for state in states:
        if last is not None and state.run == last.run and state.going_on:
            raise RunError(
                f"{run_folder}: run {state.run} is still going on there ({state.status}); wait for its end, or stop "
                f"it: `FLWR_HOME={folder.flower_home} flwr stop {state.run} {commands.CONNECTION}`"
            )


def _watch(control: Control, number: str, show: Show) -> RunState:
    try:
        _stream(control, number, show)
        return _final_state(control, number)
    except RunError as problem:
        raise _ServerGone(str(problem)) from None


@contextmanager
def _telling_what_it_waits_for(control: Control, number: str, folder: ServerFolder, show: Show) -> Iterator[None]:
    """Say again and again that a run has not begun: its log, which is all there is to see, is empty until then."""
    over = threading.Event()

    def look() -> None:
        began = time.monotonic()
        with suppress(RunError):  # without a server: whoever watches the run finds that too, and tells it
            while not over.wait(_PATIENCE_SECONDS):
                (state,) = control.runs(number)
                if state.begun or over.is_set():
                    return
                show(
                    f"run {number} has not begun after {time.monotonic() - began:.0f} seconds ({state.status}): it "
                    f"waits for the server's flower-superexec. Look at the server's terminal and at "
                    f"{folder.superexec_log}; Ctrl-C stops the run"
                )

    threading.Thread(target=look, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _stream(control: Control, number: str, show: Show) -> None:
    command = commands.stream_log(number)
    show("$ " + commands.shown(command))
    with subprocess.Popen(
        command,
        env=control.environment | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as stream:
        try:
            for line in stream.stdout or ():
                text = printable(line.rstrip())
                if text and not text.startswith(_FLOWER_SAYS):
                    show(text)
        except BaseException:
            stream.terminate()
            raise


def _final_state(control: Control, number: str) -> RunState:
    """How a run ended. The log's end says nothing about it, and comes a moment before the status is final."""
    while True:
        (state,) = control.runs(number)
        if not state.going_on:
            return state
        time.sleep(1)


def _stop(control: Control, numbers: Iterable[str], show: Show) -> None:
    for number in numbers:
        show(f"stopping run {number}")
        try:
            control.stop(number)
        except RunError as problem:
            show(f"run {number} could not be stopped: {problem}")


def _nobodys(control: Control, folder: ServerFolder, before: set[str], show: Show) -> list[str]:
    """Runs that came up while one was being started here, and that nobody noted as theirs."""
    try:
        known = before | {entry.run for entry in ledger.read(folder)}
        return [state.run for state in control.runs() if state.going_on and state.run not in known]
    except RunError as problem:
        show(f"a run may have been started; look with: feddure federate status {folder.root}\n{problem}")
        return []
