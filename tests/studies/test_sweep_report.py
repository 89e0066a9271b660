"""Leaderboards: their order, what is paired, what is missing, and the files."""

import csv
import dataclasses
import re

import pytest
import yaml

from feddure.reports import style
from feddure.studies import sweep, sweep_figures, sweep_report
from feddure.studies.compare_tables import paired
from feddure.studies.grid.store import Measurement, Store


def make(folder, grid, seeds=(0, 1, 2), **tree):
    file = folder / "rates.yaml"
    file.write_text(yaml.safe_dump({"preset": "demo", "grid": grid, "seeds": list(seeds), **tree}, sort_keys=False))
    return sweep.read(file), Store(folder / "out")


def keep(store, point, *accuracies, left_out=0.0):
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
                    partition="",
                    left_out=left_out,
                    environment={"cpu": "abacus", "cores": 2, "python": "3.11", "torch": "2", "numpy": "2"},
                )
            )


RATES = {"optimizer.learning_rate": [0.1, 0.01, 0.001]}


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_what_diverged_has_no_place(tmp_path):
    wanted, store = make(tmp_path, RATES)
    keep(store, wanted.points[0], 0.60, 0.60, 0.60, left_out=1.0)
    keep(store, wanted.points[1], 0.40, 0.50, 0.60, left_out=0.1)
    keep(store, wanted.points[2], 0.30, 0.40, 0.50)
    sweep_report.write(wanted, store)
    rows = table(store.folder / "leaderboard.csv")
    assert [(row["optimizer.learning_rate"], row["place"]) for row in rows] == [
        ("0.01", "1"),
        ("0.001", "2"),
        ("0.1", ""),
    ]
    text = (store.folder / "leaderboard.md").read_text()
    assert "learning rate 0.01 over learning rate 0.001" in text
    assert "| diverged, 60.0 ± 0.0 |" in text
    assert "left out, in the worst seed of learning rate 0.01 10 %; learning rate 0.1 100 %:" in text


def test_nothing_but_divergence(tmp_path):
    wanted, store = make(tmp_path, RATES, seeds=(0,))
    keep(store, wanted.points[0], 0.60, left_out=1.0)
    assert sweep_report.verdict(sweep_report.leaderboard(wanted, store)) == "All that is measured diverged."
    keep(store, wanted.points[1], 0.10)
    assert sweep_report.verdict(sweep_report.leaderboard(wanted, store)).endswith("is measured and did not diverge.")


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
    assert {row["problem"] for row in rows} == {""}
    assert len(table(store.folder / "results.csv")) == 9
    text = (store.folder / "leaderboard.md").read_text()
    assert "##" not in text
    assert "different data" not in text


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
    axes = sweep_figures.leaderboard(wanted, [("", rows)]).axes[0]
    assert axes.get_title("left") == ""
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
        sweep_figures.leaderboard(wanted, [("", rows)]).axes[0].get_xlabel(),
    ):
        assert "its only evaluation" in text
        assert not re.search(r"last (10|ten)", text)


def test_rows_are_values(tmp_path):
    wanted, _ = make(tmp_path, RATES)
    empty = sweep_report.Row(wanted.points[0], {})
    assert (empty.last10, empty.steps, empty.seconds) == (None, None, None)
    assert dataclasses.replace(empty) == empty


# --- several problems ----------------------------------------------------------------------------------

SETTINGS = {"partition.setting": ["iid-iid", "dir-dir"], "method": ["feddure", "fedavg", "fedmatch"]}


def two_boards(folder, **tree):
    """FedDure first on one board, FedAvg first on the other."""
    wanted, store = make(folder, SETTINGS, **tree)
    for place, point in enumerate(wanted.points[:6]):
        base = (0.7, 0.6, 0.5, 0.3, 0.4, 0.2)[place]
        keep(store, point, base, base + 0.01 * (place + 1), base + 0.03)
    return wanted, store


def test_each_problem_is_ranked_on_its_own(tmp_path):
    wanted, store = two_boards(tmp_path)
    sweep_report.write(wanted, store)
    rows = table(store.folder / "leaderboard.csv")
    assert [(row["problem"], row["place"], row["method"]) for row in rows] == [
        ("IID-IID", "1", "feddure"),
        ("IID-IID", "2", "fedavg"),
        ("IID-IID", "3", "fedmatch"),
        ("DIR-DIR", "1", "fedavg"),
        ("DIR-DIR", "2", "feddure"),
        ("DIR-DIR", "3", "fedmatch"),
    ]
    assert [row["partition.setting"] for row in rows] == ["iid-iid"] * 3 + ["dir-dir"] * 3
    assert [row["from_best"] == "" for row in rows] == [True, False, False] * 2
    expected = paired([0.3, 0.34, 0.33], [0.4, 0.45, 0.43])
    found = [float(rows[4][name]) for name in ("from_best", "interval_low", "interval_high")]
    assert found == pytest.approx([100 * value for value in expected], abs=1e-3)


def test_pages_have_a_heading_a_verdict_and_a_table_for_each_problem(tmp_path):
    wanted, store = two_boards(tmp_path)
    sweep_report.write(wanted, store)
    text = (store.folder / "leaderboard.md").read_text()
    before, first, second = re.split(r"^## .*\n", text, flags=re.MULTILINE)
    assert re.findall(r"^## (.*)", text, flags=re.MULTILINE) == ["IID-IID", "DIR-DIR"]
    assert before.strip() == "# rates"
    assert first.strip().startswith("FedDure over FedAvg: +9.67 points")
    assert second.strip().startswith("FedAvg over FedDure: +10.33 points")
    assert "| 1 | FedAvg |" in second
    assert "setting" not in text
    for once in ("each board on its own because accuracies on different data cannot be compared", "Measured on"):
        assert text.count(once) == 1
    page = (store.folder / "report.html").read_text()
    assert re.findall(r"<h3>(.*)</h3>", page) == ["IID-IID", "DIR-DIR"]
    assert re.findall(r'class="lead"><strong>(.*):</strong> (\S+ over \S+):', page) == [
        ("IID-IID", "FedDure over FedAvg"),
        ("DIR-DIR", "FedAvg over FedDure"),
    ]
    assert re.findall(r"<dt>(.*?)</dt>", page) == ["best, IID-IID", "best, DIR-DIR", "cells measured"]
    assert "6 combinations of 2 problems, 3 seeds" in page


def test_a_case_in_the_title_is_still_in_the_csv(tmp_path):
    cases = [{"name": "few", "partition.labels_per_class": 1}, {"name": "many", "partition.labels_per_class": 5}]
    wanted, store = make(tmp_path, {"method": ["feddure", "fedavg"]}, cases=cases, seeds=(0,))
    for place, point in enumerate(wanted.points):
        keep(store, point, 0.3 + place / 10)
    sweep_report.write(wanted, store)
    rows = table(store.folder / "leaderboard.csv")
    assert [(row["problem"], row["case"], row["method"]) for row in rows] == [
        ("few", "few", "fedavg"),
        ("few", "few", "feddure"),
        ("many", "many", "fedavg"),
        ("many", "many", "feddure"),
    ]
    assert "| case |" not in (store.folder / "leaderboard.md").read_text()


def test_a_problem_with_one_combination_compares_nothing(tmp_path):
    cases = [
        {"name": "FedDure", "method": "feddure"},
        {"name": "FedAvg", "method": "fedavg"},
        {"name": "FedAvg on more clients", "method": "fedavg", "partition.clients": 20},
    ]
    wanted, store = make(tmp_path, None, cases=cases, seeds=(0,))
    for point in wanted.points:
        keep(store, point, 0.5)
    (_, both), (alone, rows) = sweep_report.rankings(wanted, store)
    assert "FedDure over FedAvg" in sweep_report.verdict(both)
    assert alone.title == "clients 20"
    assert sweep_report.verdict(rows) == "FedAvg on more clients is the only combination."


def test_many_problems_have_no_card_each(tmp_path):
    wanted, store = make(tmp_path, {"partition.gamma": [0.1, 0.2, 0.3, 0.4, 0.5], "rounds": [1, 2]}, seeds=(0,))
    for point in wanted.points:
        keep(store, point, 0.5)
    sweep_report.write(wanted, store)
    page = (store.folder / "report.html").read_text()
    assert re.findall(r"<dt>(.*?)</dt>", page) == ["cells measured"]
    assert page.count("<h3>") == 5


def test_a_problem_without_measurements_says_so(tmp_path):
    wanted, store = make(tmp_path, SETTINGS)
    keep(store, wanted.points[0], 0.5, 0.6, 0.7)
    keep(store, wanted.points[1], 0.4, 0.5, None)
    keep(store, wanted.points[2], 0.3, 0.4, 0.5)
    sweep_report.write(wanted, store)
    text = (store.folder / "leaderboard.md").read_text()
    assert "Not measured: IID-IID: FedAvg, seed 2; DIR-DIR: FedDure, seed 0;" in text
    unmeasured = text.partition("## DIR-DIR")[2]
    assert unmeasured.strip().startswith("Nothing is measured yet.")
    assert unmeasured.count("| not measured |") == 3
    assert [row["place"] for row in table(store.folder / "leaderboard.csv")] == ["1", "2", "3", "", "", ""]
    cards = re.findall(r"<dt>(.*?)</dt>", (store.folder / "report.html").read_text())
    assert cards == ["best, IID-IID", "cells measured"]
    figure = drawn(wanted, store)
    assert [axes.get_title("left") for axes in figure.axes] == ["IID-IID"]


def drawn(wanted, store):
    ranked = sweep_report.rankings(wanted, store)
    return sweep_figures.leaderboard(wanted, [(board.title, rows) for board, rows in ranked])


def test_boards_are_drawn_below_one_another_on_one_scale(tmp_path):
    wanted, store = two_boards(tmp_path)
    upper, lower = drawn(wanted, store).axes
    assert (upper.get_title("left"), lower.get_title("left")) == ("IID-IID", "DIR-DIR")
    assert upper.get_position().y0 > lower.get_position().y1
    names = [[label.get_text() for label in axes.get_yticklabels()] for axes in (upper, lower)]
    assert names == [["FedDure", "FedAvg", "FedMatch"], ["FedAvg", "FedDure", "FedMatch"]]
    assert upper.get_xlim() == lower.get_xlim()
    for axes in (upper, lower):
        left, right = axes.get_xlim()
        means = [bars.lines[0] for bars in axes.containers]
        assert all(left < x < right for line in means for x in line.get_xdata())
        assert [line.get_color() for line in means] == [style.BLUE, style.MUTED, style.MUTED]


def test_a_figure_says_what_it_has_no_room_for(tmp_path):
    grid = {"partition.gamma": [place / 10 for place in range(1, 10)], "rounds": list(range(1, 9))}
    wanted, store = make(tmp_path, grid, seeds=(0,))
    for point in wanted.points:
        keep(store, point, 0.5)
    figure = drawn(wanted, store)
    assert {len(axes.get_yticks()) for axes in figure.axes} == {6}
    assert len(figure.axes) == 8
    assert figure.texts[0].get_text() == "One seed each (the best 6 of each, the first 8 of 9 boards)"


def test_maps_have_a_best_for_each_problem(tmp_path):
    grid = {"partition.setting": ["iid-iid", "dir-dir"], "optimizer.learning_rate": [1.0, 0.1], "rounds": [1, 2]}
    wanted, store = make(tmp_path, grid, seeds=(0,))
    for place, point in enumerate(wanted.points):
        keep(store, point, (0.71, 0.72, 0.73, 0.74, 0.34, 0.33, 0.32, 0.31)[place])
    figure = sweep_figures.along_axes(wanted, sweep_report.leaderboard(wanted, store))
    bold = [[text.get_text() for text in axes.texts if text.get_weight() == "bold"] for axes in figure.axes]
    assert bold == [["74.0"], ["34.0"]]
