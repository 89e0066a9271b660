"""Figures of the studies: they render with any number of seeds, and draw only what was measured."""

import numpy as np
import pytest

import synthetic
import tiny
from feddure.studies import reproduce_figures as figures
from feddure.studies.reproduce import TABLE1
from feddure.studies.reproduce_rows import Row
from feddure.tracking import style

METHODS = ("fedavg", "fedavg-matched", "fedavg-sl", "fedmatch", "feddure", "f-reg")
SEEDS = ({0: 50.0}, {0: 50.0, 1: 52.0, 2: 51.0}, {})


def table(accuracies, study="table1"):
    return [synthetic.row(study, method, accuracies, paper=45.0) for method in METHODS]


def chart(accuracies, skip=()):
    return [
        synthetic.row("gamma", method, {} if value in skip else accuracies, value=value)
        for method in ("feddure", "fedmatch")
        for value in (0.3, 0.5, 0.7, 1.0)
    ]


def words(figure):
    own = [text.get_text() for axes in figure.axes for text in axes.texts]
    return own + [text.get_text() for text in figure.texts]


@pytest.mark.parametrize("accuracies", SEEDS)
@pytest.mark.parametrize("rows", [table, lambda found: table(found, "figure1"), chart])
def test_every_figure_renders_with_one_seed_three_and_none(rows, accuracies):
    assert style.render(figures.figure(rows(accuracies)), "png", 40).startswith(b"\x89PNG")


def test_curves_are_named_by_what_they_learn_from():
    found = words(figures.figure(table(SEEDS[1], "figure1")))
    assert "FedAvg*: labels only" in found
    assert "FedAvg-SL: fully supervised" in found
    assert "FedDure" in found


def test_without_a_measurement_a_chart_says_so():
    assert "not measured yet" in words(figures.figure(chart({})))
    assert "not measured yet" in words(figures.figure(table({}, "figure1")))


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_legends_name_what_is_drawn():
    assert legend(figures.figure(table(SEEDS[1]))) == [
        "ours, mean of last 10 evaluations ± standard deviation over seeds",
        "the paper's number",
        "ours, labels only with matched steps",
    ]
    own = [synthetic.row("table1", "feddure", {0: 50.0}, dataset="fashion-mini")]
    own[0].measured[0].__dict__["curve"] = own[0].measured[0].curve[-4:]
    assert legend(figures.figure(own)) == ["ours, mean of all 4 evaluations"]
    assert not any("paper" in text for text in words(figures.figure(own)))


def test_a_table_without_labels_only_still_shows_what_its_rows_are_compared_with():
    own = synthetic.row("table2", "feddure", {0: 50.0, 1: 52.0}, reference={0: 40.0, 1: 44.0})
    figure = figures.figure([own])
    assert "ours, labels only with matched steps" in legend(figure)
    dashed = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert [line.get_xdata()[0] for line in dashed] == [42.0]


def test_long_names_stay_inside_the_figure():
    options = "local_steps=2"
    rows = [synthetic.row("table1", "fedavg-matched", SEEDS[0], options=options)]
    lines = [
        synthetic.row("gamma", method, SEEDS[0], options=options, value=0.5) for method in ("fedavg-matched", "feddure")
    ]
    figure, chart = figures.figure(rows), figures.figure(lines)
    figure.draw_without_rendering()
    chart.draw_without_rendering()
    (name,) = figure.axes[0].get_yticklabels()
    assert name.get_window_extent().x0 >= 0
    assert chart.legends[0].get_window_extent().x1 <= chart.bbox.x1


def test_a_line_is_broken_where_a_point_is_not_measured():
    line = figures.figure(chart(SEEDS[1], skip=(0.5,))).axes[0].lines[0]
    assert np.isnan(line.get_ydata()).tolist() == [False, True, False, False]


def test_a_point_alone_has_a_bar_where_a_band_would_not_be_seen():
    def places_of_bars(accuracies, skip=()):
        drawn = figures.figure(chart(accuracies, skip)).axes[0].containers
        return [
            bar[0] for container in drawn for bars in container.lines[2] for bar in np.array(bars.get_segments())[:, 0]
        ]

    assert places_of_bars(SEEDS[1], skip=(0.5,)) == [0.3, 0.3]  # of two methods
    assert places_of_bars(SEEDS[1], skip=(0.3, 0.5, 0.7)) == [1.0, 1.0]
    assert places_of_bars(SEEDS[1]) == places_of_bars(SEEDS[0], skip=(0.5,)) == []


def test_charts_say_what_the_paper_leaves_open():
    rows = [synthetic.row("clients", "feddure", SEEDS[0], value=value) for value in (2.0, 5.0)]
    assert any("names no setting" in text for text in words(figures.figure(rows)))
    assert not any("names no setting" in text for text in words(figures.figure(chart(SEEDS[0]))))


def test_data_sets_that_nobody_measured_are_left_out_of_the_chart():
    other = Row("table1", "aaai24", "cinic10", "dir-dir", "feddure", paper=46.43)
    assert len(figures.figure([*table(SEEDS[0]), other]).axes) == 1
    assert len(figures.figure([*table({}), other]).axes) == 2


def test_signs_of_formulas_in_names_are_drawn_as_they_are():
    rows = [synthetic.row(study, "feddure", SEEDS[0], options="a=$x$_{") for study in ("table1", "figure1")]
    for row in rows:
        style.render(figures.figure([row]), "png", 40)


def test_a_method_looks_the_same_everywhere_and_different_from_the_others():
    looks = [(figures.look(name)["color"], figures.look(name)["linestyle"]) for name in TABLE1]
    assert len(set(looks)) == len(looks)


def test_a_few_evaluations_are_drawn_one_by_one():
    few = synthetic.row("figure1", "feddure", {0: 50.0})
    few.measured[0].__dict__["curve"] = few.measured[0].curve[-1:]
    for row, title, marker in ((few, "each evaluation", "o"), (table(SEEDS[0], "figure1")[0], "running mean of 5", "")):
        (axes,) = figures.figure([row]).axes
        assert title in axes.get_title(loc="left")
        assert axes.lines[0].get_marker() == marker


def test_seed_curves_meet_where_all_seeds_were_evaluated():
    row = synthetic.row("figure1", "feddure", {0: 50.0, 1: 60.0})
    row.measured[1].__dict__["curve"] = row.measured[1].curve[1:]
    rounds, values = figures.seed_curves(row)
    assert rounds[0] == 10
    assert values.shape == (2, 39)


def test_partitions_show_both_settings_for_labelled_and_unlabelled_images():
    images = tiny.dataset(size=2400, classes=10)
    canvas = figures.partitions(images, clients=12)
    assert [axes.get_title(loc="left") for axes in canvas.axes] == ["Labelled", "Unlabelled"] * 2
    fedmatch, dir_dir = (figures.deal(images, setting, clients=12) for setting in figures.DEALT)
    assert np.ptp(fedmatch.counts(images.labels, 10)[0]) == 0
    assert np.ptp(dir_dir.counts(images.labels, 10)[0]) > 0
    assert any("internal imbalance" in text for text in words(canvas))
