"""What a comparison says: a row for each method, its difference from the reference seed by seed, and the page."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from feddure.methods import exchanges, make
from feddure.methods import title as method_name
from feddure.reports import figures, frame, style
from feddure.reports.frame import Difference, mean_sd
from feddure.reports.names import data_size
from feddure.reports.page import Group, Section, Text, embed, table
from feddure.reports.run_report import write_report
from feddure.studies import joining
from feddure.studies.grid.failures import Problem
from feddure.studies.plan import PAIRED_FILE, REPORT_FILE, SITES_FILE, TABLE_FILE, Plan
from feddure.tracking.metrics import TITLES
from feddure.tracking.records import Run
from feddure.tracking.summary import NOTHING, duration, number


@dataclass(frozen=True)
class View:
    """The results of a comparison by a metric; methods that have `failed` are not in its plan and have no runs."""

    plan: Plan
    runs: list[Run]
    failed: Mapping[str, Problem]
    metric: str = "accuracy"

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row a run."""
        return frame.of_runs(self.runs, self.metric)

    @cached_property
    def differences(self) -> dict[tuple[str, str], Difference]:
        """How much better than the reference, by method and evaluations; none where the reference is not there."""
        found = {}
        for method, which in itertools.product(self.plan.methods, frame.EVALUATIONS):
            column = f"{self.metric}_{which}"
            ours, theirs = (frame.by_seed(self._of(name), column) for name in (method, self.plan.against))
            difference = frame.paired(ours, theirs)
            if method != self.plan.against and difference is not None:
                found[method, which] = difference
        return found

    @cached_property
    def sites(self) -> pd.DataFrame:
        """A row a run, model and client: its accuracy under its own class mix and on the common test set, in %."""
        return joining.sites(self.runs)

    @cached_property
    def joining(self) -> joining.Joining | None:
        """What the federated methods give to a site that could train alone; None where nobody does, or nobody else."""
        alone = [method for method in self.plan.methods if not exchanges(method)]
        found = joining.Joining(self.sites, alone[0]) if alone else None
        return found if found and found.pairs else None

    def _options(self, method: str) -> str:
        """What a method's own options are where they are not its defaults: no other method has them."""
        experiment = next(run.experiment for run in self.runs if run.experiment.method == method)
        given = ((section, getattr(experiment, section, None) or {}) for section in make(experiment).sections())
        return ", ".join(f"{section}.{key}={value}" for section, own in given for key, value in own.items())

    def _of(self, method: str) -> pd.DataFrame:
        return self.frame[self.frame["method"] == method]

    @property
    def validated(self) -> bool:
        """Whether runs have images set aside for validation."""
        return bool(self.frame["validation_last10"].notna().any())

    @property
    def averaged(self) -> bool:
        """Whether there are models that are averaged over rounds."""
        return bool(self.frame["accuracy_ema"].notna().any())

    def methods(self, own_mix: bool = False) -> pd.DataFrame:
        """The methods in the plan's order, as people read them; those that have failed are last.

        `own_mix` adds the mean over clients of the accuracy under their own class mixes, for who has the room.
        """
        lines = []
        last, mean = frame.heading(self.metric, "last"), frame.mean_heading(self.frame)
        for method in self.plan.methods:
            own = self._of(method)
            sent = own["bytes_up"].mean() + own["bytes_down"].mean()
            lines.append(
                {
                    "method": method_name(method),
                    "seeds": len(own),
                    "rounds": f"{own['rounds'].iloc[0]:,}",
                    "steps": number(own["local_steps"].mean(), 1),
                    last: mean_sd(own[f"{self.metric}_last"]),
                    **({frame.heading(self.metric, mean): mean_sd(own[f"{self.metric}_last10"])} if mean else {}),
                    **({"averaged": mean_sd(own[f"{self.metric}_ema_last10"])} if self.averaged else {}),
                    **({"validation": mean_sd(own["validation_last10"])} if self.validated else {}),
                    **({"own mix": mean_sd(self._own_mix(method))} if own_mix else {}),
                    "sent": data_size(sent) if sent == sent else NOTHING,
                    "time": duration(own["seconds"].mean() if own["seconds"].notna().any() else None),
                }
            )
        lines += [{"method": method_name(method), last: "failed"} for method in self.failed]
        return pd.DataFrame(lines, dtype=object).fillna(NOTHING)

    def metrics(self) -> pd.DataFrame:
        """Every metric of each method, as the mean of the last ten evaluations; empty where there is but accuracy."""
        names = frame.metrics_of(self.frame)
        lines = [
            {
                "method": method_name(method),
                **{TITLES[name]: mean_sd(self._of(method)[f"{name}_last10"]) for name in names},
            }
            for method in self.plan.methods
        ]
        return pd.DataFrame(lines if len(names) > 1 else [], dtype=object).fillna(NOTHING)

    def _own_mix(self, method: str) -> pd.Series:
        """By seed, the mean over clients of the accuracy under their own class mixes."""
        own = self.sites[(self.sites["method"] == method) & (self.sites["model"] == "last")]
        return own.groupby("seed")["own_mix"].mean()

    def pairs(self) -> pd.DataFrame:
        """The differences over the last ten evaluations, and those of the averaged models."""
        averaged = {method: str(found) for (method, which), found in self.differences.items() if which == "ema_last10"}
        lines = [
            {
                "method": method_name(method),
                frame.mean_heading(self.frame) or "last": str(found),
                **({"averaged": averaged.get(method, NOTHING)} if averaged else {}),
                "verdict": found.verdict,
            }
            for (method, which), found in self.differences.items()
            if which == "last10"
        ]
        return pd.DataFrame(lines)

    def about_methods(self) -> str:
        """What the columns of `methods` are, and why some have failed."""
        spread = " ± standard deviation over seeds" if len(self.plan.seeds) > 1 else ""
        mean = frame.mean_heading(self.frame)
        also = f", and {frame.mean_of(self.frame, spelled_out=True)}" if mean else ", the only evaluation"
        said = [
            f"Test {TITLES[self.metric]} in %{spread}: last round{also}. Steps: local "
            "ones per client and round. Sent: by server and clients in one run. Time: each run's own."
            + f" Averaged: the model averaged over rounds, as {mean or 'last'}." * self.averaged
            + f" Validation: on images that nobody trains on, as {mean or 'last'}." * self.validated,
            *(f"{method_name(method)} has {own}." for method in self.plan.methods if (own := self._options(method))),
            *(f"{method_name(method)} failed: {problem.reason}." for method, problem in self.failed.items()),
        ]
        if self.plan.against in self.failed:
            said.append("It was the reference: no difference from it can be told.")
        return " ".join(said)

    def about_pairs(self) -> str:
        """What the columns of `pairs` are."""
        seeds = len(self.plan.seeds)
        interval = f"Each has its own 95 % interval, by Student's t over {seeds} seeds"
        if seeds == 1:
            interval = "One seed gives no interval: any of these differences may be chance"
        which = frame.mean_heading(self.frame) or "last"
        judged = f" The verdict is on {which}." * self.averaged
        against = method_name(self.plan.against)
        return f"Points of {TITLES[self.metric]} beyond {against} on the same seeds. {interval}.{judged}"

    def write_tables(self, folder: Path) -> None:
        """comparison.csv, paired.csv and sites.csv; metrics are in %, bytes and seconds those of a run.

        Methods that have failed have a line with the reason and no number.
        """
        lines: list[dict[str, Any]] = []
        for method in self.plan.methods:
            own = self._of(method)
            records = [one for run in self.runs if run.experiment.method == method for one in run.metrics]
            line = {
                "method": method,
                "seeds": " ".join(map(str, own["seed"])),
                "rounds": own["rounds"].iloc[0],
                "local_steps_per_round": round(sum(sum(one.get("steps", ())) for one in records) / len(records), 6),
                "local_steps_per_client_and_round": round(own["local_steps"].mean(), 6),
            }
            which = frame.EVALUATIONS if self.averaged else frame.EVALUATIONS[:2]
            columns = [f"{name}_{one}" for name in frame.metrics_of(self.frame) for one in which]
            line |= frame.mean_and_sd(own, columns + ["validation_last10"] * self.validated)
            for name, digits in (("bytes_down", None), ("bytes_up", None), ("seconds", 2)):
                line[name] = round(own[name].mean(), digits) if own[name].notna().all() else ""
            lines.append(line | {"failed": ""})
        lines += [{"method": method, "failed": problem.reason} for method, problem in self.failed.items()]
        frame.write_csv(folder / TABLE_FILE, pd.DataFrame(lines, dtype=object))
        columns = ["method", "against", "metric", "evaluations", "seeds"]
        columns += ["difference_mean", "interval_low", "interval_high"]
        ends = ("mean", "low", "high")
        pairs = [
            [method, self.plan.against, self.metric, which, d.n, *(frame.rounded(d, end) for end in ends), d.verdict]
            for (method, which), d in self.differences.items()
        ]
        frame.write_csv(folder / PAIRED_FILE, pd.DataFrame(pairs, columns=[*columns, "verdict"]))
        if len(self.sites):
            frame.write_csv(folder / SITES_FILE, self.sites.drop(columns=["rise", "rise_error"]).round(4))


def write(folder: Path, view: View) -> Path:
    """Write report.html, the tables and mean curves ahead of the runs one by one, and return its path."""
    formats = style.line_styles(view.plan.methods)
    shown = [formats.get(method) for method in (*view.plan.methods, *view.failed)]
    about = f"{view.about_methods()} Own mix: accuracy under each client's own class mix, mean over clients."
    parts: list[Any] = [Text(about), table(view.methods(own_mix=True), numbers_from=1, formats=shown)]
    pairs = view.pairs()
    if len(pairs):
        parts += [Text("More than chance?", "heading"), Text(view.about_pairs()), table(pairs)]
    every = view.metrics()
    if len(every):
        about = f"In %, {frame.mean_of(view.frame, spelled_out=True)}. The calibration error is better where lower."
        parts.append(
            Group([Text(about, "fact"), table(every, numbers_from=1, formats=shown[: len(every)])], "Every metric")
        )
    if view.joining is not None:
        named = bool(view.runs[0].partition.get("sites"))  # clients that were dealt are others with every seed
        parts += _joining(view.joining, named)
    if len(view.plan.seeds) > 1:
        parts.append(embed(mean_curves(view), f"Test {TITLES[view.metric]} of each method against rounds"))
    folders = [run.folder for run in view.runs]
    return write_report(folders, folder / REPORT_FILE, [Section("", parts=parts)], view.metric)


def _joining(found: joining.Joining, named: bool) -> list[Any]:
    """The answer to a site's first question, in sentences, a table and a picture."""
    about = (
        f"{method_name(found.alone)}: each site by itself, with as many steps as it takes in the federation. A site's "
        "own class mix weighs the accuracy of each class on the common test set by the site's share of it. Sites that "
        "have not trained alone, as those without a label, are left out. Dots above the line are sites that gain."
    )
    picture = embed(joining.figure(found), "Each site's accuracy alone and joined")
    return [
        Text("Is joining worth it?", "heading"),
        *(Text(sentence) for sentence in found.sentences()),
        table(found.table(), numbers_from=3),
        Text(about, "fact"),
        picture,
        *([Group([table(found.by_site(), numbers_from=1)], "Site by site, %, mean over seeds")] if named else ()),
    ]


def mean_curves(view: View) -> figures.Figure:
    """The metric of each method, mean over seeds in a band of one standard deviation."""
    formats = style.line_styles(view.plan.methods)
    found = [
        figures.over_seeds(method_name(method), formats[method], view._of(method)["curve"])
        for method in view.plan.methods
    ]
    return figures.curves(found, f"Test {TITLES[view.metric]}, %, mean over seeds ± standard deviation")
