"""Experiments that start from a model file: what fits, what is refused, and what resumes without the file."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import folders
import tiny
from feddure import experiments, nn
from feddure.errors import ConfigError, FeddureWarning, RunError
from feddure.simulation import program, runs

IMAGES = folders.IMAGES
pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a finished run with an averaged model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "TensorBoard", folders.Watcher)
        patch.setattr(runs, "write_report", lambda run_folders, out: out.write_text("report"))
        return folders.execute(tmp_path_factory.mktemp("trained") / "run", **{"server.ema": 0.7, "rounds": 3}).folder


def started(images=IMAGES, **changes):
    return tiny.federation(tiny.experiment(changes), images).server


@pytest.mark.parametrize(("name", "file"), [("", "averaged"), ("model.safetensors", "model")])
def test_the_model_and_its_average_start_from_the_file_statistics_too(trained, name, file):
    server = started(init=str(trained / name), seed=5, **{"server.ema": 0.9})
    expected = load_file(trained / f"{file}.safetensors")
    assert any("running_mean" in name for name in expected)
    tiny.assert_equal(server.model_state(), expected)
    tiny.assert_equal(server.model_state(averaged=True), expected)


def test_any_safetensors_with_the_networks_names_and_shapes(tmp_path):
    module = nn.make("cnn", 1, 4, "batch", seed=9).half()
    save_file(module.state_dict(), tmp_path / "mine.safetensors")  # with batch norm's integer counters
    found = started(init=str(tmp_path / "mine.safetensors")).model_state()
    for name, tensor in found.items():
        assert torch.equal(tensor, module.state_dict()[name].to(tensor.dtype))


@pytest.mark.parametrize("change", ["number", "names", "absent"])
def test_a_classifier_for_other_classes_starts_fresh_and_the_rest_does_not(trained, tmp_path, change):
    images, source = IMAGES, trained
    if change == "number":
        images = tiny.dataset(size=80, tests=20, side=8, classes=3)
    elif change == "names":
        images = tiny.dataset(size=80, tests=20, side=8, classes=4)
        images = type(images)(**{**vars(images), "classes": ("b", "a", "c", "d")})
    else:
        tensors = load_file(trained / "averaged.safetensors")
        source = tmp_path / "backbone.safetensors"
        save_file({name: tensor for name, tensor in tensors.items() if not name.startswith("6.")}, source)
    with pytest.warns(FeddureWarning, match=r"classifier .* left out; 6\.bias, 6\.weight start fresh"):
        found = started(images, init=str(source)).model_state()
    expected = load_file(trained / "averaged.safetensors")
    new = started(images).model_state()
    for name, tensor in found.items():
        assert torch.equal(tensor, (new if name.startswith("6.") else expected)[name])


def spoiled(source, target, **changes):
    save_file(load_file(source) | changes, target)
    return target


def test_what_does_not_fit_is_listed(trained, tmp_path):
    with pytest.raises(ConfigError, match=r"do not fit model 'resnet9-slim' \(missing: .*the file says.*'cnn'"):
        started(tiny.dataset(size=80, tests=20, side=8), init=str(trained), model="resnet9-slim")
    other = spoiled(trained / "model.safetensors", tmp_path / "other.safetensors", **{"0.0.weight": torch.zeros(2, 1)})
    with pytest.raises(ConfigError, match=r"0\.0\.weight is \[2, 1\], expected \[16, 1, 3, 3\]"):
        started(init=str(other))
    more = spoiled(trained / "model.safetensors", tmp_path / "more.safetensors", **{"7.weight": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"not part of the network: 7\.weight"):
        started(init=str(more))
    nan = spoiled(
        trained / "model.safetensors", tmp_path / "nan.safetensors", **{"6.bias": torch.full((4,), torch.nan)}
    )
    with pytest.raises(ConfigError, match=r"6\.bias not finite"):
        started(init=str(nan))


def test_files_of_other_kinds_are_refused(trained, tmp_path):
    torch.save({"0.0.weight": torch.zeros(1)}, tmp_path / "pickled.pt")
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        started(init=str(tmp_path / "pickled.pt"))
    with pytest.raises(ConfigError, match="cannot be read"):
        tiny.experiment(init=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="expected the folder of a finished run"):
        tiny.experiment(init=str(tmp_path))
    folders.execute(tmp_path / "alone", method="local", rounds=1)
    with pytest.raises(ConfigError, match="trained alone"):
        started(init=str(tmp_path / "alone"))


@pytest.mark.parametrize(
    ("metadata", "message"), [(None, "do not fit model"), ({"feddure": 10_000 * "["}, "not a whole safetensors file")]
)
def test_what_others_wrote_about_a_file(trained, tmp_path, metadata, message):
    save_file(load_file(trained / "model.safetensors"), tmp_path / "three", {"feddure": '{"classes": 3}'})
    with pytest.warns(FeddureWarning, match="start fresh"):
        started(init=str(tmp_path / "three"))
    header = {"__metadata__": metadata, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    packed = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(len(packed).to_bytes(8, "little") + packed + bytes(4))
    with pytest.raises(ConfigError, match=message):
        started(init=str(tmp_path / "file"))


def test_the_fingerprint_knows_the_content_and_not_the_place(trained, tmp_path):
    copy = shutil.copy(trained / "averaged.safetensors", tmp_path / "copy.safetensors")
    one, moved, none = tiny.experiment(init=str(trained)), tiny.experiment(init=str(copy)), tiny.experiment()
    assert experiments.fingerprint(one) == experiments.fingerprint(moved) != experiments.fingerprint(none)
    assert program.fields(one) == program.fields(none)
    (tmp_path / "config.yaml").write_text(experiments.to_yaml(moved))
    copy.unlink()
    assert experiments.load(file=tmp_path / "config.yaml") == moved
    assert experiments.load(file=tmp_path / "config.yaml", sets=["init=null"]).init_sha256 is None
    other = tiny.experiment(init=str(trained / "model.safetensors"))
    assert experiments.fingerprint(other) != experiments.fingerprint(one)
    with pytest.raises(ConfigError, match="belong together"):
        experiments.load(sets=["init_sha256=abc"])


def test_a_run_resumes_without_the_file_and_refuses_a_changed_one(trained, tmp_path, monkeypatch):
    file = shutil.copy(trained / "model.safetensors", tmp_path / "start.safetensors")
    changes = {"rounds": 3, "checkpoint_every": 1, "init": str(file)}
    whole = folders.contents(folders.execute(tmp_path / "whole", **changes).folder)
    taken = iter(range(10**9))
    with monkeypatch.context() as patch:
        patch.setattr(runs.Stop, "__call__", lambda self: next(taken) >= 9)
        patch.setattr(runs.Stop, "signal", 2)
        with pytest.raises(runs.Interrupted):
            folders.execute(tmp_path / "run", **changes)
    shutil.copy(trained / "averaged.safetensors", file)
    with pytest.raises(RunError, match="init_sha256"):
        folders.execute(tmp_path / "run", resume=True, **changes)
    file.unlink()
    runs.execute(runs.read_config(tmp_path / "run"), IMAGES, tmp_path / "run", resume=True, progress=False)
    assert folders.contents(tmp_path / "run") == whole


def test_a_changed_file_is_refused_at_the_start_and_leaves_nothing(trained, tmp_path):
    file = shutil.copy(trained / "model.safetensors", tmp_path / "start.safetensors")
    wanted = tiny.experiment(init=str(file))
    shutil.copy(trained / "averaged.safetensors", file)
    with pytest.raises(ConfigError, match="has changed"):
        runs.execute(wanted, IMAGES, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
