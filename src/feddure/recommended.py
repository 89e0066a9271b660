"""The preset `recommended`: sizes by the data and the machine, for people's own images.

The rule. Sites are the clients, or the images are dealt to as many clients as have 20 labelled images each, 10 at most.
All of them take part in a round, 10 at most. A step has 10 labelled and 20 unlabelled images; a round passes once over
the mean client's unlabelled images, but takes 20 to 45 steps. Where hardly any image is unlabelled, the labelled
ones count as such too. With a GPU a ResNet-9 trains for 200 rounds at the rate 5e-4; without one a quarter of its
width, or from 48 pixels on the small CNN, at 1e-3, for as many rounds as make about 18,000 steps of all clients
together, but 40 to 150: minutes on two cores, and longer is better; in bf16 if the CPU computes it. Clients weigh by
their labelled images: on the demo's problem that was better, and where half the clients have none it is what keeps
those from doing harm.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from feddure import environment, experiments, methods
from feddure.config import Experiment
from feddure.data.dataset import Dataset
from feddure.data.sources import Options, folder, with_options

NAME = "recommended"
OWN_IMAGES = ("folder:", "npz:")
_STEPS, _ROUNDS, _MOST_CLIENTS, _LABELS = (20, 45), (40, 150), 10, 20
_STEPS_IN_ALL = 18_000
_GREY = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L"}


class Size(NamedTuple):
    """What sizes depend on."""

    labelled: int
    unlabelled: int
    sites: int  # 0 where images have no owners
    side: int  # pixels
    gpu: bool
    bf16: bool = False  # a CPU that computes it


def recommend(size: Size, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Fields by their dotted keys and the reasons in a sentence; what was `given` stays and the rest fits to it."""
    dealt = max(2, min(_MOST_CLIENTS, size.labelled // _LABELS))
    found: dict[str, Any] = {"partition.setting": "sites" if size.sites else "iid-iid"} | dict(given)
    of_sites = size.sites > 0 and found["partition.setting"] == "sites"
    found = {"partition.clients": size.sites if of_sites else dealt} | found
    clients = size.sites if of_sites else found["partition.clients"]
    if size.unlabelled < (1 if of_sites else clients):
        found = {"partition.labelled_as_unlabelled": True} | found
    network = "resnet9" if size.gpu else "resnet9-slim" if size.side < 48 else "cnn"
    found = {
        "clients_per_round": min(clients, _MOST_CLIENTS),
        "model": network,
        "unlabelled_batch": 20,
        "optimizer.learning_rate": 5e-4 if size.gpu else 1e-3,
        "engine.precision": "bf16" if size.bf16 and not size.gpu else "auto",
    } | found
    batch = found["unlabelled_batch"] if isinstance(found["unlabelled_batch"], int) else 20
    again = found.get("partition.labelled_as_unlabelled") is True
    unlabelled = round((size.unlabelled + (size.labelled if again else 0)) / clients)
    found = {"local_steps": _between(math.ceil(unlabelled / batch), *_STEPS)} | found
    steps = found["local_steps"] if isinstance(found["local_steps"], int) else math.ceil(unlabelled / batch)
    in_a_round = max(1, steps) * found["clients_per_round"]
    found = {"rounds": 200 if size.gpu else _between(_STEPS_IN_ALL // in_a_round, *_ROUNDS)} | found
    found = {"evaluate_every": max(1, found["rounds"] // 20)} | found
    said = (
        f"{found['model']} {'on a GPU' if size.gpu else 'without a GPU'}; {found['clients_per_round']} of {clients} "
        f"clients a round; {found['local_steps']} steps a round because a client has about {unlabelled:,} unlabelled "
        f"images; {found['rounds']} rounds, {found['rounds'] * in_a_round:,} steps in all"
    )
    return found, said


def load(
    preset: str | None,
    file: Path | None,
    changes: Mapping[str, Any],
    sets: Iterable[str],
    read: Callable[[str], Dataset],
    say: Callable[[str], None],
    allow_modules: bool = False,
) -> tuple[Experiment, Dataset | None]:
    """The experiment that a command or call asks for, and its images where they had to be looked at.

    A user's own images without a preset or file take this preset.
    """
    given = {key: value for key, value in changes.items() if value is not None} | experiments.parse_sets(sets)
    name = str(given.get("dataset") or experiments.load(NAME).dataset)
    if preset != NAME and (preset is not None or file is not None or not name.startswith(OWN_IMAGES)):
        return experiments.load(preset, file, dict(changes), sets, allow_modules), None
    # Mistakes first: reading images may take long.
    methods.make(experiments.load(NAME, None, {"clients_per_round": 1} | given))
    gpu = torch.cuda.is_available() and given.get("engine.device") != "cpu"
    given["dataset"] = name = fitted_to_files(name, gpu)
    images = read(name)
    labelled = _labels(images, given)
    bf16 = environment.computes_bf16()
    size = Size(labelled, len(images.labels) - labelled, len(images.sites), images.shape[0], gpu, bf16)
    found, said = recommend(size, given)
    say(f"preset {NAME}: {said}. --set changes any field, --preset all of them")
    return experiments.load(NAME, None, found), images  # what `sets` says is in it, but the name as it was read


def fitted_to_files(name: str, gpu: bool) -> str:
    """A folder's name with a size and channels that suit its files, where it states none and they are not the usual."""
    kind, _, where = name.partition(":")
    stated, usual = where.partition("?")[2], Options()._asdict()
    found = folder.shorter_side(where) if kind == "folder" and "size=" not in stated else None
    options = image_options(*found, gpu) if found else {}
    new = {key: value for key, value in options.items() if value != usual[key] and f"{key}=" not in stated}
    return with_options(name, **new)


def image_options(shorter_side: int, modes: Iterable[str], gpu: bool) -> dict[str, int]:
    """Pixels and channels that suit files: no larger than they are, nor than the machine trains in good time."""
    most = 96 if gpu else 64
    sizes = [size for size in (32, 64, 96) if size <= min(shorter_side, most)]
    return {"size": max(sizes, default=max(8, shorter_side)), "channels": 1 if set(modes) <= _GREY else 3}


def _labels(images: Dataset, given: Mapping[str, Any]) -> int:
    """How many labels will be used, about."""
    share = given.get("partition.label_fraction")
    if isinstance(share, float | int):
        return round(share * len(images.labels))
    # A benchmark's labels are the partition's to choose; about a tenth is usual.
    return int(images.labelled.sum()) if images.labelled is not None else len(images.labels) // 10


def _between(value: int, least: int, most: int) -> int:
    return max(least, min(most, value))
