"""A real federation on the loopback address: one SuperLink and three SuperNodes in processes of their own, with TLS and
node authentication, against the simulator on the same images; and three nodes that must not get in."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

import federated
import tiny
from feddure.flower.app.app_folder import write_app
from feddure.flower.deploy import certificates
from feddure.simulation import runs
from feddure.simulation.federation import run
from feddure.tracking import records
from loopback import Loopback

pytestmark = pytest.mark.timeout(240)
STRANGERS = ("unregistered", "keyless", "deceived")


@dataclass(frozen=True)
class Outcome:
    """What the run left."""

    root: Path
    state: str
    nodes: list[dict]
    logs: dict[str, str]
    ended_by_themselves: set[str]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    root = federated.write_images(tmp_path_factory.mktemp("federation"))
    defaults = {"rounds": 2, "method": "feddure", "settings": federated.SETTINGS, "run-folder": str(root / "run")}
    write_app(root / "app", federated.DESCRIPTION, defaults | {"test-folder": str(root / "images" / "test")})
    other_authority = root / "other.crt"
    certificates.write_certificate(other_authority, certificates.make_authority("other")[1])
    with Loopback(root / "flower") as flower:
        flower.start_superlink()
        for site in federated.SITES:
            flower.register(site)
            flower.start_node(site, node(root, site))
        flower.start_node("unregistered", node(root, "north"))
        flower.start_node("keyless", node(root, "south"), key=False)
        flower.start_node("deceived", node(root, "west"), authority=other_authority)
        number = flower.run(root / "app")
        flower.wait_for((root / "run" / runs.REPORT_FILE).exists, 120, "the report")
        state = flower.wait_until_ended(number, 30)
        listed = flower.flwr("supernode", "list", "loopback")["nodes"]
        ended = {name for name in STRANGERS if flower.processes[name].poll() is not None}
        logs = {file.stem: file.read_text(errors="replace") for file in flower.folder.glob("*.log")}
    return Outcome(root, state, listed, logs, ended)


def node(root, site):
    """A node's configuration."""
    return {
        "site": site,
        "data": str(root / "images" / "clients" / site),
        "state": str(root / "state" / site),
    }


def test_the_run_is_completed(outcome):
    assert outcome.state == "finished:completed"
    assert records.read_run(outcome.root / "run").finished


def test_the_model_is_the_simulators(outcome):
    federation = federated.simulator(outcome.root, federated.experiment({"method": "feddure"}))
    run(federation)
    found = load_file(outcome.root / "run" / runs.MODEL_FILE)
    tiny.assert_near(found, federation.server.model_state(), 1e-8)
    last = records.read(outcome.root / "run" / records.METRICS)[-1]
    assert last["test"]["loss"] == pytest.approx(federation.server.test()["test"]["loss"], rel=1e-8)


def test_three_nodes_worked_in_processes_of_their_own(outcome):
    sites = [site for r in records.read(outcome.root / "run" / records.METRICS) for site in r["federation"]["sites"]]
    assert {site["site"] for site in sites} == set(federated.SITES)
    assert len({site["node"] for site in sites}) == 3
    assert len({site["pid"] for site in sites}) == len(sites) == 4


def test_strangers_are_refused_and_train_nothing(outcome):
    known = {
        site["node"] for r in records.read(outcome.root / "run" / records.METRICS) for site in r["federation"]["sites"]
    }
    assert {str(found["node-id"]) for found in outcome.nodes} == known
    for stranger in STRANGERS:
        assert "Receiving" not in outcome.logs[stranger]
        assert "SuperNode ID" not in outcome.logs[stranger]
    assert "Receiving: train message" in outcome.logs["north"]


def test_nothing_of_a_site_lies_at_the_server(outcome):
    """Images and caches stay in the sites' folders; the run folder has no partition of image numbers."""
    left = {path.name for path in (outcome.root / "run").iterdir()}
    assert runs.PARTITION_FILE not in left
    about = json.loads((outcome.root / "run" / "federation.json").read_text())
    assert {site["site"]: site["labelled"] for site in about["sites"]} == {"north": 32, "south": 26, "west": 22}
