"""Runs without what takes longer than their rounds: TensorBoard, the report and a question to git."""

import pytest

import folders
from feddure import environment
from feddure.flower.app import server


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(server, "TensorBoard", folders.Watcher)
    monkeypatch.setattr(server, "write_report", lambda run_folders, out: out.write_text("report"))
    monkeypatch.setattr(environment, "commit", lambda: None)
