"""The documentation: numbers are those of the cells, links lead somewhere, pages are as short as they promise."""

import importlib.util
import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "results" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

sys.path.insert(0, str(ROOT / "tools"))  # where it finds the tables of benchmarks
spec = importlib.util.spec_from_file_location("findings", ROOT / "tools" / "findings.py")
findings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(findings)


@pytest.mark.parametrize("page", findings.PAGES, ids=lambda path: path.name)
def test_tables_are_made_from_the_cells(page):
    text = page.read_text()
    assert "<!-- table: " in text
    assert text.count("<!-- table: ") == text.count("<!-- end -->")
    assert findings.filled(text) == text, "make findings"


def test_every_table_is_shown():
    shown = {name for page in findings.PAGES for name in re.findall(r"<!-- table: ([\w-]+) -->", page.read_text())}
    assert shown == set(findings.TABLES)


def test_the_figure_is_made_from_the_cells():
    ours, drawn = (Image.open(io.BytesIO(png)) for png in (findings.FIGURE.read_bytes(), findings.draw()))
    assert ours.size == drawn.size
    apart = np.abs(np.asarray(ours.convert("L"), float) - np.asarray(drawn.convert("L"), float))
    assert apart.mean() < 1, "make findings"  # text may be rendered a little differently elsewhere


def test_pages_are_short():
    readme, page = (re.sub("<!--.*?-->", "", path.read_text()) for path in findings.PAGES[:2])
    above_links, links, _ = readme.partition("\n## Links\n")
    assert links
    assert len(above_links.split()) <= 500
    assert len(page.split()) <= 1200


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        target = "".join(target)
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor:
            assert anchor in _anchors(found.read_text()), target


def _anchors(text):
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
