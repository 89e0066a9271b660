"""From people's own images to an exported model in two commands, and what is said on the way."""

import json
import os
import shlex
import sys

import numpy as np
import pytest
from PIL import Image

import tiny
from commands import table
from feddure.cli import own_images
from feddure.data import sources
from feddure.simulation import estimate
from feddure.tracking.records import read_run

TINY = ("--rounds", "2", "--model", "cnn", "--set", "local_steps=1", "--set", "engine.device=cpu")


def paint(path, value, side=16):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(value).integers(0, 99, (side, side, 3), dtype=np.uint8)
    pixels[..., value % 3] += 100
    Image.fromarray(pixels).save(path, "PNG")


def write_classes(root, count=6, kinds=("ant", "bee")):
    for number, kind in enumerate(kinds):
        for image in range(count):
            paint(root / kind / f"{image}.png", 3 * image + number)


def suggested(feddure, path, code=0):
    found = feddure("data", "check", path, "--json")
    assert found[0] == code, found
    return json.loads(found[1])


@pytest.mark.usefixtures("quiet")
def test_two_commands_from_a_folder_to_an_exported_model(feddure, tmp_path):
    write_classes(tmp_path / "my scans")
    report = suggested(feddure, tmp_path / "my scans")
    assert (report["train"], report["test"], report["split"]["images"]) == (10, 2, 2)
    assert report["sizes"] == {"16×16": 12}
    first, second = report["suggestion"]["commands"]
    assert "'folder:" in first
    assert "size=16" in first
    assert report["suggestion"]["seconds"] > 0
    code, _, err = feddure(*shlex.split(first)[1:], *TINY)
    assert code == 0, err
    assert "on 10 labelled and 0 unlabelled images of 2 classes" in err
    assert "on this CPU" in err
    assert "split_seed=0" in err
    code, out, err = feddure(*shlex.split(second)[1:])
    assert code == 0, err
    assert (tmp_path / "here" / out.strip()).stat().st_size > 0


@pytest.mark.usefixtures("quiet")
def test_two_commands_from_sites(feddure, tmp_path):
    for site in ("north", "south"):
        write_classes(tmp_path / "sites" / site / "labelled", 5)
        for image in range(4):
            paint(tmp_path / "sites" / site / "unlabelled" / f"{image}.png", image)
    code, _, err = feddure("run", "--dataset", tmp_path / "sites", *TINY, "--out", "run")
    assert code == 0, err
    assert "on 16 labelled and 8 unlabelled images of 2 classes, 16×16 colour, at 2 sites" in err
    code, _, err = feddure("export", "run", "--out", "sites.safetensors")
    assert code == 0, err
    assert read_run(tmp_path / "here" / "run").experiment.partition.setting == "sites"


@pytest.mark.usefixtures("quiet")
def test_damaged_files_are_listed_and_skipped_where_asked(feddure, tmp_path):
    write_classes(tmp_path / "scans")
    (tmp_path / "scans" / "ant" / "0.png").write_bytes(b"no image")
    (tmp_path / "scans" / "ant" / "notes.txt").write_text("no image")
    report = suggested(feddure, tmp_path / "scans", code=1)
    assert "ant/0.png" in report["damaged"][0]
    assert report["ignored"] == {".txt": 1}
    assert "skip_damaged=1" in report["suggestion"]["commands"][0]
    assert feddure("data", "check", tmp_path / "scans", "--skip-damaged")[0] == 0
    assert feddure("data", "check", f"folder:{tmp_path / 'scans'}?skip_damaged=1")[0] == 0
    code, _, err = feddure("run", "--dataset", tmp_path / "scans", *TINY, "--out", "run")
    assert code == 2
    assert "ant/0.png" in err
    assert "--skip-damaged" in err
    code, _, err = feddure("run", "--dataset", tmp_path / "scans", "--skip-damaged", *TINY, "--out", "run")
    assert code == 0, err
    assert "ant/0.png" in err
    assert "skip_damaged=1" in read_run(tmp_path / "here" / "run").experiment.dataset
    code, _, err = feddure("run", "--config", "run/config.yaml", "--out", "again")
    assert code == 0, err
    for name in ("run", "again"):
        (damaged,) = json.loads((tmp_path / "here" / name / "partition.json").read_text())["damaged"]
        assert "ant/0.png: is not an image" in damaged
    (tmp_path / "here" / "old.yaml").write_text(
        (tmp_path / "here" / "run" / "config.yaml").read_text().replace("&skip_damaged=1", "")
    )
    assert feddure("run", "--config", "old.yaml", "--out", "refused")[0] == 2
    assert feddure("run", "--config", "old.yaml", "--skip-damaged", "--out", "mended")[0] == 0
    assert "skip_damaged=1" in read_run(tmp_path / "here" / "mended").experiment.dataset


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_any_file_name_trains_and_is_predicted(feddure, tmp_path):
    names = [os.fsdecode(name) for name in (b"caf\xe9.png", b"new\nline.png", b"-rf.png", b"plain.png")]
    for number, kind in enumerate((os.fsdecode(b"th\xe9"), "bee")):
        for image, name in enumerate(names):
            paint(tmp_path / "scans" / kind / name, 3 * image + number)
    assert feddure("data", "check", tmp_path / "scans")[0] == 0
    code, _, err = feddure("run", "--dataset", tmp_path / "scans", *TINY, "--out", "run")
    assert code == 0, err
    code, _, err = feddure("predict", "run", tmp_path / "scans", "--csv", "found.csv", "--device", "cpu")
    assert code == 0, err
    rows = table(tmp_path / "here" / "found.csv")
    assert len(rows) == 8
    assert {"bee", "thé"} <= set(rows[0])
    assert any("new\nline" in row["file"] for row in rows)


def test_a_list_and_a_medmnist_file_are_understood(feddure, tmp_path):
    write_classes(tmp_path / "pics", 4)
    rows = [f"pics/{kind}/{image}.png,{kind if image else ''}" for kind in ("ant", "bee") for image in range(4)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *rows]))
    report = suggested(feddure, tmp_path / "list.csv")
    assert (report["unlabelled"], report["test"], report["layout"]) == (2, 2, "the list list.csv")
    parts = {}
    for part in ("train", "val", "test"):
        parts |= {f"{part}_images": np.zeros((40, 28, 28), np.uint8), f"{part}_labels": np.arange(40)[:, None] % 2}
    np.savez(tmp_path / "path.npz", **parts)
    report = suggested(feddure, tmp_path / "path.npz")
    assert (report["train"], report["test"], report["shape"]) == (80, 40, [28, 28, 1])
    assert report["suggestion"]["commands"][0].startswith(f"feddure run --dataset npz:{tmp_path}")


def test_runs_side_by_side_are_announced_with_less_time(monkeypatch):
    monkeypatch.setattr(estimate, "seconds", lambda *_: 300.0)
    wanted = [tiny.experiment(dataset="npz:mine.npz", method=method) for method in ("fedavg", "feddure")]
    for processes, time in ((1, "about 30 minutes"), (2, "about 20 minutes")):
        said = []
        own_images.say_plan(wanted, tiny.dataset(), said.append, seeds=3, processes=processes)
        assert time in said[0]


def test_a_check_and_a_run_agree_on_a_size(feddure, tmp_path):
    """A path is no option; files whose content is damaged have a size."""
    folder = tmp_path / "size=8" / "scans"
    write_classes(folder)
    for number in range(20):
        file = folder / "ant" / f"large{number}.png"
        paint(file, number, side=70)
        file.write_bytes(file.read_bytes()[:-80])
    assert suggested(feddure, folder, code=1)["suggestion"]["size"] == 64
    code, _, said = feddure("run", "--dataset", folder, "--skip-damaged", *TINY, "--out", "run")
    assert code == 0, said
    assert "64×64 colour" in said


def test_a_check_measures_what_will_be_trained_and_asks_for_no_more_than_was_asked(feddure, tmp_path):
    for name in ("a", "b"):
        for number in range(6):
            path = tmp_path / "grey" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng([number, ord(name)]).integers(0, 255, (28, 28), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
    report = suggested(feddure, tmp_path / "grey")
    trained = sources.load(report["suggestion"]["dataset"])
    assert report["shape"] == [28, 28, 1]
    assert report["fingerprint"] == trained.fingerprint
    assert report["mean"] == list(trained.mean)
    assert "skip_damaged" not in report["suggestion"]["commands"][0]
    assert "28 × 28, 1 channel" in feddure("data", "check", tmp_path / "grey")[1]


def test_files_are_read_at_the_size_that_suits_them(feddure, tmp_path):
    """As the command says that `data check` ends with; other presets read as ever, and say so."""
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "here" / "large" / name).mkdir(parents=True)
        for number in range(6):
            pixels = rng.integers(0, 255, (70, 80), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "here" / "large" / name / f"{number}.png")
    small = ("--rounds", 1, "--set", "local_steps=1", "--set", "model=cnn", "--set", "partition.clients=2")
    for name, shape in {
        "large": "64×64 grey",
        "folder:large?size=32": "32×32 colour",
        "folder:large?channels=3": "64×64 colour",
    }.items():
        code, _, said = feddure("run", "--dataset", name, *small)
        assert code == 0, said
        assert shape in said
        assert "the files are larger" not in said
    assert "size=64&channels=1" in suggested(feddure, "large")["suggestion"]["dataset"]
    named = ("--preset", "recommended", "--set", "dataset=folder:large")
    assert feddure("run", *named, *small, "--out", "named")[0] == 0
    assert read_run(tmp_path / "here" / "named").experiment.dataset == "folder:large?size=64&channels=1"
    _, _, said = feddure("run", "--preset", "demo", "--dataset", "folder:large", *small, "--set", "clients_per_round=1")
    assert "read at 32 × 32 pixels, the files are larger" in said


def test_the_command_for_images_of_twelve_bits_reads_them_as_such(feddure, tmp_path):
    for number in range(8):
        path = tmp_path / "scans" / ("ant", "bee")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(number).integers(0, 4096, (16, 16)).astype(np.uint16)
        Image.fromarray(values).save(path)
    report = suggested(feddure, tmp_path / "scans")
    assert any("were they 12-bit" in note for note in report["notes"])
    assert "depth=12" in report["suggestion"]["commands"][0]
    assert sources.load(report["suggestion"]["dataset"]).images.max() > 200
