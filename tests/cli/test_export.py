"""`feddure export` as a person and as a script sees it."""

import pytest
import torch

import folders
from commands import invoke
from feddure.errors import RunError

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


@pytest.mark.parametrize(
    ("kind", "name", "about"),
    [
        ("torchscript", "run.pt", "uint8 images [N, 1, 8, 8] to probabilities and logits [N, 4]"),
        ("safetensors", "run.safetensors", "weights only, of a network for images [N, 1, 8, 8] and 4 classes"),
    ],
)
def test_standard_output_is_the_file_and_nothing_else(tmp_path, kind, name, about):
    folder = folders.execute(tmp_path / "run").folder
    found = invoke("export", folder, "--format", kind)
    assert found.stdout == f"{folder / name}\n"
    assert (folder / name).is_file()
    assert about in found.stderr


def test_options(tmp_path):
    folder = folders.execute(tmp_path / "run", **folders.LONG).folder
    target = tmp_path / "mine.pt"
    invoke("export", folder, "--out", target)
    images = torch.full((1, 1, 8, 8), 99, dtype=torch.uint8)
    before = torch.jit.load(target)(images)
    with pytest.raises(RunError, match="--force"):
        invoke("export", folder, "--out", target, "--model", "last")
    invoke("export", folder, "--out", target, "--model", "last", "--force")
    assert not torch.equal(torch.jit.load(target)(images)[1], before[1])
