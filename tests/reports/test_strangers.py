"""Run folders from strangers: whatever their records say, a report or one error comes of it, and no markup runs."""

import base64
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feddure.errors import FeddureError, RunError
from feddure.reports import run_report
from feddure.studies.grid import store
from feddure.tracking.records import read_run

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([10**400, 10**15, -1, 1e300, "<b>", "$\\frac$", "\ud800", float("nan")]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


def evaluation(accuracy):
    return {"accuracy": accuracy, "loss": 1.0, "per_class": [accuracy] * 3, "confusion": [[5, 1, 1]] * 3}


def files():
    """What a run over sites writes, as plain values."""
    sites = [{"site": name, "problem": "late"} for name in "ab"]
    sites[0]["test_of_received_model"] = {"accuracy": 0.5}
    metrics = [
        {
            "round": number, "clients": [0, 1], "steps": [5, 5], "left_out": [1],
            "communication": {"down": 10, "up": 10}, "train": {"loss": 1.0, "d": 0.1},
            "diagnostics": {
                "weight_mean": 0.5, "weight_p10": 0.1, "pseudo_accuracy": 0.5, "weight_auroc": 0.5,
                "d_mean": 0.0, "d_lowest": -1.0, "d_highest": 1.0, "ascent_share": 0.1,
                "pseudo_accuracy_per_class": [0.5] * 3, "coverage_per_class": [0.5, None, 0.1],
                "clients": [{"weight_auroc": 0.4}],
            },
            "federation": {"sites": sites, "drawn_but_away": ["a"], "refused": ["no"]},
            "test": evaluation(0.1 * number), "test_ema": evaluation(0.2 * number),
        }
        for number in (1, 2, 3)
    ]  # fmt: skip
    counts = [[1, 2, 3], [4, 5, 6]]
    partition = {
        "classes": ["cat", "dog", "ship"], "labelled": counts, "unlabelled": counts,
        "unknown": [0, 1], "sites": ["a", "b"],
        "internal_imbalance": 0.5, "external_imbalance": None, "sha256": "0" * 64,
        "parameters": {"setting": "sites", "gamma": 0.5, "seed": 1}, "repairs": [{"number": 2}],
    }  # fmt: skip
    return {
        "metrics.jsonl": metrics,
        "timing.jsonl": [{"round": number, "seconds": 0.5, "clients": 2, "steps": 10} for number in (1, 2, 3)],
        "partition.json": partition,
        "environment.json": {"python": "3.11", "gpu": None, "cpu": "x", "cores": 2, "commit": "abc"},
        "federation.json": {"names": ["a", "b"], "sites": [{"site": "a", "labelled": 5, "unlabelled": 2}]},
    }


def write(folder, content, config="method: feddure\nrounds: 3\npartition: {setting: sites}\n"):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config)
    for name, tree in content.items():
        lines = [json.dumps(line) + "\n" for line in tree] if name.endswith("l") else [json.dumps(tree)]
        (folder / name).write_text("".join(lines))
    return folder


def places(tree, path=()):
    """Every place in nested values."""
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(value, (*path, key))


def put(tree, path, value):
    *outer, last = path
    for key in outer:
        tree = tree[key]
    tree[last] = value


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("theirs") / "run", files())


def test_the_records_that_are_changed_below_are_good_ones(folder):
    page = run_report.render([read_run(folder)])
    for text in ("Pseudo labels", "Sites", "Who owns what", "Learning curves"):
        assert text in page


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_wrong_values_anywhere_end_in_one_error_or_a_report(folder, data):
    content = json.loads(json.dumps(files()))  # no two places are the same list
    where = [path for path in places(content) if len(path) > 1]
    for path in data.draw(st.lists(st.sampled_from(where), min_size=1, max_size=2)):
        try:
            put(content, path, data.draw(JSON))
        except (KeyError, IndexError, TypeError):
            continue  # the first change has taken the place of the second away
    write(folder, content)
    try:
        found = read_run(folder)
    except FeddureError:
        return
    run_report.render([found])


@pytest.mark.parametrize("confusion", [[], [[1, 2], [3, 4]], [[1, 2, 3]] * 2 + [[]]])
def test_a_confusion_that_is_not_of_the_classes(folder, confusion):
    content = files()
    content["metrics.jsonl"][2]["test"]["confusion"] = confusion
    write(folder, content)
    with pytest.raises(RunError, match="a row and a column for each class"):
        read_run(folder)


def test_records_nested_beyond_all_measure(folder):
    write(folder, files())
    (folder / "partition.json").write_text("[" * 10**5)
    with pytest.raises(RunError, match="damaged"):
        read_run(folder)


def test_cells_of_wrong_types_are_one_error(tmp_path):
    about = {"experiment": {}, "rounds": 3, "local_steps": 5.0, "accuracy_last": 0.5, "accuracy_last10": 0.5}
    about |= {"curve": [[1, 0.5, None]], "seconds": 1.0, "build_seconds": 1.0, "partition": "x"}
    cell = {"cell": "a", **about, "environment": "e", "about": {}}
    first = json.dumps({"environment": "e", "gpu": None})
    path = tmp_path / store.CELLS
    path.write_text(f"{first}\n{json.dumps(cell)}\n")
    assert store.unpack(path)["a"].curve == [(1, 0.5, None)]
    for key in [key for key in cell if key not in ("cell", "environment", "about")]:
        for wrong in ("text", [None], {"a": []}, None, [[1, "x", []]]):
            if (key, wrong) in (("experiment", {"a": []}), ("partition", "text")):
                continue
            if wrong is None and key.startswith("accuracy"):  # there were no test images
                continue
            path.write_text(f"{first}\n{json.dumps(cell | {key: wrong})}\n")
            with pytest.raises(RunError, match="line 2 is damaged"):
                store.unpack(path)


def test_no_name_becomes_markup(tmp_path):
    """A page has one script; here names of everything try to be another, also in the pictures, which are SVG."""
    hostile = "</title><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    content = files()
    text = json.dumps(content)
    for word in ("cat", "dog", "late", "abc"):
        text = text.replace(f'"{word}"', json.dumps(hostile + word))
    content = json.loads(text.replace('"a"', json.dumps(hostile)))
    config = f"method: {json.dumps(hostile + ':x')}\nmodel: {json.dumps(hostile)}\ndataset: {json.dumps(hostile)}\n"
    made = write(tmp_path / "run", content, config + "rounds: 3\npartition: {setting: sites}\n")
    out = tmp_path / "page.html"
    run_report.write_report([made], out)
    tags = []

    class Browser(HTMLParser):
        def handle_starttag(self, tag, attributes):
            tags.append(tag)
            assert not any(name.startswith("on") for name, _ in attributes)

    Browser().feed(out.read_text(encoding="utf-8"))
    assert not {"img", "iframe", "object", "embed"} & set(tags)
    assert tags.count("svg") > 5
    (script,) = re.findall(r"<script>(.*?)</script>", out.read_text(encoding="utf-8"), re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{allowed}'" in unescape(out.read_text(encoding="utf-8"))
