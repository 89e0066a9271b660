"""Leaderboards: which combinations are ranked together, their order, what is paired, what is missing, and the files."""

import html
import re
from dataclasses import replace
from itertools import product

import pytest
import yaml

import synthetic
from commands import table
from feddure import methods
from feddure.errors import ConfigError
from feddure.reports import style
from feddure.reports.frame import paired
from feddure.studies import sweep, sweep_report
from feddure.studies.grid.failures import Problem
from feddure.studies.grid.store import Store

RATES = {"optimizer.learning_rate": [0.1, 0.01, 0.001]}
METHODS = {"method": ["feddure", "fedavg"]}
FEDAVG = methods.title("fedavg")
SETTINGS = {"partition.setting": ["iid-iid", "dir-dir"], "method": ["feddure", "fedavg", "fedmatch"]}


def make(folder, grid, seeds=(0, 1, 2), **tree):
    file = folder / "rates.yaml"
    file.write_text(yaml.safe_dump({"preset": "demo", "grid": grid, "seeds": list(seeds), **tree}, sort_keys=False))
    return sweep.read(file), Store(folder / "out")


def written(wanted, store):
    """The leaderboard's rows, its text and the page."""
    store.folder.mkdir(exist_ok=True)
    sweep_report.write(wanted, store)
    out = store.folder
    page = html.unescape((out / "report.html").read_text())
    return table(out / "leaderboard.csv"), (out / "leaderboard.md").read_text(), page


def keep(store, point, *accuracies, left_out=0.0):
    """Say that these accuracies were measured, seed by seed; None leaves a seed out."""
    about = {"cpu": "abacus", "cores": 2, "python": "3.11", "torch": "2", "numpy": "2"}
    for cell, share in zip(point.cells, accuracies, strict=True):
        if share is not None:
            found = synthetic.measured(cell, 100 * share, steps=10.0)
            store.keep(replace(found, curve=[(30, share, None)], seconds=12.0, left_out=left_out, environment=about))


def ranked(rows):
    """The learning rate and the place of each row."""
    return [(row["optimizer.learning_rate"], row["place"]) for row in rows]


# --- problems ------------------------------------------------------------------------------------------


def leaderboards(folder, grid, **tree):
    """The names of the rows by the titles of their leaderboards."""
    return {
        title: [point.name for point in points]
        for title, _, _, points in sweep_report.divide(make(folder, grid, **tree)[0])
    }


@pytest.mark.parametrize(
    ("grid", "cases"),
    [
        (METHODS | {"optimizer.learning_rate": [0.1, 0.01]}, None),
        (METHODS, [{"name": "group", "norm": "group"}, {"name": "as it is"}]),
        ({"partition.gamma": [0.1, 0.5]}, None),
        ({"partition.setting": ["iid-iid", "dir-dir"], "dataset": ["cifar10", "fashion-mini"]}, None),
        (None, [{"name": "few labels", "partition.labels_per_class": 1}, {"name": "as it is"}]),
        (METHODS | {"partition.setting": ["iid-dir"]}, None),
        (METHODS | {"partition.seed": [1, 2]}, None),
    ],
    ids=["no problem", "cases", "gamma", "problems only", "cases only", "one problem", "the partition's seed"],
)
def test_a_single_leaderboard_is_the_sweep_itself(tmp_path, grid, cases):
    wanted, _ = make(tmp_path, grid, cases=cases)
    assert sweep_report.divide(wanted) == [("", wanted.axes, cases is not None, list(wanted.points))]


FEW = [{"name": "few labels", "partition.labels_per_class": 1}, {"name": "as it is"}]
BOTH = ["FedDure", FEDAVG]


@pytest.mark.parametrize(
    ("grid", "cases", "expected"),
    [
        (METHODS | {"partition.setting": ["iid-iid", "fedmatch"]}, None, {"IID-IID": BOTH, "setting fedmatch": BOTH}),
        ({"partition.gamma": [0.3, 1.0]} | METHODS, None, {"gamma 0.3": BOTH, "gamma 1": BOTH}),
        (METHODS | {"dataset": ["cifar10"], "partition.clients": [10, 20]}, None,
         {"CIFAR-10, clients 10": BOTH, "CIFAR-10, clients 20": BOTH}),
        (METHODS, FEW, {"few labels": BOTH, "as it is": BOTH}),
        (METHODS | {"partition.setting": ["iid-dir"]}, FEW, {"IID-DIR, few labels": BOTH, "IID-DIR, as it is": BOTH}),
    ],
)  # fmt: skip
def test_a_leaderboard_for_each_problem(tmp_path, grid, cases, expected):
    assert leaderboards(tmp_path, grid, cases=cases) == expected


def test_cases_that_mix_method_and_problem_stay_in_the_rows(tmp_path):
    cases = [
        {"name": "FedDure, few", "method": "feddure", "partition.labels_per_class": 1},
        {"name": "FixMatch, few", "method": "fedavg-fixmatch", "partition.labels_per_class": 1},
        {"name": "FedDure, 2 %", "method": "feddure", "partition.labels_per_class": None,
         "partition.label_fraction": 0.02},
    ]  # fmt: skip
    assert leaderboards(tmp_path, None, cases=cases) == {
        "labels per class 1": ["FedDure, few", "FixMatch, few"],
        "label fraction 0.02": ["FedDure, 2 %"],
    }


def test_gamma_is_no_problem_without_dirichlet(tmp_path):
    cases = [
        {"name": "FedDure", "method": "feddure", "partition.setting": "iid-iid", "partition.gamma": 0.1},
        {"name": "FedAvg", "method": "fedavg", "partition.setting": "iid-iid", "partition.gamma": 0.2},
        {"name": "FedAvg, unequal", "method": "fedavg", "partition.setting": "dir-dir", "partition.gamma": 0.2},
    ]
    found = leaderboards(tmp_path, None, cases=cases)
    assert found == {"IID-IID": ["FedDure", "FedAvg"], "DIR-DIR, gamma 0.2": ["FedAvg, unequal"]}


# --- order and verdict ---------------------------------------------------------------------------------


def test_best_first_and_differences_are_paired(tmp_path):
    wanted, store = make(tmp_path, RATES)
    keep(store, wanted.points[0], 0.40, 0.50, 0.60)
    keep(store, wanted.points[1], 0.45, 0.56, 0.64)
    keep(store, wanted.points[2], 0.10, 0.20, 0.33)
    rows, text, page = written(wanted, store)
    assert ranked(rows) == [("0.01", "1"), ("0.1", "2"), ("0.001", "3")]
    assert float(rows[0]["accuracy_last10_mean"]) == pytest.approx(55)
    assert float(rows[1]["accuracy_last10_sd"]) == pytest.approx(10)
    assert (rows[0]["local_steps"], rows[0]["seconds"], rows[0]["from_best"]) == ("10.0", "12.0", "")
    expected = paired({0: 40, 1: 50, 2: 60}, {0: 45, 1: 56, 2: 64})
    found = [float(rows[1][name]) for name in ("from_best", "interval_low", "interval_high")]
    assert found == pytest.approx([expected.mean, expected.low, expected.high], abs=1e-3)
    assert {row["problem"] for row in rows} == {""}
    assert len(table(store.folder / "results.csv")) == 9
    assert "##" not in text
    for found in (text, page):
        assert "abacus" in found
        assert "55.0 ± 9.5" in found
        assert "its only evaluation" in found  # young cells do not have ten
        assert not re.search(r"last (10|ten)", found)


def test_what_diverged_has_no_place(tmp_path):
    wanted, store = make(tmp_path, RATES)
    keep(store, wanted.points[0], 0.60, 0.60, 0.60, left_out=1.0)
    (leaderboard,) = sweep_report.leaderboards(wanted, store)
    assert "diverged" in leaderboard.verdict()
    keep(store, wanted.points[1], 0.40, 0.50, 0.60, left_out=0.1)
    keep(store, wanted.points[2], 0.30, 0.40, 0.50)
    rows, text, _ = written(wanted, store)
    assert ranked(rows) == [("0.01", "1"), ("0.001", "2"), ("0.1", "")]
    assert "diverged, 60.0" in text
    assert "learning rate 0.1 100 %" in text


@pytest.mark.parametrize(
    ("best", "second", "match"),
    [
        ((0.60, 0.70, 0.81), (0.50, 0.60, 0.70), r"\+10\.33 points on the same 3 seeds, .* better by"),
        ((0.60, 0.70, 0.80), (0.50, 0.75, 0.70), r"\+5\.00 points .* no difference can be told"),
        ((0.60, None, None), (0.50, None, None), "one seed cannot tell"),
        ((0.60, 0.70, 0.80), (0.50, 0.60, 0.70), "equal on all seeds"),
        ((0.60, 0.70, None), (None, None, 0.5), "no seed is measured for both"),
        ((0.60, 0.70, None), (None, None, None), "Only .*0.1 can be ranked"),
        ((None, None, None), (None, None, None), "Nothing is measured yet"),
    ],
)
def test_the_verdict(tmp_path, best, second, match):
    wanted, store = make(tmp_path, {"optimizer.learning_rate": [0.1, 0.01]})
    keep(store, wanted.points[0], *best)
    keep(store, wanted.points[1], *second)
    (leaderboard,) = sweep_report.leaderboards(wanted, store)
    assert re.search(match, leaderboard.verdict())


def test_missing_and_failed_cells_are_named_everywhere(tmp_path):
    wanted, store = make(tmp_path, RATES)
    rows, text, page = written(wanted, store)
    assert not (store.folder / "leaderboard.png").exists()
    assert [row["place"] for row in rows] == ["", "", ""]
    keep(store, wanted.points[1], 0.5, None, 0.6)
    keep(store, wanted.points[2], 0.2, 0.3, 0.4)
    for cell in wanted.points[0].cells:
        store.fail(cell, Problem("ValueError: <no>"))
    rows, text, page = written(wanted, store)
    found = [(row["place"], row["seeds_measured"], row["seeds_missing"]) for row in rows]
    assert found == [("1", "0 2", "1"), ("2", "0 1 2", ""), ("", "", "0 1 2")]
    failed = "Failed: learning rate 0.1, seeds 0, 1, 2 (ValueError: <no>"
    for found in (text.replace("\\<", "<"), page):
        for said in ("Not measured: learning rate 0.01, seed 1.", failed, "2 of 3"):
            assert said in found


def test_names_from_the_file_are_text_in_page_and_table(tmp_path):
    cases = [{"name": "<b>|bold|</b>", "norm": "group"}, {"name": "plain"}]
    wanted, store = make(tmp_path, {"method": ["fedavg"]}, cases=cases)
    for point in wanted.points:
        keep(store, point, 0.5, 0.6, 0.8)
    _, text, _ = written(wanted, store)
    assert "<b>" not in (store.folder / "report.html").read_text()
    assert "\\<b>\\|bold\\|\\</b>" in text


def test_each_problem_is_ranked_on_its_own(tmp_path):
    wanted, store = make(tmp_path, SETTINGS)
    for place, point in enumerate(wanted.points):
        base = (0.7, 0.6, 0.5, 0.3, 0.4, 0.2)[place]
        keep(store, point, base, base + 0.01 * (place + 1), base + 0.03)
    rows, text, page = written(wanted, store)
    assert [(row["problem"], row["place"]) for row in rows] == list(product(("IID-IID", "DIR-DIR"), "123"))
    assert [row["method"] for row in rows] == ["feddure", "fedavg", "fedmatch", "fedavg", "feddure", "fedmatch"]
    expected = paired({0: 30, 1: 34, 2: 33}, {0: 40, 1: 45, 2: 43})
    found = [float(rows[4][name]) for name in ("from_best", "interval_low", "interval_high")]
    assert found == pytest.approx([expected.mean, expected.low, expected.high], abs=1e-3)
    assert re.findall(r"^## (.*)", text, flags=re.MULTILINE) == ["IID-IID", "DIR-DIR"]
    for found in (text, page):
        for said in (f"FedDure over {FEDAVG}: +9.67", f"{FEDAVG} over FedDure: +10.33", "cannot be compared"):
            assert said in found
    assert "6 combinations of 2 problems, 3 seeds" in page


def test_a_case_in_the_title_is_still_in_the_csv(tmp_path):
    cases = [{"name": "few", "partition.labels_per_class": 1}, {"name": "many", "partition.labels_per_class": 5}]
    wanted, store = make(tmp_path, METHODS, cases=cases, seeds=(0,))
    for place, point in enumerate(wanted.points[:2]):  # nothing of the other problem
        keep(store, point, 0.3 + place / 10)
    rows, text, _ = written(wanted, store)
    assert [(row["problem"], row["case"]) for row in rows] == [("few", "few")] * 2 + [("many", "many")] * 2
    assert [(row["method"], row["place"]) for row in rows[:2]] == [("fedavg", "1"), ("feddure", "2")]
    assert "| case |" not in text
    assert "Nothing is measured yet." in text.partition("## many")[2]


# --- figures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "panels"),
    [
        ({"method": ["fedavg", "feddure"]}, 0),
        ({"method": ["fedavg", "feddure"], "rounds": [1, 2, 3]}, 1),
        ({"optimizer.learning_rate": [1.0, 0.1], "rounds": [1, 2, 3]}, 1),
        ({"partition.setting": ["iid-iid", "dir-dir"], "optimizer.learning_rate": [1.0, 0.1], "rounds": [1, 2]}, 2),
        ({"optimizer.learning_rate": [1.0, 0.1], "rounds": [1, 2], "local_steps": [1, 2]}, 0),
        ({"labelled_cutout": [True, False]}, 0),
    ],
)
def test_numbers_are_drawn_as_lines_or_maps(tmp_path, grid, panels):
    wanted, store = make(tmp_path, grid, seeds=(0, 1))
    for place, point in enumerate(wanted.points[:-1]):  # one is missing
        keep(store, point, 0.3 + place / 100, 0.5)
    found = sweep_report.along_axes(wanted, sweep_report.leaderboards(wanted, store))
    assert (len(found.axes) if found else 0) == panels
    if found:
        assert style.render(found, "png", 50)
    if panels == 2:
        assert sum(text.get_text() == "–" for axes in found.axes for text in axes.texts) == 1


def test_the_figure_of_many_leaderboards_says_what_it_has_no_room_for(tmp_path):
    grid = {"partition.gamma": [place / 10 for place in range(1, 10)], "rounds": list(range(1, 9))}
    wanted, store = make(tmp_path, grid, seeds=(0,))
    for point in wanted.points:
        keep(store, point, 0.5)
    figure = sweep_report.draw(sweep_report.leaderboards(wanted, store))
    assert style.render(figure, "png", 50)
    assert len(figure.axes) == 8
    assert "the best 6 of 8 leaderboards" in figure.get_suptitle()


# --- metric ----------------------------------------------------------------------------------------------
def test_the_metric_ranks_and_cells_that_lack_it_are_measured_again(tmp_path):
    wanted, store = make(tmp_path, RATES, seeds=(0, 1), set={"metric": "auroc"})
    by_accuracy, _ = make(tmp_path, RATES, seeds=(0, 1))
    assert [cell.hash for cell in wanted.cells()] == [cell.hash for cell in by_accuracy.cells()]
    for place, point in enumerate(by_accuracy.points):
        keep(store, point, 0.3 + 0.1 * place, 0.3 + 0.1 * place)  # the last is the most accurate
    assert all(store.has(cell) for cell in by_accuracy.cells())
    assert not any(store.has(cell) for cell in wanted.cells())  # measured by an earlier version
    for place, point in enumerate(by_accuracy.points):
        found = [store.find(cell) for cell in point.cells]
        scores = {"auroc": {"last": 0.9 - 0.1 * place, "last10": 0.8 - 0.1 * place, "unheard of": 1.0}}
        store.keep(*(replace(one, metrics=scores) for one in found))
    rows, text, page = written(wanted, store)
    assert ranked(rows) == [("0.1", "1"), ("0.01", "2"), ("0.001", "3")]
    assert (float(rows[0]["auroc_last10_mean"]), float(rows[0]["accuracy_last10_mean"])) == (80, 30)
    assert "Ordered by test AUROC" in text
    assert "AUROC, " in text.splitlines()[4]
    assert "Test AUROC" in page
    assert written(by_accuracy, store)[0][0]["optimizer.learning_rate"] == "0.001"


def test_a_sweep_has_one_metric(tmp_path):
    with pytest.raises(ConfigError, match="give it in set"):
        make(tmp_path, {"metric": ["accuracy", "auroc"]})


# --- validation ------------------------------------------------------------------------------------------
def test_validation_ranks_where_every_combination_has_it(tmp_path):
    wanted, store = make(tmp_path, RATES, seeds=(0, 1), set={"validation": 0.1})
    for place, point in enumerate(wanted.points):
        keep(store, point, 0.3 + 0.1 * place, 0.3 + 0.1 * place)  # the last is best on the test set
        found = [store.find(cell) for cell in point.cells]
        store.keep(*(replace(one, validation_last10=0.9 - 0.1 * place) for one in found))
    rows, text, page = written(wanted, store)
    assert ranked(rows) == [("0.1", "1"), ("0.01", "2"), ("0.001", "3")]
    assert float(rows[0]["validation_last10_mean"]) == 90
    assert float(rows[0]["accuracy_last10_mean"]) == 30
    assert float(rows[1]["from_best"]) == pytest.approx(-10)
    (leaderboard,) = sweep_report.leaderboards(wanted, store)
    assert "validation" in leaderboard.table(brief=True).columns
    assert "validation accuracy" in text
    assert "Validation accuracy" in page
    assert table(store.folder / "results.csv")[0]["validation_last10"] == "90.0"

    keep(store, wanted.points[0], 0.3, 0.3)  # measured without
    rows, text, _ = written(wanted, store)
    assert ranked(rows) == [("0.001", "1"), ("0.01", "2"), ("0.1", "3")]
    assert "validation accuracy" not in text


def test_results_of_an_earlier_version_without_validation_are_kept(tmp_path):
    wanted, store = make(tmp_path, METHODS, seeds=(0,))
    for point in wanted.points:
        keep(store, point, 0.5)
    written(wanted, store)
    path = store.folder / "results.csv"
    lines = [line.rsplit(",", 4)[0] for line in path.read_text().splitlines()]
    path.write_text("\n".join(line.replace("rates", "before") for line in lines) + "\n")
    written(wanted, store)
    assert sorted(row["study"] for row in table(path)) == ["before"] * 2 + ["rates"] * 2


def test_cases_say_what_they_are_there_for_in_the_files_order(tmp_path):
    cases = [
        {"name": "labels only", "method": "fedavg-matched", "about": "What labels alone give."},
        {"name": "other data", "method": "feddure", "partition.labels_per_class": 3, "about": "Rules out | luck."},
        {"name": "FedDure", "method": "feddure", "against": "other data"},
    ]
    wanted, store = make(tmp_path, {"partition.setting": ["iid-iid", "dir-dir"]}, cases=cases, seeds=(0, 1))
    for point, accuracy in zip(wanted.points, (0.5, 0.4, 0.6, 0.6, 0.7, 0.3), strict=True):
        keep(store, point, accuracy, accuracy + 0.02)
    found = sweep_report.cases_table(wanted, sweep_report.leaderboards(wanted, store))
    assert list(found["case"]) == [point.name for point in wanted.points]
    assert list(found["points"]) == ["", "", "+10.0", "+20.0", "+10.0", "−30.0"]  # in the same setting
    assert list(found["compared with"]) == ["", "", "labels only", "labels only", "other data", "other data"]
    assert list(found["what it is there for"])[2:] == ["Rules out | luck."] * 2 + [""] * 2
    _, text, page = written(wanted, store)
    assert r"Rules out \| luck." in text
    assert "Rules out | luck." in page
    without, _ = make(tmp_path, {}, cases=[{"name": case["name"], "method": case["method"]} for case in cases[:2]])
    assert not len(sweep_report.cases_table(without, sweep_report.leaderboards(without, store)))
