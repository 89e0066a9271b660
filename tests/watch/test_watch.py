"""The live page over HTTP: it tells what a folder does while it grows, and nothing to anybody else."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from urllib.parse import quote

import pytest
import yaml

import folders
import tiny
import waiting
from feddure.cli.watch import watch
from feddure.errors import ConfigError, RunError
from feddure.simulation import runs
from feddure.studies import sweep
from feddure.studies.grid.failures import Problem
from feddure.studies.grid.store import Measurement, Store
from feddure.studies.plan import read_plan
from feddure.tracking.observer import Observer
from feddure.tracking.records import Writer
from feddure.watch import run as watched_run
from feddure.watch.folder import Folder
from feddure.watch.server import Server


@contextmanager
def serving(root, monkeypatch):
    monkeypatch.setattr("feddure.watch.server._SECONDS_BETWEEN_LOOKS", 0.0)
    with Server(Folder(root)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serving(tmp_path, monkeypatch) as made:
        yield made


def ask(server, target, method="GET", host=None):
    """Status, headers and content."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, target, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, content


def state(server, after=0):
    status, _, content = ask(server, f"/state?after={after}")
    assert status == 200
    return json.loads(content)


def write_run(folder, rounds=4, metrics=(), **about):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"method": "feddure", "rounds": rounds, **about}))
    add(folder, *metrics)
    return folder


def add(folder, *metrics):
    with Writer(folder / "metrics.jsonl") as writer, Writer(folder / "timing.jsonl") as timing:
        for one in metrics:
            writer.write({"clients": [0], "steps": [5], **one})
            timing.write({"round": one["round"], "seconds": 2.0})


def test_a_run_is_followed_from_its_first_round_to_its_report(tmp_path, server, quiet):
    assert state(server)["names"] == []
    seen = []

    class Asking(Observer):
        def round_done(self, federation, record, seconds):
            seen.append(state(server)["changed"]["mine"])

    experiment = tiny.experiment(rounds=3)
    runs.execute(experiment, folders.IMAGES, tmp_path / "mine", progress=False, observers=[Asking()])
    assert [(one["status"], one["round"], one["rounds"]) for one in seen] == [("running", n, 3) for n in (1, 2, 3)]
    assert [len(one["curves"]["test"]) for one in seen] == [1, 2, 3]
    assert seen[1]["left"] > 0
    assert all("trained" in text for _, _, text, _ in seen[-1]["clients"])
    last = state(server)["changed"]["mine"]
    assert last["status"] == "finished"
    assert last["report"]
    status, headers, content = ask(server, "/report/mine")
    assert (status, content) == (200, "report")
    assert headers["Content-Security-Policy"].startswith("sandbox")


def test_a_run_may_have_the_name_of_a_part_of_a_federation(tmp_path, server, quiet):
    runs.execute(tiny.experiment(rounds=1), folders.IMAGES, tmp_path / "sites", progress=False)
    assert state(server)["names"] == ["sites"]


def test_only_what_is_new_is_read_and_sent(tmp_path, server, monkeypatch):
    parsed, parse = [], watched_run._record
    monkeypatch.setattr(watched_run, "_record", lambda line: parsed.append(line) or parse(line))
    old = write_run(tmp_path / "old", metrics=[{"round": 1}])
    new = write_run(tmp_path / "new", metrics=[{"round": 1, "test": {"accuracy": 0.25}}])
    first = state(server)
    assert set(first["changed"]) == {"old", "new"}
    assert state(server, first["version"])["changed"] == {}
    parsed.clear()
    with (new / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "clients": [], "test": {"accuracy": 0.5}}\n{"round": 3, "te')
    second = state(server, first["version"])
    assert second["changed"]["new"]["curves"]["test"] == [[1, 25.0], [2, 50.0]]  # a line under way is not read
    assert len(parsed) == 1
    (old / "metrics.jsonl").unlink()
    add(old, {"round": 1}, {"round": 2})  # as a resumption replaces it
    assert list(state(server, second["version"])["changed"]) == ["old"]


def test_runs_that_are_stopped_stale_or_failed_say_so(tmp_path, server, monkeypatch):
    stopped = write_run(tmp_path / "stopped", metrics=[{"round": 1}])
    with runs.lock(stopped):
        pass
    (stopped / runs.LOCK_FILE).write_text(f"{2**22 + 1}\n")  # no process has such a number
    failed = write_run(tmp_path / "failed", metrics=[{"round": 1}])
    (failed / runs.FAILURE_FILE).write_text(json.dumps({"error": "out of <memory>"}))
    stale = write_run(tmp_path / "stale", metrics=[{"round": 1}])
    now = watched_run.time.time
    with runs.lock(stale):
        monkeypatch.setattr(watched_run.time, "time", lambda: now() + 1000)
        found = state(server)["changed"]
    assert {name: one["status"] for name, one in found.items()} == {name: name for name in found}
    assert found["failed"]["note"] == "out of <memory>"
    assert "16:40 min" in found["stale"]["note"]


def test_an_error_that_ends_a_run_is_told_until_the_run_goes_on(tmp_path, server, quiet, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(runs, "write_models", folders.disk_is_full)
        with pytest.raises(OSError, match="space"):
            folders.execute(tmp_path / "mine")
    found = state(server)["changed"]["mine"]
    assert found["status"] == "failed"
    assert "space" in found["note"]
    folders.execute(tmp_path / "mine", resume=True)
    assert state(server)["changed"]["mine"]["status"] == "finished"


def test_a_comparison_shows_its_runs_and_those_that_wait(tmp_path, server):
    folder = tmp_path / "both"
    with runs.lock(folder):
        plan = {"methods": ["fedavg", "feddure", "mine"], "seeds": [0], "against": "fedavg"}
        (folder / "comparison.yaml").write_text(yaml.safe_dump(plan))
        write_run(folder / "fedavg-seed0", metrics=[{"round": number} for number in (1, 2)])
        with runs.lock(folder / "fedavg-seed0"):
            found = state(server)["changed"]
    assert found["both"]["status"] == "running"
    assert (found["both"]["done"], found["both"]["total"]) == (0, 3)
    assert found["both"]["left"] == 2 * 2.0 + 2 * 4 * 2.0  # seconds: two rounds here, four of each of the others
    states = {name: one["status"] for name, one in found.items() if one["parent"] == "both"}
    assert states == {"both/fedavg-seed0": "running", "both/feddure-seed0": "waiting", "both/mine-seed0": "waiting"}


def test_a_sweep_shows_its_cells(tmp_path, server):
    text = {"preset": "demo", "grid": {"method": ["fedavg", "feddure"]}, "seeds": [0, 1]}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(text))
    one, other, third, _ = sweep.read(tmp_path / "sweep.yaml").cells()
    store = Store(tmp_path)
    store.note(one, "command", 5, 0.5)
    store.fail(other, Problem("no memory"))
    store.keep(Measurement(third.hash, {}, 2, 5.0, 0.75, 0.5, [(1, 0.25, None), (2, 0.75, None)], 1.0, 0.0, ""))
    found = state(server)["changed"]["."]
    assert (found["status"], found["done"], found["failed"], found["total"]) == ("running", 1, 1, 4)
    cells = {cell["status"]: cell for cell in found["cells"]}
    assert cells["running"]["points"] == [[5, 50.0]]
    assert "FedAvg" in cells["running"]["name"]
    assert cells["failed"]["note"] == "no memory"
    assert [(cells[state]["accuracy"], cells[state]["mean"]) for state in ("running", "finished")] == [
        (50, None),
        (75, 50),
    ]


def test_a_sweep_whose_start_lies_elsewhere_is_finished_when_all_its_cells_are_measured(tmp_path, server):
    text = {"config": "runs/first/config.yaml", "grid": {"rounds": [2, 3]}, "seeds": [0]}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(text))
    store = Store(tmp_path)
    for done, told in enumerate(("stopped", "finished"), 1):
        store.keep(Measurement(f"{done:016x}", {}, 2, 5.0, 0.75, 0.5, [(1, 0.25, None)], 1.0, 0.0, ""))
        found = state(server)["changed"]["."]
        assert (found["status"], found["done"], found["total"]) == (told, done, 2)


def test_a_federation_shows_its_sites_and_what_each_did_last(tmp_path, server):
    (tmp_path / "server").mkdir()
    (tmp_path / "federation.yaml").write_text("name: clinics\nsites: [north, south, west]\n")
    about = {"site": "north", "test_of_received_model": {"accuracy": 0.75}}
    sites = [about, {"site": "south", "problem": "took too long"}]
    rounds = [{"round": 1, "federation": {"sites": sites, "drawn_but_away": [], "refused": []}}]
    run = write_run(tmp_path / "runs" / "first", metrics=rounds)
    (run / "federation.json").write_text(json.dumps({"names": ["north", "south", "west"]}))
    found = state(server)["changed"]
    assert found["."]["kind"] == "federation"
    assert found["runs/first"]["parent"] == "."
    clients = found["runs/first"]["clients"]
    assert ["south", 1, "took too long", True] in clients
    assert ["north", 1, "took part; 75.0 % on its own test images", False] in clients
    assert [name for name, number, *_ in clients if not number] == ["west"]


def test_nobody_gets_what_is_not_theirs(tmp_path, monkeypatch):
    root = tmp_path / "runs"
    folder = write_run(root / "mine", metrics=[{"round": 1}])
    (tmp_path / "report.html").write_text("secret")
    (folder / "report.html").symlink_to(tmp_path / "report.html")
    with serving(root, monkeypatch) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert state(server)["names"] == ["mine"]
        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", "localhost:1"):
            for target in ("/", "/state"):
                status, _, content = ask(server, target, host=host)
                assert status == 403
                assert "mine" not in content
        assert ask(server, "/", host=f"localhost:{server.server_port}")[0] == 200
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(server, "/state", method)[0] == 501
        for target in ("mine", "..", "../", "mine/../..", "/etc/passwd", quote("../report.html", safe=""), "%00"):
            status, _, content = ask(server, f"/report/{target}")
            assert status == 404, target
            assert "secret" not in content
        for target in ("/mine/config.yaml", "/../report.html", "//etc/passwd", "/state/../mine"):
            assert ask(server, target)[0] == 404
        _, headers, _ = ask(server, "/")
        assert headers["X-Frame-Options"] == "DENY"
        with pytest.raises(ConfigError, match=r"--port .*: cannot be used"):
            Server(Folder(root), server.server_port)


@pytest.mark.parametrize(
    "junk",
    [b"", b"\0\xff", b"[]", b"{}", b"rounds: [1]\nmethod: {a: 1}\nseed: x", b"[" * 10**5 + b"\n",
     b'{"round": 1, "validation": {"accuracy": 1e308}}\n', b'{"round": "1"}\n[1]\nnull\n',
     b'{"round": 1, "federation": {"sites": [], "drawn_but_away": [], "refused": []}, "suspicious": 3}\n'],
)  # fmt: skip
def test_files_of_strangers_do_no_harm(tmp_path, junk):
    for name in ("run", "comparison", "grid", "federation"):
        folder = tmp_path / name
        (folder / "server").mkdir(parents=True)
        every = {"run": ["config.yaml", "metrics.jsonl", "timing.jsonl", "failure.json", ".lock", "federation.json"],
                 "comparison": ["comparison.yaml", "comparison.csv"], "grid": ["sweep.yaml", "cells.jsonl"],
                 "federation": ["federation.yaml", "server/running.json"]}  # fmt: skip
        for file in every[name]:
            (folder / file).write_bytes(junk)
    watched = Folder(tmp_path)
    watched.look()
    watched.look()
    assert len(json.loads(json.dumps(watched.state(), allow_nan=False))["names"]) == 4


_CELL = {"cell": "a", "experiment": {}, "rounds": 3, "local_steps": 5.0, "seconds": 1.0, "build_seconds": 1.0,
         "partition": "x", "environment": "e", "about": {}}  # fmt: skip
_NOTED = {"host": socket.gethostname(), "pid": os.getpid(), "command": ""}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("run/metrics.jsonl", {"round": 1, "clients": ["9" * 5000], "steps": [1]}),
        ("run/metrics.jsonl", {"round": 1, "clients": ["²"], "steps": [1]}),
        ("run/config.yaml", "method:\n  " + "- " * 5000 + "a\n"),
        ("run/config.yaml", "- " * 10**5),
        ("plan/comparison.yaml", "{methods: [a], seeds: [.inf], against: a}"),
        ("plan/comparison.yaml", f"{{methods: [a], seeds: [0x{'f' * 6000}], against: a}}"),
        ("plan/comparison.yaml", f"{{methods: [{'a' * 400}], seeds: [1], against: a}}"),
        ("plan/comparison.yaml", '{methods: ["a\\0b"], seeds: [1], against: a}'),
        ("plan/comparison.yaml", '{methods: ["a\\ud800b"], seeds: [1], against: a}'),
        ("grid/unfinished/a/failure.json", {"error": 5}),
        ("grid/unfinished/a/failure.json", "[" * 5000),
        ("grid/unfinished/a/progress.json", _NOTED | {"pid": "x"}),
        ("grid/unfinished/a/progress.json", _NOTED | {"pid": 10**19}),
        ("grid/unfinished/a/progress.json", _NOTED | {"score": "x"}),
        ("grid/unfinished/a/progress.json", _NOTED | {"score": 1e308}),
        ("grid/cells.jsonl", _CELL | {"accuracy_last": 1e308, "accuracy_last10": 0.5, "curve": [[1, 1e308, None]]}),
        ("grid/cells.jsonl", _CELL | {"accuracy_last": 0.5, "accuracy_last10": 0.5, "curve": [], "seconds": 1e308}),
    ],
)
def test_one_file_of_a_stranger_does_not_take_the_others_from_the_page(tmp_path, file, content):
    folder = write_run(tmp_path / "mine", metrics=[{"round": 1}])
    write_run(tmp_path / "run")
    (tmp_path / "plan").mkdir()
    (tmp_path / "grid" / "unfinished" / "a").mkdir(parents=True)
    (tmp_path / "grid" / "unfinished" / "a" / "progress.json").write_text(json.dumps(_NOTED))
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / file).write_text(f'{{"environment": "e"}}\n{text}\n' if file.endswith("cells.jsonl") else text + "\n")
    watched = Folder(tmp_path)
    for _ in range(2):
        watched.look()
        json.dumps(watched.state(), allow_nan=False)
    assert watched.entries[folder.name]["round"] == 1


def test_a_plan_of_runs_without_number_is_refused(tmp_path):
    many = "[" + ", ".join(map(str, range(3000))) + "]"
    (tmp_path / "comparison.yaml").write_text(f"{{methods: {many}, seeds: {many}, against: '1'}}")
    with pytest.raises(RunError, match="damaged"):
        read_plan(tmp_path)


def test_a_sweep_of_very_many_cells_does_not_stop_the_page(tmp_path, monkeypatch):
    """To make 100,000 experiments takes minutes, for which nobody else's run would be shown."""
    values = ", ".join(map(str, range(1, 20_001)))
    (tmp_path / "sweep.yaml").write_text(f"preset: demo\nseeds: [0]\ngrid: {{rounds: [{values}]}}\n")
    monkeypatch.setattr(sweep, "_experiment", None)  # none is made
    watched = Folder(tmp_path)
    began = time.monotonic()
    watched.look()
    assert watched.entries["."]["total"] == 20_000
    assert time.monotonic() - began < 10


def test_only_shares_are_drawn(tmp_path):
    """Between 1e17 and the next number there is no place for the lines of a chart: to draw them had no end."""
    large = [{"round": number, "test": {"accuracy": 1e17 + 16 * number}} for number in (1, 2)]
    write_run(tmp_path / "run", metrics=[*large, {"round": 3, "test": {"accuracy": 0.5}}])
    watched = Folder(tmp_path)
    watched.look()
    assert {share for _, share in watched.entries["run"]["curves"]["test"]} == {100.0, 50.0}


def test_the_command_says_where_to_look_and_ends_with_ctrl_c(tmp_path):
    command = [sys.executable, "-c", "from feddure.cli import main; main()", "watch", str(tmp_path), "--no-browser"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert "http://127.0.0.1:" in process.stderr.readline()
        assert "nothing is there yet" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        waiting.until(lambda: process.poll() is not None)
        assert process.returncode == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


def test_the_address_does_not_wait_for_pytorch(tmp_path):
    write_run(tmp_path / "mine", metrics=[{"round": 1, "test": {"accuracy": 0.25}}])
    code = """if True:
        import sys
        from unittest import mock
        from feddure import cli
        from feddure.watch import server
        def serve(self):
            print("torch" in before, self.url)
        def look(self):
            before.update(sys.modules)
            print("looks", file=sys.stderr)
        before = {}
        mock.patch("feddure.watch.folder.Folder.look", look).start()
        mock.patch.object(server.Server, "serve_forever", serve).start()
        cli.app(["watch", sys.argv[1], "--no-browser"])
    """
    asked = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert asked.stdout.startswith("False http://127.0.0.1:")
    assert asked.stderr.index("http://127.0.0.1:") < asked.stderr.index("looks")


def test_a_folder_that_cannot_be_watched_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="there is no such folder"):
        watch(tmp_path / "absent")
    with pytest.raises(RunError, match="a file was given"):
        watch(tmp_path / "file")
