"""Models from wherever they lie: run folders and files, whole or not."""

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import feddure
import folders
from feddure.errors import ConfigError, DataError, RunError
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


def accuracy(model, images=folders.IMAGES):
    return (model(images.test_images).argmax(1) == images.test_labels).mean()


def test_a_run_folder_and_its_model_file_are_the_same_model(trained):
    model = feddure.load_model(trained)
    assert accuracy(model) == feddure.Run(trained).metrics[-1]["test"]["accuracy"] > 0.3
    assert list(model.classes) == list("abcd")
    assert (feddure.load_model(trained / "model.safetensors")(PIXELS) == model(PIXELS)).all()
    assert model(PIXELS[:0]).shape == (0, 4)
    assert np.allclose(model(PIXELS).sum(1), 1)
    assert "cnn, 8 × 8 × 1 pixels, 4 classes" in repr(model)


def test_the_averaged_model_is_the_one_that_was_evaluated(tmp_path):
    run = folders.execute(tmp_path / "run", **(folders.LONG | {"optimizer.learning_rate": 0.01, "server.ema": 0.95}))
    found = accuracy(feddure.load_model(run.folder, ema=True)), accuracy(feddure.load_model(run.folder))
    wanted = run.metrics[-1]["test_ema"]["accuracy"], run.metrics[-1]["test"]["accuracy"]
    assert found == wanted
    assert wanted[0] != wanted[1]


def test_runs_without_an_averaged_model_say_so(tmp_path, trained, exported):
    with pytest.raises(RunError, match=r"run: the run kept no averaged model; train with --set server\.ema"):
        feddure.load_model(trained, ema=True)
    with pytest.raises(RunError, match="give that folder with --ema"):
        feddure.load_model(trained / "model.safetensors", ema=True)
    with pytest.raises(RunError, match="give that folder with --ema"):
        feddure.load_model(exported["torchscript"], ema=True)
    static = folders.execute(tmp_path / "static", batch_norm="static", **{"server.ema": 0.5}).folder
    with pytest.raises(RunError, match="static: the averaged model of a run with batch_norm: static"):
        feddure.load_model(static, ema=True)


def test_a_checkpoint_of_another_moment_is_not_the_averaged_model(tmp_path):
    folder = folders.execute(tmp_path / "run", **folders.LONG).folder
    file = folder / checkpoint.FILE
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'\\"round\\": 6', b'\\"round\\": 4'))
    assert file.read_bytes() != whole
    with pytest.raises(RunError, match="not the checkpoint that the finished run left"):
        feddure.load_model(folder, ema=True)
    file.unlink()
    with pytest.raises(RunError, match="the averaged model cannot be read"):
        feddure.load_model(folder, ema=True)


# --- no model there ------------------------------------------------------------------------------------


def test_nothing_there(tmp_path):
    with pytest.raises(RunError, match="nowhere: there is no such run folder or model file"):
        feddure.load_model(tmp_path / "nowhere")


def test_an_unfinished_run(tmp_path):
    folder = folders.execute(tmp_path / "my run").folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"has not finished.* feddure run --out '.*my run' --resume"):
        feddure.load_model(folder)


def test_a_folder_of_several_runs(tmp_path):
    for name in ("fedavg-seed0", "fedavg-seed1"):
        folders.execute(tmp_path / name)
    with pytest.raises(RunError, match=r"several runs; name one of them: .*fedavg-seed0, .*fedavg-seed1"):
        feddure.load_model(tmp_path)


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(RunError, match=r"not a run folder, model\.safetensors is missing"):
        feddure.load_model(tmp_path)


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
        ("torchscript", "not a model that feddure wrote"),
        ("onnx", "not a model that feddure wrote"),
        ("torch", "not a whole TorchScript file"),
        ("empty", "not a model that feddure wrote"),
        ("text", "not a model that feddure wrote"),
        ("damaged onnx", "not an ONNX file that onnxruntime can read"),
        ("damaged", "not a whole safetensors file"),
    ],
)
def test_files_of_other_programs(tmp_path, kind, message):
    write_foreign(tmp_path / "file", kind)
    with pytest.raises(RunError, match=f"file: {message}"):
        feddure.load_model(tmp_path / "file")


@pytest.mark.parametrize("kind", ["safetensors", "onnx", "torchscript"])
def test_a_file_that_was_cut_off(tmp_path, exported, kind):
    file = tmp_path / "file"
    file.write_bytes(exported[kind].read_bytes()[:-2000])
    with pytest.raises(RunError, match="file: not a"):
        feddure.load_model(file)


# --- a model that cannot be used -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("6.bias"),
        lambda tensors: tensors.update({"7.bias": torch.zeros(4)}),
        lambda tensors: tensors.update({"6.bias": torch.zeros(5)}),
    ],
)
def test_tensors_that_do_not_fit_the_network(tmp_path, change):
    path = folders.execute(tmp_path / "run").folder / "model.safetensors"
    rewrite(path, change)
    with pytest.raises(RunError, match=r"not those of model 'cnn' \(\d\.bias\); use the code"):
        feddure.load_model(path)


def test_a_diverged_model(tmp_path):
    path = folders.execute(tmp_path / "run").folder / "model.safetensors"
    rewrite(path, lambda tensors: tensors["6.bias"].fill_(torch.nan))
    with pytest.raises(RunError, match="output is not finite"):
        feddure.load_model(path)(PIXELS)


def test_images_of_another_kind(trained):
    model = feddure.load_model(trained)
    for images in (PIXELS / 255, PIXELS[..., 0], PIXELS[:, :7]):
        with pytest.raises(DataError, match=r"expected uint8 \[N, 8, 8, 1\]"):
            model(images)


def test_devices(trained, monkeypatch):
    with pytest.raises(ConfigError, match="device 'tpu': expected auto, cpu or cuda"):
        feddure.load_model(trained, device="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device is available"):
        feddure.load_model(trained, device="cuda")


def test_an_onnx_file_on_a_gpu_needs_an_onnxruntime_for_it(exported, monkeypatch):
    import onnxruntime

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert feddure.load_model(exported["onnx"])(PIXELS).shape == (20, 4)
    with pytest.raises(ConfigError, match="has no CUDA"):
        feddure.load_model(exported["onnx"], device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["safetensors", "torchscript"])
def test_a_gpu_says_the_same(trained, tmp_path, kind):
    file = feddure.export(trained, tmp_path / "file", format=kind)
    on_cpu, on_gpu = (feddure.load_model(file, device=device)(PIXELS) for device in ("cpu", "cuda"))
    assert np.abs(on_cpu - on_gpu).max() < 1e-3
