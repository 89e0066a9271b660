"""The demo's hostile site: named in each round, and outvoted."""

import subprocess

import pytest
import torch

import federated
import folders
from feddure.flower.app import server as server_app
from feddure.flower.app.client import Worker
from feddure.flower.deploy import demo, demo_attacker
from feddure.flower.deploy.allowlist import CLIENT_PROGRAM, write_wrappers
from feddure.flower.deploy.layout import Bundle
from feddure.flower.deploy.status import _suspicious
from feddure.tracking import records

SETTINGS = federated.SETTINGS.replace("clients_per_round=2", "clients_per_round=3")


@pytest.fixture
def hostile(monkeypatch):
    """In this process, where all sites are one program, west alone is hostile."""
    honest = Worker.train
    monkeypatch.setattr(Worker, "train", honest)  # restored at the end
    monkeypatch.setattr(demo_attacker.allowlist, "main", lambda: None)
    demo_attacker.main()
    poisoned = Worker.train

    def train(self, site, *rest):
        return (poisoned if site.name == "west" else honest)(self, site, *rest)

    Worker.train = train


@pytest.mark.usefixtures("hostile")
def test_the_hostile_site_is_named_in_every_round(tmp_path, monkeypatch):
    monkeypatch.setattr(server_app, "TensorBoard", folders.Watcher)
    monkeypatch.setattr(server_app, "write_report", lambda run_folders, out: out)
    root = federated.write_images(tmp_path)
    made = {}
    for defence in (demo._DEFENDED, demo._UNDEFENDED):
        folder = tmp_path / defence[-6:]
        server = federated.federate(root, settings=f"{SETTINGS} {defence}", run_folder=str(folder))
        made[defence] = server.state["theta"], records.read(folder / records.METRICS)
    (theta, lines), (spoilt, others) = made.values()
    assert _suspicious(lines, federated.SITES) == {"west": [1, 2]}
    assert _suspicious(others, federated.SITES) == {}
    assert torch.linalg.norm(spoilt) > torch.linalg.norm(theta)


def test_its_program_takes_the_place_of_the_sites_own(tmp_path):
    bundle = Bundle(tmp_path)
    honest = (write_wrappers(bundle.programs) / CLIENT_PROGRAM).read_text()
    demo_attacker.replace_program(bundle)
    assert (bundle.programs / CLIENT_PROGRAM).read_text() != honest
    done = subprocess.run([bundle.programs / CLIENT_PROGRAM, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--token" in done.stdout
