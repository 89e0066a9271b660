"""One real federation on the loopback address, as operators start it: a server and three sites in processes of their
own, with TLS and keys, against the simulator on the same images (one site has labelled none and approves this run
alone, the others set some aside for validation); three nodes that must not get in; and a SuperExec that is killed
before the run."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

import federated
import tiny
from deployed import Deployed, below, superexec
from feddure import recommended
from feddure.flower.app import audit, run_config
from feddure.flower.app.site_data import ImageFolder
from feddure.flower.deploy import certificates, control, site
from feddure.flower.deploy.layout import Bundle, read_connection
from feddure.flower.deploy.processes import Process, free_port
from feddure.flower.deploy.status import Status, read_status
from feddure.simulation import runs
from feddure.simulation.federation import run
from feddure.tracking import records

pytestmark = pytest.mark.timeout(400)
SETTINGS = f"{federated.SETTINGS} validation=0.3"
APPROVED = re.compile(r"sites approve this run as ([0-9a-f]{32})")
STRANGERS = ("unregistered", "keyless", "deceived")


@dataclass(frozen=True)
class Outcome:
    """What the run left."""

    root: Path
    exit_code: int | None
    status: Status
    logs: dict[str, str]
    server_code: int | None
    left_running: list[list[str]]
    arguments: set[str]  # of all that server and sites started while the run went on


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    root = federated.write_images(tmp_path_factory.mktemp("federation"))
    images = root / "images" / "clients"
    shutil.rmtree(images / "west" / "labelled")  # a site without labels
    with Deployed(root, federated.DESCRIPTION) as federation:
        federation.start_server()
        server = federation.processes["server"]
        lost = federation.wait_for(lambda: superexec(server), 30, "a SuperExec")
        lost.kill()
        federation.wait_for(lambda: superexec(server) not in (None, lost), 30, "another SuperExec")
        for name in ("north", "south"):
            federation.start_site(name, images / name)
        for name in STRANGERS:
            federation.processes[name] = start_stranger(federation, name, images / "north")
        settings = [word for pair in SETTINGS.split() for word in ("--set", pair)]
        tests = ("--test", root / "images" / "test")
        asked = ("--method", "feddure", "--rounds", 2)
        process = federation.start_run("run", root / "run", *asked, *tests, *settings)
        approved = federation.wait_for(lambda: APPROVED.search(federation.log("run")), 60, "the run's hash")
        federation.start_site("west", images / "west", "--approve", approved[1])
        arguments = set()

        def ended():
            for each in map(below, (server, *(federation.processes[name] for name in federated.SITES))):
                arguments.update(word for child in each for word in words_of(child))
            return process.ended

        federation.wait_for(ended, 200, "the run to end")
        status = read_status(federation.folder)
    logs = {file.stem: file.read_text(errors="replace") for file in federation.logs.iterdir()}
    left = [words for each in psutil.process_iter() if str(root) in " ".join(words := words_of(each))]
    return Outcome(root, process.code, status, logs, server.code, left, arguments)


def words_of(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def start_stranger(federation, name, images):
    """A SuperNode with a key that nobody registered, without a key, or with another federation's authority."""
    known = federation.folder.bundle("north")
    bundle = Bundle(federation.logs.parent / name)
    bundle.state.mkdir(parents=True)
    bundle.authority.write_bytes(known.authority.read_bytes())
    if name == "deceived":
        certificates.write_certificate(bundle.authority, certificates.make_authority("other")[1])
    certificates.write_private_key(bundle.key, certificates.make_node_key(), ssh=True)
    command = site.supernode_command(bundle, read_connection(known), ImageFolder(images), free_port())
    if name == "keyless":
        position = command.index("--auth-supernode-private-key")
        del command[position : position + 2]
    return Process(command, control.environment(bundle.flower_home), federation.logs / f"{name}.log")


def test_the_run_is_completed_and_nothing_is_left_running(outcome):
    assert outcome.exit_code == 0, outcome.logs["run"]
    assert records.read_run(outcome.root / "run").finished
    assert (outcome.root / "run" / runs.REPORT_FILE).exists()
    assert {each.site: each.status for each in outcome.status.sites} == dict.fromkeys(federated.SITES, "online")
    assert [(each.status, each.round) for each in outcome.status.runs] == [("finished:completed", 2)]
    assert outcome.server_code == 128 + 15
    assert outcome.left_running == []


def test_the_model_is_the_simulators(outcome):
    bounds = {"server.weight_cap": run_config.WEIGHT_CAP, "server.norm_bound": run_config.NORM_BOUND}
    asked = federated.experiment({"method": "feddure", **bounds}, SETTINGS, recommended.NAME)
    federation = federated.simulator(outcome.root, asked)
    run(federation)
    found = load_file(outcome.root / "run" / runs.MODEL_FILE)
    tiny.assert_near(found, federation.server.model_state(), 1e-8)
    last = records.read(outcome.root / "run" / records.METRICS)[-1]
    (validated,) = (site for site in last["federation"]["sites"] if "validation_of_received_model" in site)
    assert last["validation"]["images"] == validated["validation_of_received_model"]["images"]
    assert last["test"]["loss"] == pytest.approx(federation.server.test()["test"]["loss"], rel=1e-8)


def test_three_sites_took_part(outcome):
    found = [site for r in records.read(outcome.root / "run" / records.METRICS) for site in r["federation"]["sites"]]
    assert {site["site"] for site in found} == set(federated.SITES)
    assert len({site["node"] for site in found}) == 3
    for name in federated.SITES:
        assert f"{name} joined from 127.0.0.1" in outcome.logs["server"]
        assert f"{name} left" in outcome.logs["server"]


def test_strangers_are_refused_and_train_nothing(outcome):
    for stranger in STRANGERS:
        assert "Receiving" not in outcome.logs[stranger]
        assert "SuperNode ID" not in outcome.logs[stranger]
    assert "Receiving: train message" in outcome.logs["north"]
    assert "turned away: 127.0.0.1" in outcome.logs["server"]


def test_nothing_of_a_site_lies_at_the_server(outcome):
    """Images and caches stay in the sites' folders; the run folder has no partition of image numbers."""
    assert runs.PARTITION_FILE not in {path.name for path in (outcome.root / "run").iterdir()}
    about = json.loads((outcome.root / "run" / "federation.json").read_text())
    assert {site["site"]: site["labelled"] for site in about["sites"]} == {"north": 22, "south": 18, "west": 0}


def test_the_audit_logs_are_whole_and_agree(outcome):
    server = audit.read(outcome.root / "federation" / "server" / audit.FILE)
    assert server.problem == ""
    events = [entry["event"] for entry in server.entries]
    assert (events[0], events[-1]) == ("server starts", "server ends")
    assert {"site joined", "site left", "run begins", "run ends"} <= set(events)
    received = {
        site["received"]["sha256"] for entry in server.entries if entry["event"] == "round" for site in entry["sites"]
    }
    logs = [audit.read(outcome.root / "federation" / "sites" / name / "state" / audit.FILE) for name in federated.SITES]
    assert {log.problem for log in logs} == {""}
    assert {entry["sent"]["sha256"] for log in logs for entry in log.entries} == received


def test_no_token_is_among_the_arguments_of_a_process(outcome):
    assert "--token-file" in outcome.arguments
    assert "--token" not in outcome.arguments
