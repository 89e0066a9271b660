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
    whole = [test for record in metrics if _is_whole(test := record.get(model) or {}, counts.shape[-1])]
    for test in whole[-LAST:]:
        confusion = test.get("confusion") or confusion
        alone = test.get("per_class_by_client")
        for client in [client for client in range(len(counts)) if alone is None or str(client) in alone]:
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


def _is_whole(test: Mapping[str, Any], classes: int) -> bool:
    """Whether an evaluation says what is needed here; a stranger's may not."""
    shares = test.get("per_class") or ()
    return len(shares) == classes and None not in shares and test.get("accuracy") is not None


def _own_mix(counts: np.ndarray, shares: Sequence[Sequence[float]]) -> float | None:
    return float(np.mean(shares, axis=0) @ counts / counts.sum()) if counts.sum() else None
