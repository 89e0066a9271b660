"""The preset `recommended`: a stated rule for sizes, everything can be overridden, and a run's file replays."""

import numpy as np
import pytest

import feddure
import tiny
from feddure import experiments, recommended
from feddure.errors import ConfigError
from feddure.recommended import Size, recommend


def sizes(given=None, **size):
    usual = {"labelled": 60, "unlabelled": 90, "sites": 3, "side": 32, "gpu": False}
    return recommend(Size(**(usual | size)), given or {})[0]


def test_few_images_on_a_cpu():
    found = sizes()
    assert found["partition.setting"] == "sites"
    assert found["model"] == "resnet9-slim"
    assert (found["clients_per_round"], found["local_steps"], found["rounds"]) == (3, 20, 150)
    assert experiments.load("recommended", changes=found).method == "fedtutor"


@pytest.mark.parametrize(
    ("size", "given", "expected"),
    [
        ({"sites": 25}, {}, {"clients_per_round": 10, "rounds": 90}),
        ({"unlabelled": 1800}, {}, {"local_steps": 30, "rounds": 150}),
        ({"unlabelled": 90_000}, {}, {"local_steps": 45, "rounds": 133}),
        ({"sites": 10, "unlabelled": 90_000}, {}, {"local_steps": 45, "rounds": 40}),
        ({"unlabelled": 0}, {}, {"local_steps": 20, "partition.labelled_as_unlabelled": True}),
        ({"unlabelled": 0, "labelled": 3000}, {}, {"local_steps": 45}),
        ({"unlabelled": 2, "sites": 0}, {}, {"partition.labelled_as_unlabelled": True}),
        ({"unlabelled": 0}, {"partition.labelled_as_unlabelled": False}, {"partition.labelled_as_unlabelled": False}),
        ({"side": 64}, {}, {"model": "cnn"}),
        ({"gpu": True}, {}, {"model": "resnet9", "rounds": 200, "optimizer.learning_rate": 5e-4}),
        ({"bf16": True}, {}, {"engine.precision": "bf16"}),
        ({"bf16": True, "gpu": True}, {}, {"engine.precision": "auto"}),
        ({"bf16": True}, {"engine.precision": "fp32"}, {"engine.precision": "fp32"}),
        ({"sites": 0}, {}, {"partition.setting": "iid-iid", "partition.clients": 3, "clients_per_round": 3}),
        ({"sites": 0, "labelled": 5}, {}, {"partition.clients": 2}),
        ({"sites": 0}, {"partition.setting": "sites"}, {"partition.setting": "sites"}),
        ({"sites": 0, "labelled": 5000}, {}, {"partition.clients": 10}),
        ({}, {"partition.setting": "dir-dir"}, {"partition.clients": 3}),
        ({}, {"partition.setting": "dir-dir", "partition.clients": 6}, {"clients_per_round": 6}),
        ({}, {"local_steps": 50}, {"local_steps": 50, "rounds": 120}),
        ({}, {"local_steps": "epoch", "unlabelled_batch": "auto"}, {"rounds": 150}),
        ({}, {"rounds": 7}, {"rounds": 7, "evaluate_every": 1}),
    ],
)
def test_the_rule(size, given, expected):
    found = sizes(given, **size)
    assert {key: found[key] for key in expected} == expected
    experiments.load("recommended", changes=found)


@pytest.mark.parametrize(
    ("side", "modes", "gpu", "expected"),
    [
        (28, ["L"], False, {"size": 28, "channels": 1}),
        (40, ["L", "RGB"], False, {"size": 32, "channels": 3}),
        (3000, ["I;16"], False, {"size": 64, "channels": 1}),
        (3000, ["RGB"], True, {"size": 96, "channels": 3}),
    ],
)
def test_pixels_that_suit_files_and_machine(side, modes, gpu, expected):
    assert recommended.image_options(side, modes, gpu) == expected


def own_images():
    images = tiny.dataset(size=80, tests=20, side=12)
    known = np.arange(80) % 2 == 0
    labels = np.where(known, images.labels, -1)
    tests = {"test_images": images.test_images, "test_labels": images.test_labels}
    owners = {"site": np.arange(80) % 3, "sites": np.array(["x", "y", "z"])}
    return {"images": images.images, "labels": labels} | tests | owners


@pytest.mark.usefixtures("quiet")
def test_own_images_take_it_unless_something_else_is_named(tmp_path, capsys):
    np.savez(tmp_path / "mine.npz", **own_images())
    name = f"npz:{tmp_path / 'mine.npz'}"
    sets = {"local_steps": 1, "model": "cnn", "engine.device": "cpu"}
    done = feddure.run(dataset=name, rounds=2, sets=sets, out=tmp_path / "run")
    wanted = done.experiment
    assert (wanted.method, wanted.server.ema, wanted.clients_per_round) == ("fedtutor", 0.9, 3)
    assert (wanted.local_steps, wanted.rounds, wanted.model) == (1, 2, "cnn")
    assert "preset recommended" in capsys.readouterr().err
    again = feddure.run(config_file=tmp_path / "run" / "config.yaml", out=tmp_path / "again", progress=False)
    assert again.experiment == wanted
    assert again.metrics == done.metrics
    assert [site.client for site in done.sites] == [0, 1, 2]

    def load(preset=None, file=None, **changes):
        return recommended.load(preset, file, changes, (), lambda name: tiny.dataset(), lambda line: None)[0]

    assert load(file=tmp_path / "run" / "config.yaml", dataset=name).rounds == 2
    assert load("demo", dataset=name).model == "cnn"
    assert load(dataset="cifar10") == experiments.load(changes={"dataset": "cifar10"})
    assert load("recommended").method == "fedtutor"


def test_mistakes_are_told_before_images_are_read():
    with pytest.raises(ConfigError, match="rounds: 0 was given"):
        recommended.load(None, None, {"dataset": "npz:none", "rounds": 0}, (), lambda name: 1 / 0, print)
