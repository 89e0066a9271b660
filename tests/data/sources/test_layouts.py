"""How people lay out their images, and what is made of it."""

import csv
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddure.data import sources
from feddure.data.sources import own
from feddure.errors import DataError, FeddureWarning

KINDS = ("ant", "bee", "cat")


def paint(path: Path, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (value, value // 2, 0)).save(path, "PNG")
    return path


def write_classes(root: Path, count: int = 10, kinds: tuple[str, ...] = KINDS) -> Path:
    for number, kind in enumerate(kinds):
        for image in range(count):
            paint(root / kind / f"{image}.png", 40 * number + image)
    return root


def read(path: Path, options: str = "?size=8"):
    return sources.read(f"folder:{path}{options}")


def test_a_folder_of_classes_is_all_labelled_and_gives_its_own_tests(tmp_path):
    dataset, found = read(write_classes(tmp_path))
    assert dataset.classes == KINDS
    assert dataset.labelled.all()
    assert np.bincount(dataset.labels).tolist() == [8, 8, 8]
    assert np.bincount(dataset.test_labels).tolist() == [2, 2, 2]
    every = np.concatenate([dataset.images, dataset.test_images])[:, 0, 0, 0]
    assert len(set(every.tolist())) == 30  # each image is in one of the two
    assert "ImageFolder" in found.layout
    assert found.split.images == 6
    assert "split_seed=0" in " ".join(found.sentences())


def test_the_split_is_that_of_its_seed(tmp_path):
    write_classes(tmp_path)
    same = [read(tmp_path)[0], read(tmp_path, "?size=8&test=0.2&split_seed=0")[0]]
    other, larger = read(tmp_path, "?size=8&split_seed=1")[0], read(tmp_path, "?size=8&test=0.5")[0]
    np.testing.assert_array_equal(same[0].test_images, same[1].test_images)
    assert same[0].fingerprint == same[1].fingerprint != other.fingerprint
    assert len(larger.test_images) == 15


def test_small_classes_keep_a_training_image_at_each_site(tmp_path):
    for site, counts in {"north": (1, 9), "south": (2, 0), "west": (1, 1)}.items():
        for kind, count in zip(KINDS, counts, strict=False):
            for image in range(count):
                paint(tmp_path / site / "labelled" / kind / f"{image}.png", 10 * count + image)
    dataset, found = read(tmp_path)
    assert found.layout == "a folder a site"
    assert dataset.sites == ("north", "south", "west")
    kept = [[int(((dataset.site == site) & (dataset.labels == kind)).sum()) for kind in (0, 1)] for site in range(3)]
    assert kept == [[1, 7], [1, 0], [1, 1]]
    assert np.bincount(dataset.test_labels).tolist() == [1, 2]


@pytest.mark.parametrize("names", [("train", "val", "test", "unlabelled"), ("Training", "valid", "testing", "unsup")])
def test_train_validation_and_test(tmp_path, names):
    train, validation, test, unlabelled = names
    write_classes(tmp_path / train, 3)
    write_classes(tmp_path / validation, 2)
    for image in range(5):
        paint(tmp_path / unlabelled / f"{image}.png")
    dataset, found = read(tmp_path)
    assert (len(dataset.test_labels), dataset.labelled.sum(), (~dataset.labelled).sum()) == (6, 9, 5)
    assert found.split is None
    assert "validation images are the test part" in found.remarks[0]
    write_classes(tmp_path / test, 1)
    dataset, found = read(tmp_path)
    assert (len(dataset.test_labels), dataset.labelled.sum(), (~dataset.labelled).sum()) == (3, 15, 5)
    assert "validation images join the training ones" in found.remarks[0]


def test_class_folders_beside_unlabelled_and_test_folders(tmp_path):
    write_classes(tmp_path, 3, ("car", "train"))  # a folder `train` of pictures is a class
    write_classes(tmp_path / "test", 1, ("car", "train"))
    paint(tmp_path / "unlabeled" / "deep" / "1.png")
    dataset, _ = read(tmp_path)
    assert dataset.classes == ("car", "train")
    assert (len(dataset.test_labels), dataset.labelled.tolist()) == (2, [True] * 6 + [False])


def test_sites_of_class_folders(tmp_path):
    write_classes(tmp_path / "clients" / "a", 2)
    write_classes(tmp_path / "clients" / "b" / "labelled", 3)
    write_classes(tmp_path / "test", 1)
    dataset, _ = read(tmp_path)
    assert dataset.sites == ("a", "b")
    assert np.bincount(dataset.site).tolist() == [6, 9]


ROWS = [
    {"path": "pics/1.png", "label": "10", "split": "train", "site": "x"},
    {"path": "pics/2.png", "label": "9", "split": "", "site": "y"},
    {"path": "pics/3.png", "label": "", "split": "train", "site": "y"},
    {"path": "pics/4.png", "label": "9", "split": "unlabelled", "site": "x"},
    {"path": "pics/5.png", "label": "9", "split": "TEST", "site": ""},
]


def write_table(root: Path, name: str, rows: list[dict]) -> Path:
    path = root / name
    if name.endswith(".json"):
        path.write_text(json.dumps([{key: value or None for key, value in row.items()} for row in rows]))
    elif name.endswith(".jsonl"):
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter=";" if "semicolon" in name else ",")
            table.writeheader()
            table.writerows(rows)
    return path


@pytest.mark.parametrize("name", ["manifest.csv", "semicolon.csv", "mine.json", "mine.jsonl"])
def test_a_list_of_images(tmp_path, name):
    for number in range(1, 6):
        paint(tmp_path / "pics" / f"{number}.png", number)
    path = write_table(tmp_path, name, ROWS)
    dataset, found = read(tmp_path if name == "manifest.csv" else path)
    assert dataset.classes == ("9", "10")
    assert dataset.labels.tolist() == [1, 0, -1, -1]
    assert dataset.images[:, 0, 0, 0].tolist() == [1, 2, 3, 4]
    assert (dataset.sites, dataset.site.tolist()) == (("x", "y"), [0, 1, 1, 0])
    assert dataset.test_labels.tolist() == [0]
    assert name in found.layout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "pics/none.png"}, "1 of 5 images are not there, such as .*none.png"),
        ({"split": "tset"}, "row 1: split is 'tset', expected train"),
        ({"split": "test", "label": ""}, "row 1: a test image without label"),
        ({"path": "pics/../pics/5.png"}, "row 5: pics/5.png is in row 1 too"),
        ({"site": ""}, "1 of 4 training images have no site"),
        ({"path": ""}, "row 1: has no path"),
        ({"label": "9"}, "expected 2 or more"),
    ],
)
def test_mistakes_in_a_list_name_the_row(tmp_path, change, message):
    for number in range(1, 6):
        paint(tmp_path / "pics" / f"{number}.png", number)
    path = write_table(tmp_path, "mine.csv", [ROWS[0] | change, *ROWS[1:]])
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.parametrize(("name", "content"), [("a.json", "{"), ("a.json", "3"), ("a.csv", ""), ("a.csv", "x,y\n1,2")])
def test_a_list_that_is_none(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=name):
        read(tmp_path / name)


def test_a_folder_in_a_folder_is_pointed_out(tmp_path):
    write_classes(tmp_path / "unpacked", 2)
    with pytest.raises(DataError, match=r"did you mean .*unpacked"):
        read(tmp_path)


def test_a_misspelt_part_is_no_class(tmp_path):
    write_classes(tmp_path / "lablled", 2)
    write_classes(tmp_path / "tets", 2)
    with pytest.raises(DataError, match="Did you mean 'labelled'"):
        read(tmp_path)


def test_damaged_files_are_named_or_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(own, "MOST_PROBLEMS", 3)
    write_classes(tmp_path)
    for number in range(7):
        (tmp_path / "ant" / f"{number}.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"ant/0.png: is not an image[^$]*4 more files\n7 files[^$]*--skip-damaged"):
        read(tmp_path)
    dataset, _ = read(tmp_path, "?size=8&skip_damaged=1")
    assert [text.partition(":")[0] for text in dataset.damaged] == [
        str(tmp_path / "ant" / f"{n}.png") for n in range(7)
    ]
    assert len(dataset.images) + len(dataset.test_images) == 23
    with pytest.warns(FeddureWarning, match="7 damaged files are left out:\n.*ant/0.png"):
        sources.load(f"folder:{tmp_path}?size=8&skip_damaged=1")
    for image in (tmp_path / "bee").iterdir():
        image.write_bytes(b"no image")
    with pytest.raises(DataError, match="every training image of class bee is damaged"):
        read(tmp_path, "?size=8&skip_damaged=1")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_any_file_name(tmp_path):
    names = (b"caf\xe9.png", b"new\nline.png", b"-rf.png", b'a,b;"c.png', b"\x1b[31m.PNG", b"no ending")
    for number, kind in enumerate(KINDS):
        for image, name in enumerate(names):
            paint(tmp_path / kind / os.fsdecode(name), 40 * number + image)
    assert len(read(tmp_path, "?size=8&test=0")[0].images) == 18
    with (tmp_path / "all.csv").open("wb") as file:
        file.write(b"path,label\n")
        for kind in KINDS:
            for name in names:
                quoted = b'"%s/%s"' % (kind.encode(), name.replace(b'"', b'""'))
                file.write(quoted + b"," + kind.encode() + b"\n")
    assert len(read(tmp_path / "all.csv", "?size=8&test=0")[0].images) == 18
    (tmp_path / "ant" / "new\nline.png").write_bytes(b"no image")
    (tmp_path / "bee" / os.fsdecode(b"caf\xe9.png")).write_bytes(b"no image")
    damaged = read(tmp_path, "?size=8&skip_damaged=1")[0].damaged
    assert [text.splitlines() for text in damaged] == [[text] for text in damaged]  # a line each
    assert "café" in damaged[1]


def test_a_bare_path_is_a_data_set_of_own_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_classes(Path("scans"), 1)
    Path("a.npz").touch()
    assert sources.resolve("scans") == "folder:scans"
    assert sources.resolve("scans?size=64", skip_damaged=True) == "folder:scans?size=64&skip_damaged=1"
    assert sources.resolve("a.npz") == "npz:a.npz"
    assert sources.resolve("cifar10") == "cifar10"
    assert sources.resolve("folder:a.npz", skip_damaged=True) == "folder:a.npz"
    assert sources.resolve("folder:scans?skip_damaged=0", True) == "folder:scans?skip_damaged=1"


def test_sites_that_look_like_classes_are_refused_and_both_ways_out_work(tmp_path):
    for number, site in enumerate(("north", "south")):
        write_classes(tmp_path / "flat" / site, count=4 + number)
    with pytest.raises(DataError, match=r"north, south hold the same folders \(ant, bee, cat\).*clients/.*labelled/"):
        read(tmp_path / "flat")
    for way, classes, sites in (("clients", KINDS, ("north", "south")), ("labelled", ("north", "south"), ())):
        (tmp_path / way).mkdir()
        (tmp_path / "flat").rename(tmp_path / way / way)
        dataset, _ = read(tmp_path / way)
        assert (dataset.classes, dataset.sites) == (classes, sites)
        (tmp_path / way / way).rename(tmp_path / "flat")


def test_classes_may_hold_folders_of_their_own(tmp_path):
    for kind, inner in (("ant", "2023"), ("ant", "2024"), ("bee", "2023"), ("bee", "patient 7")):
        paint(tmp_path / kind / inner / "1.png", len(inner) + 40 * (kind == "bee"))
    assert read(tmp_path)[0].classes == ("ant", "bee")


@pytest.mark.parametrize("name", ["unlabeld", "Unlabbeled", "unlabelled images"])
def test_a_misspelt_folder_of_unlabelled_images_is_no_class(tmp_path, name):
    write_classes(tmp_path, kinds=("ant", "bee", name))
    with pytest.raises(DataError, match=f"{name}: did you mean unlabelled/"):
        read(tmp_path)


def test_a_list_beside_the_folder_of_its_images_is_pointed_at(tmp_path):
    paint(tmp_path / "images" / "1.png")
    (tmp_path / "all.csv").write_text("path,label\nimages/1.png,ant\n")
    with pytest.raises(DataError, match=r"did you mean .*all\.csv\?"):
        read(tmp_path)
