"""Images that are the same where they should not be."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tiny
from feddure.data import sources
from feddure.data.sources import repeats
from feddure.errors import FeddureWarning


def found(dataset, files=()):
    return {repeat.kind: repeat for repeat in repeats.find(dataset, files)}


def test_images_that_all_differ_have_no_repeats():
    assert not found(tiny.dataset())


def test_each_kind_is_counted_and_its_first_two_files_are_named():
    data = tiny.dataset()
    images, tests = data.images.copy(), data.test_images.copy()
    one, other = np.flatnonzero(data.labels == 0)[:2], np.flatnonzero(data.labels == 1)[:1]
    images[one[1]] = images[one[0]]  # a copy
    images[other] = images[one[0]]  # under another class
    tests[3:5] = images[-1]
    labels = data.test_labels.copy()
    labels[3:5] = data.labels[-1]
    site = np.zeros(len(images), dtype=np.int64)
    site[one[1]] = 1
    data = replace(data, images=images, test_images=tests, test_labels=labels)
    names = [f"train{n}" for n in range(len(images))] + [f"test{n}" for n in range(len(tests))]
    said = found(data, names)
    assert {kind: repeat.images for kind, repeat in said.items()} == {"test": 2, "classes": 3, "copies": 1}
    assert said["test"].files == ("test3", f"train{len(images) - 1}")
    assert said["copies"].files == (f"train{one[1]}", f"train{one[0]}")
    assert set(said["classes"].files) >= {f"train{other[0]}"}
    at_sites = replace(data, sites=("north", "south"), site=site)
    assert found(at_sites)["sites"].images == 3
    assert found(at_sites)["sites"].files == ()
    assert "copies" not in found(at_sites)


def test_images_of_one_colour_are_not_called_the_same():
    data = tiny.dataset()
    assert not found(replace(data, images=np.zeros_like(data.images), test_images=np.zeros_like(data.test_images)))


def test_an_image_is_among_labelled_and_unlabelled_ones_without_a_word():
    data = tiny.dataset()
    images, labels = data.images.copy(), data.labels.copy()
    images[1], labels[1] = images[0], -1
    assert not found(replace(data, images=images, labels=labels, labelled=labels >= 0))


def write(root: Path, **values: int) -> Path:
    for place, value in values.items():
        path = root / f"{place.replace('_', '/')}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(value).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    return root


def test_whoever_trains_is_told_of_leakage_and_of_contradictions(tmp_path):
    write(tmp_path, train_ant_0=0, train_ant_1=1, train_bee_0=2, train_bee_1=1, test_ant_7=0, test_bee_7=9)
    with pytest.warns(FeddureWarning) as noted:
        dataset = sources.load(f"folder:{tmp_path}?size=8")
    leaked, mixed = dataset.notes  # which a run keeps for who reads its report
    assert [str(note.message) for note in noted] == [leaked, mixed]
    assert "test images that look exactly the same after reading as training images: 1, such as" in leaked
    assert "test/ant/7.png and " in leaked
    assert "train/ant/0.png" in leaked
    assert "one of another class: 2, such as" in mixed
    assert "ant/1.png" in mixed
    assert "bee/1.png" in mixed


def test_copies_alone_are_no_warning(tmp_path):
    write(tmp_path, train_ant_0=0, train_ant_1=0, train_bee_0=2, test_ant_7=7, test_bee_7=9)
    _, read = sources.read(f"folder:{tmp_path}?size=8")
    assert [repeat.kind for repeat in read.repeats] == ["copies"]
