"""What `reproduce` writes of a study: whole files for any part that is measured, pages that need nothing."""

import csv

import pytest
from rich.console import Console

import synthetic
import tiny
from feddure.studies.grid.store import Store
from feddure.studies.paper import plan as reproduce
from feddure.studies.paper import report as reproduce_report
from feddure.studies.theory import measure as theory
from feddure.studies.theory import report as theory_report

METHODS = ("fedavg-matched", "fedmatch", "feddure")


def request(**fields):
    return reproduce.Request(**({"datasets": ("cifar10",), "methods": METHODS, "seeds": (0,)} | fields))


def accuracy(cell):
    return {"feddure": 57.0, "fedavg-matched": 55.0, "fedmatch": 45.0}[cell.experiment.method]


def printed(parts, width=140):
    console = Console(width=width, file=None, record=True, quiet=False, force_terminal=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


def self_contained(path):
    text = path.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert 'src="http' not in text
    assert "<script" not in text
    return text


@pytest.mark.parametrize("study", ["table1", "figure1", "gamma"])
def test_a_study_is_written_as_csv_markdown_figure_and_page(tmp_path, study):
    cells = reproduce.cells(study, request(settings=("dir-dir",)))
    store = synthetic.filled(tmp_path, cells, accuracy)
    written = reproduce_report.write(study, cells, store, tmp_path)
    assert {path.name for path in written} >= {f"{study}-aaai24.{end}" for end in ("csv", "md", "png", "html")}
    assert (tmp_path / f"{study}-aaai24.png").read_bytes().startswith(b"\x89PNG")
    page = self_contained(tmp_path / f"{study}-aaai24.html")
    assert "57.00" in page
    assert "FedMatch" in (tmp_path / f"{study}-aaai24.md").read_text()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".") and path.suffix != ".lock"]


def test_a_table_with_some_of_its_cells_says_what_is_left(tmp_path):
    cells = reproduce.cells("table1", request(settings=("dir-dir",), seeds=(0, 1)))
    store = synthetic.filled(tmp_path, cells[:2], accuracy)
    reproduce_report.write("table1", cells, store, tmp_path)
    page, text = ((tmp_path / f"table1-aaai24.{end}").read_text() for end in ("html", "md"))
    for found in (page, text):
        assert "not measured" in found
        assert "feddure reproduce table1 --datasets cinic10" in found
    assert "- CIFAR-10, FedDure: IID-IID (seed 0); IID-DIR (seed 0); DIR-DIR (seeds 0, 1)" in text


def test_cells_that_failed_are_listed_with_the_reason(tmp_path):
    cells = reproduce.cells("table1", request(settings=("dir-dir",), seeds=(0, 1)))
    bad = [cell for cell in cells if cell.experiment.method == "fedmatch"]
    store = synthetic.filled(tmp_path, [cell for cell in cells if cell not in bad], accuracy)
    failed = {bad[0].hash: "ValueError: <a> mistake", bad[1].hash: "ValueError: <a> mistake"}
    reproduce_report.write("table1", cells, store, tmp_path, failed)
    page, text = ((tmp_path / f"table1-aaai24.{end}").read_text() for end in ("html", "md"))
    line = "CIFAR-10, FedMatch: DIR-DIR (seeds 0, 1): ValueError: "
    assert f"## Failed\n\n- {line}\\<a> mistake\n" in text
    assert f"<li>{line}&lt;a&gt; mistake</li>" in page
    left = text[text.index("## Not measured yet") :]
    assert "FedMatch: IID-IID (seeds 0, 1); IID-DIR (seeds 0, 1)\n" in left
    shown = printed(reproduce_report.show("table1", cells, store, failed))
    assert "failed (" in shown
    assert "measured; 2 failed" in shown
    reproduce_report.write("table1", cells, store, tmp_path)
    assert "Failed" not in (tmp_path / "table1-aaai24.md").read_text()


def test_options_that_all_rows_share_are_said_once_above_the_table(tmp_path):
    changes = {"server.weight": "uniform", "evaluate_every": 7}
    cells = reproduce.cells("table1", request(settings=("dir-dir",), changes=changes))
    store = synthetic.filled(tmp_path, cells[:-1], accuracy)
    reproduce_report.write("table1", cells, store, tmp_path)
    files = {
        path.suffix: path.read_text() for path in tmp_path.glob("table1-*") if path.suffix in (".md", ".html", ".csv")
    }
    for text in (printed(reproduce_report.show("table1", cells, store)), files[".md"], files[".html"]):
        assert text.count("All with server.weight=uniform, evaluate_every=7.") == 1
        assert "FedMatch, " not in text
        assert "FedMatch" in text
    assert files[".csv"].count("server.weight=uniform evaluate_every=7") == 3


def test_options_of_some_rows_stay_with_their_names(tmp_path):
    usual = reproduce.cells("table1", request(settings=("dir-dir",)))
    changed = reproduce.cells(
        "table1", request(settings=("dir-dir",), changes={"feddure.d_clip": 0.3}, methods=["feddure"])
    )
    store = synthetic.filled(tmp_path, [*usual, *changed], accuracy)
    shown = printed(reproduce_report.show("table1", changed, store))
    assert "FedDure, feddure.d_clip=0.3" in shown
    assert "All with" not in shown


def test_nothing_measured_and_nothing_asked_are_no_errors(tmp_path):
    store = Store(tmp_path)
    cells = reproduce.cells("table1", request())
    for wanted in (cells, []):
        assert reproduce_report.write("table1", wanted, store, tmp_path)
        assert "0 of" in printed(reproduce_report.show("table1", wanted, store))


def test_the_terminal_shows_ours_with_the_papers_number_and_the_difference(tmp_path):
    cells = reproduce.cells("table1", request(settings=("dir-dir",), seeds=(0, 1)))
    store = synthetic.filled(tmp_path, cells, lambda cell: accuracy(cell) + cell.experiment.seed)
    text = printed(reproduce_report.show("table1", cells, store))
    assert "57.5 ± 0.7 (57.73, −0.2)" in text
    assert "6 of" in text


def test_words_are_explained_below_the_first_table_and_only_those_that_are_there(tmp_path):
    cells = reproduce.cells("table1", request(settings=("dir-dir",)))
    store = synthetic.filled(tmp_path, cells, accuracy)
    reproduce_report.write("table1", cells, store, tmp_path)
    page, text = ((tmp_path / f"table1-aaai24.{end}").read_text() for end in ("html", "md"))
    for found, table in ((page, "<table"), (text, "| method |")):
        assert found.count("use every training label") == 1
        first = found.index(table)
        assert first < found.index("use every training label") < found.index("Fashion-MNIST", first)
    told = printed(reproduce_report.show("table1", cells, store))
    assert "with as many local steps as the semi-supervised methods" in told
    assert "every training label" not in told
    assert "(paper, ours − paper)" in told


def test_another_presets_pages_have_its_own_data_sets_and_nothing_of_the_paper(tmp_path):
    demo = {"preset": "demo", "datasets": ("fashion-mini",), "settings": ("dir-dir",)}
    cells = reproduce.cells("table1", request(**demo))
    store = synthetic.filled(tmp_path, cells, accuracy)
    reproduce_report.write("table1", cells, store, tmp_path)
    page, text = ((tmp_path / f"table1-demo.{end}").read_text() for end in ("html", "md"))
    for found in (page, text, printed(reproduce_report.show("table1", cells, store))):
        assert "Fashion-Mini" in found
        assert "mean of all 6 evaluations" in found
        assert not any(word in found for word in ("CIFAR-10", "Fashion-MNIST", "CINIC-10", "the paper"))


def test_pages_escape_what_users_write(tmp_path):
    changes = {"options": {"note": "<b>bold</b>"}}
    cells = reproduce.cells("table1", request(settings=("dir-dir",), changes=changes))
    store = synthetic.filled(tmp_path, cells, accuracy)
    page = next(path for path in reproduce_report.write("table1", cells, store, tmp_path) if path.suffix == ".html")
    text = page.read_text()
    assert "<b>bold" not in text
    assert "&lt;b&gt;bold" in text
    assert "/" not in page.name


def test_other_numbers_of_rounds_are_not_compared_silently(tmp_path):
    cells = reproduce.cells("table1", request(settings=("dir-dir",), rounds=20))
    store = synthetic.filled(tmp_path, cells, accuracy)
    (page,) = [path for path in reproduce_report.write("table1", cells, store, tmp_path) if path.suffix == ".html"]
    assert page.name == "table1-aaai24-20-rounds.html"
    assert "20 rounds, not the 200 of the paper" in page.read_text()


@pytest.mark.parametrize("study", ["table1", "figure1", "gamma"])
def test_a_figure_that_fails_loses_no_numbers(tmp_path, study, monkeypatch):
    cells = reproduce.cells(study, request(settings=("dir-dir",)))
    store = synthetic.filled(tmp_path, cells, accuracy)

    def fail(rows):
        raise ValueError("no figure today")

    monkeypatch.setattr(reproduce_report.reproduce_figures, "figure", fail)
    with pytest.raises(ValueError, match="no figure today"):
        reproduce_report.write(study, cells, store, tmp_path)
    for end in ("csv", "md"):
        assert "57.0" in (tmp_path / f"{study}-aaai24.{end}").read_text()
    assert (tmp_path / "figure1-aaai24-curves.csv").exists() == (study == "figure1")


@pytest.mark.parametrize("study", ["table1", "figure1", "gamma"])
def test_very_many_changes_still_make_files(tmp_path, study):
    changes = {"options": {f"field_{number}": "a long value" for number in range(40)}, "server.weight": "uniform"}
    cells = reproduce.cells(study, request(settings=("dir-dir",), changes=changes))
    store = synthetic.filled(tmp_path, cells, accuracy)
    written = reproduce_report.write(study, cells, store, tmp_path)
    assert {path.suffix for path in written} == {".csv", ".md", ".png", ".html"}
    assert max(len(path.name) for path in written) <= 130
    index = (tmp_path / "index.html").read_text()
    assert all(path.name in index for path in written if path.suffix != ".csv")


def test_figure_1_has_its_curves_as_numbers(tmp_path):
    cells = reproduce.cells("figure1", request())
    store = synthetic.filled(tmp_path, cells, accuracy)
    reproduce_report.write("figure1", cells, store, tmp_path)
    with (tmp_path / "figure1-aaai24-curves.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 40 * len(METHODS)
    assert {line["seeds"] for line in lines} == {"1"}


def test_partitions_are_counted_and_drawn(tmp_path, monkeypatch):
    images = tiny.dataset(size=6000, classes=10, name="tiny")
    monkeypatch.setattr(reproduce_report.data, "load", lambda *_, **__: images)
    written = reproduce_report.write_partitions(tmp_path, ["tiny"])
    assert {path.name for path in written} == {f"partitions-tiny.{end}" for end in ("csv", "png", "md", "html")}
    with (tmp_path / "partitions-tiny.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 400
    total = sum(int(line[name]) for line in lines if line["setting"] == "dir-dir" for name in images.classes)
    assert total == 6000
    assert "internal" in self_contained(tmp_path / "partitions-tiny.html")


def test_theory_is_measured_once(tmp_path, monkeypatch):
    asked = []

    def measure(*settings, **_):
        asked.append(settings)
        return "study"

    monkeypatch.setattr(theory, "measure", measure)
    monkeypatch.setattr(theory_report, "summary", lambda study: {})
    monkeypatch.setattr(theory_report, "write", lambda study, folder, report: (folder / "theory.json").write_text("{}"))
    for _ in range(2):
        assert reproduce_report.write_theory(tmp_path)[-1] == tmp_path / "theory.html"
    assert asked == [(4096, 3, 16.0)]
