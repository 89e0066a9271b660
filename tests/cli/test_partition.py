"""`feddure partition`, end to end on the embedded images."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tiny
from commands import invoke
from feddure.data import sources
from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.partition import Partition
from feddure.errors import ConfigError


def run(*arguments: str | Path) -> str:
    return invoke("partition", *arguments).stdout


def refuse(*arguments: str | Path) -> str:
    """The message with which the command refuses."""
    with pytest.raises(ConfigError) as caught:
        run(*arguments)
    return str(caught.value)


def hospitals() -> Dataset:
    """Three sites, one of them without unlabelled images; nobody knows the classes of the unlabelled."""
    labels = np.array([0, 1, 0, 1, 0, 1, UNKNOWN, UNKNOWN])
    owners = {"sites": ("north", "south [old]", "west"), "site": np.array([0, 0, 0, 1, 1, 2, 1, 2])}
    return tiny.dataset(size=8, tests=1, classes=2, labels=labels, labelled=labels >= 0, **owners)


@pytest.fixture
def own_data(monkeypatch):
    monkeypatch.setattr(sources, "load", lambda *_, **__: hospitals())


def test_json_plot_and_file_in_one_go(tmp_path):
    out, plot = tmp_path / "new" / "partition.npz", tmp_path / "new" / "partition.png"
    printed = run("--setting", "dir-dir", "--clients", 20, "--seed", 3, "--out", out, "--plot", plot, "--json")
    report = json.loads(printed)
    data = sources.load("fashion-mini")
    saved = Partition.load(out, data)
    assert report["sha256"] == saved.sha256
    assert report["parameters"] == saved.parameters
    assert saved.parameters["seed"] == 3
    labelled, unlabelled = saved.counts(data.labels, 10)
    assert [client["labelled_per_class"] for client in report["clients"]] == labelled.tolist()
    assert [client["unlabelled_per_class"] for client in report["clients"]] == unlabelled.tolist()
    for client in report["clients"]:
        for kind in ("labelled", "unlabelled"):
            counts = client[f"{kind}_per_class"]
            assert client[kind] == sum(counts)
            missing = [name for name, count in zip(data.classes, counts, strict=True) if count == 0]
            assert client[f"absent_{kind}"] == missing
    assert 0 < report["internal_imbalance"] < 1
    assert 0 < report["external_imbalance"] < 1
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in plot.parent.iterdir()) == ["partition.npz", "partition.png"]


def test_the_table_shows_hash_measures_and_repairs():
    for arguments in (["--setting", "iid-iid", "--clients", 4], ["--clients", 20, "--gamma", 0.01]):
        shown, report = run(*arguments), json.loads(run(*arguments, "--json"))
        assert report["sha256"] in shown
        assert f"internal imbalance: {report['internal_imbalance']:.3f}" in shown
        moved = sum(repair["number"] for repair in report["repairs"])
        assert (f"images moved to them: {moved}" if moved else "repairs: none needed") in shown
    assert set(report["repairs"][0]) == {"from_client", "to_client", "kind", "number"}


def test_long_tables_show_both_ends_unless_all_is_asked_for():
    many = ["--setting", "iid-iid", "--clients", 30]
    assert "… 10 more" in run(*many)
    every = run(*many, "--all")
    assert "more" not in every
    assert len(every.splitlines()) > len(run(*many).splitlines())


def test_sites_are_clients_by_name(own_data):
    shown = run("--setting", "sites")
    assert "1 south [old]" in shown
    assert "not known" in shown
    report = json.loads(run("--setting", "sites", "--json"))
    assert [client["site"] for client in report["clients"]] == ["north", "south [old]", "west"]
    assert [client["unlabelled"] for client in report["clients"]] == [0, 1, 1]
    assert report["clients"][1]["absent_unlabelled"] is None
    assert report["internal_imbalance"] is None
    assert json.loads(run("--json")) == report  # unless another setting is asked for
    dealt = json.loads(run("--setting", "iid-iid", "--clients", 2, "--labels-per-class", 1, "--json"))
    assert len(dealt["clients"]) == 2
    assert "has 3 sites" in refuse("--setting", "sites", "--clients", 4)


def test_own_images_go_by_their_path(tmp_path):
    for number in range(12):
        folder = tmp_path / "images" / ("cat", "dog", "unlabelled")[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 20 * number, np.uint8)).save(folder / f"{number}.png")
    of_images = ("--dataset", f"{tmp_path / 'images'}?test=0", "--setting", "iid-iid", "--clients", 2)
    report = json.loads(run(*of_images, "--json"))
    assert [client["labelled_per_class"] for client in report["clients"]] == [[2, 2], [2, 2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clients", 0], "--clients: 0 was given"),
        (["--gamma", -1], "--gamma: -1.0 was given"),
        (["--gamma", "nan"], "--gamma: nan was given"),
        (["--setting", "dir"], "--setting: 'dir' was given"),
        (["--seed", -1], "--seed: -1 was given"),
        (["--labels-per-class", 2, "--label-fraction", 0.1], "--labels-per-class and --label-fraction were both"),
        (["--labels-per-class", 60], "--labels-per-class=60: class "),
        (["--setting", "sites"], "--setting sites: "),
        (["--clients", 10**5, "--labels-per-class", 1], "labels (--labels-per-class or --label-fraction)"),
        (["--clients", 100, "--label-fraction", 1.0], "lower --label-fraction to at most 0.98"),
    ],
)
def test_impossible_requests_name_the_option(arguments, message):
    assert message in refuse(*arguments)


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--plot", "picture.gif", "expected a name that ends in .png or .svg or .pdf"),
        ("--out", "partition.zip", "expected a name that ends in .npz"),
        ("--out", "folder.npz", "this is a folder"),
        ("--plot", "file/picture.png", "cannot be written"),
    ],
)
def test_places_that_cannot_be_written_are_refused_before_any_work(tmp_path, monkeypatch, option, name, message):
    monkeypatch.setattr(sources, "load", lambda *_, **__: pytest.fail("the data set was loaded"))
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "file").touch()
    refusal = refuse(option, tmp_path / name)
    assert refusal.startswith(f"{option} {tmp_path / name}: ")
    assert message in refusal
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder.npz"]


def test_clients_in_pairs_some_without_labels(tmp_path):
    shares = ("--labelled-clients", 0.5, "--unlabelled-fraction", 0.5, "--labelled-as-unlabelled")
    printed = run("--setting", "pairs", "--gamma", 0.1, "--clients", 8, *shares, "--plot", tmp_path / "p.png", "--json")
    clients = json.loads(printed)["clients"]
    assert sorted(client["labelled"] for client in clients) == [0] * 4 + [100] * 4
    own = (len(sources.load("fashion-mini").images) - 400) // 16  # beside these, a client's labelled images
    assert all(client["unlabelled"] == own + client["labelled"] for client in clients)
    assert (tmp_path / "p.png").stat().st_size > 10_000
    assert "--setting pairs" in refuse("--setting", "pairs", "--clients", 7)
