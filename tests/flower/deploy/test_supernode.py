"""What a malicious server could make a site's SuperNode take into memory."""

import io
import json
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_body
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import fleet_http_connection, start_client_internal

from feddure.flower.app import limits
from feddure.flower.app.run_config import write_app
from feddure.flower.deploy import supernode
from feddure.flower.deploy.allowlist import ForeignCode, check_app

MODEL = np.arange(100_000, dtype=np.float32)
RUN = 7


def parts(values: np.ndarray) -> dict[str, bytes]:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 1, 1
    content = RecordDict({"parameters": ArrayRecord({"theta": Array(values)})})
    message = Message(content, dst_node_id=1, message_type="train")
    return {name: each.deflate() for name, each in get_all_nested_objects(message).items()}


def receive(state: Path, objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What of a message the SuperNode takes, and whether it confirms it."""
    taken = []

    def flower(**callbacks):
        for name in objects:
            callbacks["pull_object"](RUN, name)
            taken.append(name)
        callbacks["confirm_message_received"](RUN, "message")
        taken.append("confirmed")

    monkeypatch.setattr(supernode, "_receive", flower)
    callbacks = {"pull_object": lambda run, name: objects[name], "confirm_message_received": lambda run, name: None}
    with suppress(ValueError):  # which Flower writes into its log
        supernode.receive_bounded(state, **callbacks, state="Flower's own")
    return taken


def test_a_model_of_the_expected_size_comes_in_and_one_ten_times_as_large_does_not(tmp_path, monkeypatch):
    limits.allow_download(tmp_path, RUN, MODEL.nbytes)
    assert receive(tmp_path, parts(MODEL), monkeypatch)[-1] == "confirmed"
    assert "confirmed" not in receive(tmp_path, parts(np.arange(1_000_000, dtype=np.float32)), monkeypatch)


def test_a_run_that_the_site_has_not_agreed_to_sends_no_model(tmp_path, monkeypatch):
    limits.allow_download(tmp_path, RUN + 1, MODEL.nbytes)
    assert "confirmed" not in receive(tmp_path, parts(MODEL), monkeypatch)
    (tmp_path / limits.DOWNLOADS).write_text("damaged")
    assert "confirmed" not in receive(tmp_path, parts(MODEL), monkeypatch)


def test_one_part_that_is_named_a_million_times_is_not_put_together(tmp_path, monkeypatch):
    limits.allow_download(tmp_path, RUN, MODEL.nbytes)
    objects = parts(MODEL)
    (array,) = [name for name, content in objects.items() if content.startswith(b"Array ")]
    body = get_object_body(objects[array], Array)
    about = json.loads(body) | {"arraychunk_ids": [0] * 20}
    objects[array] = objects[array].replace(body, json.dumps(about).encode())
    taken = receive(tmp_path, objects, monkeypatch)
    assert len(taken) == len(objects)
    assert "confirmed" not in taken


def test_a_site_remembers_what_only_so_many_runs_may_send(tmp_path):
    for run in range(40):
        limits.allow_download(tmp_path, run, 1000)
    assert len(json.loads((tmp_path / limits.DOWNLOADS).read_bytes())) == 16
    assert limits.allowed_download(tmp_path, 39) > limits.allowed_download(tmp_path, 0) == limits.METADATA_BYTES


class Server(httpx.BaseTransport):
    """Answers as a malicious server would; counts what was read of it."""

    def __init__(self, status: int = 200, headers: dict[str, str] | None = None, megabytes: int = 0):
        self.answer = status, headers or {}
        self.megabytes, self.read, self.asked = megabytes, 0, []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(str(request.url))
        server = self

        class Body(httpx.SyncByteStream):
            def __iter__(self):
                for _ in range(server.megabytes):
                    server.read += 1
                    yield bytes(1 << 20)

        status, headers = self.answer
        return httpx.Response(status, headers=headers, stream=Body())


def client(server: Server) -> supernode.BoundedClient:
    made = supernode.BoundedClient("http://server")
    made._client._transport = server
    return made


def test_an_endless_answer_is_not_read_to_its_end():
    server = Server(megabytes=1000)
    with pytest.raises(ValueError, match="more than"):
        client(server).PullMessages(PullMessagesRequest())
    assert server.read == 2
    with pytest.raises(ValueError, match="more than"):
        client(server).PullObject(PullObjectRequest())
    assert server.read == 2 + 9


def test_an_answer_that_would_unpack_to_more_is_refused():
    with pytest.raises(ValueError, match="compressed"):
        client(Server(headers={"content-encoding": "gzip"})).PullMessages(PullMessagesRequest())


def test_a_server_cannot_send_a_site_to_another_address():
    server = Server(307, {"location": "http://10.0.0.1/admin"})
    with pytest.raises(httpx.HTTPStatusError):
        client(server).PullMessages(PullMessagesRequest())
    assert server.asked == ["http://server/v1/fleet/pull-messages"]


def test_an_ordinary_answer_is_read():
    assert client(Server()).PullMessages(PullMessagesRequest()) == PullMessagesResponse()


def test_the_program_is_flowers_with_the_bounds_in_place(monkeypatch, tmp_path):
    seen = SimpleNamespace()

    def flower():
        seen.client = supernode.fleet_http_connection.FleetHttpClient
        seen.receive = supernode.start_client_internal._pull_and_store_message

    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", flower)
    monkeypatch.setattr(supernode.fleet_http_connection, "FleetHttpClient", supernode.FleetHttpClient)
    monkeypatch.setattr(supernode.start_client_internal, "_pull_and_store_message", supernode._receive)
    monkeypatch.setattr("sys.argv", ["supernode", str(tmp_path), "--insecure"])
    supernode.main()
    assert seen.client is supernode.BoundedClient
    assert seen.receive is not supernode._receive


@pytest.fixture
def config_of(monkeypatch, tmp_path):
    """What the SuperNode reads of an app."""
    flowers = start_client_internal.get_fused_config_from_fab
    for place, name in ((fleet_http_connection, "FleetHttpClient"), (start_client_internal, "_pull_and_store_message")):
        monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.setattr(start_client_internal, "get_fused_config_from_fab", flowers)
    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", lambda: None)
    monkeypatch.setattr("sys.argv", ["supernode", str(tmp_path)])
    supernode.main()
    run = SimpleNamespace(override_config={"description": "what was agreed"})
    return lambda app: start_client_internal.get_fused_config_from_fab(app, run)


def test_the_options_of_a_run_are_read(config_of, tmp_path, agreed):
    write_app(tmp_path / "app", agreed)
    assert config_of(build_fab_from_disk(tmp_path / "app"))["description"] == "what was agreed"


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("says", [300 << 20, 100])
def test_an_app_that_unpacks_to_more_is_not_unpacked(config_of, kind, says):
    """Its megabyte may stand for gigabytes, and the size that it says of itself for nothing."""
    content, megabyte = io.BytesIO(), b"#" * (1 << 20)
    with zipfile.ZipFile(content, "w", kind) as archive, archive.open("pyproject.toml", "w") as file:
        for _ in range(300):
            file.write(megabyte)
    bomb = content.getvalue().replace((300 << 20).to_bytes(4, "little"), says.to_bytes(4, "little"))
    tracemalloc.start()
    try:
        assert config_of(bomb) == {}
        with pytest.raises(ForeignCode):
            check_app(bomb)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
