"""The audit log: a chain that a change breaks and a kill does not."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
from flwr.app import Array, ArrayRecord, RecordDict

import federated
from feddure.errors import RunError
from feddure.flower.app import audit
from feddure.flower.app.audit import AuditLog


@pytest.fixture
def log(tmp_path):
    for number in range(5):
        AuditLog(tmp_path).write("round", number=number)
    return tmp_path / audit.FILE


def numbers(found):
    return [entry.get("number", "torn") for entry in found.entries]


def test_an_untouched_log_is_whole(log):
    found = audit.read(log)
    assert (numbers(found), found.problem, found.torn) == ([0, 1, 2, 3, 4], "", False)
    assert log.stat().st_mode & 0o077 == 0


def test_a_message_of_an_insider_does_not_break_the_chain(tmp_path):
    shapeless = Array(dtype="float32", shape=(0,) * 500_000, stype="numpy.ndarray", data=b"")
    found = audit.describe_arrays(RecordDict({"parameters": ArrayRecord({"theta": shapeless})}))
    assert len(json.dumps(found)) < 1000
    log = AuditLog(tmp_path)
    log.write("first")
    log.write("long", text="x" * 3_000_000)  # whatever else should ever be long
    log.write("last")
    assert audit.read(tmp_path / audit.FILE).problem == ""


def test_an_entry_for_which_the_disk_has_no_room_is_an_error(tmp_path):
    """The server would hand out its hash, or the site send its update, as if it were there."""
    code = (
        "import resource, signal, sys\nfrom pathlib import Path\nfrom feddure.flower.app.audit import AuditLog\n"
        "log = AuditLog(Path(sys.argv[1]))\nlog.write('first')\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))\nlog.write('second', text='x' * 500)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "the audit log cannot be written (the disk is full)" in done.stderr
    AuditLog(tmp_path).write("third")
    found = audit.read(tmp_path / audit.FILE)
    assert [entry["event"] for entry in found.entries] == ["first", "a line was torn", "third"]
    assert found.problem == ""


def change(lines):
    lines[2] = lines[2].replace(b'"number": 2', b'"number": 7')


def remove(lines):
    del lines[2]


def add(lines):
    lines.insert(3, lines[2])


def swap(lines):
    lines[2], lines[3] = lines[3], lines[2]


def tear(lines):
    lines[2] = lines[2][:20]


@pytest.mark.parametrize("tamper", [change, remove, add, swap, tear])
def test_a_change_breaks_the_chain_where_it_is(log, tamper):
    lines = log.read_bytes().splitlines()
    tamper(lines)
    log.write_bytes(b"\n".join(lines) + b"\n")
    found = audit.read(log)
    assert found.problem.startswith(("line 3", "line 4"))
    assert numbers(found)[:2] == [0, 1]
    assert len(found.entries) < 5


def test_a_changed_last_line_is_another_head(log):
    head = audit.read(log).head
    log.write_bytes(log.read_bytes().replace(b'"number": 4', b'"number": 5'))
    assert audit.read(log).head != head
    log.write_bytes(log.read_bytes()[:-20] + b"\n")
    assert "last line" in audit.read(log).problem


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_torn_last_line_is_recognised_and_vouched_for(log, cut):
    log.write_bytes(log.read_bytes()[:-cut])
    found = audit.read(log)
    assert (found.problem, found.torn) == ("", cut > 1)
    AuditLog(log.parent).write("round", number=9)
    found = audit.read(log)
    assert (found.problem, found.torn) == ("", False)
    assert numbers(found) == ([0, 1, 2, 3, 4, 9] if cut == 1 else [0, 1, 2, 3, "torn", 9])


def test_processes_that_are_killed_leave_a_whole_log(tmp_path):
    code = "import sys; from pathlib import Path; from feddure.flower.app.audit import AuditLog\n"
    code += "log = AuditLog(Path(sys.argv[1])); print('x', flush=True)\nwhile True: log.write('round', text='x' * 3000)"
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ)
        for _ in range(2)
    ]
    for process in both:
        process.stdout.readline()
    while len(audit.read(tmp_path / audit.FILE).entries if (tmp_path / audit.FILE).exists() else ()) < 5:
        pass
    for process in both:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    AuditLog(tmp_path).write("after")
    assert audit.read(tmp_path / audit.FILE).problem == ""


def test_server_and_sites_agree_on_what_travelled(tmp_path):
    root = federated.write_images(tmp_path)
    nodes = federated.grid(root)
    (root / "server").mkdir()

    def refuse(message, reply):
        if message.metadata.message_type == "train":
            reply.content.config_records["answer"]["round"] = 70
        return reply

    nodes.changes[13] = refuse
    settings = federated.SETTINGS.replace("clients_per_round=2", "clients_per_round=3")
    federated.federate(root, nodes, settings=settings, server_folder=str(root / "server"))
    servers = audit.read(root / "server" / audit.FILE)
    assert servers.problem == ""
    events = [entry["event"] for entry in servers.entries]
    assert events == [*["site takes part"] * 3, "run begins", "round", "round", "run ends"]
    rounds = [{site["site"]: site for site in entry["sites"]} for entry in servers.entries if entry["event"] == "round"]
    heads = {entry["before"] for entry in servers.entries}
    for name in federated.SITES:
        own = audit.read(root / "state" / name / audit.FILE)
        assert own.problem == ""
        for entry, line in zip(rounds, own.entries, strict=True):
            assert line["event"] == "trained"
            assert line["sent"] == entry[name]["received"]
            assert line["received"] == entry[name]["sent"]
            assert line["servers_log"] in heads
        assert ("not_used" in rounds[0][name]) == (name == "west")
        assert audit.compare(servers, own) == []
    assert rounds[0]["north"]["weight"] == 56
    assert json.dumps(rounds[0]).count("sha256") == 6


# --- two logs ------------------------------------------------------------------------------------------------
SENT, UPLOAD = ({"bytes": 9, "sha256": digit * 64} for digit in "12")


def write_both(root, change=None):
    """A server's and a site's log of two rounds; the server's owner may have changed it and chained it anew."""
    server, site = root / "server", root / "site"
    for folder in (server, site):
        folder.mkdir(parents=True)
    AuditLog(server).write("server starts")
    for number in (1, 2):
        about = [{"site": "north", "sent": SENT, "received": UPLOAD}]
        head = AuditLog(server).write("round", run="ab", round=number, sites=about)
        about = {"site": "north", "run": "ab", "round": str(number), "servers_log": head}
        AuditLog(site).write("trained", **about, received=SENT, sent=UPLOAD)
    if change is not None:
        entries = audit.read(server / audit.FILE).entries
        (server / audit.FILE).unlink()
        for entry in entries:
            facts = {key: value for key, value in entry.items() if key not in ("time", "before")}
            AuditLog(server).write(**change(facts))
    return audit.read(server / audit.FILE), audit.read(site / audit.FILE)


def change_upload(entry):
    return entry | {"sites": [{"site": "north", "sent": SENT, "received": SENT}]} if entry.get("round") == 2 else entry


def forget_site(entry):
    return entry | {"sites": []} if entry["event"] == "round" else entry


def change_other(entry):
    return entry | {"also": 1}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (change_upload, "round 2: the site sent 222222222222, and the server's log has 111111111111"),
        (forget_site, "round 1: the server's log has no such round with this site"),
        (change_other, "round 1: the server's log ended with another entry then"),
    ],
)
def test_a_server_that_writes_its_log_anew_disagrees_with_the_sites(tmp_path, change, found):
    servers, site = write_both(tmp_path, change)
    assert servers.problem == ""
    assert any(found in line for line in audit.compare(servers, site))


def test_a_site_that_forgets_a_round_disagrees_with_the_server(tmp_path):
    servers, site = write_both(tmp_path)
    assert audit.compare(servers, site) == []
    short = dataclasses.replace(site, entries=site.entries[:1])
    (line,) = audit.compare(servers, short)
    assert "round 2: the server received 222222222222, and the site's log has nothing of it" in line


def test_a_line_of_a_strangers_log_that_is_nested_too_deep_is_no_entry(tmp_path):
    (tmp_path / audit.FILE).write_bytes(b"[" * 100_000 + b"\n")
    assert "was changed" in audit.read(tmp_path / audit.FILE).problem


def test_a_servers_log_is_compared_with_a_sites(tmp_path):
    servers, _ = write_both(tmp_path)
    with pytest.raises(RunError, match="not the audit log of a site"):
        audit.compare(servers, servers)
