"""What all tests share: one thread, a tiny data set, and a skip where there is no GPU."""

import pytest
import tiny
import torch

from feddure.data.dataset import Dataset

# Networks here are so small that threads cost more than they save, and one thread makes sums repeatable.
torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def images() -> Dataset:
    """160 training and 60 test images of 12 × 12 pixels in four classes."""
    return tiny.dataset()
