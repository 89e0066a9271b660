"""What `reproduce` writes: whole files for any part that is measured, pages that need nothing beside themselves."""

import json

import pandas as pd
import pytest

import synthetic
from feddure.reports import style
from feddure.studies.grid.failures import Problem
from feddure.studies.grid.store import Store
from feddure.studies.paper import figures, plan, report
from feddure.studies.theory import measure as theory
from feddure.studies.theory import report as theory_report

METHODS = {"fedavg-matched": 55.0, "fedmatch": 45.0, "feddure": 57.0}
ENDINGS = ("csv", "md", "png", "html")


@pytest.fixture
def quick(monkeypatch):
    """Files without their figures, which take most of the time."""
    monkeypatch.setattr(figures, "figure", lambda rows: style.new_figure(1, 1))


def request(**fields):
    usual = {"datasets": ("cifar10",), "settings": ("dir-dir",), "methods": tuple(METHODS), "seeds": (0,)}
    return plan.Request(**(usual | fields))


def accuracy(cell):
    return METHODS[cell.experiment.method]


def written(folder, study="table1", kept=None, failed=(), **fields):
    """The files of a study of which these cells are measured, by their endings."""
    cells = plan.cells(study, request(**fields))
    store = synthetic.filled(folder, cells[kept or slice(None)], accuracy)
    for place in failed:
        store.fail(cells[place], Problem("ValueError: <a> mistake"))
    found = report.results(cells, store)
    name = plan.stem(cells)
    page = report.write(found, name, folder)
    assert page == folder / f"{name}.html"
    texts = {end: (folder / f"{name}.{end}").read_text() for end in ENDINGS if end != "png"}
    assert texts["html"].lstrip().startswith("<!DOCTYPE html>")
    assert 'src="http' not in texts["html"]
    assert texts["html"].count("<script") == 1
    return texts


@pytest.mark.parametrize("study", ["table1", "figure1", "gamma"])
def test_a_study_is_written_as_csv_markdown_figure_and_page(tmp_path, study):
    texts = written(tmp_path, study)
    for text in texts.values():
        assert "57.0" in text
        assert "fedmatch" in text.lower()
    assert (tmp_path / f"{study}-aaai24.png").read_bytes().startswith(b"\x89PNG")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".") and path.suffix != ".lock"]
    index = (tmp_path / "index.html").read_text()
    assert all(f'href="{study}-aaai24.{end}"' in index for end in ENDINGS)


def test_a_table_with_some_of_its_cells_says_what_is_left(tmp_path, quick):
    texts = written(tmp_path, kept=slice(2), seeds=(0, 1))
    for end in ("md", "html"):
        assert "not measured" in texts[end]
        assert "feddure reproduce table1 --datasets cinic10" in texts[end]
        assert "CIFAR-10, FedDure: IID-IID (seed 0); IID-DIR (seed 0); DIR-DIR (seeds 0, 1)" in texts[end]
    assert "2 of" in texts["md"]


def test_cells_that_failed_are_listed_with_the_reason(tmp_path, quick):
    texts = written(tmp_path, kept=slice(1), failed=[1])
    assert "CIFAR-10, FedMatch: DIR-DIR (seed 0): ValueError: \\<a> mistake" in texts["md"]
    assert "CIFAR-10, FedMatch: DIR-DIR (seed 0): ValueError: &lt;a&gt; mistake" in texts["html"]
    assert "1 failed" in texts["md"]
    assert "Failed" not in written(tmp_path)["md"]


def test_options_that_all_rows_share_are_said_once_above_the_table(tmp_path, quick):
    changes = {"server.weight": "uniform", "evaluate_every": 7}
    texts = written(tmp_path, changes=changes)
    assert texts.pop("csv").count("server.weight=uniform evaluate_every=7") == 3
    for text in texts.values():
        assert text.count("server.weight=uniform evaluate_every=7") == 1


def test_nothing_measured_is_no_error(tmp_path, quick):
    for study in ("figure1", "gamma", "table1"):
        assert "0 of" in written(tmp_path, study, kept=slice(0))["md"]


def test_another_presets_pages_have_its_own_data_sets_and_nothing_of_the_paper(tmp_path, quick):
    texts = written(tmp_path, preset="demo", datasets=("fashion-mini",))
    for end in ("md", "html"):
        assert "Fashion-Mini" in texts[end]
        assert "mean of all " in texts[end]
        assert not any(word in texts[end] for word in ("CIFAR-10", "Fashion-MNIST", "CINIC-10", "(paper"))


def test_pages_escape_what_users_write(tmp_path, quick):
    texts = written(tmp_path, changes={"options": {"note": "<b>bold</b>"}})
    assert "<b>bold" not in texts["html"]
    assert "&lt;b&gt;bold" in texts["html"]


def test_other_numbers_of_rounds_are_not_compared_silently(tmp_path, quick):
    assert "not the 200 of the paper" in written(tmp_path, rounds=20)["html"]


def test_a_tree_with_uncommitted_changes_is_told_below_the_table(tmp_path, quick, monkeypatch):
    assert "uncommitted" not in written(tmp_path / "clean")["md"]
    monkeypatch.setitem(synthetic.ENVIRONMENT, "commit", "0000000-dirty")
    texts = written(tmp_path / "dirty")
    for end in ("md", "html"):
        assert "57.00 †" in texts[end]
        assert "†: measured" in texts[end]


def test_a_figure_that_fails_loses_no_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "figure", lambda rows: pytest.fail("no figure today"))
    with pytest.raises(pytest.fail.Exception):
        written(tmp_path, "figure1")
    for name in ("figure1-aaai24.csv", "figure1-aaai24.md"):
        assert "57.0" in (tmp_path / name).read_text()


@pytest.mark.parametrize("study", ["table1", "figure1", "gamma", "clients"])
@pytest.mark.parametrize("seeds", [1, 3])
def test_every_figure_is_drawn_whatever_is_measured(study, seeds):
    values = plan.STUDIES[study].values or (None,)
    paper = {"dir-dir": 60.0} if study == "table1" else {}
    rows = [
        synthetic.row(
            study, method, {seed: base + seed for seed in range(seeds if value != values[-1] else min(seeds, 1))},
            value=value, setting=setting, paper=paper.get(setting),
        )
        for method, base in (METHODS | {"my.package.of_methods:A$Method$OfMine": 50.0}).items()
        for setting in ("iid-dir", "dir-dir")
        for value in values
    ]  # fmt: skip
    assert style.render(figures.figure(rows), "png", 40).startswith(b"\x89PNG")


def test_theory_is_measured_once(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(theory, "measure", lambda **_: asked.append("study"))
    monkeypatch.setattr(theory_report, "summary", lambda study: {})
    monkeypatch.setattr(theory_report, "write", lambda study, folder, report: (folder / "theory.json").write_text("{}"))
    for _ in range(2):
        assert report.write_theory(tmp_path) == tmp_path / "theory.html"
    assert asked == ["study"]


def test_theory_has_a_page_with_its_findings(tmp_path):
    found = {
        "quantity": "‖g‖² <b>", "first": 1e-2, "last": 2e-5, "fit": {"slope": -1.5, "error": 0.1}, "against": "T",
        "control": "θ frozen", "control_fit": {"slope": 0.5, "error": None},
    }  # fmt: skip
    summary = {
        "environment": {"cpu": "some processor", "cores": 2, "torch": "2"},
        "settings": {"seeds": 3, "largest": 4096},
        "findings": [found | {"theorem": number, "verdict": f"Verdict {number}."} for number in (1, 2)],
        "notes": ["A note."],
        "meaning": ["A meaning."],
    }
    (tmp_path / "theory.json").write_text(json.dumps(summary))
    report.write_index(tmp_path)
    assert 'href="theory.html"' in (tmp_path / "index.html").read_text()
    page = (tmp_path / "theory.html").read_text()
    for text in ("Verdict 2.", "−1.50 ± 0.10", "+0.50 ± –", "A note.", "A meaning.", "&lt;b&gt;"):
        assert text in page


@pytest.mark.parametrize("content", ["{}", "[]", "not json"])
def test_without_findings_there_is_no_page(tmp_path, content):
    (tmp_path / "theory.json").write_text(content)
    report.write_index(tmp_path)
    assert not (tmp_path / "theory.html").exists()


def test_the_index_leads_to_what_is_there(tmp_path):
    for name in ("table1-aaai24.html", "table1-aaai24.md", "table1-aaai24-fine.html", "table1-aaai24-fine.csv"):
        (tmp_path / name).touch()
    report.write_index(tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert page.index('<a href="table1-aaai24.html">') < page.index('<a href="table1-aaai24-fine.html">')
    assert "table2" not in page


def test_claims_are_written_for_each_preset_that_has_cells(tmp_path):
    requests = [request(preset=preset, settings=("iid-dir",), seeds=(0, 1, 2)) for preset in ("aaai24", "aaai24-fine")]
    cells = [cell for one in requests for cell in plan.cells("table1", one)]
    store = synthetic.filled(tmp_path, cells, lambda cell: accuracy(cell) + int(cell.hash, 16) % 7 / 10)
    found = report.all_claims(store)
    report.write_claims(found, tmp_path)
    lines = pd.read_csv(tmp_path / "claims.csv")
    assert set(lines[lines["claim"] == "gain over FedMatch"]["verdict"]) == {"does not hold"}
    assert set(lines["preset"]) == {"aaai24", "aaai24-fine", "any"}
    assert len(pd.read_csv(tmp_path / "claims-comparisons.csv")) > len(lines)
    for name in ("claims.md", "claims.html"):
        text = (tmp_path / name).read_text()
        assert "Preset aaai24-fine" in text
        assert "Of 2 claims 2 are not measured." in text


def test_claims_without_any_measurement_are_no_error(tmp_path):
    found = report.all_claims(Store(tmp_path))
    report.write_claims(found, tmp_path)
    assert set(pd.read_csv(tmp_path / "claims.csv")["verdict"]) == {"not measured"}
