"""Exported files: what they hold, that they compute what the run's model computes, and what is refused."""

import json
import math
import runpy
import sys
import zipfile
from functools import partial
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
from feddure import nn as networks
from feddure.data.sources import images
from feddure.errors import ConfigError, RunError
from feddure.serving.export import write_safetensors
from feddure.serving.load import Description

onnx = pytest.importorskip("onnx")  # an extra that a machine for GPU tests may lack
onnxruntime = pytest.importorskip("onnxruntime")

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

FORMATS = ("safetensors", "onnx", "torchscript")
ABOUT = {"model": "cnn", "norm": "batch", "classes": list("abcd"), "mean": [0.35], "std": [0.25]}


class Odd(nn.Module):
    """Doubles its logits where a condition holds that a traced graph cannot keep."""

    def __init__(self, channels, classes, condition):
        super().__init__()
        self.head = nn.Linear(channels * 64, classes)
        self.condition = condition

    def forward(self, x):
        return self.head(x.flatten(1)) * (2.0 if self.condition(x) else 1.0)


def three_or_more(x):
    return len(x) >= 3


def bright(x):
    return x.sum() > 0


OWN = """
from torch import nn

class Patches(nn.Sequential):
    def __init__(self, channels, classes):
        super().__init__(
            nn.Conv2d(channels, 8, 4, stride=4), nn.GELU(), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, classes)
        )

    def forward(self, images):
        return super().forward(images).view(images.shape[0], -1)
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
    path.write_bytes(write_safetensors(network, description))
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


def test_a_built_in_network_computes_the_same_everywhere_and_quietly(tmp_path, capfd, recwarn):
    """A residual network with group norm; the trained run below is a plain one with batch norm."""
    about = {"model": "resnet9-slim", "norm": "group", "channels": 3, "size": 16, "classes": 10}
    source = model_file(tmp_path / "model.safetensors", **about)
    description, network = model_of(**about)
    files = [feddure.export(source, format=kind) for kind in ("onnx", "torchscript")]
    assert capfd.readouterr() == ("", "")
    assert not list(recwarn)
    session, script = onnxruntime.InferenceSession(files[0]), torch.jit.load(files[1])
    for count in (1, 7):
        images = noise(description, count)
        wanted = expected(description, network, images)
        assert_near(session.run(["probabilities", "logits"], {"images": images}), wanted)
        assert_near([output.numpy() for output in script(torch.from_numpy(images))], wanted)


def test_a_trained_run_and_its_averaged_model(trained, exported, tmp_path):
    pixels = folders.IMAGES.test_images
    averaged = feddure.export(trained, tmp_path / "averaged.safetensors", model="averaged")
    last = feddure.export(trained, tmp_path / "last.safetensors", model="last")
    written = (exported["safetensors"], "auto"), (exported["onnx"], "auto"), (averaged, "averaged"), (last, "last")
    for file, which in written:
        wanted = feddure.load_model(trained, model=which)(pixels)
        assert np.abs(feddure.load_model(file)(pixels) - wanted).max() < 1e-4


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
    assert np.abs(feddure.load_model(files[1])(folders.IMAGES.test_images) - wanted).max() < 1e-4
    script = torch.jit.load(files[2])
    probabilities, _ = script(torch.from_numpy(folders.IMAGES.test_images.transpose(0, 3, 1, 2).copy()))
    assert np.abs(probabilities.numpy() - wanted).max() < 1e-4


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


def test_no_path_of_the_machine_travels(trained, exported):
    assert b"/home/ada" in (trained / "model.safetensors").read_bytes()
    for kind in FORMATS:
        content = exported[kind].read_bytes()
        for words in (b"/home/ada", str(Path(networks.__file__).parent).encode()):
            assert words not in content


def test_numbers_of_another_type_are_refused_by_the_model_itself(exported):
    images = np.zeros((1, 1, 8, 8), dtype=np.float32)
    session, script = onnxruntime.InferenceSession(exported["onnx"]), torch.jit.load(exported["torchscript"])
    with pytest.raises(Exception, match="uint8"):
        session.run(None, {"images": images})
    with pytest.raises(Exception, match="expected uint8 images"):
        script(torch.from_numpy(images))


# --- where it lies -------------------------------------------------------------------------------------


def test_without_a_format_and_a_file_it_is_onnx(copied):
    assert feddure.export(copied) == copied / "gamma 0.5.onnx"


def test_the_file_has_the_name_of_its_run(copied, monkeypatch):
    before = (copied / "model.safetensors").read_bytes()
    assert feddure.export(copied, format="safetensors") == copied / "gamma 0.5.safetensors"
    monkeypatch.chdir(copied)
    assert feddure.export(".", format="torchscript") == Path("gamma 0.5.pt")
    assert feddure.export("model.safetensors", format="torchscript") == Path("model.pt")
    assert (copied / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("onnx", "x.pt", "ending means torchscript"),
        (None, "x.model", r"give --format \(safetensors, onnx, torchscript\)"),
        ("pickle", None, "format 'pickle'"),
    ],
)
def test_formats_that_are_refused(tmp_path, kind, name, message):
    with pytest.raises(ConfigError, match=message):
        feddure.export(tmp_path, name and tmp_path / name, format=kind)


@pytest.mark.parametrize(
    ("out", "force", "message"),
    [
        ("mine.pt", False, r"mine\.pt: is there already; add --force"),
        ("model.safetensors", True, "is the model to export"),
        (".", True, "cannot be written"),
        ("no/such/folder.pt", True, "cannot be written"),
    ],
)
def test_targets_that_are_refused(tmp_path, out, force, message):
    source = model_file(tmp_path / "model.safetensors")
    (tmp_path / "mine.pt").write_text("precious")
    before = source.read_bytes()
    kind = "safetensors" if out.endswith("safetensors") else "torchscript"
    with pytest.raises(RunError, match=message):
        feddure.export(source, tmp_path / out, format=kind, force=force)
    assert source.read_bytes() == before
    assert (tmp_path / "mine.pt").read_text() == "precious"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine.pt", "model.safetensors"]
    feddure.export(source, tmp_path / "mine.pt", force=True)
    assert zipfile.is_zipfile(tmp_path / "mine.pt")


# --- what cannot be exported ---------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
@pytest.mark.parametrize("kind", ["onnx", None])
def test_without_the_extra_the_message_names_it(tmp_path, monkeypatch, missing, kind):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=rf"need {missing} .*pip install 'feddure\[onnx\]'"):
        feddure.export(model_file(tmp_path / "model.safetensors"), format=kind)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_exported_program_is_not_exported_again(exported, tmp_path):
    with pytest.raises(RunError, match="cannot be exported again"):
        feddure.export(exported["torchscript"], tmp_path / "again.onnx")


@pytest.mark.parametrize(
    ("condition", "kind", "message"),
    [
        (three_or_more, "torchscript", "computes something else as torchscript"),
        (bright, "onnx", "model 'odd' cannot be written as onnx"),
    ],
)
def test_a_network_that_a_format_cannot_hold_leaves_no_file(tmp_path, condition, kind, message):
    feddure.register_network("odd", partial(Odd, condition=condition))
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
            wanted, _ = images.read(path, images.Rule(**shape))
            assert np.array_equal(read_pixels(path, shape)[0].transpose(1, 2, 0), wanted), path.name
    (best,) = feddure.predict("model.safetensors", "boot.png")
    label, probability = capsys.readouterr().out.split(": ")
    assert label == best.label
    assert math.isclose(float(probability), best.probability, abs_tol=1e-4)
