"""Files from strangers: whatever they name, no code of theirs runs; the user's own word, or --allow-modules, does."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save
from torch import nn

import folders
import tiny
from feddure import experiments, plugins
from feddure.flower.app.policy import check_policy
from feddure.serving import load
from feddure.simulation import runs
from feddure.studies import compare

pytestmark = pytest.mark.usefixtures("quiet")

PACKAGE = "import pathlib\npathlib.Path('ran').touch()\n"  # to look for stranger.code runs this
CODE = """
import pathlib, sys
pathlib.Path('ran').touch()
from torch import nn
from feddure.methods.fedavg import FedAvg
sys.path.insert(0, {tests!r})
import tiny

class Method(FedAvg):
    pass

def Data():
    return tiny.dataset()

class Net(nn.Sequential):
    def __init__(self, channels, classes):
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
"""
NAMES = {"method": "stranger.code:Method", "model": "stranger.code:Net", "dataset": "stranger.code:Data"}


@pytest.fixture(autouse=True)
def _here(feddure, monkeypatch):
    """A folder with the stranger's package, as after the unpacking of an archive."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("stranger").mkdir()
    Path("stranger/__init__.py").write_text(PACKAGE)
    Path("stranger/code.py").write_text(CODE.format(tests=str(Path(__file__).parents[1])))
    plugins._hash.cache_clear()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "stranger"]:
        del sys.modules[name]


def write_config(**names):
    Path("theirs.yaml").write_text(experiments.to_yaml(tiny.experiment({"rounds": 1} | names)))
    plugins._ALLOWED.clear()  # what made the file has allowed its names
    return Path("theirs.yaml")


def write_model(model):
    header = {"model": model, "norm": "batch", "classes": list("abcd"), "mean": [0.5], "std": [0.25]}
    header |= {"size": 8, "channels": 1}
    tensors = nn.Linear(1, 4).state_dict()
    content = save({f"2.{name}": tensor for name, tensor in tensors.items()}, {"feddure": json.dumps(header)})
    Path("theirs.safetensors").write_bytes(content)
    return Path("theirs.safetensors")


def write_run(**names):
    """A run that stopped after its first round, and names modules."""
    folder = folders.execute(Path("theirs")).folder
    (folder / "config.yaml").write_text(experiments.to_yaml(tiny.experiment({"rounds": 2} | names)))
    for name in ("model.safetensors", "report.html"):
        (folder / name).unlink()
    plugins._ALLOWED.clear()
    return folder


def write_photo():
    Image.new("L", (8, 8)).save("photo.png")
    return Path("photo.png")


def write_sweep(key, name):
    write_config()
    tree = {"config": "theirs.yaml", "set": {"dataset": "fashion-mini"}, "grid": {key: [name]}}
    if key == "dataset":
        del tree["set"]
    Path("sweep.yaml").write_text(yaml.safe_dump(tree))
    plugins._ALLOWED.clear()
    return Path("sweep.yaml")


def write_comparison(name):
    folder = Path("compared")
    shutil.copytree(write_run(), compare.run_folder(folder, "fedavg", 0))
    (folder / "comparison.yaml").write_text(compare.Plan((name, "fedavg"), (0,), "fedavg").to_yaml())
    return folder


def refuses(call):
    code, _, told = call
    assert code == 2
    assert "stranger.code" in told
    assert "--allow-modules" in told
    assert not Path("ran").exists()
    assert "stranger" not in sys.modules


@pytest.mark.parametrize("key", NAMES)
def test_no_file_makes_a_command_import_what_it_names(feddure, key):
    """Every command that reads names from a file, with a name in every field that can be a module's."""
    names = {key: NAMES[key]}
    refuses(feddure("run", "--config", write_config(**names), "--out", "out"))
    if key != "method":  # a comparison names its methods itself
        refuses(feddure("compare", "--config", write_config(**names), "--methods", "fedavg", "--out", "out"))
    refuses(feddure("run", "--out", write_run(**names), "--resume"))
    refuses(feddure("sweep", write_sweep(key, NAMES[key]), "--dry-run"))


def test_neither_does_a_model_or_a_comparison(feddure):
    model, photo = write_model(NAMES["model"]), write_photo()
    refuses(feddure("predict", model, photo))
    refuses(feddure("export", model, "--out", "out.onnx"))
    refuses(feddure("compare", "--out", write_comparison(NAMES["method"]), "--resume"))
    Path("theirs/model.safetensors").write_bytes(model.read_bytes())
    refuses(feddure("predict", "theirs", photo))


def test_reports_need_no_code(feddure):
    """A run of one's own modules is shown without them: nothing is imported, and so nothing refused."""
    folder = write_run(**NAMES)
    code, _, told = feddure("report", folder)
    assert code == 0, told
    code, _, told = feddure("config", "--config", folder / "config.yaml")
    assert code == 0, told
    assert not Path("ran").exists()


def test_what_the_user_types_or_allows_is_imported(feddure, tmp_path):
    typed = ("--method", NAMES["method"], "--dataset", NAMES["dataset"], "--set", f"model={NAMES['model']}")
    code, _, told = feddure("run", "--config", write_config(), *typed, "--out", "mine")
    assert code == 0, told
    plugins._ALLOWED.clear()
    assert feddure("predict", "mine", write_photo())[0] == 2
    code, _, told = feddure("predict", "mine", write_photo(), "--allow-modules")
    assert code == 0, told
    code, _, told = feddure("run", "--config", write_config(**NAMES), "--out", "theirs", "--allow-modules")
    assert code == 0, told


def test_the_printed_way_to_resume_works(tmp_path):
    assert runs.how_to_resume(tmp_path, tiny.experiment(NAMES)).endswith("--resume --allow-modules")
    assert runs.how_to_resume(tmp_path, tiny.experiment(dataset="folder:x")).endswith("--resume")


def test_a_site_that_allows_no_modules_knows_none():
    with pytest.raises(Exception, match="not allowed"):
        check_policy({}, yaml.safe_dump({"method": NAMES["method"]}))
    assert not plugins._ALLOWED
    check_policy({"modules": "true"}, yaml.safe_dump({"method": NAMES["method"]}))
    assert {NAMES["method"]} == plugins._ALLOWED


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_file_is_not_run(feddure):
    """TorchScript can write files: this one does as soon as it is called."""

    class Hostile(nn.Module):
        def forward(self, x: torch.Tensor):
            torch.from_file("ran", True, 8)
            return x, x

    about = {"model": "cnn", "norm": "batch", "classes": list("abcd"), "mean": [0.5], "std": [0.25]}
    extra = {"feddure.json": json.dumps(about | {"size": 8, "channels": 1}).encode()}
    torch.jit.save(torch.jit.script(Hostile()), "theirs.pt", _extra_files=extra)
    code, _, told = feddure("predict", "theirs.pt", write_photo())
    assert (code, "safetensors" in told) == (2, True)
    assert not Path("ran").exists()


def test_an_onnx_file_reads_no_other_file(tmp_path):
    """onnxruntime reads a constant's external data from anywhere, also of a model that it is given as bytes."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    Path("secret").write_bytes(bytes(16))
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", "secret"), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    inner = onnx.helper.make_graph(
        [onnx.helper.make_node("Constant", [], ["y"], value=tensor)],
        "inner", [], [onnx.helper.make_tensor_value_info("y", 1, [4])],
    )  # fmt: skip
    yes = onnx.helper.make_tensor("c", onnx.TensorProto.BOOL, [], [True])
    nodes = [
        onnx.helper.make_node("Constant", [], ["c"], value=yes),
        onnx.helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner),
    ]
    graph = onnx.helper.make_graph(nodes, "g", [], [onnx.helper.make_tensor_value_info("z", 1, [4])])
    for shape in (graph, inner):
        made = onnx.helper.make_model(shape, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
        with pytest.raises(load.RunError, match="in other files"):
            load.run_onnx(made.SerializeToString(), "theirs.onnx", torch.device("cpu"))


@pytest.mark.parametrize(
    "change",
    [
        {"size": 10**6},
        {"size": -1},
        {"channels": 10**6},
        {"classes": [""] * 10**5},
        {"classes": ["a\x1b]0;gone\x07", "b"]},
        {"mean": [0.5] * 10**5},
        {"mean": 5},
        {"model": 7},
    ],
)
def test_a_description_that_asks_for_too_much(change):
    header = {"model": "cnn", "norm": "batch", "classes": list("abcd"), "mean": [0.5], "std": [0.25]}
    header |= {"size": 8, "channels": 1}
    load.Description.from_json(json.dumps(header), "theirs")
    with pytest.raises(load.RunError, match="not a model that feddure wrote"):
        load.Description.from_json(json.dumps(header | change), "theirs")
    with pytest.raises(load.RunError, match="not a model that feddure wrote"):
        load.Description.from_json("[" * 10**5, "theirs")


def test_no_name_of_a_file_is_a_command_to_the_terminal(feddure):
    """Names in an archive of images may hold what sets the title of a window, or what hides what stands before it."""
    hostile = "\x1b]0;gone\x07\x9b31m\u202e"
    for kind in ("a", f"b{hostile}"):
        Path("images", kind).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (8, 8), 50 * number).save(Path("images", kind, f"{hostile}{number}.png"))
    Path("images", "a", f"{hostile}torn.png").write_bytes(b"\x89PNG")
    model = folders.execute(Path("mine")).folder
    for command in (("predict", model, "images"), ("data", "check", "images", "--skip-damaged")):
        _, *printed = feddure(*command)
        assert "torn.png" in "".join(printed)
        assert not set(hostile) & set("".join(printed)) - set("]0;gone31m")
