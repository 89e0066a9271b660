"""Aggregation that a few hostile clients cannot steer, given what the clients of a round sent.

All of it assumes that fewer than half of a round's clients are hostile, and none of it knows who they are: under
unequal class mixes an honest client can look like an outlier too. `norm_bound` shortens updates that are longer than
so many times the round's median; `robust` takes the place of the mean:

    median        coordinate by coordinate (Yin et al., ICML 2018)
    trimmed-mean  the same without the largest and smallest share of values (Yin et al., ICML 2018)
    krum          the update that is closest to its n − f − 2 nearest others (Blanchard et al., NeurIPS 2017)
    multi-krum    the weighted mean of the n − f updates of which that is most true

with f = share · n hostile ones assumed. The first three give every client the same weight.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from feddure.config import ServerOptions
from feddure.methods.base import State


def bound_norms(
    received: Sequence[Mapping[str, Tensor]], uploads: Sequence[State], bound: float
) -> tuple[list[State], dict[int, float]]:
    """Updates, tensor by tensor, no longer than `bound` times the round's median; and how long the others were.

    The lower median, so that of two clients the one with the shorter update is believed, and that of the clients who
    moved the tensor at all: those without labels leave some as they are. A tensor that no client received, such as
    class counts, counts from zero; a large honest client has a long one, and is not named for it.
    """
    bounded, excess = [dict(upload) for upload in uploads], dict[int, float]()
    for name in uploads[0]:
        known = all(name in sent for sent in received)
        before = [
            sent[name].double() if known else 0 * upload[name].double()
            for sent, upload in zip(received, uploads, strict=True)
        ]
        changes = [upload[name].double() - start for upload, start in zip(uploads, before, strict=True)]
        lengths = torch.stack([change.norm() for change in changes])
        moved = lengths[lengths > 0]
        median = moved.median() if len(moved) else lengths.new_zeros(())
        for place in torch.nonzero(lengths > bound * median).flatten().tolist():
            if known:
                excess[place] = max(excess.get(place, 0.0), float(lengths[place] / median))
            shorter = before[place] + changes[place] * (bound * median / lengths[place])
            bounded[place][name] = shorter.to(uploads[place][name].dtype)
    return bounded, excess


def select(options: ServerOptions, received: Sequence[Mapping[str, Tensor]], uploads: Sequence[State]) -> list[int]:
    """The clients whose updates are used: with Krum the most central ones, by what all have received; else all."""
    names = [name for name in uploads[0] if name != "statistics" and all(name in sent for sent in received)]
    if options.robust not in ("krum", "multi-krum") or not names:
        return list(range(len(uploads)))
    flat = torch.stack([torch.cat([upload[name].flatten() for name in names]) for upload in uploads])
    scores = krum_scores(flat, hostile(options, len(uploads)))
    wanted = 1 if options.robust == "krum" else len(uploads) - hostile(options, len(uploads))
    return sorted(scores.argsort(stable=True)[:wanted].tolist())


def krum_scores(flat: Tensor, hostile: int) -> Tensor:
    """For each update, a row, the sum of its squared distances to its n − f − 2 nearest others."""
    flat = flat - flat.median(0).values  # distances stay, and lose less to rounding
    square = (flat * flat).sum(1)
    distances = (square.unsqueeze(0) + square.unsqueeze(1) - 2 * flat @ flat.T).clamp(min=0)
    distances = distances.nan_to_num(nan=torch.inf, posinf=torch.inf).fill_diagonal_(torch.inf)
    return distances.sort(1).values[:, : max(1, len(flat) - hostile - 2)].sum(1)


def combine(options: ServerOptions, uploads: Sequence[State]) -> State | None:
    """One upload in place of all where `robust` works coordinate by coordinate; None where a mean is taken."""
    number = len(uploads)
    cut = {"median": (number - 1) // 2, "trimmed-mean": hostile(options, number)}.get(options.robust)
    if cut is None:
        return None
    cut = min(cut, (number - 1) // 2)
    return {
        name: torch.stack([upload[name] for upload in uploads]).sort(0).values[cut : number - cut].mean(0)
        for name in uploads[0]
    }


def hostile(options: ServerOptions, clients: int) -> int:
    """How many of a round's clients may be hostile: the assumed share, and at least one of three or more."""
    return max(int(options.robust_share * clients), min(1, clients // 3))
