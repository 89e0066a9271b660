"""What `reproduce` writes: whole files for any part that is measured, pages that need nothing, an index of all."""

import csv

import pytest
from rich.console import Console

import synthetic
import tiny
from feddure.errors import RunError
from feddure.studies import reproduce, reproduce_report, theory, theory_report
from feddure.studies.cells import Store

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
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_table_with_some_of_its_cells_says_what_is_left(tmp_path):
    cells = reproduce.cells("table1", request(settings=("dir-dir",), seeds=(0, 1)))
    store = synthetic.filled(tmp_path, cells[:2], accuracy)
    reproduce_report.write("table1", cells, store, tmp_path)
    page, text = ((tmp_path / f"table1-aaai24.{end}").read_text() for end in ("html", "md"))
    for found in (page, text):
        assert "not measured" in found
        assert "feddure reproduce table1 --datasets cinic10" in found
    assert "- CIFAR-10, FedDure: IID-IID (seed 0); IID-DIR (seed 0); DIR-DIR (seeds 0, 1)" in text


def test_nothing_measured_and_nothing_asked_are_no_errors(tmp_path):
    store = Store(tmp_path)
    cells = reproduce.cells("table1", request())
    for wanted in (cells, []):
        assert reproduce_report.write("table1", wanted, store, tmp_path)
        assert "0 of" in printed(reproduce_report.show("table1", wanted, store))
    assert reproduce_report.write_claims(tmp_path, store)


def test_the_terminal_shows_ours_with_the_papers_number_and_the_difference(tmp_path):
    cells = reproduce.cells("table1", request(settings=("dir-dir",), seeds=(0, 1)))
    store = synthetic.filled(tmp_path, cells, lambda cell: accuracy(cell) + cell.experiment.seed)
    text = printed(reproduce_report.show("table1", cells, store))
    assert "57.5 ± 0.7 (57.73, −0.2)" in text
    assert "6 of" in text


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


def test_figure_1_has_its_curves_as_numbers(tmp_path):
    cells = reproduce.cells("figure1", request())
    store = synthetic.filled(tmp_path, cells, accuracy)
    reproduce_report.write("figure1", cells, store, tmp_path)
    with (tmp_path / "figure1-aaai24-curves.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 40 * len(METHODS)
    assert {line["seeds"] for line in lines} == {"1"}


def test_claims_are_written_for_each_preset_that_has_cells(tmp_path):
    cells = [
        cell
        for preset in ("aaai24", "aaai24-fine")
        for cell in reproduce.cells("table1", request(preset=preset, settings=("iid-dir",), seeds=(0, 1)))
    ]
    store = synthetic.filled(tmp_path, cells, lambda cell: accuracy(cell) + int(cell.hash, 16) % 7 / 10)
    written = reproduce_report.write_claims(tmp_path, store)
    assert {path.name for path in written} == {"claims.csv", "claims-comparisons.csv", "claims.md", "claims.html"}
    with (tmp_path / "claims.csv").open() as file:
        lines = list(csv.DictReader(file))
    gains = {line["preset"]: line["verdict"] for line in lines if line["claim"] == "gain over FedMatch"}
    assert gains.keys() == {"aaai24", "aaai24-fine"}
    assert "not measured" not in gains.values()
    assert {line["preset"] for line in lines} == {"aaai24", "aaai24-fine", "any"}
    assert "Preset aaai24-fine" in self_contained(tmp_path / "claims.html")
    assert "gain over FedMatch" in (tmp_path / "claims.md").read_text()
    assert "does not hold" in printed(reproduce_report.show_claims(reproduce_report.all_claims(store, tmp_path)))


def test_the_index_links_what_lies_there_and_spares_a_readme_of_others(tmp_path):
    cells = reproduce.cells("table2", request(methods=("feddure",)))
    store = synthetic.filled(tmp_path, cells, accuracy)
    reproduce_report.write("table2", cells, store, tmp_path)
    assert 'href="table2-aaai24.html"' in self_contained(tmp_path / "index.html")
    assert "(table2-aaai24.html)" in (tmp_path / "README.md").read_text()
    assert "table1" not in (tmp_path / "README.md").read_text()
    reproduce_report.write_claims(tmp_path, store)
    assert "(claims.html)" in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("mine")
    reproduce_report.write_index(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


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
        assert tmp_path / "theory.md" in reproduce_report.write_theory(tmp_path)
    assert asked == [(4096, 3, 16.0)]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file"):
        reproduce_report.write("table1", [], Store(tmp_path), tmp_path / "file")
