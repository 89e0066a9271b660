"""Leaderboards: their order, what is paired, what is missing, and the files."""

import csv
import dataclasses
import re

import pytest
import yaml

from feddure.studies import sweep, sweep_figures, sweep_report
from feddure.studies.cells import Measurement, Store
from feddure.studies.compare_tables import paired


def make(folder, grid, seeds=(0, 1, 2), **tree):
    file = folder / "rates.yaml"
    file.write_text(yaml.safe_dump({"preset": "demo", "grid": grid, "seeds": list(seeds), **tree}, sort_keys=False))
    return sweep.read(file), Store(folder / "out")


def keep(store, point, *accuracies):
    """Say that these accuracies were measured, seed by seed; None leaves a seed out."""
    for cell, accuracy in zip(point.cells, accuracies, strict=True):
        if accuracy is not None:
            store.keep(
                Measurement(
                    experiment=cell.experiment.model_dump(),
                    config_hash=cell.hash,
                    rounds=30,
                    local_steps=10.0,
                    accuracy_last=accuracy + 0.01,
                    accuracy_last10=accuracy,
                    accuracy_ema=None,
                    curve=[(30, accuracy, None)],
                    seconds=12.0,
                    build_seconds=0.0,
                    together=1,
                    partition="",
                    environment={"cpu": "abacus", "cores": 2, "python": "3.11", "torch": "2", "numpy": "2"},
                )
            )


RATES = {"optimizer.learning_rate": [0.1, 0.01, 0.001]}


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_best_first_and_differences_are_paired(tmp_path):
    wanted, store = make(tmp_path, RATES)
    keep(store, wanted.points[0], 0.40, 0.50, 0.60)
    keep(store, wanted.points[1], 0.45, 0.56, 0.64)
    keep(store, wanted.points[2], 0.10, 0.20, 0.33)
    sweep_report.write(wanted, store)
    rows = table(store.folder / "leaderboard.csv")
    assert [row["optimizer.learning_rate"] for row in rows] == ["0.01", "0.1", "0.001"]
    assert [row["place"] for row in rows] == ["1", "2", "3"]
    assert float(rows[0]["accuracy_last10_mean"]) == pytest.approx(55)
    assert float(rows[1]["accuracy_last10_sd"]) == pytest.approx(10)
    assert rows[0]["from_best"] == ""
    expected = paired([0.40, 0.50, 0.60], [0.45, 0.56, 0.64])
    found = [float(rows[1][name]) for name in ("from_best", "interval_low", "interval_high")]
    assert found == pytest.approx([100 * value for value in expected], abs=1e-3)
    assert len(table(store.folder / "results.csv")) == 9


@pytest.mark.parametrize(
    ("best", "second", "match"),
    [
        ((0.60, 0.70, 0.81), (0.50, 0.60, 0.70), r"\+10\.33 points on the same 3 seeds, .* more than chance"),
        ((0.60, 0.70, 0.80), (0.50, 0.75, 0.70), r"\+5\.00 points .* no difference can be told"),
        ((0.60, None, None), (0.50, None, None), "one seed cannot tell"),
        ((0.60, 0.70, 0.80), (0.50, 0.60, 0.70), "equal on all seeds: more seeds are needed"),
        ((0.60, 0.70, None), (None, None, 0.5), "no seed is measured for both"),
        ((0.60, 0.70, None), (None, None, None), "Only .*0.1 is measured"),
        ((None, None, None), (None, None, None), "Nothing is measured yet"),
    ],
)
def test_the_verdict(tmp_path, best, second, match):
    wanted, store = make(tmp_path, {"optimizer.learning_rate": [0.1, 0.01]})
    keep(store, wanted.points[0], *best)
    keep(store, wanted.points[1], *second)
    assert re.search(match, sweep_report.verdict(sweep_report.leaderboard(wanted, store)))


def test_missing_cells_are_named_everywhere(tmp_path):
    wanted, store = make(tmp_path, RATES)
    keep(store, wanted.points[1], 0.5, None, 0.6)
    keep(store, wanted.points[2], 0.2, 0.3, 0.4)
    sweep_report.write(wanted, store)
    rows = table(store.folder / "leaderboard.csv")
    assert [row["place"] for row in rows] == ["1", "2", ""]
    assert [(row["seeds_measured"], row["seeds_missing"]) for row in rows] == [
        ("0 2", "1"),
        ("0 1 2", ""),
        ("", "0 1 2"),
    ]
    text = (store.folder / "leaderboard.md").read_text()
    page = (store.folder / "report.html").read_text()
    for found in (text, page):
        assert "Not measured: learning rate 0.01, seed 1; learning rate 0.1, seed 0" in found
        assert "2 of 3" in found
        assert "not measured" in found


def test_nothing_measured_still_gives_tables(tmp_path):
    wanted, store = make(tmp_path, RATES)
    store.folder.mkdir()
    names = {path.name for path in sweep_report.write(wanted, store)}
    assert names == {"leaderboard.csv", "leaderboard.md", "report.html"}


def test_names_from_the_file_are_text_in_page_and_table(tmp_path):
    cases = [{"name": "<b>|bold|</b>", "norm": "group"}, {"name": "plain"}]
    wanted, store = make(tmp_path, {"method": ["fedavg"]}, cases=cases)
    keep(store, wanted.points[0], 0.5, 0.6, 0.8)
    keep(store, wanted.points[1], 0.4, 0.5, 0.6)
    sweep_report.write(wanted, store)
    assert "<b>" not in (store.folder / "report.html").read_text()
    assert "<b>\\|bold\\|</b>" in (store.folder / "leaderboard.md").read_text()


@pytest.mark.parametrize(
    ("grid", "kind"),
    [
        ({"method": ["fedavg", "feddure"]}, "none"),
        ({"method": ["fedavg", "feddure"], "rounds": [1, 2, 3]}, "lines"),
        ({"optimizer.learning_rate": [1.0, 0.1], "rounds": [1, 2, 3]}, "maps"),
        ({"optimizer.learning_rate": [1.0, 0.1], "rounds": [1, 2], "local_steps": [1, 2]}, "none"),
        ({"labelled_cutout": [True, False]}, "none"),
    ],
)
def test_numbers_are_drawn_as_lines_or_maps(tmp_path, grid, kind):
    wanted, store = make(tmp_path, grid, seeds=(0, 1))
    for place, point in enumerate(wanted.points[:-1]):  # one is missing
        keep(store, point, 0.3 + place / 100, 0.5)
    rows = sweep_report.leaderboard(wanted, store)
    found = sweep_figures.along_axes(wanted, rows)
    if kind == "none":
        assert found is None
    elif kind == "lines":
        lines = [bars.lines[0] for bars in found.axes[0].containers]
        assert [len(line.get_xdata()) for line in lines] == [3, 2]
        (left, right), (low, high) = found.axes[0].get_xlim(), found.axes[0].get_ylim()
        assert all(left < x < right for line in lines for x in line.get_xdata())
        assert all(low < y < high for line in lines for y in line.get_ydata())
    else:
        assert sorted(text.get_text() for text in found.axes[0].texts).count("–") == 1
        assert len(found.axes[0].texts) == 6


def test_the_figure_has_a_name_for_each_combination(tmp_path):
    wanted, store = make(tmp_path, RATES)
    for place, point in enumerate(wanted.points):
        keep(store, point, 0.3 + place / 10, 0.4 + place / 10, 0.5)
    rows = sweep_report.leaderboard(wanted, store)
    axes = sweep_figures.leaderboard(wanted, rows).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [row.point.name for row in rows]


def test_young_cells_are_not_said_to_have_ten_evaluations(tmp_path):
    wanted, store = make(tmp_path, RATES)
    for point in wanted.points:
        keep(store, point, 0.3, 0.4, 0.5)
    sweep_report.write(wanted, store)
    rows = sweep_report.leaderboard(wanted, store)
    for text in (
        (store.folder / "leaderboard.md").read_text(),
        (store.folder / "report.html").read_text(),
        str(sweep_report.brief(wanted, rows)),
        sweep_figures.leaderboard(wanted, rows).axes[0].get_xlabel(),
    ):
        assert "its only evaluation" in text
        assert not re.search(r"last (10|ten)", text)


def test_rows_are_values(tmp_path):
    wanted, _ = make(tmp_path, RATES)
    empty = sweep_report.Row(wanted.points[0], {})
    assert (empty.last10, empty.steps, empty.seconds) == (None, None, None)
    assert dataclasses.replace(empty) == empty
