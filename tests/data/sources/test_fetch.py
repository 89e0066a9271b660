"""Downloads from a server of our own that can be told to misbehave."""

import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feddure.data import sources
from feddure.data.sources import fashion, fetch
from feddure.data.sources.base import Download, File
from feddure.data.sources.cifar import CIFAR10
from feddure.errors import DataError

HANG_UP = 0


class Server(ThreadingHTTPServer):
    """Serves `files`; the next `cuts` answers end early, after so many bytes each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []
        self.ranges = True
        self.status = 200
        self.asked: list[tuple[str, str | None]] = []
        self.sent = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/sets"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[-1]
        wanted = self.headers.get("Range")
        self.server.asked.append((name, wanted))
        if self.server.status == HANG_UP:
            self.close_connection = True
            return
        if self.server.status != 200 or name not in self.server.files:
            self.send_error(404 if self.server.status == 200 else self.server.status)
            return
        body = self.server.files[name]
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.server.ranges else 0
        if start >= len(body) > 0:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        rest = body[start:]
        if self.server.cuts:
            rest = rest[: self.server.cuts.pop(0)]
        self.server.sent += len(rest)  # first: who has read the rest may look at once
        self.wfile.write(rest)
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


@pytest.fixture
def fashion_files(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Four small files in place of Fashion-MNIST's."""
    for number, name in enumerate(fashion.FILES):
        array = np.random.default_rng(number).integers(0, 10, (30, 28, 28)[: 3 if "images" in name else 1])
        server.files[f"{name}.gz"] = idx(array.astype(np.uint8))
    files = tuple(
        File(f"http://127.0.0.1:9/official/{name}", md5(content), f"FashionMNIST/raw/{name}")
        for name, content in server.files.items()
    )
    source = replace(fashion.SOURCE, download=Download(files))
    monkeypatch.setitem(sources._SOURCES, "fashion-mnist", source)
    return server


def archive(members: dict[str, bytes], extra: tuple[tarfile.TarInfo, ...] = ()) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for info in extra:
            tar.addfile(info)
    return out.getvalue()


FILES = (*CIFAR10.batches, "batches.meta")
MEMBERS = {f"{CIFAR10.folder}/{name}": np.random.default_rng(1).bytes(50) for name in FILES}
ARCHIVE = archive({**MEMBERS, f"{CIFAR10.folder}/readme.html": b"x"})


@pytest.fixture
def serve(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    """Serve an archive in place of the official one."""

    def place(content: bytes = ARCHIVE, name: str = "cifar10") -> Server:
        source = sources.find_source(name)
        (file,) = source.download.files
        there = File(f"{server.address}/{file.path}", md5(content), file.path)
        monkeypatch.setitem(sources._SOURCES, name, replace(source, download=replace(source.download, files=(there,))))
        server.files[file.path] = content
        return server

    return place


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_files_arrive_can_be_loaded_and_are_not_fetched_again(tmp_path, fashion_files):
    for _ in range(2):
        place = fetch.fetch("fashion-mnist", tmp_path, fashion_files.address)
        assert place == tmp_path / "FashionMNIST" / "raw"
        assert names(place) == sorted(f"{name}.gz" for name in fashion.FILES)
        assert len(fashion_files.asked) == 4
    assert len(sources.load("fashion-mnist", tmp_path).images) == 30
    (place / "t10k-labels-idx1-ubyte.gz").unlink()
    fetch.fetch("fashion-mnist", tmp_path, fashion_files.address)
    assert [name for name, _ in fashion_files.asked[4:]] == ["t10k-labels-idx1-ubyte.gz"]


def test_a_cut_connection_is_resumed_where_it_broke(tmp_path, serve):
    server = serve()
    server.cuts = [100, 57]
    fetch.fetch("cifar10", tmp_path)
    assert server.asked == [(CIFAR10.archive, wanted) for wanted in (None, "bytes=100-", "bytes=157-")]
    assert server.sent == len(ARCHIVE)  # no byte came twice


def test_a_later_call_resumes_what_an_earlier_one_left(tmp_path, serve):
    server = serve()
    server.cuts = [100, 0]
    with pytest.raises(DataError, match="100 bytes are kept for the next attempt"):
        fetch.fetch("cifar10", tmp_path)
    assert names(tmp_path) == [f"{CIFAR10.archive}.part"]
    fetch.fetch("cifar10", tmp_path)
    assert server.asked[-1] == (CIFAR10.archive, "bytes=100-")
    assert server.sent == len(ARCHIVE)


def test_a_server_without_ranges_starts_over(tmp_path, serve):
    server = serve()
    server.cuts, server.ranges = [100], False
    fetch.fetch("cifar10", tmp_path)
    assert server.sent == 100 + len(ARCHIVE)


@pytest.mark.parametrize("surplus", [b"", b"x"])
def test_a_part_that_is_complete_or_too_long_is_judged_by_its_sum(tmp_path, serve, surplus):
    serve()
    (tmp_path / f"{CIFAR10.archive}.part").write_bytes(ARCHIVE + surplus)
    if surplus:
        with pytest.raises(DataError, match="MD5"):
            fetch.fetch("cifar10", tmp_path)
        assert names(tmp_path) == []
    assert fetch.fetch("cifar10", tmp_path) == tmp_path / CIFAR10.folder


def test_a_wrong_checksum_leaves_nothing_behind(tmp_path, fashion_files):
    fashion_files.files["train-labels-idx1-ubyte.gz"] += b"!"
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz: .* MD5 sum .* expected"):
        fetch.fetch("fashion-mnist", tmp_path, fashion_files.address)
    assert names(tmp_path) == ["FashionMNIST/raw/train-images-idx3-ubyte.gz"]  # the one that was right


def test_without_a_server_it_says_where_to_put_which_files(tmp_path, fashion_files):
    with pytest.raises(DataError, match="could not be downloaded") as caught:
        fetch.fetch("fashion-mnist", tmp_path)  # the official address of the test answers to nobody
    for file in sources.find_source("fashion-mnist").download.files:
        assert all(part in str(caught.value) for part in (str(tmp_path / file.path), file.url, file.md5))
    assert names(tmp_path) == []


@pytest.mark.parametrize(("status", "message"), [(404, "HTTP 404"), (503, "HTTP 503"), (HANG_UP, "closed connection")])
def test_an_answer_that_is_no_file_is_an_error(tmp_path, fashion_files, status, message):
    fashion_files.status = status
    with pytest.raises(DataError, match=message):
        fetch.fetch("fashion-mnist", tmp_path, fashion_files.address)
    assert names(tmp_path) == []


def test_an_archive_is_unpacked_and_removed(tmp_path, serve):
    serve()
    assert fetch.fetch("cifar10", tmp_path) == tmp_path / CIFAR10.folder
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == MEMBERS


@pytest.mark.parametrize("prefix", ["", "./", "CINIC-10/"])
def test_the_tree_of_cinic_is_unpacked_with_and_without_a_top_folder(tmp_path, serve, prefix):
    tree = {f"{split}/bird/cifar10-{split}-1.png": b"x" for split in ("train", "valid", "test")}
    serve(archive({prefix + name: body for name, body in {**tree, "README.md": b"x"}.items()}), "cinic10")
    assert fetch.fetch("cinic10", tmp_path) == tmp_path / "CINIC-10"
    assert names(tmp_path / "CINIC-10") == sorted(tree)


def test_an_archive_cannot_write_elsewhere(tmp_path, serve):
    link = tarfile.TarInfo(f"{CIFAR10.folder}/test_batch")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    escapes = dict.fromkeys((f"{CIFAR10.folder}/../../escaped", "/absolute", "../escaped"), b"x")
    serve(archive({name: body for name, body in {**escapes, **MEMBERS}.items() if name != link.name}, (link,)))
    data_dir = tmp_path / "inner" / "data"
    with pytest.raises(DataError, match="not complete"):
        fetch.fetch("cifar10", data_dir)
    assert [name for name in names(tmp_path) if not name.startswith(f"inner/data/{CIFAR10.folder}/")] == []
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


def test_an_archive_that_is_none_leaves_no_folder(tmp_path, serve):
    serve(ARCHIVE[:-20])
    with pytest.raises(DataError, match="not a whole archive"):
        fetch.fetch("cifar10", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [CIFAR10.archive]


def test_what_the_user_put_there_is_kept(tmp_path, serve):
    server = serve()
    own = tmp_path / CIFAR10.archive
    own.write_bytes(b"mine")
    with pytest.raises(DataError, match=r"cifar-10-python\.tar\.gz: has the MD5 sum .* move it away"):
        fetch.fetch("cifar10", tmp_path)
    assert own.read_bytes() == b"mine"
    own.write_bytes(ARCHIVE)
    assert fetch.fetch("cifar10", tmp_path) == tmp_path / CIFAR10.folder
    assert own.read_bytes() == ARCHIVE
    (tmp_path / CIFAR10.folder / "data_batch_1").unlink()
    with pytest.raises(DataError, match="not complete; move it away"):
        fetch.fetch("cifar10", tmp_path)
    assert (tmp_path / CIFAR10.folder / "test_batch").exists()
    assert server.asked == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, fashion_files):
    (tmp_path / "FashionMNIST").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="cannot be written"):
        fetch.fetch("fashion-mnist", tmp_path, fashion_files.address)


@pytest.mark.parametrize(
    ("name", "mirror", "message"),
    [
        ("fashion-mini", None, "cifar10, .*fashion-mnist, cinic10"),
        ("cifar", None, "did you mean 'cifar10'"),
        ("cifar10", "example.org/sets", "begins with http"),
        ("cifar10", "file:///sets", "begins with http"),
        ("cifar10", "http://[bad", "could not be downloaded"),
    ],
)
def test_mistakes_are_explained(tmp_path, name, mirror, message):
    with pytest.raises(DataError, match=message):
        fetch.fetch(name, tmp_path, mirror)
