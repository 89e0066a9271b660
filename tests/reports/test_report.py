import base64
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest

from feddure.config import load
from feddure.errors import RunError
from feddure.reports import figures, style
from feddure.reports.run_report import write_report
from feddure.tracking.records import Writer

CLASSES = ["cat", "dog", "<ship>"]


def make_run(folder, done=6, evaluated=True, ema=False, left_out=(), partition=True, classes=CLASSES, **changes):
    """A small run folder as `feddure run` would leave it."""
    folder.mkdir(parents=True)
    options = {"rounds": 6, "clients_per_round": 2, "partition.clients": 4, "evaluate_every": 2}
    experiment = load(
        "demo",
        changes={"method": "fedavg"} | options | {key.replace("__", "."): value for key, value in changes.items()},
    )
    (folder / "config.yaml").write_text(experiment.to_yaml())
    (folder / "environment.json").write_text(json.dumps({"python": "3.11.9", "command": f"run {folder.name}"}))
    counts = np.arange(4 * len(classes)).reshape(4, len(classes))
    if partition:
        about = {
            "classes": classes,
            "labelled": counts.tolist(),
            "unlabelled": (10 * counts).tolist(),
            "sha256": f"{experiment.seed:064d}",
            "parameters": {"setting": "dir-dir", "gamma": 0.5, "seed": experiment.seed},
            "repairs": [{"from_client": client, "to_client": 1, "kind": "labelled", "number": 2} for client in (0, 3)],
        }
        (folder / "partition.json").write_text(json.dumps(about))
    with Writer(folder / "metrics.jsonl") as metrics, Writer(folder / "timing.jsonl") as timing:
        for number in range(1, done + 1):
            line = {"round": number, "clients": [0, 3], "steps": [5, 5], "left_out": list(left_out)}
            line["train"] = {"loss": 1 / number, "share": None if number == 2 else 0.5}
            if evaluated and number % 2 == 0:
                line["test"] = evaluation(number / 10, len(classes))
                if ema:
                    line["test_ema"] = evaluation(number / 10 + 0.1, len(classes))
            metrics.write(line | {"bytes_up": 7, "diagnostics": {"drift": [1.0, 2.0]}})
            timing.write({"round": number, "seconds": 0.5, "clients": 2, "steps": 10})
    return folder


def evaluation(accuracy, classes):
    confusion = np.full((classes, classes), 2) + np.diag(np.full(classes, 5))
    return {
        "accuracy": accuracy,
        "loss": 1 - accuracy,
        "per_class": [accuracy] * classes,
        "confusion": confusion.tolist(),
    }


class Page(HTMLParser):
    """What a browser would find: text, pictures, and everything that points elsewhere."""

    def __init__(self, path):
        super().__init__()
        self.text, self.pictures, self.links, self.tags, self._style = [], {}, [], [], False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        self._style = tag == "style"
        self.links += [found[name] for name in ("src", "href") if name in found]
        if tag == "img":
            self.pictures[found["alt"]] = base64.b64decode(found["src"].split("base64,")[1]).decode()

    def handle_endtag(self, tag):
        self._style = False

    def handle_data(self, data):
        if not self._style and data.strip():
            self.text.append(" ".join(data.split()))

    def says(self, text):
        return text in " ".join(self.text).replace("\u202f", " ")


def page_of(*folders):
    out = folders[0].parent / "out.html"
    assert write_report(list(folders), out) == out
    return Page(out)


def test_one_run_shows_its_numbers_and_pictures(tmp_path):
    page = page_of(make_run(tmp_path / "run", method="feddure", dataset="cifar10"))
    assert page.says("FedDure on CIFAR-10")
    assert page.says("2 of 4 clients train in each of 6 rounds.")
    assert page.says("66 images carry a label, 660 do not.")
    assert page.says("60.0 %")
    assert page.says("40.0 % mean of all 3 evaluations")
    assert page.says("4 images were moved")
    assert page.says("feddure run --config config.yaml")
    shown = " ".join(page.pictures)
    for picture in (
        "Test accuracy",
        "Test loss",
        "each class",
        "Confusion",
        "while training",
        "on each client",
    ):
        assert picture in shown


def test_the_file_needs_nothing_beside_itself(tmp_path):
    page = page_of(make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1))
    assert page.links
    assert all(link.startswith("data:") for link in page.links)
    assert not {"script", "link", "iframe"} & set(page.tags)
    html = (tmp_path / "out.html").read_text()
    assert not re.search(r"url\(|@import|https?://", re.sub(r'"data:[^"]*"', "", html))


def test_pictures_are_whole_svg_files_without_times(tmp_path):
    page = page_of(make_run(tmp_path / "run", ema=True))
    for picture in page.pictures.values():
        assert ElementTree.fromstring(picture).tag.endswith("svg")
        assert "<dc:date>" not in picture


def test_equal_runs_give_equal_files(tmp_path):
    for name in ("a", "b"):
        write_report([make_run(tmp_path / name / "run")], tmp_path / f"{name}.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_names_from_data_cannot_become_markup(tmp_path):
    page = page_of(make_run(tmp_path / "run", dataset="npz:<script>alert(1)</script>"))
    assert "script" not in page.tags
    assert page.says("npz:<script>alert(1)</script>")


def test_a_finished_run_has_no_notes_and_an_unfinished_one_says_so(tmp_path):
    assert not page_of(make_run(tmp_path / "whole")).says("Unfinished")
    assert page_of(make_run(tmp_path / "young", done=4)).says("Unfinished: 4 of 6 rounds.")
    assert page_of(make_run(tmp_path / "lossy", left_out=(3,))).says("Updates left out, not finite: 6 of 12.")


@pytest.mark.parametrize("done", [0, 1])
def test_a_run_without_evaluation_has_a_report(tmp_path, done):
    page = page_of(make_run(tmp_path / "run", done=done, evaluated=False))
    assert page.says("Not evaluated yet: the first evaluation follows round 2.")
    assert not any("accuracy" in alt for alt in page.pictures)


def test_a_run_without_partition_or_environment_has_a_report(tmp_path):
    folder = make_run(tmp_path / "run", partition=False)
    (folder / "environment.json").unlink()
    (folder / "timing.jsonl").unlink()
    page = page_of(folder)
    assert not page.says("Who owns what")
    assert not page.says("Environment")
    assert page.says("Time –")


def test_evaluations_without_classes_have_curves_only(tmp_path):
    folder = make_run(tmp_path / "run", evaluated=False)
    with Writer(folder / "metrics.jsonl") as writer:
        writer.keep(5)
        writer.write({"round": 6, "test": {"accuracy": 0.5, "loss": None}})
    page = page_of(folder)
    assert [alt for alt in page.pictures if alt.startswith("Test")] == [
        "Test accuracy against rounds: FedAvg ends at 50.0\u202f%"
    ]
    assert not page.says("Classes")


def test_the_averaged_model_has_a_card_and_a_dashed_line(tmp_path):
    page = page_of(make_run(tmp_path / "run", ema=True))
    assert page.says("Averaged model 50.0 % 70.0 % at the last")
    curve = next(svg for alt, svg in page.pictures.items() if alt.startswith("Test accuracy"))
    assert "stroke-dasharray" in curve


def test_configuration_lists_what_is_not_the_default(tmp_path):
    page = page_of(make_run(tmp_path / "run", server__ema=0.9))
    start = page.text.index("Configuration")
    changes = page.text[start : page.text.index("server.ema", start) + 3]
    assert changes[-3:] == ["server.ema", "0.9", "–"]
    assert "server.weight" not in changes


def test_the_configuration_in_the_page_is_the_runs_own(tmp_path):
    folder = make_run(tmp_path / "run", seed=11)
    (link,) = (link for link in page_of(folder).links if "yaml" in link)
    saved = tmp_path / "saved.yaml"
    saved.write_bytes(base64.b64decode(link.split("base64,")[1]))
    assert load(file=saved) == load(file=folder / "config.yaml")


def test_several_runs_are_compared(tmp_path):
    page = page_of(
        make_run(tmp_path / "first", method="feddure"),
        make_run(tmp_path / "second", method="fedavg-fixmatch", done=4),
    )
    assert page.says("FedDure and FedAvg-FixMatch on Fashion-Mini, 2 runs")
    assert page.says("The runs differ in method.")
    assert page.says("Unfinished. second: 4 of 6 rounds.")
    assert page.says("first FedDure dir-dir 0 6 60.00 40.00 60 5.0 3.0 s")
    assert page.says("second FedAvg-FixMatch dir-dir 0 4 of 6 40.00 30.00 40 5.0 2.0 s")
    assert page.says("feddure run --config second.yaml")
    assert sum(alt.startswith("Confusion") for alt in page.pictures) == 2
    assert sum("on each client" in alt for alt in page.pictures) == 1


def test_no_more_clients_train_than_there_are(tmp_path):
    more = {"partition__setting": "sites", "partition__clients": 9, "clients_per_round": 5}
    assert page_of(make_run(tmp_path / "run", **more)).says("4 of 4 clients train in each of 6 rounds.")


def test_runs_of_different_length_have_one_column_for_it(tmp_path):
    page = page_of(make_run(tmp_path / "long"), make_run(tmp_path / "short", rounds=4, done=4))
    assert page.says("run method setting seed rounds last")
    assert page.says("short FedAvg dir-dir 0 4 40.00")


def test_seeds_are_averaged_and_each_partition_is_drawn(tmp_path):
    page = page_of(*(make_run(tmp_path / f"seed{seed}", seed=seed) for seed in (0, 1)))
    assert page.says("FedAvg 0, 1 60.00 ± 0.00 40.00 ± 0.00")
    html = (tmp_path / "out.html").read_text()
    assert html.count("Number of labelled and unlabelled images of each class on each client") == 2


def test_runs_with_different_classes_share_their_curves_alone(tmp_path):
    page = page_of(make_run(tmp_path / "three"), make_run(tmp_path / "two", classes=["cat", "dog"], dataset="cifar10"))
    assert any(alt.startswith("Test accuracy") for alt in page.pictures)
    assert not any(alt.startswith("Accuracy of each class") for alt in page.pictures)


def test_many_runs_and_equal_names_work(tmp_path):
    folders = [make_run(tmp_path / str(n) / "run", seed=n % 3, done=2) for n in range(figures.MOST_LABELS + 2)]
    page = page_of(*folders)
    assert page.says("14 runs")


def test_a_report_is_written_whole_or_not_at_all(tmp_path):
    run = make_run(tmp_path / "run")
    out = tmp_path / "report.html"
    out.write_text("before")
    (run / "metrics.jsonl").write_text('{"round": 1}\nnonsense\n{"round": 3}\n')
    with pytest.raises(RunError, match="line 2 of 3 is damaged"):
        write_report([run], out)
    assert out.read_text() == "before"


def test_where_a_report_cannot_be_written_is_said(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(RunError, match=r"a folder was given for the report"):
        write_report([run], tmp_path)
    with pytest.raises(RunError, match=r"the folder .*absent does not exist"):
        write_report([run], tmp_path / "absent" / "report.html")
    with pytest.raises(RunError, match="no run was given"):
        write_report([], tmp_path / "report.html")


def test_names_at_the_ends_of_curves_never_overlap():
    gap = 0.1
    places = figures.apart([0.0, 0.01, 0.5, 0.52, 0.53, 0.99, 1.0], gap)
    assert places == sorted(places)
    assert min(np.diff(places)) >= gap - 1e-12
    assert places[0] >= 0
    assert places[-1] <= 1
    assert figures.apart([0.2, 0.8], gap) == [0.2, 0.8]


@pytest.mark.parametrize(
    ("accuracies", "shown"),
    [((0.1, 0.9), "50%"), ((0.41, 0.58), "42.5%"), ((0.361, 0.374), "36.2%")],
)
def test_ticks_say_where_they_are(accuracies, shown):
    metrics = [{"round": number, "test": {"accuracy": value}} for number, value in enumerate(accuracies, start=1)]
    figure = figures.accuracy({"a": metrics})
    figure.canvas.draw()
    axis = figure.axes[0].yaxis
    texts = [label.get_text() for label in axis.get_majorticklabels()]
    assert shown in texts
    for text, place in zip(texts, axis.get_majorticklocs(), strict=True):
        assert float(text.removesuffix("%")) == pytest.approx(100 * place)


def test_texts_of_small_figures_are_whole_and_clear_of_dots():
    metrics = [{"round": 1, "test": evaluation(0.0, 2)}]
    confusion = figures.confusion(metrics[0]["test"]["confusion"], ["a", "b"])
    title = confusion.texts[0].get_window_extent(confusion.canvas.get_renderer())
    assert title.x1 <= confusion.bbox.x1
    dots = figures.per_class({"first": metrics, "second": metrics}, ["a long class name", "b"])
    dots.canvas.draw()
    (axes,) = dots.axes
    radius = axes.lines[0].get_markersize() / 2 * dots.dpi / 72
    for label in axes.get_yticklabels():
        assert label.get_window_extent().x0 >= 0
        assert label.get_window_extent().x1 < axes.bbox.x0 - radius


def test_bubbles_become_circles_of_the_same_size():
    counts = {
        "classes": ["a", "b"],
        "labelled": [[4, 1], [0, 9]],
        "unlabelled": [[40, 10], [20, 0]],
        "unknown": [0, 30],
        "parameters": {"setting": "dir-dir", "gamma": 0.5, "seed": 0},
    }
    svg = figures.svg(figures.ownership(counts, "data"))
    areas = {style.LABELLED: [], style.UNLABELLED: []}
    for radius, colour in re.findall(r'<circle cx="\S+" cy="\S+" r="(\S+)" style="fill: (\S+);', svg):
        areas[colour.upper()].append(float(radius) ** 2)
    for found, numbers in zip(areas.values(), ([1, 4, 9], [10, 20, 30, 40]), strict=True):
        found = np.sort(found)
        assert np.allclose(found / found[-1], np.array(numbers) / numbers[-1], atol=0.01)


def test_classes_by_the_hundred_are_drawn():
    names = [f"class number {number}" for number in range(100)]
    metrics = [{"round": number, "test": evaluation(0.5, 100)} for number in (1, 2)]
    for figure in (
        figures.per_class({"a": metrics}, names),
        figures.class_history(metrics, names),
        figures.confusion(metrics[0]["test"]["confusion"], names),
    ):
        assert len(figures.svg(figure)) < 1_000_000
