"""Client by client: how accurate its model is on the common test set, and under the client's own class mix.

A client's own images have its own mix of classes. The accuracy to expect on them is Σ_c s_c a_c, with s_c the share of
class c among the client's images whose class is known, and a_c the accuracy of class c on the common test set.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from feddure.tracking.records import Record
from feddure.tracking.summary import LAST


class SiteAccuracy(NamedTuple):
    """Means of the last ten evaluations of the model that a client has: the common one, or its own."""

    client: int
    own_mix: float | None  # None where no class of its images is known, or none of them is tested
    common: float


def site_accuracies(metrics: Sequence[Record], partition: Mapping[str, Any], model: str = "test") -> list[SiteAccuracy]:
    """Each client's accuracies, of the global model or the averaged one (`test_ema`).

    Where clients train alone it is each one's own model; those that have none are left out.
    """
    if not partition.keys() >= {"labelled", "unlabelled"}:
        return []
    counts = np.array(partition["labelled"]) + np.array(partition["unlabelled"])
    found: dict[int, list[tuple[float, list[float]]]] = {}
    confusion = None
    for record in [record for record in metrics if record.get(model)][-LAST:]:
        test = record[model]
        confusion = test.get("confusion", confusion)
        alone = test.get("per_class_by_client")
        for client in range(len(counts)) if alone is None else map(int, alone):
            shares = test["per_class"] if alone is None else alone[str(client)]
            common = test["accuracy"] if alone is None else test["by_client"][str(client)]
            found.setdefault(client, []).append((common, shares))
    if confusion is None:
        return []
    counts = counts * (np.sum(confusion, axis=1) > 0)  # a class without test images says nothing
    return [
        SiteAccuracy(client, _own_mix(counts[client], [shares for _, shares in each]), fmean(c for c, _ in each))
        for client, each in sorted(found.items())
    ]


def mean_own_mix(metrics: Sequence[Record], partition: Mapping[str, Any], model: str = "test") -> float | None:
    """The mean over clients of the accuracy under their own class mixes; None where none is known."""
    known = [site.own_mix for site in site_accuracies(metrics, partition, model) if site.own_mix is not None]
    return fmean(known) if known else None


def _own_mix(counts: np.ndarray, shares: Sequence[Sequence[float]]) -> float | None:
    return float(np.mean(shares, axis=0) @ counts / counts.sum()) if counts.sum() else None
