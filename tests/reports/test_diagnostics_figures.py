import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddure.config import load
from feddure.reports import style
from feddure.reports.diagnostics_figures import draw
from feddure.reports.diagnostics_summary import (
    best_of_threshold,
    findings,
    judged,
    last_means,
    per_class,
    running_mean,
    table,
    trace,
)
from feddure.reports.figures import look, svg
from feddure.reports.run_report import write_report
from feddure.simulation.diagnostics import auroc
from feddure.tracking.records import Writer

CLASSES = ["cat", "dog", "<ship>"]
REWARD, WEIGHTS, RIGHT = "Reward d of C-reg", "Weights m of pseudo labels", "Right pseudo labels"
SEPARATION, ASCENT, LOSSES = "AUROC of m, right against wrong", "Steps of gradient ascent", "Losses while training"
BY_CLASS = "Pseudo labels by true class"
EVERY = [REWARD, WEIGHTS, RIGHT, SEPARATION, ASCENT, LOSSES, BY_CLASS]


def feddure(rounds=30, **changes):
    """The records of a method with weights and a reward; a change is a value or a function of the round."""
    base = {
        "weight_mean": 0.5,
        "weight_p10": 0.48,
        "weight_p50": 0.5,
        "weight_p90": 0.53,
        "pseudo_accuracy": 0.6,
        "pseudo_accuracy_weighted": 0.604,
        "weight_auroc": 0.53,
        "pseudo_accuracy_per_class": [0.9, 0.2, None],
        "coverage_per_class": [0.5, 0.4, None],
        "d_mean": 0.01,
        "d_lowest": -0.1,
        "d_highest": 0.2,
        "ascent_share": 0.0,
        "clients": [{"weight_auroc": 0.4}, {"weight_auroc": 0.6}, {"weight_auroc": None}],
    }
    return records(rounds, base | changes, {"loss": 0.5, "loss_unlabelled": 0.25, "d": 0.01})


def fixmatch(rounds=30, **changes):
    """The records of a method that weighs by a threshold."""
    mask = {"weight_mean": 0.3, "weight_p10": 0.0, "weight_p50": 0.0, "weight_p90": 1.0}
    rest = {"pseudo_accuracy_weighted": 0.9, "clients": [{"weight_auroc": 0.55}]}
    lines = feddure(rounds, **mask | rest | changes)
    for line in lines:
        for name in ("d_mean", "d_lowest", "d_highest", "ascent_share"):
            del line["diagnostics"][name]
        del line["train"]["d"]
    return lines


def fedavg(rounds=30):
    return [{"round": number, "train": {"loss": 0.7}} for number in range(1, rounds + 1)]


def records(rounds, diagnostics, train):
    def at(number):
        return {name: value(number) if callable(value) else value for name, value in diagnostics.items()}

    return [{"round": number, "train": dict(train), "diagnostics": at(number)} for number in range(1, rounds + 1)]


@pytest.fixture(scope="module")
def charts():
    """The figures of one run with regulators; drawing takes a while."""
    return draw({"a": feddure()}, CLASSES)


@pytest.fixture(scope="module")
def compared():
    """The figures of three runs, of which the first has no pseudo labels and the last is short."""
    return draw({"first": fedavg(), "second": feddure(), "third": fixmatch(10, weight_mean=0.9)})


def titles(charts):
    return [chart.title for chart in charts]


def figure_of(charts, title):
    (chart,) = (chart for chart in charts if chart.title == title)
    return chart.figure


def lines_of(axes):
    """The named lines of a panel."""
    return {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}


# --- numbers -----------------------------------------------------------------------------------------------
def test_a_running_mean_covers_five_rounds_of_a_short_run_and_a_tenth_of_a_long_one():
    assert running_mean(np.arange(10.0)).tolist() == [1, 1.5, 2, 3, 4, 5, 6, 7, 7.5, 8]
    peak = np.zeros(200)
    peak[100] = 1
    assert np.flatnonzero(running_mean(peak)).tolist() == list(range(90, 111))


def test_a_running_mean_leaves_out_rounds_without_a_value():
    values = np.array([1.0, np.nan, 3.0, np.nan, np.nan, np.nan, np.nan, np.nan, 8.0])
    found = running_mean(values)
    assert found[:3].tolist() == [2, 2, 2]
    assert np.isnan(found[5])
    assert found[-1] == 8


def test_a_trace_has_a_value_for_each_round_and_the_clients_own_auroc():
    lines = feddure(4, weight_auroc=lambda number: None if number == 2 else number / 10)
    lines.append({"round": 5, "train": {"loss": None}})
    found = trace(lines)
    assert found["round"].tolist() == [1, 2, 3, 4, 5]
    assert np.isnan(found["weight_auroc"]).tolist() == [False, True, False, False, True]
    assert found["auroc_within"][:4].tolist() == [0.5] * 4
    assert found["chance"].tolist() == [1 / 3] * 5
    assert "drift" not in trace([{"round": 1, "diagnostics": {"drift": [1.0]}}])


def test_the_level_of_ascent_is_shown_only_where_rewards_come_near_it():
    assert "ascent_below" not in trace(feddure(d_lowest=-0.4))
    assert trace(feddure(3, d_lowest=-0.6))["ascent_below"].tolist() == [-0.5] * 3
    assert "ascent_below" not in trace(feddure(3, d_lowest=-0.6, reach=0.5))
    assert trace(feddure(3, d_lowest=-1.1, reach=0.5))["ascent_below"].tolist() == [-1.0] * 3
    assert "ascent_below" not in trace(feddure(3, d_lowest=-1.1, reach=0.0))  # d acts on nothing


def test_weights_of_a_threshold_have_no_percentiles_but_a_best_auroc():
    found = trace(fixmatch(5, weight_p90=lambda number: 0.4 if number == 3 else 1.0))
    assert "weight_p10" not in found
    assert found["auroc_best"] == pytest.approx(np.full(5, 0.75))
    assert "weight_p10" in trace(feddure(5))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 20), st.data())
def test_the_best_of_a_threshold_is_what_letting_right_ones_pass_first_gives(size, data):
    right = data.draw(st.integers(1, size - 1))
    passing = data.draw(st.integers(0, size))
    numbers = np.arange(size)
    expected = auroc((numbers < passing).astype(float), numbers < right)
    assert best_of_threshold(np.array(passing / size), np.array(right / size)) == pytest.approx(expected, abs=1e-7)


def test_means_are_those_of_the_last_rounds():
    found = last_means(trace(feddure(30, weight_auroc=lambda number: 0.9 if number <= 10 else 0.5)))
    assert found["weight_auroc"] == pytest.approx(0.5)
    gone = feddure(30, weight_auroc=lambda number: 0.9 if number <= 10 else None)
    assert "weight_auroc" not in last_means(trace(gone))


def test_quantities_of_classes_fill_a_table_of_rounds():
    found = per_class([*feddure(2), {"round": 3}], "coverage_per_class")
    assert found.shape == (3, 3)
    assert found[0, :2].tolist() == [0.5, 0.4]
    assert np.isnan(found[2]).all()
    assert per_class(fedavg(3), "coverage_per_class").shape == (3, 0)


# --- words -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "word"),
    [
        (0.0, "the wrong way round"),
        (0.394, "the wrong way round"),
        (0.40, "slightly the wrong way round"),
        (0.474, "slightly the wrong way round"),
        (0.48, "not at all"),
        (0.50, "not at all"),
        (0.524, "not at all"),
        (0.526, "hardly"),
        (0.53, "hardly"),
        (0.60, "a little"),
        (0.70, "fairly well"),
        (0.80, "well"),
        (0.90, "very well"),
        (1.0, "very well"),
    ],
)
def test_an_auroc_is_judged_by_the_digits_that_are_shown(value, word):
    assert judged(value) == word


def plain(sentences):
    return {name: text.replace("\u202f", " ") for name, text in sentences.items()}


def test_a_run_with_regulators_is_put_in_words():
    said = plain(findings(feddure(30, ascent_share=lambda number: 0.3 if number <= 10 else 0.06), CLASSES))
    assert said == {
        "reward": "d is +0.010 on average in the last 20 rounds, from −0.100 to +0.200: "
        "on the whole it added to the weight of pseudo labels.",
        "weights": "m is 0.50 on average in the last 20 rounds, mostly between 0.48 and 0.53: "
        "pseudo labels count almost alike.",
        "accuracy": "60.0 % of the pseudo labels are right in the last 20 rounds, 60.4 % weighted by m: "
        "the weights hardly matter.",
        "separation": "The weights separate right from wrong pseudo labels with an AUROC of 0.53 in the last "
        "20 rounds: hardly. Within single clients it is 0.50.",
        "ascent": "6.0 % of the steps in the last 20 rounds moved the model away from its pseudo labels; "
        "over the whole run, 14.0 % did.",
        "losses": "The loss is 0.50 on labels and 0.25 on pseudo labels in the last 20 rounds.",
        "classes": "90 % of the pseudo labels of cat are right in the last 20 rounds, and 20 % of those of dog.",
    }


def test_a_run_with_a_threshold_is_put_in_words():
    said = plain(findings(fixmatch(15, weight_auroc=0.7)))
    assert "reward" not in said
    assert "ascent" not in said
    assert said["weights"] == "30.0 % of the pseudo labels pass the threshold over all 15 rounds."
    assert said["accuracy"].endswith("90.0 % weighted by m: the weights favour right ones.")
    assert "AUROC of 0.70 over all 15 rounds: 0.75 at best with 30.0 % passing the threshold." in said["separation"]
    assert "of class 0 are right" in said["classes"]


@pytest.mark.parametrize(
    ("figure", "changes", "ending"),
    [
        ("reward", {"d_mean": -0.02}, "on the whole it took from the weight of pseudo labels."),
        ("weights", {"weight_p90": 0.6}, "pseudo labels count somewhat differently."),
        ("weights", {"weight_p10": 0.1, "weight_p90": 0.9}, "pseudo labels count very differently."),
        ("accuracy", {"pseudo_accuracy_weighted": 0.57}, "the weights favour wrong ones."),
        ("accuracy", {"pseudo_accuracy_weighted": None}, "are right in the last 20 rounds."),
        ("separation", {"weight_auroc": 0.3, "clients": []}, "0.30 in the last 20 rounds: the wrong way round."),
        ("ascent", {}, "over the whole run, 0.0 % did."),
    ],
)
def test_words_follow_the_numbers(figure, changes, ending):
    assert plain(findings(feddure(**changes)))[figure].endswith(ending)


def test_a_run_without_records_says_nothing():
    assert findings([]) == {}
    assert set(findings(fedavg())) == set()


def test_runs_are_compared_in_a_table():
    columns, rows = table({"ours": feddure(), "plain": fedavg(), "theirs": fixmatch(weight_auroc=0.7)})
    assert list(rows) == ["ours", "theirs"]
    ours, theirs = (dict(zip(columns, rows[label], strict=True)) for label in rows)
    assert (ours["right"], ours["weighted"], ours["mean d"], ours["AUROC"]) == ("60.00", "60.40", "+0.010", "0.53")
    assert ours["m tells them apart"] == "hardly"
    assert (theirs["mean d"], theirs["ascent"], theirs["m tells them apart"]) == ("–", "–", "0.75 at best")


# --- pictures ----------------------------------------------------------------------------------------------
def test_a_run_has_the_figures_of_what_it_recorded(charts):
    assert titles(charts) == EVERY
    assert titles(draw({"a": fixmatch()})) == [WEIGHTS, RIGHT, SEPARATION, LOSSES, BY_CLASS]
    assert draw({"a": fedavg()}) == []
    assert draw({"a": []}) == []
    assert draw({"a": [{"round": 1, "diagnostics": {"drift": [1.0]}}]}) == []


def test_images_of_unknown_class_leave_weights_and_rewards():
    lines = feddure()
    for line in lines:
        kept = ("weight_mean", "weight_p10", "weight_p50", "weight_p90", "d_mean", "d_lowest", "d_highest")
        line["diagnostics"] = {name: line["diagnostics"][name] for name in kept}
    assert titles(draw({"a": lines})) == [REWARD, WEIGHTS, LOSSES]


def test_every_figure_says_how_to_read_it_and_what_it_says_of_its_only_run(charts, compared):
    assert all(chart.finding.endswith(".") and chart.reading.endswith(".") for chart in charts)
    assert all(chart.reading.endswith(".") and not chart.finding for chart in compared)


def test_raw_rounds_are_faint_and_their_running_mean_is_strong():
    rising = feddure(weight_auroc=lambda number: 0.5 + 0.01 * (number % 2))
    (axes,) = figure_of(draw({"a": rising}), SEPARATION).axes
    raw = next(line for line in axes.get_lines() if line.get_alpha())
    strong = lines_of(axes)["all clients"]
    assert raw.get_ydata().tolist() == [line["diagnostics"]["weight_auroc"] for line in rising]
    assert raw.get_linewidth() < strong.get_linewidth()
    assert np.ptp(strong.get_ydata()) < np.ptp(raw.get_ydata())
    assert set(lines_of(axes)["cannot tell"].get_ydata()) == {0.5}


def test_accuracy_is_drawn_beside_chance(charts):
    (axes,) = figure_of(charts, RIGHT).axes
    assert {name: pytest.approx(line.get_ydata()[0]) for name, line in lines_of(axes).items()} == {
        "plain": 0.6,
        "weighted by m": 0.604,
        "chance": 1 / 3,
    }
    assert axes.get_ylim()[0] == 0


def test_bands_reach_from_the_lowest_to_the_highest(charts, compared):
    for title, low, high in ((REWARD, -0.1, 0.2), (WEIGHTS, 0.48, 0.53)):
        (band,) = figure_of(charts, title).axes[0].collections
        heights = band.get_paths()[0].vertices[:, 1]
        assert (heights.min(), heights.max()) == pytest.approx((low, high))
    assert not figure_of(compared, WEIGHTS).axes[1].collections  # weights of a threshold


def test_several_runs_keep_their_colours_and_share_their_scale(compared):
    panels = figure_of(compared, WEIGHTS).axes
    assert [axes.get_title(loc="left") for axes in panels] == ["second", "third"]
    assert [lines_of(axes)["mean"].get_color() for axes in panels] == [look(1)["color"], look(2)["color"]]
    assert len({axes.get_ylim() for axes in panels}) == len({axes.get_xlim() for axes in panels}) == 1
    assert len(figure_of(compared, LOSSES).axes) == 3
    assert len(figure_of(compared, REWARD).axes) == 1
    (overlay,) = figure_of(compared, SEPARATION).axes
    assert [*lines_of(overlay)] == ["second", "third", "cannot tell"]
    assert lines_of(overlay)["cannot tell"].get_xdata()[-1] == 30


def test_a_heat_map_shows_the_classes_over_the_rounds_with_their_last_means():
    lines = feddure(120, pseudo_accuracy_per_class=lambda number: [1.0 if number > 60 else 0.0, 0.25, None])
    right, weight = figure_of(draw({"a": lines}, CLASSES), BY_CLASS).axes
    cells = right.images[0].get_array()
    assert cells.shape == (3, 40)  # three rounds to a cell
    assert cells[0, :20].tolist() == [0] * 20
    assert cells[0, 20:].tolist() == [1] * 20
    assert np.isnan(np.ma.filled(cells[2], np.nan)).all()
    assert [text.get_text() for text in right.texts] == ["100", "25", "–"]
    assert [text.get_text() for text in weight.texts] == ["50", "40", "–"]
    assert [label.get_text() for label in right.get_yticklabels()] == CLASSES


def test_classes_of_several_runs_are_dots_in_their_colours(compared):
    right, _ = figure_of(compared, BY_CLASS).axes
    assert list(lines_of(right)) == ["second", "third"]
    assert lines_of(right)["third"].get_xdata()[:2] == pytest.approx([0.9, 0.2])
    assert lines_of(right)["third"].get_color() == look(2)["color"]
    assert [label.get_text() for label in right.get_yticklabels()] == ["class 0", "class 1", "class 2"]


def test_different_classes_are_not_compared():
    other = feddure(2, coverage_per_class=[0.5, 0.5], pseudo_accuracy_per_class=[0.5, 0.5])
    assert BY_CLASS not in titles(draw({"a": feddure(2), "b": other}))


def test_classes_by_the_hundred_are_drawn():
    many = feddure(5, coverage_per_class=[0.5] * 100, pseudo_accuracy_per_class=[0.5] * 100)
    figure = figure_of(draw({"a": many}), BY_CLASS)
    assert figure.get_figheight() < 10
    assert len(svg(figure)) < 200_000


def test_losses_have_the_colours_of_labelled_and_unlabelled_images(charts):
    (axes,) = figure_of(charts, LOSSES).axes
    assert lines_of(axes)["labels"].get_color() == style.LABELLED
    assert lines_of(axes)["pseudo labels"].get_color() == style.UNLABELLED


# --- in the report -----------------------------------------------------------------------------------------
def write_run(folder, lines, method="feddure"):
    folder.mkdir()
    (folder / "config.yaml").write_text(load("demo", changes={"method": method, "rounds": len(lines)}).to_yaml())
    (folder / "partition.json").write_text(json.dumps({"classes": CLASSES}))
    with Writer(folder / "metrics.jsonl") as metrics:
        for line in lines:
            metrics.write(line)
    return folder


def page(*folders):
    out = folders[0].parent / "report.html"
    return write_report(list(folders), out).read_text(encoding="utf-8").replace("\u202f", " ")


def test_the_report_of_a_run_shows_its_pseudo_labels_in_figures_and_words(tmp_path):
    html = page(write_run(tmp_path / "run", feddure()))
    places = [html.index(f"<figcaption>{title}") for title in EVERY]
    assert all(earlier < later for earlier, later in pairwise(places))
    assert "with an AUROC of 0.53 in the last 20 rounds: hardly." in html
    assert "Inside the training" not in html  # all of it is shown here


def test_quantities_of_a_methods_own_stay_inside_the_training(tmp_path):
    lines = feddure(4)
    for line in lines:
        line["train"]["drift"] = 0.5
    assert "Inside the training" in page(write_run(tmp_path / "run", lines))


def test_the_report_of_a_run_without_pseudo_labels_is_as_before(tmp_path):
    html = page(write_run(tmp_path / "run", fedavg(), "fedavg"))
    assert "<h2>Pseudo labels</h2>" not in html
    assert "Inside the training" in html


def test_the_report_of_several_runs_compares_their_pseudo_labels(tmp_path):
    html = page(
        write_run(tmp_path / "a", fedavg(6), "fedavg"),
        write_run(tmp_path / "b", feddure(6)),
        write_run(tmp_path / "c", fixmatch(6), "fedavg-fixmatch"),
    )
    section = html[html.index("<h2>Pseudo labels</h2>") : html.index("<h2>Configuration</h2>")]
    numbers = section[section.index("<tbody>") : section.index("</tbody>")]
    assert "FedAvg</th>" not in numbers
    assert f'color: {look(1)["color"]}">●</span>FedDure</th>' in numbers
    assert f'color: {look(2)["color"]}">●</span>FedAvg-FixMatch</th>' in numbers


def test_two_hundred_rounds_take_moderate_room():
    noise = np.random.RandomState(0).uniform(0.3, 0.7, size=(201, 12))
    columns = ("weight_mean", "pseudo_accuracy", "pseudo_accuracy_weighted", "weight_auroc", "d_mean", "ascent_share")
    changes = {name: lambda number, place=place: noise[number, place] for place, name in enumerate(columns)}
    lines = feddure(
        200, **changes, d_lowest=lambda number: -noise[number, 6], weight_p10=lambda number: noise[number, 7]
    )
    pictures = [svg(chart.figure) for chart in draw({"a": lines})]
    assert sum(map(len, pictures)) * 4 / 3 < 300_000  # as the page embeds them
