"""Hostile clients of a simulation: an insider who takes part in the protocol, and does harm by what it sends."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from feddure import rng
from feddure.config import AttackOptions, Experiment
from feddure.data.batches import Batch
from feddure.methods.base import State
from feddure.simulation.server import ImageCounts


def attackers(experiment: Experiment, clients: int) -> frozenset[int]:
    """The hostile clients: the same in all rounds, at least one where there is an attack."""
    if experiment.attack.kind == "none":
        return frozenset()
    number = max(1, round(experiment.attack.share * clients))
    return frozenset(rng.sample(clients, number, experiment.seed, "attackers").tolist())


def claimed_counts(options: AttackOptions, hostile: frozenset[int], counts: Sequence[ImageCounts]) -> list[ImageCounts]:
    """What clients say of themselves."""
    if options.kind != "lie-about-counts":
        return list(counts)
    return [
        ImageCounts(round(options.factor * true.labelled), round(options.factor * true.unlabelled))
        if client in hostile
        else true
        for client, true in enumerate(counts)
    ]


def poison_labels(options: AttackOptions, batch: Batch, classes: int) -> Batch:
    """A hostile client's batches: under label-flip, class c is called C − 1 − c."""
    return replace(batch, labels=classes - 1 - batch.labels) if options.kind == "label-flip" else batch


def poison_upload(options: AttackOptions, received: Mapping[str, Tensor], upload: State, key: tuple[int, ...]) -> State:
    """What a hostile client sends in place of its upload."""
    if options.kind not in ("scale", "sign-flip", "noise"):
        return upload
    sent = dict(upload)
    for name in upload.keys() & received.keys() - {"statistics"}:
        change = upload[name] - received[name]
        if options.kind == "noise":
            drawn = torch.from_numpy(rng.legacy(*key, "attack", name).standard_normal(tuple(change.shape))).to(change)
            change = drawn * (change.norm() / drawn.norm())
        factor = -options.factor if options.kind == "sign-flip" else options.factor
        sent[name] = received[name] + factor * change
    return sent
