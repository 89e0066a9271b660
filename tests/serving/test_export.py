"""Exported files: what they hold, that they compute what the run's model computes, and what is refused."""

import json
import math
import runpy
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import feddure
import folders
import tiny
from feddure import nn as networks
from feddure.data.sources import images
from feddure.errors import ConfigError, RunError
from feddure.serving import formats
from feddure.serving.description import Description

onnx = pytest.importorskip("onnx")  # an extra that a machine for GPU tests may lack
onnxruntime = pytest.importorskip("onnxruntime")

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

FORMATS = ("safetensors", "onnx", "torchscript")
ABOUT = {"model": "cnn", "norm": "batch", "classes": list("abcd"), "mean": [0.35], "std": [0.25]}


class Linear(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.head = nn.Linear(channels * 64, classes)

    def forward(self, x):
        return self.head(x.flatten(1))


class DependsOnTheCount(Linear):
    """Doubles its logits where there are three images or more."""

    def forward(self, x):
        return super().forward(x) * (2.0 if len(x) >= 3 else 1.0)


class DependsOnValues(Linear):
    """Doubles its logits for bright images."""

    def forward(self, x):
        return super().forward(x) * (2.0 if x.sum() > 0 else 1.0)


OWN = """
from torch import nn

class Patches(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 8, 4, stride=4), nn.GELU(), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.head = nn.Linear(32, classes)

    def forward(self, images):
        features = self.layers(images)
        return self.head(features.view(images.shape[0], -1))
"""


def model_of(model="cnn", norm="batch", channels=1, size=8, classes=4):
    """An untrained model file's description and network, its batch norm somewhere else than at its start."""
    about = Description(
        model=model,
        norm=norm,
        classes=tuple("abcdefghij"[:classes]),
        mean=(0.35, 0.45, 0.55)[:channels],
        std=(0.25, 0.2, 0.3)[:channels],
        size=size,
        channels=channels,
    )
    network = networks.make(model, channels, classes, norm, seed=3).eval()
    torch.manual_seed(5)
    for name, buffer in network.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.1)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    return about, network


def model_file(path, **about):
    description, network = model_of(**about)
    path.write_bytes(formats.write_safetensors(network, description))
    return path


def noise(about, count):
    random = np.random.RandomState(count)
    return random.randint(0, 256, size=(count, *about.input_shape)).astype(np.uint8)


def expected(about, network, images):
    """By hand: normalised, through the network, and softmax."""
    mean, std = (np.array(values, dtype=np.float32).reshape(1, -1, 1, 1) for values in (about.mean, about.std))
    with torch.no_grad():
        logits = network(torch.from_numpy((images.astype(np.float32) / 255 - mean) / std))
    return logits.softmax(1).numpy(), logits.numpy()


def assert_near(found, wanted, tolerance=1e-4):
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() < tolerance


# --- the same numbers in every format ------------------------------------------------------------------


@pytest.mark.parametrize(
    "about",
    [
        {"model": "cnn", "norm": "batch", "channels": 1},
        {"model": "cnn", "norm": "group", "channels": 3, "size": 12},
        {"model": "resnet9-slim", "norm": "group", "channels": 1, "size": 28, "classes": 10},
        {"model": "resnet9", "norm": "batch", "channels": 3, "size": 32, "classes": 10},
        {"model": "cnn", "norm": "none", "channels": 1},
    ],
    ids=lambda about: "-".join(map(str, about.values())),
)
def test_built_in_networks_compute_the_same_everywhere(tmp_path, about):
    source = model_file(tmp_path / "model.safetensors", **about)
    description, network = model_of(**about)
    session = onnxruntime.InferenceSession(feddure.export(source, format="onnx"))
    script = torch.jit.load(feddure.export(source, format="torchscript"))
    for count in (1, 7):
        images = noise(description, count)
        wanted = expected(description, network, images)
        assert_near(session.run(["probabilities", "logits"], {"images": images}), wanted)
        assert_near([output.numpy() for output in script(torch.from_numpy(images))], wanted)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_trained_run(trained, exported, kind):
    pixels = folders.IMAGES.test_images
    wanted = feddure.load_model(trained)(pixels)
    assert np.abs(feddure.load_model(exported[kind])(pixels) - wanted).max() < 1e-4


def test_a_network_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "nets_to_export.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    folder = folders.execute(tmp_path / "run", model="nets_to_export:Patches").folder
    files = [feddure.export(folder, format=kind) for kind in FORMATS]
    wanted = feddure.load_model(folder)(folders.IMAGES.test_images)
    monkeypatch.chdir("/")
    monkeypatch.delitem(sys.modules, "nets_to_export")
    with pytest.raises(ConfigError, match="nets_to_export"):  # weights alone need the network's code
        feddure.load_model(files[0])
    for file in files[1:]:
        assert np.abs(feddure.load_model(file)(folders.IMAGES.test_images) - wanted).max() < 1e-4


def test_the_averaged_model(tmp_path):
    run = folders.execute(tmp_path / "run", **folders.LONG)
    federation = tiny.finished(tiny.experiment(folders.LONG), folders.IMAGES)
    averaged = federation.server.program.network.state_dict(*federation.server.averaged)
    file = feddure.export(run.folder, tmp_path / "averaged.safetensors", ema=True)
    found = load_file(file)
    tiny.assert_near(found, {name: tensor.float() for name, tensor in averaged.items()}, 1e-7)
    plain = load_file(feddure.export(run.folder, tmp_path / "plain.safetensors"))
    assert any(not torch.equal(found[name], plain[name]) for name in averaged)


# --- what travels with it ------------------------------------------------------------------------------


def test_the_description_travels_with_every_format(exported):
    extra = {"feddure.json": ""}
    torch.jit.load(exported["torchscript"], _extra_files=extra)
    with safe_open(exported["safetensors"], framework="pt") as opened:
        texts = [opened.metadata()["feddure"], extra["feddure.json"]]
    session = onnxruntime.InferenceSession(exported["onnx"])
    texts.append(session.get_modelmeta().custom_metadata_map["feddure"])
    for text in texts:
        found = json.loads(text)
        assert found == ABOUT | {"size": 8, "channels": 1, "depth": 16, "version": feddure.__version__}


def test_the_safetensors_file_loads_strictly_and_in_single_precision(exported):
    state = load_file(exported["safetensors"])
    networks.make("cnn", 1, 4, "batch", seed=1).load_state_dict(state, strict=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32, torch.int64}


def test_the_onnx_graph_is_plain(exported):
    model = onnx.load(exported["onnx"])
    onnx.checker.check_model(model, full_check=True)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]
    (images,) = model.graph.input
    assert images.name == "images"
    assert images.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert [place.dim_param or place.dim_value for place in images.type.tensor_type.shape.dim] == ["batch", 1, 8, 8]
    assert [output.name for output in model.graph.output] == ["probabilities", "logits"]


def test_no_path_of_the_machine_travels(trained, exported):
    assert b"/home/ada" in (trained / "model.safetensors").read_bytes()
    for kind in FORMATS:
        content = exported[kind].read_bytes()
        for words in (b"/home/ada", str(Path(networks.__file__).parent).encode()):
            assert words not in content


def test_exporting_says_nothing(tmp_path, capfd, recwarn):
    source = model_file(tmp_path / "model.safetensors", norm="group")
    for kind in FORMATS:
        feddure.export(source, tmp_path / kind, format=kind)
    assert capfd.readouterr() == ("", "")
    assert not list(recwarn)


def test_numbers_of_another_type_are_refused_by_the_model_itself(exported):
    images = np.zeros((1, 1, 8, 8), dtype=np.float32)
    session, script = onnxruntime.InferenceSession(exported["onnx"]), torch.jit.load(exported["torchscript"])
    with pytest.raises(Exception, match="uint8"):
        session.run(None, {"images": images})
    with pytest.raises(Exception, match="expected uint8 images"):
        script(torch.from_numpy(images))


# --- where it lies -------------------------------------------------------------------------------------


def test_the_file_has_the_name_of_its_run(tmp_path, monkeypatch):
    folder = folders.execute(tmp_path / "gamma0.5").folder
    before = (folder / "model.safetensors").read_bytes()
    assert feddure.export(folder, format="safetensors") == folder / "gamma0.5.safetensors"
    monkeypatch.chdir(folder)
    assert feddure.export(".", format="torchscript") == Path("gamma0.5.pt")
    assert feddure.export("model.safetensors", format="torchscript") == Path("model.pt")
    assert (folder / "model.safetensors").read_bytes() == before


def test_the_ending_decides_on_the_format(tmp_path):
    source = model_file(tmp_path / "model.safetensors")
    assert zipfile.is_zipfile(feddure.export(source, tmp_path / "a.pt"))
    assert load_file(feddure.export(source, tmp_path / "a.safetensors"))
    with pytest.raises(ConfigError, match=r"give --format \(safetensors, onnx, torchscript\)"):
        feddure.export(source, tmp_path / "a.model")
    with pytest.raises(ConfigError, match="give --format"):
        feddure.export(source)


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [("onnx", "x.pt", "torchscript"), ("torchscript", "x.ONNX", "onnx"), ("onnx", "x.safetensors", "safetensors")],
)
def test_an_ending_of_another_format_is_refused(tmp_path, kind, name, meant):
    with pytest.raises(ConfigError, match=rf"{name}: the ending means {meant}, but --format {kind} was given"):
        feddure.export(tmp_path, tmp_path / name, format=kind)


def test_an_existing_file_is_replaced_only_by_force(tmp_path):
    source = model_file(tmp_path / "model.safetensors")
    target = tmp_path / "mine.pt"
    target.write_text("precious")
    with pytest.raises(RunError, match=r"mine\.pt: is there already; add --force"):
        feddure.export(source, target)
    assert target.read_text() == "precious"
    feddure.export(source, target, force=True)
    assert target.read_bytes().startswith(b"PK")


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("model.safetensors", "is the model to export"),
        (".", "is a folder"),
        ("no/such/folder.safetensors", "no such folder"),
    ],
)
def test_targets_that_are_refused(tmp_path, out, message):
    source = model_file(tmp_path / "model.safetensors")
    before = source.read_bytes()
    with pytest.raises(RunError, match=message):
        feddure.export(source, tmp_path / out, format="safetensors", force=True)
    assert source.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


# --- what cannot be exported ---------------------------------------------------------------------------


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="format 'pickle': expected one of safetensors, onnx, torchscript"):
        feddure.export(model_file(tmp_path / "model.safetensors"), format="pickle")


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_without_the_extra_the_message_names_it(tmp_path, monkeypatch, missing):
    source = model_file(tmp_path / "model.safetensors")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=rf"need {missing} .*pip install 'feddure\[onnx\]'"):
        feddure.export(source, format="onnx")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_exported_program_is_not_exported_again(tmp_path):
    file = feddure.export(model_file(tmp_path / "model.safetensors"), format="torchscript")
    with pytest.raises(RunError, match="cannot be exported again"):
        feddure.export(file, format="onnx")


@pytest.mark.parametrize(
    ("network", "kind", "message"),
    [
        (DependsOnTheCount, "torchscript", "computes something else as torchscript"),
        (DependsOnTheCount, "onnx", "computes something else as onnx"),
        (DependsOnValues, "onnx", "model 'odd' cannot be written as onnx"),
    ],
)
def test_a_network_that_a_format_cannot_hold_leaves_no_file(tmp_path, network, kind, message):
    feddure.register_network("odd", network)
    source = model_file(tmp_path / "model.safetensors", model="odd")
    with pytest.raises(RunError, match=message):
        feddure.export(source, format=kind)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


# --- the page about it ---------------------------------------------------------------------------------


def photographs(folder):
    """Files of every kind that the rule treats in its own way."""
    folder.mkdir()
    random = np.random.RandomState(0)
    grey, wide = (random.randint(0, 256, size).astype(np.uint8) for size in ((28, 28), (30, 47, 3)))
    deep = random.randint(0, 4096, (40, 31)).astype(np.uint16)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(grey).save(folder / "grey.png")
    Image.fromarray(wide).save(folder / "wide.png")
    Image.fromarray(deep).save(folder / "deep.png")
    Image.fromarray(np.dstack([wide, wide[..., 0]])).save(folder / "transparent.png")
    Image.fromarray(wide).convert("P").save(folder / "palette.png", transparency=3)
    Image.fromarray(wide).convert("CMYK").save(folder / "print.tif")
    Image.fromarray(wide).save(folder / "turned.jpg", exif=turned)
    return sorted(folder.iterdir())


def test_the_page_shows_how_to_use_the_onnx_file(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    (tmp_path / "page.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    about = {"size": 28, "classes": 10}
    feddure.export(model_file(tmp_path / "model.safetensors", **about), tmp_path / "clothes.onnx")
    pixels = noise(model_of(**about)[0], 1)
    Image.fromarray(pixels[0, 0]).save(tmp_path / "boot.png")
    monkeypatch.chdir(tmp_path)
    read_pixels = runpy.run_path("page.py")["read_pixels"]
    for path in photographs(tmp_path / "photographs"):
        for size, channels, depth in ((28, 1, 16), (16, 3, 12)):
            shape = {"size": size, "channels": channels, "depth": depth}
            wanted = images.read(path, **shape)
            assert np.array_equal(read_pixels(path, shape)[0].transpose(1, 2, 0), wanted), path.name
    (best,) = feddure.predict("model.safetensors", "boot.png")
    label, probability = capsys.readouterr().out.split(": ")
    assert label == best.label
    assert math.isclose(float(probability), best.probability, abs_tol=1e-4)
