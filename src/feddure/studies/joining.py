"""Is joining worth it? What each site has alone and what it has in the federation, on the same seeds.

Accuracies are means of the last ten evaluations, in per cent: on the common test set, and under a site's own class mix
(`tracking.sites`). Both by the model itself, not its average over
rounds: a client alone has none.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from feddure.methods import title as method_name
from feddure.reports import frame, inline, style
from feddure.reports.figures import WIDE, Figure
from feddure.reports.frame import Difference, signed
from feddure.studies.plan import REFERENCE
from feddure.tracking.records import Run
from feddure.tracking.sites import site_accuracies
from feddure.tracking.summary import NOTHING, evaluations

TESTS = {"own_mix": "own class mix", "common": "common test set"}
_MODELS = {"test": "last", "test_ema": "averaged"}


def sites(runs: Sequence[Run]) -> pd.DataFrame:
    """A row for each run, model and client."""
    rows = []
    for run in runs:
        named = run.partition.get("sites") or ()
        rise, error = _rise(run)
        for model, kind in _MODELS.items():
            for found in site_accuracies(run.metrics, run.partition, model):
                unlabelled = sum(run.partition["unlabelled"][found.client])
                unknown = (run.partition.get("unknown") or [0] * (found.client + 1))[found.client]
                rows.append(
                    {
                        "method": run.experiment.method,
                        "seed": run.experiment.seed,
                        "site": named[found.client] if named else f"client {found.client}",
                        "model": kind,
                        "rise": rise,
                        "rise_error": error,
                        "labelled": sum(run.partition["labelled"][found.client]),
                        "unlabelled": unlabelled + unknown,
                        "own_mix": None if found.own_mix is None else 100 * found.own_mix,
                        "common": 100 * found.common,
                    }
                )
    columns = ["method", "seed", "site", "model", "rise", "rise_error", "labelled", "unlabelled", *TESTS]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(TESTS, float))


class Joining:
    """Every federated method of a comparison against `alone`, the method whose clients exchange nothing."""

    def __init__(self, found: pd.DataFrame, alone: str):
        self.alone = alone
        by_site = found.set_index(["seed", "site"])
        mine = by_site[by_site["method"] == alone]
        self.pairs: dict[tuple[str, str], pd.DataFrame] = {}  # (method, model) → a row a seed and site that has both
        for (method, model), theirs in by_site[by_site["method"] != alone].groupby(["method", "model"], sort=False):
            values = [*TESTS, "rise", "rise_error"]
            both = theirs[values].add_suffix("_joined").join(mine[values].add_suffix("_alone"), how="inner")
            if len(both):
                self.pairs[str(method), str(model)] = both

    def best(self) -> dict[str, pd.DataFrame]:
        """For each method its last model: a client alone has no averaged one, and an average lags in early rounds."""
        return {method: both for (method, model), both in self.pairs.items() if model == "last"}

    def table(self) -> pd.DataFrame:
        """What sites have alone and joined, and how many of them gain."""
        lines = []
        for (method, model), both in self.pairs.items():
            for test, name in TESTS.items():
                gain = difference(both, test)
                if gain is None:
                    continue
                kept = both.dropna(subset=[f"{test}_joined", f"{test}_alone"])
                lines.append(
                    {
                        "method": method_name(method),
                        "model": model,
                        "tested on": name,
                        "alone": f"{kept[f'{test}_alone'].mean():.1f}",
                        "joined": f"{kept[f'{test}_joined'].mean():.1f}",
                        "gain": signed(gain.mean),
                        "95 % interval": gain.interval or NOTHING,
                        "sites that gain": gainers(both, test),
                    }
                )
        return pd.DataFrame(lines)

    def by_site(self) -> pd.DataFrame:
        """What each site has alone and with each method, mean over seeds."""
        best = self.best()
        parts = {}
        for test, name in TESTS.items():
            mine = pd.concat([both[f"{test}_alone"] for both in best.values()])
            parts[f"alone, {name}"] = mine.groupby("site").mean()
            for method, both in best.items():
                parts[f"{method_name(method)}, {name}"] = both[f"{test}_joined"].groupby("site").mean()
        found = pd.DataFrame(parts).map(lambda value: NOTHING if value != value else f"{value:.1f}")
        return found.reset_index(names="site")

    def sentences(self) -> list[str]:
        """The answer, a sentence a method."""
        best = self.best()
        labels_only = difference(best[REFERENCE], "common") if REFERENCE in best else None
        return [_sentence(method, both, None if method == REFERENCE else labels_only) for method, both in best.items()]


def _rise(run: Run) -> tuple[float, float]:
    """By how much the last three evaluations are above the three before, and the standard error of that."""
    found = [100 * accuracy for _, accuracy in evaluations(run.metrics, "accuracy")]
    if len(found) < 6:
        return math.inf, 0.0
    before, after = np.array(found[-6:-3]), np.array(found[-3:])
    return after.mean() - before.mean(), math.sqrt((before.var(ddof=1) + after.var(ddof=1)) / 3)


def _rising(both: pd.DataFrame, side: str) -> bool:
    """Whether accuracies of one side rise by more than a point, and by more than evaluations scatter."""
    of_runs = both[[f"rise_{side}", f"rise_error_{side}"]].groupby("seed").first()
    rises, errors = (of_runs[name] for name in of_runs)
    return bool(rises.mean() > max(1, 2 * math.sqrt((errors**2).mean() / len(errors))))


def difference(both: pd.DataFrame, test: str) -> Difference | None:
    """The mean site's gain by joining, seed by seed."""
    means = both[[f"{test}_joined", f"{test}_alone"]].dropna().groupby("seed").mean()
    ours, theirs = (dict(zip(means.index, means[name], strict=True)) for name in means)
    return frame.paired(ours, theirs)


def gainers(both: pd.DataFrame, test: str) -> str:
    """How many sites gain by joining, each seed's counted by itself."""
    kept = both[[f"{test}_joined", f"{test}_alone"]].dropna()
    return f"{(kept[f'{test}_joined'] > kept[f'{test}_alone']).sum()} of {len(kept)}"


def _sentence(method: str, both: pd.DataFrame, labels_only: Difference | None) -> str:
    title, own, common = method_name(method), difference(both, "own_mix"), difference(both, "common")
    assert common is not None, "sites without a pair are not in the table"
    main, test = (own, "own_mix") if own is not None else (common, "common")
    interval = f" (95 % interval {main.interval})" if main.interval else ""
    parts = [f"{signed(main.mean)} points on {_PLACES[test]}{interval}"]
    parts += [f"{signed(common.mean)} on {_PLACES['common']}"] if own is not None else []
    behind = ["alone", "joined"]  # who could catch up by training longer
    if main.n < 3:
        answer = f"cannot be judged by {('one seed', 'two seeds')[main.n - 1]}"
    elif main.above or main.below:
        answer, behind = ("is worth it", ["alone"]) if main.above else ("does harm", ["joined"])
    else:
        answer = "makes no difference that can be told"
    if any(_rising(both, side) for side in behind):
        answer = "cannot be judged before accuracies stop rising (more --rounds, into a new --out)"
    owners = f"({both.index.get_level_values('site').nunique()} sites × {main.n} seeds)" if main.n > 1 else "sites"
    told = f"Joining with {title} {answer}: {' and '.join(parts)}; {gainers(both, test)} {owners} gain"
    if labels_only is not None and labels_only.n == common.n:
        told += f"; on the common test set {signed(common.mean - labels_only.mean)} beyond labels only"
    return f"{told}."


_PLACES = {"own_mix": "a site's own class mix", "common": "the common test set"}


def figure(found: Joining) -> Figure:
    """A dot for each site and seed, alone across and joined up, under its own mix and on the common test set."""
    best = found.best()
    formats = style.line_styles(best)
    with style.applied():
        canvas = style.new_figure(WIDE, 4.6)
        values = np.concatenate([both.to_numpy(dtype=float) for both in best.values()])
        low, high = float(np.nanmin(values)) - 3, min(float(np.nanmax(values)) + 3, 100.5)
        for place, test in enumerate(TESTS, 1):
            axes = canvas.add_subplot(1, 2, place)
            for method, both in best.items():
                kept = both[[f"{test}_alone", f"{test}_joined"]].dropna()
                dots = formats[method] | {"linestyle": "", "markersize": 5, "alpha": 0.7, "markeredgewidth": 0}
                axes.plot(kept.iloc[:, 0], kept.iloc[:, 1], gid=inline.part_of(method_name(method)), **dots)
            axes.plot([low, high], [low, high], "-", color=style.MUTED, linewidth=1, zorder=0)
            axes.set(xlim=(low, high), ylim=(low, high), aspect="equal", xlabel="alone", ylabel="joined")
            axes.set_title(f"Accuracy on {_PLACES[test]}, %")
        handles = [Line2D([], [], **formats[method] | {"linestyle": ""}) for method in best]
        style.legend(canvas, map(method_name, best), handles)
        return canvas
