"""What a site lets a server ask of it; a node's configuration decides.

`helpers=false`: the site takes no part in FedMatch, whose server hands a site's parameters to other sites as helpers.
`modules=true`: methods and networks may be classes of modules that are installed at the site, `package.module:Class`.
Without it a server could make the site import, and so run, any module that it finds.
`approve` is `always`, `ask` or the hash of a run: that of its experiment, without the batch that the server settles
once it knows the sites, and of the number that Flower gave this start of the run. Under `ask`, which is the default,
the site takes no part before its operator approved, in whatever the server asks. A server could give a number twice, so
the site counts too: an approval is for each round once, in their order, and so for no more rounds than it names.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from feddure import methods, plugins
from feddure.config import Experiment
from feddure.errors import ConfigError, RunError
from feddure.files import parse_yaml, write_json
from feddure.flower.app.audit import AuditLog
from feddure.flower.app.private_files import make_private_folder, state_folder
from feddure.flower.app.sanitize import disclosed, one_line
from feddure.methods.base import Method
from feddure.simulation.server import Assignment

MOST_IMAGES = 10**8
"""Images that a site may say it has, and a server may let it go through in a round, repeated ones included."""
MOST_IN_STEP = 2**16
"""Images that a server may ask a site to take in one step."""
_EPOCHS = 4
"""Times an epoch over the images that are here: since the server was told of them some may have been taken away."""

MOST_HELPERS = 64
"""Models of other sites that a server may send along, each of which takes memory here."""
APPROVALS = "approvals.json"
LEAVES = (
    "the model's parameters and batch-norm statistics, after each round",
    "the numbers of labelled, unlabelled and unreadable images",
    "means over a round, such as losses and weights of pseudo labels, and its seconds",
    "accuracy and loss on the site's own test images, if any, and their number",
    "accuracy on images set aside, if the run has validation, and their number",
    "the site's name and address, its versions of feddure and of federation.yaml",
    "the kind of a problem, without names of files and folders",
)
"""Whatever the method; the consent, the README of a bundle and docs/security.md all say this."""

MOST_WAITING = 20
"""Runs without an answer; more than these are refused and not noted."""
_WAITING_SECONDS = 3600.0
"""A server asks again each minute or, in a run that goes on without the site, each round; later the run is over."""


def check_policy(node: Mapping[str, Any], experiment: str) -> None:
    """Refuse an experiment, as YAML, that the node's configuration does not allow; nothing is imported for it."""
    tree = parse_yaml(experiment) or {}
    wanted = {name: str(tree.get(name) or "") for name in ("method", "model")}
    for name, value in wanted.items():
        if ":" in value and not _allows(node, "modules", default=False):
            raise disclosed(
                ConfigError(
                    f"{name} '{value}': own modules are not allowed at this site; allow them with modules=true"
                ),
                "own modules are not allowed at this site",
            )
    plugins.allow(*wanted.values())
    if wanted["method"] in methods.METHODS:  # an import path may lead there too: the ClientApp asks for the class again
        check_method(node, methods.METHODS[wanted["method"]])


def check_method(node: Mapping[str, Any], method: Method | type[Method]) -> None:
    """Refuse a method that the site declines, whatever the server called it."""
    if method.relays_uploads and not _allows(node, "helpers", default=True):
        raise disclosed(
            ConfigError(f"method '{method.name}' sends a site's parameters to other sites, and helpers=false"),
            f"this site declines method '{method.name}', which sends its parameters to other sites as helpers",
        )


def check_work(
    experiment: Experiment, method: Method, assignment: Assignment, labelled: int, unlabelled: int, image_bytes: int
) -> None:
    """Refuse work that no site could carry out, or that is more than the run asked for when it was approved.

    `labelled` and `unlabelled` are the site's numbers of images, `image_bytes` is what one takes in training.
    """
    steps, batch = assignment.steps, assignment.unlabelled_batch
    in_step = experiment.labelled_batch + batch
    if steps < 1 or batch < 0 or in_step > MOST_IN_STEP or steps * in_step > MOST_IMAGES:
        raise disclosed(
            ConfigError(
                f"the server asks for {steps} steps on {in_step} images each, expected at most {MOST_IN_STEP} images "
                f"in a step and {MOST_IMAGES} in a round"
            )
        )
    if not 1 <= assignment.round <= experiment.rounds:
        raise disclosed(
            ConfigError(f"the server asks for round {assignment.round}, expected one of 1 to {experiment.rounds}")
        )
    # The server may believe in labelled images alone, which are more than the unlabelled ones that came since.
    most = max(method.steps(labelled, there, max(batch, 1)) for there in (unlabelled, 0))
    if experiment.local_steps == "epoch" or type(method).steps is not Method.steps:
        most *= _EPOCHS
    if steps > most:
        raise disclosed(ConfigError(f"the server asks for {steps} local steps, expected {most} at most"))
    needed = steps * (experiment.labelled_batch + batch * method.needs.views) * image_bytes
    if needed > (free := psutil.virtual_memory().available):
        raise disclosed(
            ConfigError(
                f"the images of this round would take {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
            ),
            "the images of this round would take more memory than the site has",
        )


def _allows(node: Mapping[str, Any], key: str, default: bool) -> bool:
    """A yes or no in a node's configuration; anything else than the two is the cautious answer, no."""
    return str(node.get(key, default)).strip().lower() == "true"


# --- approval ----------------------------------------------------------------------------------------
def run_hash(experiment: str, run_id: int) -> str:
    """The hash by which one run is approved; `experiment` is YAML, `run_id` is Flower's."""
    tree = {key: value for key, value in (parse_yaml(experiment) or {}).items() if key != "unlabelled_batch"}
    return hashlib.sha256(json.dumps([run_id, tree], sort_keys=True, default=str).encode()).hexdigest()[:32]


def check_approval(node: Mapping[str, Any], experiment: str, run_id: int, round_number: int | None = None) -> None:
    """Refuse a run that the site's operator has not approved; one that is new is noted as asked for.

    Where a round is about to be trained, it is noted that its approval is used.
    """
    wanted = str(node.get("approve", "ask"))
    if wanted == "always":
        return
    found, asks, answers = run_hash(experiment, run_id), _describe(experiment), Answers(state_folder(node))
    if wanted == "ask":
        _expect_approved(answers.ask(found, asks), found, asks, node)
    elif wanted != found:
        raise disclosed(
            ConfigError(f"this site's operator approved run {one_line(wanted, 16)}, and this is run {found}")
        )
    if round_number is not None:
        answers.begin_round(found, asks, round_number)


def _expect_approved(answer: bool | None, found: str, asks: str, node: Mapping[str, Any]) -> None:
    if answer is None:
        raise disclosed(
            ConfigError(
                f"run {found} waits for your approval: {asks}. Answer y or n here, or: "
                f"feddure federate approve DIR {node.get('site')} {found}"
            ),
            f"its operator has not approved run {found} yet",
        )
    if not answer:
        raise disclosed(ConfigError(f"its operator refused run {found}"))


class Answers:
    """A site's file of runs that asked, what was answered, and how far they came."""

    def __init__(self, state: Path):
        self._state = state
        self._path = state / APPROVALS

    def read(self) -> dict[str, dict[str, Any]]:
        """By hash: what a run `asks`, the `answer` (true, false, or null before there is one), the last `round`."""
        try:
            return json.loads(self._path.read_bytes()) if self._path.exists() else {}
        except (OSError, ValueError):
            raise RunError(f"{self._path}: cannot be read; remove it, and runs ask again") from None

    def waiting(self) -> list[str]:
        """The runs without an answer."""
        return [found for found, entry in self.read().items() if _waits(entry)]

    def ask(self, found: str, asks: str) -> bool | None:
        """The answer to a run; None where there is none yet."""
        known = self.read()
        if known.get(found, {}).get("answer") is not None:
            return known[found]["answer"]
        waiting = self.waiting()
        if found not in waiting and len(waiting) >= MOST_WAITING:
            return None  # a server that asks for ever does not fill the disk
        with self._changing() as known:
            for over in [each for each, entry in known.items() if entry["answer"] is None and not _waits(entry)]:
                del known[over]
            entry = known.setdefault(found, {"asks": asks, "answer": None})
            entry["asked"] = time.time()
        if found not in waiting:
            AuditLog(self._state).write("run asks for approval", run=found, asks=asks)
        return entry["answer"]

    def answer(self, found: str, approved: bool) -> None:
        """What the site's operator says to a run."""
        with self._changing() as known:
            if found not in known:
                raise ConfigError(f"run {found}: has not asked; there are: {', '.join(known) or 'none'}")
            known[found]["answer"] = approved
        AuditLog(self._state).write("run approved" if approved else "run refused", run=found)

    def begin_round(self, found: str, asks: str, number: int) -> None:
        """Note a round of an approved run before it is trained, so that a kill counts too much, not too little."""
        with self._changing() as known:
            entry = known.setdefault(found, {"asks": asks, "answer": True})
            if number <= (last := entry.get("round", 0)):
                raise disclosed(
                    ConfigError(
                        f"the server asks for round {number} of run {found}, which had round {last} here: "
                        "an approval is for each round once"
                    )
                )
            entry["round"] = number

    @contextmanager
    def _changing(self) -> Iterator[dict[str, dict[str, Any]]]:
        """What is in the file, and is written back at the end."""
        make_private_folder(self._state, RunError)
        with FileLock(self._path.with_name(f".{APPROVALS}.lock")):
            known = self.read()
            yield known
            write_json(self._path, known, RunError, durable=True)


def _waits(entry: Mapping[str, Any]) -> bool:
    return entry["answer"] is None and time.time() - entry.get("asked", 0) < _WAITING_SECONDS


def _describe(experiment: str) -> str:
    tree = Experiment().model_dump() | (parse_yaml(experiment) or {})
    asked = {name: one_line(tree[name], 60) for name in ("method", "model", "rounds", "local_steps", "validation")}
    steps = "an epoch" if asked["local_steps"] == "epoch" else f"{asked['local_steps']} local steps"
    share = f", {asked['validation']} of the labelled images set aside for validation" if tree["validation"] else ""
    leaves = [*LEAVES]
    known = methods.METHODS.get(asked["method"])
    if known is None:
        leaves.append("and what else this method of a module sends")
    elif known.uploads_class_counts:
        leaves.append("how many images of each class it learnt from")
    if known is not None and known.relays_uploads:
        leaves.append("the server hands the parameters to other sites")
    return (
        f"{asked['method']}, {asked['model']}, {asked['rounds']} rounds of {steps}{share}. "
        f"What leaves the site: {'; '.join(leaves)}"
    )
