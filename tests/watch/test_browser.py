"""Reports and the live page in a real Chromium."""

import json
import re
import threading

import pytest
import yaml

import browsing
from feddure import experiments
from feddure.reports.run_report import write_report
from feddure.tracking.records import Writer
from feddure.watch.folder import Folder
from feddure.watch.server import Server

pytestmark = pytest.mark.browser

POINT = """
  const figure = document.querySelector("figure[data-chart]"), svg = figure.querySelector("svg");
  const box = svg.getBoundingClientRect();
  const point = () => svg.dispatchEvent(new window.PointerEvent("pointermove",
    {clientX: box.right - 4, clientY: box.top + box.height / 2, bubbles: true}));
  const tip = () => { point(); return document.querySelector(".tip").innerText; };
  const before = tip();
  figure.querySelector(".legend [role=button]").dispatchEvent(new window.MouseEvent("click", {bubbles: true}));
  const drawn = [...figure.querySelectorAll("[data-series]")].filter((part) => !part.closest(".legend"));
  const hidden = drawn.filter((part) => window.getComputedStyle(part).display === "none").length;
  return {before, after: tip(), hidden};
"""
LOOK = """
  const inside = (one) => one.scrollWidth <= one.clientWidth + 1;
  const style = (one) => window.getComputedStyle(one);
  return {
    page: document.documentElement.scrollWidth,
    cards: [...document.querySelectorAll(".cards div")].map(inside),
    scrolls: [...document.querySelectorAll(".scroll")].map((one) => inside(one) || style(one).overflowX === "auto"),
    figure: style(document.querySelector("figure")).backgroundColor,
    text: style(document.querySelector("figure text")).fill,
  };
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two small runs, one with a name that would like to be markup."""
    root = tmp_path_factory.mktemp("runs")
    for name, method in (("first", "fedavg"), ("<b>second", "feddure")):
        folder = root / name
        folder.mkdir()
        changes = {"method": method, "rounds": 6, "partition.clients": 4, "clients_per_round": 2, "evaluate_every": 2}
        (folder / "config.yaml").write_text(experiments.to_yaml(experiments.load("demo", changes=changes)))
        with Writer(folder / "metrics.jsonl") as metrics:
            for number in (2, 4, 6):
                test = {"accuracy": number / 10 + 0.01 * len(name), "loss": 1 / number}
                metrics.write({"round": number, "clients": [0], "steps": [5], "train": {"loss": 1.0}, "test": test})
    return root


@pytest.fixture(scope="module")
def reports(runs):
    """The page of both, and that of one."""
    both = write_report(sorted(runs.iterdir()), runs.parent / "both.html").read_text()
    return both, write_report([runs / "first"], runs.parent / "one.html").read_text()


def test_charts_tell_values_and_their_legends_hide_lines(reports, tmp_path):
    found = browsing.ask(reports[0], POINT, tmp_path)
    assert found["before"].startswith("round 6")
    for line in ("FedAvg", "FedDure", "65", "69"):
        assert line in found["before"]
    assert found["hidden"] == 1
    assert ("65" in found["after"]) != ("69" in found["after"])


@pytest.mark.parametrize("dark", [False, True])
def test_pages_fit_a_phone_and_a_dark_screen(reports, tmp_path, dark):
    found = browsing.ask(reports[1], LOOK, tmp_path, 390, dark)
    assert found["page"] <= 390
    assert len(found["cards"]) >= 4
    assert all(found["cards"])
    assert all(found["scrolls"])
    paper, ink = (sum(map(int, re.findall(r"\d+", found[part])[:3])) for part in ("figure", "text"))
    assert (paper < 200 < ink) if dark else (ink < 200 < paper)


def test_the_live_page_shows_runs_and_no_markup_of_theirs(runs, tmp_path):
    (runs / "first" / "failure.json").write_text(json.dumps({"error": "<script>alert(1)</script>"}))
    plan = {"methods": ["fedavg", "sage"], "seeds": [0], "against": "fedavg"}
    (runs / "pair").mkdir()
    (runs / "pair" / "comparison.yaml").write_text(yaml.safe_dump(plan))
    with Server(Folder(runs)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            page = browsing.dom(server.url, tmp_path / "profile")
        finally:
            server.shutdown()
            thread.join()
    for text in ("6 of 6", "&lt;b&gt;second", "&lt;script&gt;alert(1)&lt;/script&gt;", "not begun", "69.0 %"):
        assert text in page
    assert page.count("<polyline") == 4
    assert "<b>second" not in page
