"""`feddure federate run`: a run of the federation's app, watched to its real end."""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from feddure.errors import ConfigError, RunError
from feddure.files import write_json
from feddure.flower.app import run_config, site_data
from feddure.flower.app.description import Description
from feddure.flower.app.sanitize import printable
from feddure.flower.deploy.control import CONNECTION, LOOPBACK, Control, RunState, Show, program, shown
from feddure.flower.deploy.layout import ServerFolder, join_address, read_settings
from feddure.flower.deploy.processes import Terminated, ending_with_parent, is_listening
from feddure.simulation import checkpoint
from feddure.simulation import runs as simulation_runs
from feddure.simulation.engine import Engine
from feddure.simulation.server import ImageCounts, Server
from feddure.tracking import records

_FLOWERS_LINES = ("INFO ", "Using SuperLink", "Successfully installed")
"""How lines begin that say nothing about the run."""
_MEANINGS = {
    "Task failed with unknown error.": "its program was ended; the server's terminal says why",
    "No heartbeat received from the task": "its program was ended or hangs: is the server's machine out of memory?",
}
"""What Flower notes of a run, where that says too little."""
_START_SECONDS = 30.0
"""A run begins within a few seconds."""


def run(
    folder: ServerFolder,
    options: Mapping[str, Any],
    run_folder: Path,
    show: Show,
    resume: bool = False,
    round_number: int = 0,
) -> records.Run:
    """Start a run, show its log, and return its records; an error where it did not complete.

    `options` are keys of `run_config.KEYS`; a run that is resumed keeps those it had, and may go back to a round.
    """
    description = folder.read()
    run_folder = run_folder.resolve()
    _expect_server(folder)
    if resume and not _is_begun(run_folder):
        raise RunError(f"{run_folder}: no run is there to resume; name its folder with --out")
    if resume and (present := simulation_runs.read_config(run_folder)) is not None:
        # Sites that were added since take part in the next run.
        description = description.model_copy(update={"sites": description.sites[: present.partition.clients]})
    asked = last_options(folder, run_folder) if resume else {}
    asked.pop("init", None)  # its weights are in the checkpoint: the file may be gone
    wanted = asked | dict(options)
    here = {"run-folder": str(run_folder), "resume": resume, "server-folder": str(folder.server.resolve())}
    here |= {"round": round_number} if round_number else {}
    # A mistake is told before a run is started, and before it is noted as what the run was asked for.
    preflight(run_config.read(wanted | here | {"description": description.to_yaml()}), description)
    control = Control(folder, show)
    before = control.runs()
    _expect_over(folder, run_folder, before)
    go_on = f"go on with: feddure federate run {folder.root} --out {run_folder} --resume"
    number: str | None = None
    try:
        run_config.write_app(folder.app, description)
        number = control.start(wanted | here)
        add_to_run_index(folder, RunEntry(number, str(run_folder), wanted))
        with _reporting_delay(control, number, folder, show):
            try:
                _stream(control, number, show)
                state = _final_state(control, number)
            except RunError as gone:
                look = f"see whether the run begins by itself: feddure federate status {folder.root}"
                next_step = go_on if _is_begun(run_folder) else look
                raise RunError(f"run {number}: the server went away; once it is back, {next_step}\n{gone}") from None
    except Terminated:  # Ctrl-C here is meant for the run at the SuperLink
        if number is None:
            _stop(control, _unindexed(control, folder, {each.run for each in before}, show), show)
        else:
            _stop(control, [number], show)
            if _is_begun(run_folder):
                show(go_on)
        raise
    if not state.completed:
        details = _MEANINGS.get(state.details, state.details)
        reason = f": {details}" if details else ""
        raise RunError(
            f"run {number} did not complete ({state.status}{reason}). Its log is above, and again with "
            f"`FLWR_HOME={folder.flower_home} flwr log {number} {CONNECTION} --show`"
            + (f"\n{go_on}" if _is_begun(run_folder) else "")
        )
    return records.read_run(run_folder)


def _expect_server(folder: ServerFolder) -> None:
    port = read_settings(folder).control_port
    if not is_listening(port):
        raise RunError(
            f"{join_address(LOOPBACK, port)}: no server runs on this machine; "
            f"start it in another terminal: feddure federate server {folder.root}"
        )


def _is_begun(run_folder: Path) -> bool:
    """Whether a folder holds a run that can be resumed."""
    return (run_folder / records.CONFIG).exists()


def _expect_over(folder: ServerFolder, run_folder: Path, states: Iterable[RunState]) -> None:
    started = {entry.run for entry in read_run_index(folder) if Path(entry.folder) == run_folder}
    for state in states:
        if state.run in started and state.going_on:
            raise RunError(
                f"{run_folder}: run {state.run} is still going on there ({state.status}); wait for its end, or stop "
                f"it: `FLWR_HOME={folder.flower_home} flwr stop {state.run} {CONNECTION}`"
            )


@contextmanager
def _reporting_delay(control: Control, number: str, folder: ServerFolder, show: Show) -> Iterator[None]:
    """Say again and again that a run has not begun: its log, which is all there is to see, is empty until then."""
    over = threading.Event()

    def look() -> None:
        began = time.monotonic()
        with suppress(RunError):  # without a server: whoever watches the run finds that too, and tells it
            while not over.wait(_START_SECONDS):
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
    command = [program("flwr"), "log", number, CONNECTION, "--stream"]
    show("$ " + shown(command))
    with subprocess.Popen(
        ending_with_parent(command, signal.SIGTERM),
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
                if text and not text.startswith(_FLOWERS_LINES):
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


def _unindexed(control: Control, folder: ServerFolder, before: set[str], show: Show) -> list[str]:
    """Runs that came up while one was being started here, and that nobody noted as theirs."""
    try:
        known = before | {entry.run for entry in read_run_index(folder)}
        return [state.run for state in control.runs() if state.going_on and state.run not in known]
    except RunError as problem:
        show(f"a run may have been started; look with: feddure federate status {folder.root}\n{problem}")
        return []


# --- before the start --------------------------------------------------------------------------------
def preflight(options: run_config.RunOptions, description: Description) -> None:
    """Refuse options with which a run's ServerApp would end before its first round: nothing is started for them."""
    options = run_config.as_resumed(options)
    simulation_runs.check_folder(options.experiment, options.folder, options.resume)
    if options.minimum_sites > len(description.sites):
        raise ConfigError(
            f"--minimum-sites {options.minimum_sites}: the federation '{description.name}' has "
            f"{len(description.sites)} sites; expected that number or fewer"
        )
    if options.tests is not None and not any(site_data.test_files(options.tests.path, description)):
        raise ConfigError(f"--test {options.tests}: no file is there; expected <class>/ folders with images in it")
    experiment = options.experiment
    Engine(experiment.engine)
    if ":" in experiment.method + experiment.model:
        return  # the ServerApp looks for modules elsewhere than this process
    # The network is made where it takes no memory of a GPU that the run needs.
    engine = Engine(experiment.engine.model_copy(update={"device": "cpu", "precision": "fp32", "compile": False}))
    counts = [ImageCounts(1, 1) for _ in description.sites]
    resumes = options.resume and (options.folder / checkpoint.FILE).exists()
    shown = site_data.without_images(description)
    server = Server(experiment, shown, counts, engine, description.fingerprint(), resumes=resumes)
    if options.protection.noise and server.state["statistics"].numel():
        raise ConfigError("--dp-noise: batch-norm statistics cannot be made private; add --set norm=group")


# --- the server's index of its runs ------------------------------------------------------------------
@dataclass(frozen=True)
class RunEntry:
    """One start of a run: Flower knows runs by number, people by folder."""

    run: str
    folder: str
    options: dict[str, Any]


def read_run_index(folder: ServerFolder) -> list[RunEntry]:
    """All starts, the oldest first."""
    try:
        written = json.loads(folder.run_index.read_text())
        return [RunEntry(entry["run"], entry["folder"], entry["options"]) for entry in written]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError):
        raise RunError(
            f"{folder.run_index}: cannot be read; move it away, the runs themselves are in their folders"
        ) from None


def add_to_run_index(folder: ServerFolder, entry: RunEntry) -> None:
    """Add a start."""
    entries = [*read_run_index(folder), entry]
    write_json(folder.run_index, [asdict(each) for each in entries], RunError, durable=True)


def last_options(folder: ServerFolder, run_folder: Path) -> dict[str, Any]:
    """What the run in a folder was asked for when it was last started."""
    starts = [entry for entry in read_run_index(folder) if Path(entry.folder) == run_folder]
    if not starts:
        raise RunError(f"{run_folder}: not a run of this federation; give the options it was started with")
    return starts[-1].options
