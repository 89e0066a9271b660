"""Figures of the studies: they render with any number of seeds, and draw only what was measured."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

import synthetic
from feddure.reports import style
from feddure.studies.paper import figures
from feddure.studies.paper.rows import Row

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


LONG = (
    "partition.clients=10 unlabelled_batch=5 local_steps=1 labelled_batch=5 optimizer.learning_rate=0.001 "
    "server.weight=uniform model=mine:Net options={'note': 'some words', 'other': [1, 2]}"
)
NAMES = (
    [("feddure", LONG), ("fedavg-matched", LONG), ("fedavg", LONG)],
    [("feddure", ""), ("feddure", LONG), ("fedmatch", f"{LONG} fedmatch.helpers=4")],
    [("my_laboratory.methods:" + "Long" * 40, ""), ("feddure", "a=" + "W" * 5000), ("mine:" + "W" * 30, "")],
)


def rows_of(study, pairs, accuracies=SEEDS[1], settings=("dir-dir",)):
    """A row for each method and its options at each point of the study's axis."""
    values = (0.3, 1.0) if study == "gamma" else (None,)
    return [
        synthetic.row(study, method, accuracies, options=options, setting=setting, value=value)
        for method, options in pairs
        for setting in settings
        for value in values
    ]


def names_of(study, figure):
    """The texts that name rows, curves or lines."""
    if study == "gamma":
        return figure.legends[0].get_texts()
    axes = figure.axes[0]
    return list(axes.texts) if study == "figure1" else axes.get_yticklabels()


def box_of(text):
    return Text.get_window_extent(text)  # without the line that leads from a name to its curve


@pytest.mark.parametrize("pairs", NAMES)
@pytest.mark.parametrize("study", ["table1", "figure1", "gamma"])
@pytest.mark.parametrize("settings", [("dir-dir",), ("iid-iid", "iid-dir", "dir-dir")])
def test_long_names_stay_inside_the_figure_and_apart_from_each_other(study, pairs, settings):
    figure = figures.figure(rows_of(study, pairs, settings=settings))
    figure.draw_without_rendering()
    whole, names = figure.bbox, names_of(study, figure)
    assert len(names) == len(pairs)
    for box in map(box_of, [*names, *figure.texts]):
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1
    for below, above in itertools.pairwise(sorted(map(box_of, names), key=lambda box: box.y0)):
        assert below.y1 <= above.y0 + 1 or below.x1 <= above.x0 or above.x1 <= below.x0
    assert all(axes.get_position().width * whole.width > 80 for axes in figure.axes)


@pytest.mark.parametrize("study", ["table1", "figure1", "gamma"])
def test_options_that_all_rows_share_are_said_once(study):
    options = "model=cnn local_steps=1"
    figure = figures.figure(rows_of(study, [("feddure", options), ("fedmatch", f"{options} fedmatch.helpers=4")]))
    figure.draw_without_rendering()
    assert {text.get_text() for text in names_of(study, figure)} == {"FedDure", "FedMatch, fedmatch.helpers=4"}
    assert "All with model=cnn, local_steps=1" in words(figure)


def test_curves_do_not_count_rows_that_are_not_drawn_among_those_that_share_options():
    rows = [synthetic.row("figure1", "feddure", SEEDS[0], options="a=1"), synthetic.row("figure1", "fedmatch", {})]
    assert "All with a=1" in words(figures.figure(rows))


def test_many_panels_make_the_figure_wider():
    rows = [
        synthetic.row("gamma", "feddure", SEEDS[0], value=value, dataset=f"mine:{number}")
        for number in range(12)
        for value in (0.3, 0.5)
    ]
    assert len(figures.figure(rows).axes) == 12


@pytest.mark.parametrize("study", ["figure1", "gamma"])
def test_lines_bands_and_names_of_a_users_methods_agree_and_differ_from_each_other(study):
    figure = figures.figure(rows_of(study, [("mine:A", ""), ("mine:B", ""), ("c-reg", "")]))
    (axes,) = figure.axes
    colours = [line.get_color() for line in axes.lines]
    assert len(set(colours)) == 3
    assert [to_hex(band.get_facecolor()[0]) for band in axes.collections] == [colour.lower() for colour in colours]
    if study == "gamma":
        handles = figure.legends[0].legend_handles
        shown = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.lines]
        assert [(one.get_color(), one.get_marker(), one.get_linestyle()) for one in handles] == shown
    else:
        named = {text.get_text(): text.get_color() for text in axes.texts}
        assert named == dict(zip(("mine:A", "mine:B", "C-reg"), colours, strict=True))


def test_a_line_is_broken_where_a_point_is_not_measured():
    line = figures.figure(chart(SEEDS[1], skip=(0.5,))).axes[0].lines[0]
    assert np.isnan(line.get_ydata()).tolist() == [False, True, False, False]


def places_of_bars(rows):
    drawn = figures.figure(rows).axes[0].containers
    return [bar[0] for container in drawn for bars in container.lines[2] for bar in np.array(bars.get_segments())[:, 0]]


def test_a_point_alone_has_a_bar_where_a_band_would_not_be_seen():
    assert places_of_bars(chart(SEEDS[1], skip=(0.5,))) == [0.3, 0.3]  # of two methods
    assert places_of_bars(chart(SEEDS[1], skip=(0.3, 0.5, 0.7))) == [1.0, 1.0]
    assert places_of_bars(chart(SEEDS[1])) == places_of_bars(chart(SEEDS[0], skip=(0.5,))) == []


def test_a_point_of_one_seed_has_no_band_and_is_hollow_where_others_have_more():
    seeds = {0.3: SEEDS[0], 0.5: SEEDS[1], 0.7: SEEDS[0], 1.0: SEEDS[0]}
    rows = [synthetic.row("gamma", "feddure", own, value=value) for value, own in seeds.items()]
    figure = figures.figure(rows)
    line, hollow = figure.axes[0].lines[0], figure.axes[0].lines[-1]
    assert not np.isnan(line.get_ydata()).any()
    assert hollow.get_xdata().tolist() == [0.3, 0.7, 1.0]
    assert hollow.get_markerfacecolor() == "white"
    assert hollow.get_marker() == line.get_marker()
    (band,) = figure.axes[0].collections[:1]
    assert not any(path.vertices[:, 0].min() < path.vertices[:, 0].max() for path in band.get_paths())
    assert places_of_bars(rows) == [0.5]
    assert any("(hollow: one seed)" in text for text in words(figure))
    assert not any("hollow" in text for text in words(figures.figure(chart(SEEDS[0]))))


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
