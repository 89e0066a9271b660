"""The flat layout: every tensor has its place, and nothing is lost on the way there and back."""

import pytest
import torch

from feddure.nn.flat import Layout
from feddure.nn.networks import ResNet9, SmallCNN

CPU = torch.device("cpu")


def named(module):
    return {name: parameter.detach().double() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("module", [SmallCNN(3, 4), ResNet9(1, 10, "group", width=4)], ids=["cnn", "resnet"])
def test_there_and_back(module):
    tensors = named(module)
    layout = Layout(tensors, precise=[name for name in tensors if ".1." in name], frozen=list(tensors)[-1:])
    views = layout.views(layout.flatten(tensors, torch.float64, CPU))
    assert views.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(views[name], tensor)


def test_places_do_not_overlap_and_groups_come_in_order():
    tensors = {"a": torch.zeros(3), "scale": torch.zeros(2), "b": torch.zeros(2, 2), "fixed": torch.zeros(())}
    layout = Layout(tensors, precise=["scale"], frozen=["fixed"])
    assert [(entry.name, entry.start) for entry in layout.entries] == [("a", 0), ("b", 3), ("scale", 7), ("fixed", 9)]
    assert (layout.cast, layout.trained, layout.size) == (7, 9, 10)
    assert [entry.name for entry in layout.trained_entries] == ["a", "b", "scale"]
    assert [entry.name for entry in layout.frozen_entries] == ["fixed"]


def test_convolution_weights_are_channels_last_in_memory():
    tensors = {"kernel": torch.rand(4, 3, 2, 2)}
    layout = Layout(tensors)
    view = layout.views(layout.flatten(tensors, torch.float32, CPU))["kernel"]
    assert view.is_contiguous(memory_format=torch.channels_last)


def test_gradients_land_where_their_parameters_lie():
    tensors = {"kernel": torch.rand(4, 3, 2, 2), "scale": torch.rand(4), "fixed": torch.rand(4), "bias": torch.rand(4)}
    layout = Layout(tensors, precise=["scale"], frozen=["fixed"])
    gathered = torch.full((layout.size,), float("nan"))
    for place, values in layout.gather([tensors[entry.name] for entry in layout.trained_entries]):
        gathered[place] = values
    expected = layout.flatten(tensors, torch.float32, CPU)
    assert torch.equal(gathered[: layout.trained], expected[: layout.trained])
    assert gathered[layout.trained :].isnan().all()
