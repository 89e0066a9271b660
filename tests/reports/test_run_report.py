"""Pages of runs: the numbers a reader looks for, nothing from elsewhere, and no markup from names."""

import base64
import json
import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from feddure import experiments
from feddure.errors import RunError
from feddure.experiments import load
from feddure.reports import figures, inline
from feddure.reports.run_report import participation, write_report
from feddure.tracking import metrics
from feddure.tracking.records import Run, Writer

CLASSES = ["cat", "dog", "<ship>"]


def make_run(folder, done=6, evaluated=True, ema=False, left_out=(), partition=True, classes=CLASSES, **changes):
    """A small run folder as `feddure run` would leave it."""
    folder.mkdir(parents=True)
    options = {"rounds": 6, "clients_per_round": 2, "partition.clients": 4, "evaluate_every": 2}
    given = {key.replace("__", "."): value for key, value in changes.items()}
    experiment = load("demo", changes={"method": "fedavg"} | options | given)
    (folder / "config.yaml").write_text(experiments.to_yaml(experiment))
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
            metrics.write(line | {"communication": {"up": 7e6, "down": 9e6}, "diagnostics": {"drift": [1.0, 2.0]}})
            timing.write({"round": number, "seconds": 0.5, "clients": 2, "steps": 10})
    return folder


def evaluation(accuracy, classes):
    confusion = np.full((classes, classes), 2) + np.diag(np.full(classes, 5))
    shares = [accuracy] * classes
    return {"accuracy": accuracy, "loss": 1 - accuracy, "per_class": shares, "confusion": confusion.tolist()}


def complete(accuracy, macro_f1=0.4321):
    """An evaluation with all that a run writes now; nothing was tested of the last class."""
    return metrics.from_confusion([[7, 3, 0], [2, 8, 0], [0, 0, 0]]) | {
        "accuracy": accuracy,
        "loss": 1.0,
        "macro_f1": macro_f1,
        "auroc": 0.8765,
        "ece": 0.0987,
        "calibration": {"images": [0, 12, 8], "confidence": [0.0, 0.5, 0.9], "accuracy": [0.0, 0.6, 0.7]},
        "by_site": {"north": {"images": 20, "accuracy": 0.6543}},
    }


class Page(HTMLParser):
    """What a browser would find: text, pictures, and everything that points elsewhere."""

    def __init__(self, path):
        super().__init__()
        self.text, self.links, self.tags, self._style = [], [], [], False
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)
        drawn = re.findall(r'role="img" aria-label="([^"]*)"[^>]*>(<svg.*?</svg>)', self.html)
        self.pictures = {unescape(alt): svg for alt, svg in drawn}

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        self._style = tag in ("style", "script")
        self.links += [found[name] for name in ("src", "href") if name in found]

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


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The page of one run with an averaged model and hostile names."""
    changes = {"method": "feddure", "server__ema": 0.9, "seed": 11, "dataset": "npz:<script>alert(1)</script>"}
    return page_of(make_run(tmp_path_factory.mktemp("single") / "run", ema=True, left_out=(3,), **changes))


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """The page of runs of two methods, one of them on two seeds, the last one unfinished."""
    folder = tmp_path_factory.mktemp("several")
    first = make_run(folder / "first", method="feddure")
    second = make_run(folder / "second", method="feddure", seed=1)
    return page_of(first, second, make_run(folder / "third", method="fedavg-fixmatch", done=4))


def test_one_run_shows_its_numbers_and_pictures(single):
    for text in ("FedDure on", "2 of 4 clients", "66 images carry a label, 660 do not", "4 images were moved"):
        assert single.says(text), text
    for card in ("40.0 % mean of all 3", "60.0 % round 6", "Averaged model 50.0 %", "54 MB", "Time 3.0 s"):
        assert single.says(card), card
    # 21 of 33, its confusion's diagonal, by Wilson's formula, worked out by hand
    assert single.says("The model to use 70.0 % averaged, round 6; 33 images, 95 % interval 46.6 to 77.8")
    assert single.says("6 of 12")  # updates that were left out
    shown = " ".join(single.pictures)
    for picture in ("Test accuracy", "Test loss", "each class", "Confusion", "while training", "on each client"):
        assert picture in shown


def test_pages_need_nothing_beside_themselves(single, several):
    for page in (single, several):
        assert page.links
        assert all(link.startswith(("data:", "#")) for link in page.links)
        assert not {"link", "iframe"} & set(page.tags)
        page_alone = re.sub(r'"data:[^"]*"|"http://www\.w3\.org/2000/svg"', "", page.html)
        assert not re.search(r"url\((?!#)|@import|https?://", page_alone)
        for picture in page.pictures.values():
            assert ElementTree.fromstring(picture).tag.endswith("svg")
            assert "<dc:date>" not in picture


def test_configuration_lists_what_is_not_the_default_and_can_be_saved(single, tmp_path):
    start = single.text.index("Configuration")
    changes = single.text[start : single.text.index("server.ema", start) + 3]
    assert changes[-3:] == ["server.ema", "0.9", "–"]
    assert "server.weight" not in changes
    (link,) = (link for link in single.links if "text/plain" in link)
    saved = tmp_path / "saved.yaml"
    saved.write_bytes(base64.b64decode(link.split("base64,")[1]))
    assert load(file=saved).seed == 11


def test_several_runs_are_compared(several):
    for text in (
        "FedDure and FedAvg-FixMatch on Fashion-Mini, 3 runs",
        "The runs differ in method and seed.",
        "third: 4 of 6 rounds",
        "first FedDure dir-dir 0 6 60.00 40.00 60 5.0 3.0 s",
        "third FedAvg-FixMatch dir-dir 0 4 of 6 40.00 30.00 40 5.0 2.0 s",
        "0, 1 60.0 ± 0.0 40.0 ± 0.0",
        "feddure run --config second.yaml",
    ):
        assert several.says(text), text
    assert sum(alt.startswith("Confusion") for alt in several.pictures) == 3
    assert several.html.count("of each class on each client") == 2


def test_equal_runs_give_equal_files(tmp_path):
    for name in ("a", "b"):
        write_report([make_run(tmp_path / name / "run", done=2)], tmp_path / f"{name}.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


@pytest.mark.parametrize("done", [0, 1])
def test_a_run_without_evaluation_has_a_report(tmp_path, done):
    page = page_of(make_run(tmp_path / "run", done=done, evaluated=False))
    assert page.says(f"Unfinished: {done} of 6 rounds")
    assert page.says("the first evaluation follows round 2")
    assert not any("accuracy" in alt for alt in page.pictures)


def test_what_makes_results_look_better_stands_before_them(tmp_path):
    folder = make_run(tmp_path / "run")
    kept = json.loads((folder / "partition.json").read_text()) | {"notes": ["2 test images train"], "damaged": ["a"]}
    (folder / "partition.json").write_text(json.dumps(kept))
    page = page_of(folder)
    assert page.says("Images: 2 test images train.")
    assert page.says("Damaged files, left out and listed in partition.json: 1.")


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
    with Writer(folder / "metrics.jsonl", last_round=5) as writer:
        writer.write({"round": 6, "test": {"accuracy": 0.5, "loss": None}})
    page = page_of(folder)
    assert [alt.partition(":")[0] for alt in page.pictures if "Test" in alt] == ["Test accuracy against rounds"]
    assert not page.says("Classes")


def test_data_sets_have_axes_of_their_own_and_different_classes_are_not_compared(tmp_path):
    page = page_of(make_run(tmp_path / "three"), make_run(tmp_path / "two", classes=["cat", "dog"], dataset="cifar10"))
    curves = [alt for alt in page.pictures if alt.startswith("Test accuracy")]
    assert len(curves) == 2
    assert any("CIFAR-10" in alt for alt in curves)
    assert not any(alt.startswith("Accuracy of each class") for alt in page.pictures)


def test_many_runs_and_equal_names_work(tmp_path):
    folders = [make_run(tmp_path / str(n) / "run", seed=n % 3, done=2, partition=False) for n in range(8)]
    page = page_of(*folders)
    assert page.says("8 runs")
    assert not page.says("over seeds")  # a repeat of the same seed is no sample


def test_no_more_clients_train_than_there_are(tmp_path):
    more = {"partition__setting": "sites", "partition__clients": 9, "clients_per_round": 5, "evaluated": False}
    assert page_of(make_run(tmp_path / "run", **more)).says("4 of 4 clients train in each of 6 rounds.")


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


def test_classes_by_the_hundred_are_drawn():
    names = [f"class number {number}" for number in range(60)]
    test = evaluation(0.5, 60)
    line = figures.Line("a", [{"round": 1, "test": test}], {"color": "red", "marker": "o"})
    for figure in (
        figures.by_class([line], {"right": [test["per_class"]]}, names),
        figures.over_rounds({"right": pd.DataFrame([test["per_class"]] * 2)}, names, 1),
        figures.confusion(test["confusion"], names),
    ):
        assert len(inline.svg(figure)) < 1_000_000


# --- sites ---------------------------------------------------------------------------------------------


def federated(folder, rounds, setting="sites", **about):
    metrics = [{"round": number, "federation": found} for number, found in enumerate(rounds, start=1)]
    return Run(folder, experiments.load(changes={"partition.setting": setting}), metrics, [], {}, {}, about)


def played(*sites, away=(), refused=()):
    return {"sites": list(sites), "drawn_but_away": list(away), "refused": list(refused)}


def test_each_site_has_a_row_of_counts(tmp_path):
    first = played({"site": "north", "test_of_received_model": {"accuracy": 0.5}}, {"site": "south", "problem": "late"})
    second = played({"site": "south", "problem": "drawn, but not connected"}, away=("south",), refused=("east: why",))
    about = {"site": "north", "labelled": 1200, "unlabelled": 7, "unreadable": 0}
    run = federated(tmp_path, [first, second, second], names=["north", "south", "east"], sites=[about])
    found, remarks = participation(run)
    north, south, east = found.rows
    assert north[:8] == ["north", "1,200", "7", "0", "1", "1", "0", "0"]
    assert north[8].startswith("50.0")
    assert south[4:8] == ["3", "0", "2", "1"]
    assert east[4:8] == ["0", "0", "0", "0"]
    said = " ".join(remarks)
    for text in ("east was never connected", "south: drawn, but not connected", "Refused: east: why"):
        assert text in said


def test_runs_without_real_sites_have_none(tmp_path):
    assert participation(federated(tmp_path, [])) is None
    assert participation(federated(tmp_path, [played({"site": "client-0"})], setting="iid-iid")) is None


def test_probes_are_drawn_for_each_setting_and_over_seeds(tmp_path):
    names = ["global_accuracy", "global_confidence", "own_accuracy", "own_confidence", "drift", "cosine"]
    folders = []
    for method, setting, seed in (("fedavg", "dir-dir", 0), ("fedtutor", "dir-dir", 0), ("fedtutor", "iid-iid", 1)):
        folder = make_run(tmp_path / f"{method}-{setting}", method=method, partition__setting=setting, seed=seed)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines[::2]:
            line["probe"] = dict.fromkeys([*names, "test_received", "test_clients", "test_aggregated"], 0.5)
            averaged = {"averaged_accuracy": 0.6, "averaged_confidence": 0.5}
            line["probe"] |= {"cosine": None} if method == "fedavg" else averaged
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        folders.append(folder)
    write_report(folders, tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert "Who labels, and how far clients drift" in page.html
    assert "Right labels, overconfidence, and test accuracy around aggregation" in page.pictures
    write_report([make_run(tmp_path / "plain")], tmp_path / "plain.html")
    assert "Who labels, and how far clients drift" not in Page(tmp_path / "plain.html").html


# --- quality -------------------------------------------------------------------------------------------


def with_evaluations(folder, test, test_ema=None, **changes):
    """A run with one evaluation."""
    make_run(folder, evaluated=False, **changes)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1]) | {"test": test} | ({"test_ema": test_ema} if test_ema else {})
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    return folder


def test_every_metric_of_the_last_and_the_averaged_model(tmp_path):
    run = with_evaluations(tmp_path / "run", complete(0.75), complete(0.76, 0.5432), metric="macro_f1")
    page = page_of(run)
    for text in ("Test macro F1", "43.21", "54.32", "87.65", "9.87", "65.43"):
        assert page.says(text), text
    assert page.says("sensitivity, averaged model")
    assert page.says("left out of the means: <ship>")
    assert {"Reliability diagram", "Confusion matrix of the averaged model"} <= page.pictures.keys()
    assert any(alt.startswith("Test macro F1 against rounds") for alt in page.pictures)


def test_runs_of_an_earlier_version_have_what_their_confusion_tells(single):
    assert single.says("balanced accuracy")
    assert single.says("specificity")
    assert not single.says("AUROC 0")
    assert "Reliability diagram" not in single.pictures


def test_one_evaluation_is_not_called_a_mean_of_ten(tmp_path):
    runs = [with_evaluations(tmp_path / name, complete(0.7), seed=seed) for seed, name in enumerate("ab")]
    assert not page_of(*runs).says("last 10")
    assert page_of(runs[0]).says("its only evaluation")
