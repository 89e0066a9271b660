"""The folder of a reproduction: its index links what lies there, and theory's findings have a page."""

import json

import pytest

from feddure.errors import RunError
from feddure.reports import style
from feddure.studies.paper.files import write_files, write_index

FOUND = {
    "quantity": "‖g‖² <b>", "first": 1e-2, "last": 2e-5, "fit": {"slope": -1.5, "error": 0.1}, "control": "θ frozen",
    "control_fit": {"slope": 0.5, "error": None}, "against": "T",
}  # fmt: skip
REPORT = {
    "environment": {"cpu": "some processor", "cores": 2, "torch": "2"},
    "settings": {"seeds": 3, "largest": 4096},
    "findings": [FOUND | {"theorem": number, "verdict": f"Verdict {number}."} for number in (1, 2)],
    "notes": ["A note."],
    "meaning": ["A meaning."],
}


def test_the_index_links_what_lies_there_and_spares_a_readme_of_others(tmp_path):
    write_files(tmp_path, {"table2-aaai24.html": b"", "table2-aaai24.csv": b""})
    page, readme = (tmp_path / "index.html").read_text(), (tmp_path / "README.md").read_text()
    assert 'href="table2-aaai24.html"' in page
    assert "(table2-aaai24.csv)" in readme
    assert "table1" not in page + readme
    write_files(tmp_path, {"claims.html": b""})
    assert "(claims.html)" in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("mine")
    write_index(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_pages_lead_on_to_pages_and_markdown_to_markdown(tmp_path):
    names = [f"table1-{preset}.{end}" for preset in ("aaai24-fine", "aaai24") for end in ("html", "md", "csv")]
    write_files(tmp_path, dict.fromkeys(names, b""))
    page, readme = (tmp_path / "index.html").read_text(), (tmp_path / "README.md").read_text()
    assert '<a href="table1-aaai24.html">table1-aaai24</a>' in page
    assert "[table1-aaai24](table1-aaai24.md)" in readme
    assert "html" not in readme
    assert page.index("table1-aaai24.html") < page.index("table1-aaai24-fine.html")


def test_theory_has_a_page_with_its_findings_and_figure(tmp_path):
    (tmp_path / "theory.json").write_text(json.dumps(REPORT))
    (tmp_path / "theory.md").write_text("# theory")
    (tmp_path / "theory.png").write_bytes(style.render(style.new_figure(2, 1), "png", 50))
    write_index(tmp_path)
    assert '<a href="theory.html">theory</a>' in (tmp_path / "index.html").read_text()
    page = (tmp_path / "theory.html").read_text()
    assert "data:image/png;base64," in page
    for text in ("Theorem 2", "Verdict 1.", "−1.50 ± 0.10", "+0.50 ± –", "A note.", "A meaning.", "&lt;b&gt;"):
        assert text in page


@pytest.mark.parametrize("content", ["{}", "[]", "not json"])
def test_without_findings_there_is_no_page(tmp_path, content):
    (tmp_path / "theory.json").write_text(content)
    write_index(tmp_path)
    assert not (tmp_path / "theory.html").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file"):
        write_files(tmp_path / "file", {})
