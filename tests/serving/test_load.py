"""Models from wherever they lie: run folders and files, whole or not, of this version and of 0.1."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import feddure
import folders
from feddure import nn as networks
from feddure.errors import ConfigError, DataError, RunError
from feddure.nn.network import Network
from feddure.simulation import checkpoint

pytestmark = pytest.mark.usefixtures("quiet")

PIXELS = folders.IMAGES.test_images


def rewrite(path, change):
    """Change a model file's tensors and leave its description."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


def confusion(model):
    """As in metrics.jsonl."""
    counts = np.zeros((4, 4), dtype=int)
    np.add.at(counts, (folders.IMAGES.test_labels, model(PIXELS).argmax(1)), 1)
    return counts.tolist()


def test_a_run_folder_and_its_model_file_are_the_same_model(trained):
    model = feddure.load_model(trained, model="last")
    last = feddure.Run(trained).metrics[-1]
    assert last["test"]["accuracy"] > 0.3
    averaged = feddure.load_model(trained, model="averaged")
    assert confusion(model) == last["test"]["confusion"]
    assert confusion(averaged) == last["test_ema"]["confusion"]
    assert not np.allclose(averaged(PIXELS), model(PIXELS))
    assert (feddure.load_model(trained)(PIXELS) == averaged(PIXELS)).all()  # what people want where there is one
    assert list(model.classes) == list("abcd")
    assert (feddure.load_model(trained / "model.safetensors")(PIXELS) == model(PIXELS)).all()
    assert model(PIXELS[:0]).shape == (0, 4)
    assert np.allclose(model(PIXELS).sum(1), 1)


def old_run(folder: Path) -> Path:
    """A finished run of version 0.1: its own configuration and headers, tensors drawn here."""
    made = Path(__file__).parent / "run-0.1"
    (folder / checkpoint.FILE).parent.mkdir(parents=True)
    (folder / "config.yaml").write_bytes((made / "config.yaml").read_bytes())
    models = [networks.make("cnn", 1, 4, "batch", seed) for seed in range(2)]
    network = Network(models[0], torch.device("cpu"), "fp64")
    save_file(
        network.state_dict(*network.take(models[0])),
        folder / "model.safetensors",
        {"feddure": (made / "model.json").read_text().strip()},
    )
    averaged = {f"averaged.{number}": tensor for number, tensor in enumerate(network.take(models[1]))}
    save_file(averaged, folder / checkpoint.FILE, {"feddure": (made / "checkpoint.json").read_text().strip()})
    return folder


@pytest.mark.parametrize("which", ["auto", "averaged"])
def test_a_run_of_version_0_1_is_loaded_and_exported(tmp_path, which):
    folder = old_run(tmp_path / "old")
    model = feddure.load_model(folder, model=which)
    about = model.description
    assert (about.size, about.channels, about.depth, about.norm) == (8, 1, 12, "batch")
    network = networks.make("cnn", 1, 4, "batch", seed=int(which == "averaged")).eval()
    with torch.no_grad():
        wanted = network((torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255 - 0.35) / 0.25).softmax(1)
    assert np.abs(model(PIXELS) - wanted.numpy()).max() < 1e-5
    file = feddure.export(folder, tmp_path / "file.safetensors", model=which)
    assert (feddure.load_model(file)(PIXELS) == model(PIXELS)).all()


def test_a_file_that_version_0_1_exported_is_loaded(tmp_path):
    about = (
        '{"version": "0.1.0", "model": "cnn", "norm": "group", "classes": ["ä", "b"], "mean": [0.1, 0.2, 0.3], '
        '"std": [0.4, 0.5, 0.6], "size": 12, "channels": 3}'
    )
    save_file(networks.make("cnn", 3, 2, "group", seed=0).state_dict(), tmp_path / "model", {"feddure": about})
    model = feddure.load_model(tmp_path / "model")
    assert model.classes == ("ä", "b")
    assert model(np.zeros((3, 12, 12, 3), dtype=np.uint8)).shape == (3, 2)


def test_a_model_that_is_not_there_is_refused(tmp_path, trained, exported):
    for file in (trained / "model.safetensors", exported["torchscript"]):
        with pytest.raises(RunError, match="a file holds one model"):
            feddure.load_model(file, model="averaged")
    folder = folders.execute(tmp_path / "run", rounds=1).folder
    with pytest.raises(RunError, match="kept no averaged model"):
        feddure.load_model(folder, model="averaged")
    alone = folders.execute(tmp_path / "alone", rounds=1, method="local").folder
    with pytest.raises(RunError, match="its clients trained alone"):
        feddure.load_model(alone)
    with pytest.raises(ConfigError, match="expected one of auto, averaged, last"):
        feddure.load_model(folder, model="best")


def test_the_averaged_model_has_statistics_of_its_own_where_they_are_measured(tmp_path):
    changes = {"server.ema": 0.5, "batch_norm": "static", "rounds": 2}
    folder = folders.execute(tmp_path / "run", **changes).folder
    averaged, last = (feddure.load_model(folder, model=which)(PIXELS) for which in ("averaged", "last"))
    assert not np.allclose(averaged, last)


@pytest.mark.parametrize("damage", ["another moment", "gone"])
def test_a_checkpoint_of_0_1_that_is_not_the_last_is_no_averaged_model(tmp_path, damage):
    file = old_run(tmp_path / "old") / checkpoint.FILE
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes().replace(b'\\"round\\": ', b'\\"round\\": 1'))
    with pytest.raises(RunError, match=r"cannot be read|not the checkpoint that the finished run left"):
        feddure.load_model(tmp_path / "old", model="averaged")


def test_places_without_a_model(tmp_path, copied):
    (tmp_path / "empty").mkdir()
    for place, message in (
        ("nowhere", "no such run folder or model file"),
        ("empty", "not a run folder"),
        (".", rf"several runs; name one of them: {re.escape(str(copied))}"),
    ):
        with pytest.raises(RunError, match=message):
            feddure.load_model(tmp_path / place)
    (copied / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"has not finished.* feddure run --out '.*gamma 0\.5' --resume"):
        feddure.load_model(copied)


def write_foreign(path, kind):
    if kind == "safetensors":
        save_file({"weight": torch.zeros(2)}, path)
    elif kind == "torchscript":
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)
    elif kind == "torch":
        torch.save({"weight": torch.zeros(2)}, path)
    elif kind == "onnx":
        import onnx

        value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
        other = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
        graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [value], [other])
        opset = onnx.helper.make_opsetid("", 18)
        path.write_bytes(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString())
    else:
        path.write_bytes(
            {"empty": b"", "text": b"hello", "damaged onnx": b"\x08\x07 no", "damaged": b"\xff" * 8 + b"{"}[kind]
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("safetensors", "not a model that feddure wrote"),
        ("torchscript", "a file of PyTorch"),
        ("onnx", "not a model that feddure wrote"),
        ("torch", "a file of PyTorch"),
        ("empty", "not a model that feddure wrote"),
        ("text", "not a model that feddure wrote"),
        ("damaged onnx", "not a whole ONNX file"),
        ("damaged", "not a whole safetensors file"),
    ],
)
def test_files_of_other_programs(tmp_path, kind, message):
    write_foreign(tmp_path / "file", kind)
    with pytest.raises(RunError, match=f"file: {message}"):
        feddure.load_model(tmp_path / "file")


@pytest.mark.parametrize("kind", ["safetensors", "onnx"])
def test_a_file_that_was_cut_off(tmp_path, exported, kind):
    file = tmp_path / "file"
    file.write_bytes(exported[kind].read_bytes()[:-2000])
    with pytest.raises(RunError, match="file: not a"):
        feddure.load_model(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("6.bias"),
        lambda tensors: tensors.update({"7.bias": torch.zeros(4)}),
        lambda tensors: tensors.update({"6.bias": torch.zeros(5)}),
    ],
)
def test_tensors_that_do_not_fit_the_network(copied, change):
    rewrite(copied / "averaged.safetensors", change)
    with pytest.raises(RunError, match=r"not those of model 'cnn' \(\d\.bias\)"):
        feddure.load_model(copied)


def test_a_diverged_model(copied):
    rewrite(copied / "averaged.safetensors", lambda tensors: tensors["6.bias"].fill_(torch.nan))
    with pytest.raises(RunError, match="output is not finite"):
        feddure.load_model(copied)(PIXELS)


@pytest.mark.parametrize(
    ("shape", "output", "message"),
    [([1], "probabilities", "gives float32"), ([1, 9], "probabilities", "gives"), ([1, 4], "other", "cannot run")],
)
def test_an_onnx_file_that_gives_something_else(tmp_path, shape, output, message):
    onnx = pytest.importorskip("onnx")
    about = {"model": "cnn", "norm": "batch", "classes": list("abcd"), "mean": [0.5], "std": [0.25], "size": 8}
    tensor = onnx.helper.make_tensor("x", onnx.TensorProto.FLOAT, shape, [0.0] * shape[-1])
    names = [output, "logits"]
    image = onnx.helper.make_tensor_value_info("images", onnx.TensorProto.UINT8, ["n", 1, 8, 8])
    outputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names]
    nodes = [onnx.helper.make_node("Constant", [], [name], value=tensor) for name in names]
    graph = onnx.helper.make_graph(nodes, "g", [image], outputs)
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    made.metadata_props.add(key="feddure", value=json.dumps(about | {"channels": 1}))
    (tmp_path / "theirs.onnx").write_bytes(made.SerializeToString())
    model = feddure.load_model(tmp_path / "theirs.onnx", device="cpu")
    with pytest.raises(RunError, match=rf"theirs\.onnx: .*{message}"):
        model(np.zeros((1, 8, 8, 1), np.uint8))


def test_images_of_another_kind(trained):
    model = feddure.load_model(trained)
    for images in (PIXELS / 255, PIXELS[..., 0], PIXELS[:, :7]):
        with pytest.raises(DataError, match=r"expected uint8 \[N, 8, 8, 1\]"):
            model(images)


def test_devices(trained, exported, monkeypatch):
    import onnxruntime

    with pytest.raises(ConfigError, match="device 'tpu'"):
        feddure.load_model(trained, device="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device is available"):
        feddure.load_model(trained, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert feddure.load_model(exported["onnx"])(PIXELS).shape == (20, 4)
    with pytest.raises(ConfigError, match="has no CUDA"):
        feddure.load_model(exported["onnx"], device="cuda")


@pytest.mark.gpu
def test_a_gpu_says_the_same(trained, tmp_path):
    file = feddure.export(trained, tmp_path / "file.safetensors")
    on_cpu, on_gpu = (feddure.load_model(file, device=device)(PIXELS) for device in ("cpu", "cuda"))
    assert np.abs(on_cpu - on_gpu).max() < 1e-3
