"""A partition: who owns which images, and which of them carry a label.

`make` follows the recipe; the artefact it returns is the truth of an experiment. It is saved with a hash over
every index and every parameter, and a file that differs from what was saved in a single byte is refused.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from feddure import config, rng
from feddure.data import recipes
from feddure.data.dataset import UNKNOWN, Dataset
from feddure.errors import ConfigError, DataError
from feddure.files import read_regular, write_whole

_FORMAT = 1
_SEAL = 64  # bytes of the hash that ends a file
_KINDS: tuple[Literal["labelled", "unlabelled"], ...] = ("labelled", "unlabelled")


class Repair(NamedTuple):
    """Images moved so that no client is left with too few."""

    from_client: int
    to_client: int
    kind: str  # labelled or unlabelled
    number: int


@dataclass(frozen=True, eq=False)
class Partition:
    """Sorted image numbers of each client, and how they came to be; equal partitions have equal `sha256`."""

    labelled: tuple[np.ndarray, ...]
    unlabelled: tuple[np.ndarray, ...]
    parameters: dict[str, Any]
    repairs: tuple[Repair, ...] = ()
    validation: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # images that nobody owns

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.labelled)

    @cached_property
    def sha256(self) -> str:
        """Hash of parameters, repairs and indices, the same on every machine."""
        digest = hashlib.sha256(_canonical({"parameters": self.parameters, "repairs": self.repairs}).encode())
        for kind in _KINDS:
            for array in _flat(getattr(self, kind)):
                digest.update(array.tobytes())
        digest.update(self.validation.astype("<i8").tobytes())
        return digest.hexdigest()

    def counts(self, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Labelled and unlabelled images as counts [client, class]; images of unknown class are left out."""
        return _counts(self.labelled, labels, classes), _counts(self.unlabelled, labels, classes)

    def save(self, path: str | Path) -> None:
        """Write the artefact: a plain npz, equal partitions giving equal bytes."""
        write_whole(Path(path), _pack(self), DataError)

    @staticmethod
    def load(path: str | Path, dataset: Dataset) -> "Partition":
        """Read an artefact back, checked byte for byte and against the data set it belongs to."""
        path = Path(path)
        try:
            content = read_regular(path)
        except OSError as error:
            raise DataError(f"{path}: the partition cannot be read ({error.strerror})") from None
        partition = _unpack(path, content)
        name, fingerprint = partition.parameters["dataset"], partition.parameters["fingerprint"]
        if fingerprint != dataset.fingerprint:
            raise DataError(
                f"{path}: made for data set '{name}' with fingerprint {fingerprint[:12]}, but "
                f"'{dataset.name}' with fingerprint {dataset.fingerprint[:12]} was given; make a partition "
                "of this data set with `feddure partition`"
            )
        return partition


def make(dataset: Dataset, options: config.PartitionOptions, seed: int, validation: float = 0.0) -> Partition:
    """The partition that these options and this seed describe; the same on every machine.

    A share of the images whose label may be used is first set aside for `validation`.
    """
    check(options)
    if options.setting == "sites" and (dataset.site is None or not dataset.sites):
        raise ConfigError(
            f"--setting sites (partition.setting): data set '{dataset.name}' does not say which site owns "
            "which image; use a folder data set with sites, or another setting"
        )
    if options.setting == "fedmatch" and len(dataset.classes) != len(recipes.FEDMATCH_MIX):
        raise ConfigError(
            f"--setting fedmatch (partition.setting): defined for {len(recipes.FEDMATCH_MIX)} classes, but "
            f"data set '{dataset.name}' has {len(dataset.classes)}; use iid-dir or dir-dir"
        )
    if validation:
        return _make_of_rest(dataset, options, seed, validation)
    clients = len(dataset.sites) if options.setting == "sites" else options.clients
    pools = recipes.choose_labels(dataset, options, clients, seed)
    parts: dict[str, tuple[np.ndarray, ...]] = {}
    repairs: list[Repair] = []
    for kind in _KINDS:
        pool = getattr(pools, kind)
        if dataset.site is not None and options.setting == "sites":
            images = np.concatenate(pool)
            owners = dataset.site[images]
        else:
            holders = np.arange(clients)
            if kind == "labelled" and options.labelled_clients < 1:
                number = recipes.labelled_clients(options, clients)
                holders = np.sort(rng.sample(clients, number, "partition", seed, "labelled clients"))
            images, owners = _deal(options, kind, pool, len(holders), seed)
            moves = recipes.repair(owners, len(holders), "partition", seed, "repair", kind)
            repairs += [Repair(int(holders[rich]), int(holders[poor]), kind, number) for rich, poor, number in moves]
            owners = holders[owners]
        parts[kind] = _by_client(images, owners, clients)
    parts["unlabelled"] = _kept(parts["unlabelled"], options.unlabelled_fraction, seed)
    if options.labelled_as_unlabelled:
        parts["unlabelled"] = tuple(map(np.union1d, parts["unlabelled"], parts["labelled"]))
    # Options that are newer than the first published partitions are named where they act, so that hashes stay.
    newer = ("labelled_clients", "unlabelled_fraction", "labelled_as_unlabelled")
    parameters = {
        "setting": options.setting,
        "clients": clients,
        "gamma": options.gamma if options.setting in config.DIRICHLET else None,
        "labels_per_class": recipes.labels_per_class(dataset, options),
        "label_fraction": options.label_fraction,
        "seed": seed,
        "dataset": dataset.name,
        "fingerprint": dataset.fingerprint,
        **options.model_dump(include=set(newer), exclude_defaults=True),
    }
    return Partition(parts["labelled"], parts["unlabelled"], parameters, tuple(repairs))


def check(options: config.PartitionOptions) -> None:
    """Refuse options that contradict each other."""
    if options.labels_per_class is not None and options.label_fraction is not None:
        raise ConfigError("partition.labels_per_class and partition.label_fraction were both given: use one of them")
    for name in ("labelled_clients", "unlabelled_fraction"):
        if options.setting == "sites" and getattr(options, name) != 1:
            raise ConfigError(
                f"partition.{name} {getattr(options, name):g} was given, but under partition.setting sites every "
                "image stays where it is: leave it out, or use another setting"
            )
    if options.setting == "pairs":
        for number in (options.clients, recipes.labelled_clients(options, options.clients)):
            if number % 2:
                kind = "clients" if number == options.clients else "clients with labels (partition.labelled_clients)"
                raise ConfigError(
                    f"partition.setting pairs deals to clients two by two, but there would be {number} {kind}: "
                    "expected an even number"
                )


def expect_clients(clients: int | None, setting: str, images: Dataset) -> None:
    """Refuse a --clients that contradicts the sites of the data, which are the clients under --setting sites."""
    if setting == "sites" and images.sites and clients not in (None, len(images.sites)):
        raise ConfigError(
            f"--clients {clients}: data set '{images.name}' has {len(images.sites)} sites, and under "
            f"--setting sites each is one client; leave --clients out, or deal all images to {clients} clients with "
            "--setting iid-iid"
        )


def _make_of_rest(dataset: Dataset, options: config.PartitionOptions, seed: int, share: float) -> Partition:
    """The partition of what is left when a share of the labelled images is set aside; of each site's, where they own.

    A site of a real federation sets the same images aside.
    """
    usable = dataset.labels if dataset.labelled is None else np.where(dataset.labelled, dataset.labels, UNKNOWN)
    if options.setting == "sites":
        owned = [np.flatnonzero(dataset.site == site) for site in range(len(dataset.sites))]
        found = [own[recipes.hold_out(usable[own], share, seed, site)] for site, own in enumerate(owned)]
        held = np.sort(np.concatenate(found))
    else:
        held = recipes.hold_out(usable, share, seed)
    if not len(held):
        labelled = int((usable != UNKNOWN).sum())
        raise ConfigError(f"validation: {share:g} of {labelled} labelled images is less than two; give a larger share")
    kept = np.delete(np.arange(len(dataset.labels)), held)
    arrays = {name: getattr(dataset, name) for name in ("labels", "labelled", "site")}
    rest = {name: array[kept] for name, array in arrays.items() if array is not None}
    try:
        made = make(replace(dataset, **rest), options, seed)  # nothing there looks at the pixels
    except ConfigError as error:
        raise ConfigError(f"{error} (validation: {share:g} sets {len(held)} images aside)") from None
    return replace(
        made,
        **{kind: tuple(kept[part] for part in getattr(made, kind)) for kind in _KINDS},
        parameters=made.parameters | {"fingerprint": dataset.fingerprint, "validation": share},
        validation=held,
    )


def internal_imbalance(partition: Partition, labels: np.ndarray, classes: int) -> float | None:
    """Mean over clients of the total-variation distance between the class mixes of labelled and unlabelled.

    Clients without images of known class on either side are left out; None where no client remains.
    """
    labelled, unlabelled = partition.counts(labels, classes)
    both = (labelled.sum(axis=1) > 0) & (unlabelled.sum(axis=1) > 0)
    if not both.any():
        return None
    return float(np.abs(_mix(labelled[both]) - _mix(unlabelled[both])).sum(axis=1).mean() / 2)


def external_imbalance(partition: Partition, labels: np.ndarray, classes: int) -> float | None:
    """Mean over pairs of clients of the total-variation distance between the class mixes of all their images.

    An image that a client has both with and without its label counts once.

    Clients without images of known class are left out; None where fewer than two remain.
    """
    together = _counts(tuple(map(np.union1d, partition.labelled, partition.unlabelled)), labels, classes)
    mixes = _mix(together[together.sum(axis=1) > 0])
    clients = len(mixes)
    if clients < 2:
        return None
    # Over all pairs of n sorted values the i-th is added i times and subtracted n - 1 - i times: no n² here.
    signs = 2 * np.arange(clients) - (clients - 1)
    return max(0.0, float((signs @ np.sort(mixes, axis=0)).sum() / (clients * (clients - 1))))


def describe(made: Partition, images: Dataset) -> dict[str, Any]:
    """All there is to know about a partition, as plain values."""
    clients = []
    for number, counts in enumerate(zip(*made.counts(images.labels, len(images.classes)), strict=True)):
        client: dict[str, Any] = {"client": number}
        if made.parameters["setting"] == "sites":
            client["site"] = images.sites[number]
        for kind, row in zip(_KINDS, counts, strict=True):
            size = len(getattr(made, kind)[number])
            absent = [name for name, held in zip(images.classes, row, strict=True) if not held]
            client[kind] = size
            client[f"{kind}_per_class"] = row.tolist()
            # Among images of unknown class nobody can say what is absent.
            client[f"absent_{kind}"] = absent if row.sum() == size else None
        clients.append(client)
    return _about(made, images) | {"clients": clients}


def summarise(made: Partition, images: Dataset) -> dict[str, Any]:
    """A partition as counts: what a run keeps of it, and reports draw."""
    labelled, unlabelled = made.counts(images.labels, len(images.classes))
    return _about(made, images) | {
        "labelled": labelled.tolist(),
        "unlabelled": unlabelled.tolist(),
        "validation": len(made.validation),
        "unknown": [int((images.labels[indices] == UNKNOWN).sum()) for indices in made.unlabelled],
        "sites": list(images.sites) if made.parameters["setting"] == "sites" else [],
        "notes": list(images.notes),
        "damaged": list(images.damaged),
    }


def _about(made: Partition, images: Dataset) -> dict[str, Any]:
    classes = len(images.classes)
    return {
        "parameters": made.parameters,
        "sha256": made.sha256,
        "internal_imbalance": internal_imbalance(made, images.labels, classes),
        "external_imbalance": external_imbalance(made, images.labels, classes),
        "repairs": [repair._asdict() for repair in made.repairs],
        "classes": list(images.classes),
    }


def _deal(
    options: config.PartitionOptions, kind: str, pool: list[np.ndarray], clients: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Labelled or unlabelled images and their owners, by the recipe of the setting."""
    if options.setting == "pairs":
        return recipes.pairs(pool, clients, options.gamma, "partition", seed, "pairs", kind)
    totals = [len(part) for part in pool]
    if options.setting == "fedmatch" and kind == "unlabelled":
        counts = recipes.fedmatch(totals, clients)
    elif options.setting == "dir-dir" or (options.setting == "iid-dir" and kind == "unlabelled"):
        counts = recipes.dirichlet(totals, clients, options.gamma, "partition", seed, "shares", kind)
    else:
        counts = recipes.even(totals, clients, "partition", seed, "rounds", kind)
    return recipes.deal(pool, counts)


def _kept(parts: tuple[np.ndarray, ...], share: float, seed: int) -> tuple[np.ndarray, ...]:
    """This share of each client's images; those of a smaller one are among those of a larger one."""
    if share == 1:
        return parts
    orders = [rng.permutation(len(part), "partition", seed, "kept", client) for client, part in enumerate(parts)]
    return tuple(np.sort(part[order[: round(share * len(part))]]) for part, order in zip(parts, orders, strict=True))


def _by_client(images: np.ndarray, owners: np.ndarray, clients: int) -> tuple[np.ndarray, ...]:
    ordered = images[np.lexsort((images, owners))]
    return _cut(ordered, np.bincount(owners, minlength=clients))


def _cut(indices: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, ...]:
    indices = indices.astype(np.int64)
    indices.flags.writeable = False
    return tuple(np.split(indices, np.cumsum(sizes)[:-1]))


def _flat(parts: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """All indices in client order and the clients' sizes, as little-endian 64-bit integers."""
    parts = list(parts)
    return np.concatenate(parts).astype("<i8"), np.array([len(part) for part in parts], dtype="<i8")


def _counts(parts: tuple[np.ndarray, ...], labels: np.ndarray, classes: int) -> np.ndarray:
    indices, sizes = _flat(parts)
    owners, found = np.repeat(np.arange(len(parts)), sizes), labels[indices]
    known = found >= 0
    cells = owners[known] * classes + found[known]
    return np.bincount(cells, minlength=len(parts) * classes).reshape(len(parts), classes)


def _mix(counts: np.ndarray) -> np.ndarray:
    return counts / counts.sum(axis=1, keepdims=True)


def _canonical(tree: dict[str, Any]) -> str:
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _pack(partition: Partition) -> bytes:
    """The artefact's bytes: an uncompressed npz without dates, whose zip comment is the hash of the rest."""
    about = {
        "format": _FORMAT,
        "parameters": partition.parameters,
        "repairs": partition.repairs,
        "sha256": partition.sha256,
    }
    arrays = {"about": np.array(_canonical(about).encode())}
    arrays |= {"validation": partition.validation.astype("<i8")} if len(partition.validation) else {}
    for kind in _KINDS:
        arrays[kind], arrays[f"{kind}_sizes"] = _flat(getattr(partition, kind))
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = bytes(_SEAL)
    content = buffer.getvalue()[:-_SEAL]
    return content + _seal(content)


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _unpack(path: Path, content: bytes) -> Partition:
    # The zip format's own checksums leave headers and dates unguarded; the seal covers every byte.
    if content[-_SEAL:] != _seal(content[:-_SEAL]):
        raise DataError(
            f"{path}: not a partition, or damaged since it was saved; copy it afresh or make it again with "
            "`feddure partition`"
        )
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        about = json.loads(arrays["about"].item())
        if about["format"] != _FORMAT:
            raise DataError(
                f"{path}: written in format {about['format']}, but this version reads {_FORMAT}; make it "
                "again with `feddure partition`"
            )
        labelled, unlabelled = (_cut(arrays[kind], arrays[f"{kind}_sizes"]) for kind in _KINDS)
        validation = arrays["validation"].astype(np.int64) if "validation" in arrays else np.empty(0, dtype=np.int64)
    repairs = tuple(Repair(*repair) for repair in about["repairs"])
    return Partition(labelled, unlabelled, about["parameters"], repairs, validation)
