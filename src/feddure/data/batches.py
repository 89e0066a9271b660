"""A client's stream of batches for one round.

Which images, and how each is augmented, are decided on the CPU from counter-based draws; the pixels of all
clients of a round are then made together on the device. All shapes are static: batches come from a reshuffled cycle
over the client's images, so each one is full, and a set smaller than a batch repeats within it. A client without
labelled (or unlabelled) images gets batches of size zero there.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache, partial
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from feddure import rng
from feddure.data import augment
from feddure.data.dataset import Dataset
from feddure.errors import ConfigError

VIEWS = ("plain", "weak", "strong")


@dataclass(frozen=True)
class Needs:
    """What a method's step wants to see."""

    plain: bool = False  # unlabelled images as they are
    weak: bool = False  # unlabelled images, T_w
    strong: bool | int = False  # unlabelled images, T_s; from 2 on, so many views of each
    every_label: bool = False  # all of the client's images count as labelled (fully supervised)
    labelled: Literal["plain", "weak", "strong"] = "weak"  # the view of labelled images

    def __post_init__(self) -> None:
        if not (isinstance(self.strong, int) and self.strong >= 0) or self.labelled not in VIEWS:
            raise ConfigError(
                f"Needs(strong={self.strong!r}, labelled={self.labelled!r}): expected a number of strong views, and "
                "'plain', 'weak' or 'strong' for labelled images"
            )

    @property
    def views(self) -> int:
        """Views of each unlabelled image."""
        return int(self.plain) + int(self.weak) + int(self.strong)

    @property
    def unlabelled(self) -> bool:
        return self.views > 0


@dataclass(frozen=True)
class Batch:
    """One step's images and labels; or, with one more leading dimension, those of all steps of a round."""

    labelled: Tensor  # T_w(x), or x or T_s(x) where that is needed
    labels: Tensor
    plain: Tensor
    weak: Tensor  # T_w(u)
    strong: Tensor  # T_s(u); several views have a dimension of their own, [views, batch, ...]
    truth: Tensor  # the unlabelled images' classes: for diagnostics, never for learning
    index: Tensor  # which image of the data set each unlabelled row is
    made: dict[str, Tensor] = field(default_factory=dict)  # what the method's `before_steps` made, by name

    def step(self, index: int) -> "Batch":
        return self.map(lambda tensor: tensor[index])

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The same with every tensor changed."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "made"}
        made = {name: change(tensor) for name, tensor in self.made.items()}
        return Batch(**{name: change(tensor) for name, tensor in values.items()}, made=made)

    def tensors(self) -> list[Tensor]:
        values = [getattr(self, entry.name) for entry in fields(self) if entry.name != "made"]
        return [*values, *self.made.values()]

    def for_method(self, method: str, needs: Needs) -> "Batch":
        """The same for a method with these needs: to ask for another view is an error, not a view of no images."""
        kind = _kind_for(method, needs)
        return kind(*(getattr(self, entry.name) for entry in fields(kind)))


@cache
def _kind_for(method: str, needs: Needs) -> Any:
    """The class of a method's batches, a data class of its own so that `dataclasses.replace` works on them."""

    def missing(batch: Any, name: str) -> NoReturn:
        if name not in VIEWS:
            raise AttributeError(f"a batch has no '{name}'; it has {', '.join(entry.name for entry in fields(Batch))}")
        wanted = ", ".join(
            f"{view}={getattr(needs, view) or True}" for view in VIEWS if view == name or getattr(needs, view)
        )
        raise ConfigError(
            f"method '{method}' uses batch.{name}, which is not among its needs: "
            f"add needs = feddure.Needs({wanted}) to its class"
        )

    given = [(entry.name, Any) for entry in fields(Batch) if entry.name not in VIEWS or getattr(needs, entry.name)]
    return make_dataclass("Batch", given, frozen=True, namespace={"__getattr__": missing})


@dataclass(frozen=True)
class BatchPlan:
    """What one client trains on in one round."""

    client: int
    labelled: np.ndarray  # indices of its labelled images
    unlabelled: np.ndarray
    steps: int
    labelled_batch: int
    unlabelled_batch: int
    needs: Needs
    cutout: bool = False  # cut the weak view of labelled images too; T_s does so anyway

    @property
    def labelled_view(self) -> str:
        return "cut" if self.cutout and self.needs.labelled == "weak" else self.needs.labelled

    def pools(self) -> tuple[np.ndarray, np.ndarray]:
        """Images that count as labelled, images that count as unlabelled."""
        none = np.empty(0, dtype=np.int64)
        if self.needs.every_label:
            once = self.unlabelled[~np.isin(self.unlabelled, self.labelled)]
            return np.concatenate([self.labelled, once]), none
        return self.labelled, self.unlabelled if self.needs.unlabelled else none


def cycle(pool: np.ndarray, length: int, *key: rng.Key) -> np.ndarray:
    """`length` entries of a reshuffled cycle over `pool`."""
    if len(pool) == 0 or length == 0:
        return np.empty(0, dtype=np.int64)
    passes = -(-length // len(pool))
    order = np.argsort(rng.bits(passes * len(pool), *key).reshape(passes, len(pool)), axis=1, kind="stable")
    return pool[order.reshape(-1)[:length]]


def _by_step(views: Sequence[np.ndarray], steps: int) -> np.ndarray:
    """What belongs to several views of a round's images, in the order steps, views, images."""
    return np.stack([view.reshape(steps, -1) for view in views], axis=1).reshape(-1)


class DeviceImages:
    """A data set's images on the device, from which batches are made."""

    def __init__(self, dataset: Dataset, device: torch.device, dtype: torch.dtype):
        self.device = device
        self.dtype = dtype
        self.side = dataset.shape[0]
        self.images = _tensor(dataset.images).to(device)
        self.labels = _tensor(dataset.labels).to(device)
        self._classes, self._number = dataset.labels, len(dataset.classes)
        self.test_images = _tensor(dataset.test_images).to(device)
        self.test_labels = _tensor(dataset.test_labels).to(device)
        self.test_site = None if dataset.test_site is None else _tensor(dataset.test_site).to(device)
        self.sites = len(dataset.sites)
        self.flip = dataset.flip
        self.normalise = augment.Normalise(dataset.mean, dataset.std, dtype)

    def test_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The whole test set, in pieces, each normalised when it is asked for: all at once are large."""
        for images, labels in zip(self.test_images.split(size), self.test_labels.split(size), strict=True):
            yield augment.plain(images, self.normalise), labels

    def training_batches(self, index: np.ndarray, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """These training images and their labels, as test images are, in pieces."""
        for start in range(0, len(index), size):
            rows = index[start : start + size]
            yield self.plain(rows), self.labels[self._upload(rows)]

    def plain(self, index: np.ndarray) -> Tensor:
        """These training images, normalised, without augmentation."""
        return augment.plain(self.images[self._upload(index)], self.normalise)

    def batches(self, plans: list[BatchPlan], seed: int, round_number: int) -> list[Batch]:
        """The batches of all these clients for a round, each with a leading dimension of steps."""
        weak, cut, strong, plain = (_Pile() for _ in range(4))
        parts = []
        for plan in plans:
            key = (round_number, plan.client)
            pool, others = plan.pools()
            labelled = cycle(pool, plan.steps * plan.labelled_batch, seed, "labelled", *key)
            unlabelled = cycle(others, plan.steps * plan.unlabelled_batch, seed, "unlabelled", *key)
            pile, words = {
                "plain": (plain, 0),
                "weak": (weak, augment.WEAK_BITS),
                "cut": (cut, augment.WEAK_BITS + augment.CUTOUT_BITS),
                "strong": (strong, augment.STRONG_BITS),
            }[plan.labelled_view]
            raw = rng.bits(len(labelled) * words, seed, "augment-labelled", *key)
            spans = {"labelled": pile.add(labelled, raw)}
            if plan.needs.weak:
                raw = rng.bits(len(unlabelled) * augment.WEAK_BITS, seed, "augment-weak", *key)
                spans["weak"] = weak.add(unlabelled, raw)
            if views := int(plan.needs.strong):
                purposes = ["augment-strong", *(f"augment-strong-{view}" for view in range(1, views))]
                raws = [rng.bits(len(unlabelled) * augment.STRONG_BITS, seed, purpose, *key) for purpose in purposes]
                repeated, raw = (_by_step(arrays, plan.steps) for arrays in ([unlabelled] * views, raws))
                spans["strong"] = strong.add(repeated, raw)
            if plan.needs.plain:
                spans["plain"] = plain.add(unlabelled, None)
            parts.append((plan, labelled, unlabelled, spans))
        pixels = {
            "weak": weak.make(self, augment.weak_decisions, augment.weak),
            "cut": cut.make(self, partial(augment.weak_decisions, cutout=True), augment.weak),
            "strong": strong.make(self, augment.strong_decisions, augment.strong),
            "plain": self.plain(plain.index()),
        }
        every = [index for _, labelled, unlabelled, _ in parts for index in (labelled, unlabelled)]
        on_device = self._upload(np.concatenate(every))
        sizes = [len(index) for index in every]
        rows, labels = on_device.split(sizes), self.labels[on_device].split(sizes)
        return [
            self._assemble(plan, spans, pixels, labels[2 * i], labels[2 * i + 1], rows[2 * i + 1])
            for i, (plan, _, _, spans) in enumerate(parts)
        ]

    def class_counts(self, plans: Sequence[BatchPlan]) -> list[Tensor]:
        """How many labelled images of each class each of these clients learns from; one upload for all."""
        counts = [np.bincount(self._classes[plan.pools()[0]], minlength=self._number) for plan in plans]
        return list(self._upload(np.stack(counts))) if counts else []

    def _assemble(
        self,
        plan: BatchPlan,
        spans: dict[str, slice],
        pixels: dict[str, Tensor],
        labels: Tensor,
        truth: Tensor,
        index: Tensor,
    ) -> Batch:
        def view(kind: str, source: str) -> Tensor:
            made = pixels[source]
            part = made[spans[kind]] if kind in spans else made[:0]
            views = (int(plan.needs.strong),) if kind == "strong" and plan.needs.strong > 1 else ()
            rows = len(part) // math.prod((plan.steps, *views))
            # [steps, batch, channels, height, width]; each step's images stay channels-last in memory.
            return part.permute(0, 2, 3, 1).unflatten(0, (plan.steps, *views, rows)).movedim(-1, -3)

        return Batch(
            labelled=view("labelled", plan.labelled_view),
            labels=labels.view(plan.steps, -1),
            plain=view("plain", "plain"),
            weak=view("weak", "weak"),
            strong=view("strong", "strong"),
            truth=truth.view(plan.steps, -1),
            index=index.view(plan.steps, -1),
        )

    def _upload(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64)).to(self.device, non_blocking=True)


def _tensor(array: np.ndarray) -> Tensor:
    """The array's own memory, unless PyTorch cannot share it: read-only or running backwards."""
    return torch.from_numpy(np.require(array, requirements=("C", "W")))


class _Pile:
    """Images of several clients that are augmented in one go."""

    def __init__(self) -> None:
        self._indices: list[np.ndarray] = []
        self._raw: list[np.ndarray] = []
        self._length = 0

    def add(self, index: np.ndarray, raw: np.ndarray | None) -> slice:
        self._indices.append(index)
        if raw is not None:
            self._raw.append(raw)
        start, self._length = self._length, self._length + len(index)
        return slice(start, self._length)

    def index(self) -> np.ndarray:
        return np.concatenate(self._indices) if self._indices else np.empty(0, dtype=np.int64)

    def make(
        self,
        source: DeviceImages,
        decide: Callable[[np.ndarray, int], np.ndarray],
        apply: Callable[[Tensor, np.ndarray, augment.Normalise], Tensor],
    ) -> Tensor:
        index = self.index()
        if not len(index):
            return source.plain(index)
        decisions = decide(np.concatenate(self._raw).reshape(len(index), -1), source.side)
        if not source.flip:
            decisions[:, 0] = 0
        return apply(source.images[source._upload(index)], decisions, source.normalise)
