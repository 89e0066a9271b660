"""What all tests share: one thread, a tiny data set, and a skip where there is no GPU or browser."""

from collections.abc import Iterator

import pytest
import torch

import browsing
import folders
import tiny
from feddure import environment, methods, plugins
from feddure.data.dataset import Dataset
from feddure.simulation import runs

# Networks here are so small that threads cost more than they save, and one thread makes sums repeatable.
torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("browser") and not browsing.CHROMIUM:
        pytest.skip("needs Chromium")


@pytest.fixture(autouse=True)
def registered_methods() -> Iterator[None]:
    """A method that a test registers, and a module that it allows, is unknown to the next one, whichever that is."""
    before = dict(methods.METHODS)
    yield
    plugins._ALLOWED.clear()
    methods.METHODS.clear()
    methods.METHODS.update(before)


@pytest.fixture(scope="session")
def images() -> Dataset:
    """160 training and 60 test images of 12 × 12 pixels in four classes."""
    return tiny.dataset()


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without what takes longer than the run: TensorBoard, the report and a question to git."""
    monkeypatch.setattr(runs, "TensorBoard", folders.Watcher)
    monkeypatch.setattr(runs, "write_report", lambda run_folders, out: out.write_text("report"))
    monkeypatch.setattr(environment, "commit", lambda: None)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the long run when nothing interrupts it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "TensorBoard", folders.Watcher)
        patch.setattr(runs, "write_report", lambda run_folders, out: None)
        return folders.contents(folders.execute(tmp_path_factory.mktemp("whole"), **folders.LONG).folder)
