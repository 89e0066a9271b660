"""Runs without what takes longer than their rounds: TensorBoard, the report and a question to git."""

import pytest

import folders
from feddure import environment
from feddure.flower.app import run_folder


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(run_folder, "TensorBoard", folders.Watcher)
    monkeypatch.setattr(run_folder, "write_report", lambda run_folders, out: out.write_text("report"))
    monkeypatch.setattr(environment, "commit", lambda: None)
