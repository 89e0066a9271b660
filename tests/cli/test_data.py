"""`feddure data` as a person and as a script sees it."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from commands import invoke
from feddure.data import sources
from feddure.data.sources import fashion


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("FEDDURE_DATA", raising=False)


def run(*arguments: object, code: int = 0) -> str:
    return invoke("data", *arguments, exit_code=code).stdout


def write_fashion(data_dir: Path, labels: tuple[int, ...] = tuple(range(10))) -> None:
    folder = data_dir / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name in fashion.FILES:
        array = np.zeros((len(labels), 28, 28), np.uint8) if "images" in name else np.array(labels, np.uint8)
        sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
        (folder / f"{name}.gz").write_bytes(gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()))


def write_sites(root: Path) -> None:
    for path in (
        "clients/north/labelled/ant",
        "clients/south [new]/labelled/bee",
        "clients/south [new]/unlabelled",
        "test/ant",
    ):
        (root / path).mkdir(parents=True)
        Image.new("RGB", (8, 8), (len(path), 0, 0)).save(root / path / "1.png")


def test_the_list_says_what_there_is_and_where(tmp_path, monkeypatch):
    write_fashion(tmp_path)
    monkeypatch.setenv("FEDDURE_DATA", str(tmp_path))
    lines = {line.split()[0]: line for line in run("list").splitlines() if line.strip()}
    assert "in the package" in lines["fashion-mini"]
    assert "FashionMNIST/raw" in lines["fashion-mnist"]
    assert "not here" in lines["cifar10"]


def test_the_list_for_scripts_is_json_alone(tmp_path):
    write_fashion(tmp_path)
    rows = {row["name"]: row for row in json.loads(run("list", "--data-dir", tmp_path, "--json"))}
    assert list(rows) == [source.name for source in sources.sources()]
    assert rows["cifar10"] == {
        "name": "cifar10",
        "about": rows["cifar10"]["about"],
        "classes": 10,
        "train": 50000,
        "test": 10000,
        "path": None,
    }
    assert rows["fashion-mnist"]["path"] == str(tmp_path / "FashionMNIST" / "raw")


def test_check_counts_measures_and_approves_the_real_thing():
    text = run("check", "fashion-mini")
    assert sources.load("fashion-mini").fingerprint in text
    assert "Ankle boot" in text
    report = json.loads(run("check", "fashion-mini", "--json"))
    assert report["official"] is True
    assert report["deviations"] == []
    assert report["shape"] == [28, 28, 1]
    assert report["classes"][9] == {"name": "Ankle boot", "train": 600, "labelled": 600, "test": 100}
    assert report["unlabelled"] is None


def test_check_says_what_is_not_official_and_exits_with_1(tmp_path):
    write_fashion(tmp_path)
    text = run("check", "fashion-mnist", "--data-dir", tmp_path, code=1)
    assert "train images found of T-shirt/top: 1 of 6,000" in text
    report = json.loads(run("check", "fashion-mnist", "--data-dir", tmp_path, "--json", code=1))
    assert report["official"] is False
    assert any("test_labels: the SHA-256" in deviation for deviation in report["deviations"])


def test_check_counts_sites_and_unlabelled_images(tmp_path):
    write_sites(tmp_path)
    report = json.loads(run("check", f"folder:{tmp_path}?size=8", "--json"))
    assert report["official"] is None
    assert report["unlabelled"] == 1
    assert report["classes"] == [
        {"name": "ant", "train": 1, "labelled": 1, "test": 1},
        {"name": "bee", "train": 1, "labelled": 1, "test": 0},
    ]
    assert report["sites"] == [
        {"name": "north", "train": 1, "labelled": 1, "test": 0, "classes": {"ant": 1, "bee": 0}},
        {"name": "south [new]", "train": 2, "labelled": 1, "test": 0, "classes": {"ant": 0, "bee": 1}},
    ]
    text = run("check", f"folder:{tmp_path}?size=8")
    assert "2 labelled, 1 unlabelled" in text
    assert "south [new]" in text  # no markup
    (row,) = (line.split() for line in text.splitlines() if line.startswith("unlabelled"))
    assert row == ["unlabelled", "0", "1"]


def test_check_notes_what_may_not_be_meant(tmp_path):
    write_sites(tmp_path)
    Image.fromarray(np.full((8, 8), 4095, dtype=np.uint16)).save(tmp_path / "test" / "ant" / "1.png")
    notes = json.loads(run("check", f"folder:{tmp_path}?size=8", "--json"))["notes"]
    assert notes[0] == "class 'bee' has no test image"
    assert notes[1].startswith("1 16-bit image(s) use less than a quarter of the range")
    text = run("check", f"folder:{tmp_path}?size=8")
    assert all(f"note: {note}" in text for note in notes)
    assert json.loads(run("check", "fashion-mini", "--json"))["notes"] == []


def test_fetch_says_where_the_data_are(tmp_path):
    write_fashion(tmp_path)
    assert str(tmp_path / "FashionMNIST" / "raw") in run("fetch", "fashion-mnist", "--data-dir", tmp_path)
    answer = json.loads(run("fetch", "fashion-mnist", "--data-dir", tmp_path, "--json"))
    assert answer == {"name": "fashion-mnist", "path": str(tmp_path / "FashionMNIST" / "raw")}


def test_check_notes_images_that_are_the_same_and_exits_with_0(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    for place, number in {
        "clients/north/labelled/ant/a": 0,
        "clients/north/labelled/ant/b": 0,
        "clients/north/labelled/bee/c": 1,
        "clients/south/labelled/bee/d": 1,
        "clients/south/labelled/ant/e": 2,
        "clients/south/labelled/bee/f": 2,
        "test/ant/g": 3,
        "test/bee/h": 1,
    }.items():
        path = tmp_path / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[number]).save(path)
    report = json.loads(run("check", f"folder:{tmp_path}?size=8", "--json"))
    assert {repeat["kind"]: repeat["images"] for repeat in report["repeats"]} == {
        "test": 1,
        "classes": 2,
        "sites": 2,
        "copies": 1,
    }
    text = run("check", f"folder:{tmp_path}?size=8")
    for named in ("test/bee/h.png", "ant/e.png", "south/labelled/bee/d.png", "ant/b.png"):
        (note,) = (line for line in text.splitlines() if line.startswith("note: ") and named in line)
        assert "exactly the same after reading" in note
