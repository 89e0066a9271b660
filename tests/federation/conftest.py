import folders
import pytest

from feddure import environment
from feddure.federation import runs


@pytest.fixture
def quiet(monkeypatch):
    """Runs without what takes longer than the run: TensorBoard, the report and a question to git."""
    monkeypatch.setattr(runs, "TensorBoard", folders.Watcher)
    monkeypatch.setattr(runs, "write_report", lambda run_folders, out: out.write_text("report"))
    monkeypatch.setattr(environment, "commit", lambda: None)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The files of the long run when nothing interrupts it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "TensorBoard", folders.Watcher)
        patch.setattr(runs, "write_report", lambda run_folders, out: None)
        return folders.contents(folders.execute(tmp_path_factory.mktemp("whole"), **folders.LONG).folder)
