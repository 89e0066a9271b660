"""The documentation: numbers are those of the cells, links lead somewhere, pages are short, commands work."""

import functools
import importlib.util
import io
import re
import shlex
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from markdown_it import MarkdownIt
from PIL import Image
from typer.main import get_command

import feddure
from feddure import cli
from feddure.flower.app.policy import LEAVES

ROOT = Path(__file__).parents[1]
BORROWED = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]  # pages of the site, too
PAGES = [*BORROWED, ROOT / "results" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LONGER = {"appendix.md": 5000, "findings.md": 1200, "security.md": 1500}

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


@pytest.mark.parametrize("name", findings.FIGURES)
def test_the_figures_are_made_from_the_cells(name):
    pngs = ((findings.IMAGES / name).read_bytes(), findings.drawn(findings.FIGURES[name]))
    ours, drawn = (Image.open(io.BytesIO(png)) for png in pngs)
    assert ours.size == drawn.size
    apart = np.abs(np.asarray(ours.convert("L"), float) - np.asarray(drawn.convert("L"), float))
    assert apart.mean() < 1, "make findings"  # text may be rendered a little differently elsewhere


def words(text):
    """Of prose and tables; code, comments and the marks of a table are none."""
    text = re.sub(r"<!--.*?-->|```.*?```", "", text, flags=re.DOTALL)
    return len([word for word in text.split() if re.search(r"\w", word)])


def test_readme_is_one_screen():
    above_links, links, _ = (ROOT / "README.md").read_text().partition("\n## Links\n")
    assert links
    assert len(re.sub("<!--.*?-->", "", above_links).split()) <= 500


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_pages_are_short(page):
    assert words(page.read_text()) <= LONGER.get(page.name, 900)


@pytest.mark.parametrize(
    "page", [*PAGES, *(ROOT / "results").glob("*/*.md")], ids=lambda path: str(path.relative_to(ROOT))
)
def test_formulas_keep_their_signs(page):
    """Emphasis is written with asterisks, so that an underscore that begins one is a formula's and would be lost."""
    shown = MarkdownIt("gfm-like", {"linkify": False}).parse(page.read_text())
    emphasised = [
        block.content
        for block in shown
        for each in block.children or ()
        if each.type == "em_open" and each.markup == "_"
    ]
    assert not emphasised


def test_security_names_all_that_leaves_a_site():
    """As the question before a run and the README of a bundle do."""
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "security.md").read_text(), re.MULTILINE)
    assert [each for each in LEAVES if each not in rows] == []


def test_the_site_leads_to_every_page():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = set(re.findall(r": (\S+\.md)$", nav, re.MULTILINE))
    borrowed = {"index.md", "contributing.md", "changelog.md"}
    assert listed == borrowed | {page.name for page in (ROOT / "docs").glob("*.md")}


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


# --- commands ------------------------------------------------------------------------------------------------


def commands(page):
    """The command lines of a page's code blocks, without comments; continued lines are one."""
    blocks = re.findall(r"^ *```(?:sh|text|console)\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    split = [shlex.split(line, comments=True) for line in lines if line.startswith(("feddure ", "make ", "source "))]
    return [words for words in split if words]


def understand(arguments):
    """Parse a command's line as the command does, and run nothing; a wrong option or value is an error."""
    command = get_command(cli.app)
    context = command.make_context("feddure", list(arguments))
    while isinstance(command, click.Group):
        rest = [*context._protected_args, *context.args]
        _, command, rest = command.resolve_command(context, rest)
        context = command.make_context(command.name, rest, parent=context)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda path: path.name)
def test_commands_of_the_pages_exist(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, *arguments in commands(page):
        if name == "make":
            assert {word for word in arguments if word.isalpha()} <= targets
        elif name == "feddure":
            understand(arguments)
        else:
            assert arguments == [".venv/bin/activate"]


@pytest.fixture
def newcomer(tmp_path, monkeypatch):
    """The folder of somebody who has images: ten of each of two classes, and a photograph."""
    monkeypatch.chdir(tmp_path)
    images, rng = Path("my/images"), np.random.default_rng(0)
    for folder in ("labelled/dark", "labelled/light", "test/dark", "test/light", "unlabelled"):
        (images / folder).mkdir(parents=True)
        for number in range(10):
            shade = 0 if "dark" in folder else 128
            pixels = rng.integers(shade, shade + 128, (12, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(images / folder / f"{number}.png")
    Image.fromarray(pixels).save("photo.png")


@pytest.mark.filterwarnings("default")  # the command says itself how warnings are shown
@pytest.mark.usefixtures("newcomer", "quiet")
def test_the_readme_works_as_written(monkeypatch, capsys):
    """Every command and the Python lines, in their order; what trains does so for one round of one step.

    Commands leave their reports empty, which take longest; that of the Python lines is drawn.
    """
    small = {"rounds": 1, "sets": {"local_steps": 1, "engine.device": "cpu"}}
    options = [word for key in ("rounds=1", "local_steps=1", "engine.device=cpu") for word in ("--set", key)]
    ran = []
    for name, *arguments in commands(ROOT / "README.md"):
        if name != "feddure":
            continue  # make demo has made the environment that this test runs in
        trains = arguments[0] == "run"
        monkeypatch.setattr(sys, "argv", ["feddure", *arguments, *(options if trains else [])])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code, (arguments, capsys.readouterr().err)
        ran.append(arguments[0])
    assert ran == ["run", "data", "run", "export", "predict"]
    assert Path("runs/first/report.html").is_file()
    assert Path("model.onnx").is_file()
    assert "photo.png" in capsys.readouterr().out

    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.setattr(feddure, "run", functools.partial(feddure.run, **small), raising=False)
    exec(lines, {})
    accuracy, report = capsys.readouterr().out.splitlines()
    assert accuracy.endswith("%")
    assert Path(report).is_file()
