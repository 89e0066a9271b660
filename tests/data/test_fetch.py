"""Downloads from a server of our own that can be told to misbehave."""

import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feddure.data import sources
from feddure.data.sources import cifar, fashion, fetch
from feddure.data.sources.fetch import Download, File
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


def random_bytes(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


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
    monkeypatch.setitem(fetch.DOWNLOADS, "fashion-mnist", Download(files))
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


def serve_archive(server: Server, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes) -> Download:
    """Serve an archive in place of the official one."""
    official = fetch.DOWNLOADS[name]
    (file,) = official.files
    download = Download(
        (File(f"{server.address}/{file.path}", md5(content), file.path),), official.folder, official.members
    )
    monkeypatch.setitem(fetch.DOWNLOADS, name, download)
    server.files[file.path] = content
    return download


def cifar_members() -> dict[str, bytes]:
    return {f"{cifar.FOLDER}/{name}": random_bytes(50, 1) for name in (*cifar.BATCHES, "batches.meta")}


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_files_arrive_and_can_be_loaded(tmp_path: Path, fashion_files: Server) -> None:
    place = fetch.fetch("fashion-mnist", tmp_path, fashion_files.address)
    assert place == tmp_path / "FashionMNIST" / "raw"
    assert names(tmp_path) == sorted(f"FashionMNIST/raw/{name}.gz" for name in fashion.FILES)
    assert len(sources.load("fashion-mnist", tmp_path).images) == 30


def test_what_is_there_is_not_fetched_again(tmp_path: Path, fashion_files: Server) -> None:
    fetch.fetch("fashion-mnist", tmp_path, fashion_files.address)
    asked = len(fashion_files.asked)
    fetch.fetch("fashion-mnist", tmp_path, fashion_files.address)
    assert len(fashion_files.asked) == asked
    (tmp_path / "FashionMNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()
    fetch.fetch("fashion-mnist", tmp_path, fashion_files.address)
    assert [name for name, _ in fashion_files.asked[asked:]] == ["t10k-labels-idx1-ubyte.gz"]


def test_a_cut_connection_is_resumed_where_it_broke(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = archive(cifar_members())
    download = serve_archive(server, monkeypatch, "cifar10", content)
    server.cuts = [100, 57]
    fetch.fetch("cifar10", tmp_path)
    name = download.files[0].path
    assert server.asked == [(name, None), (name, "bytes=100-"), (name, "bytes=157-")]
    assert server.sent == len(content)  # no byte came twice


def test_a_later_call_resumes_what_an_earlier_one_left(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = archive(cifar_members())
    download = serve_archive(server, monkeypatch, "cifar10", content)
    server.cuts = [100, 0]
    with pytest.raises(DataError, match="100 bytes are kept for the next attempt"):
        fetch.fetch("cifar10", tmp_path)
    assert names(tmp_path) == [f"{cifar.ARCHIVE}.part"]
    fetch.fetch("cifar10", tmp_path)
    assert server.asked[-1] == (download.files[0].path, "bytes=100-")
    assert server.sent == len(content)


def test_a_server_without_ranges_starts_over(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    content = archive(cifar_members())
    serve_archive(server, monkeypatch, "cifar10", content)
    server.cuts, server.ranges = [100], False
    fetch.fetch("cifar10", tmp_path)
    assert server.sent == 100 + len(content)


@pytest.mark.parametrize("surplus", [b"", b"x"])
def test_a_part_that_is_complete_or_too_long_is_judged_by_its_sum(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, surplus: bytes
) -> None:
    content = archive(cifar_members())
    serve_archive(server, monkeypatch, "cifar10", content)
    (tmp_path / f"{cifar.ARCHIVE}.part").write_bytes(content + surplus)
    if surplus:
        with pytest.raises(DataError, match="MD5"):
            fetch.fetch("cifar10", tmp_path)
        assert names(tmp_path) == []
    assert fetch.fetch("cifar10", tmp_path) == tmp_path / cifar.FOLDER


def test_a_wrong_checksum_leaves_nothing_behind(tmp_path: Path, fashion_files: Server) -> None:
    fashion_files.files["train-labels-idx1-ubyte.gz"] += b"!"
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz: .* MD5 sum .* expected"):
        fetch.fetch("fashion-mnist", tmp_path, fashion_files.address)
    assert names(tmp_path) == ["FashionMNIST/raw/train-images-idx3-ubyte.gz"]  # the one that was right


def test_without_a_server_it_says_where_to_put_which_files(tmp_path: Path, fashion_files: Server) -> None:
    with pytest.raises(DataError, match="could not be downloaded") as caught:
        fetch.fetch("fashion-mnist", tmp_path)  # the official address of the test answers to nobody
    for file in fetch.DOWNLOADS["fashion-mnist"].files:
        assert f"{tmp_path / file.path}  from {file.url}  (MD5 {file.md5})" in str(caught.value)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("status", "message"), [(404, "HTTP 404"), (503, "HTTP 503"), (HANG_UP, "closed connection")])
def test_an_answer_that_is_no_file_is_an_error(
    tmp_path: Path, fashion_files: Server, status: int, message: str
) -> None:
    fashion_files.status = status
    with pytest.raises(DataError, match=message):
        fetch.fetch("fashion-mnist", tmp_path, fashion_files.address)
    assert names(tmp_path) == []


def test_an_archive_is_unpacked_and_removed(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    members = cifar_members()
    serve_archive(server, monkeypatch, "cifar10", archive({**members, f"{cifar.FOLDER}/readme.html": b"x"}))
    assert fetch.fetch("cifar10", tmp_path) == tmp_path / cifar.FOLDER
    assert names(tmp_path) == sorted(members)
    assert (tmp_path / cifar.FOLDER / "test_batch").read_bytes() == members[f"{cifar.FOLDER}/test_batch"]


@pytest.mark.parametrize("prefix", ["", "./", "CINIC-10/"])
def test_the_tree_of_cinic_is_unpacked_with_and_without_a_top_folder(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    tree = {f"{split}/bird/cifar10-{split}-1.png": b"x" for split in ("train", "valid", "test")}
    content = archive({prefix + name: body for name, body in {**tree, "README.md": b"x"}.items()})
    serve_archive(server, monkeypatch, "cinic10", content)
    assert fetch.fetch("cinic10", tmp_path) == tmp_path / "CINIC-10"
    assert names(tmp_path / "CINIC-10") == sorted(tree)


def test_an_archive_cannot_write_elsewhere(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tarfile.TarInfo(f"{cifar.FOLDER}/test_batch")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    members = {
        f"{cifar.FOLDER}/../../escaped": b"x",
        "/absolute": b"x",
        "../escaped": b"x",
        **cifar_members(),
    }
    del members[f"{cifar.FOLDER}/test_batch"]
    serve_archive(server, monkeypatch, "cifar10", archive(members, (link,)))
    data_dir = tmp_path / "inner" / "data"
    with pytest.raises(DataError, match="not complete"):
        fetch.fetch("cifar10", data_dir)
    assert [name for name in names(tmp_path) if not name.startswith(f"inner/data/{cifar.FOLDER}/")] == []
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


def test_an_archive_that_the_user_put_there_is_unpacked_and_kept(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = archive(cifar_members())
    serve_archive(server, monkeypatch, "cifar10", content)
    (tmp_path / cifar.ARCHIVE).write_bytes(content)
    assert fetch.fetch("cifar10", tmp_path) == tmp_path / cifar.FOLDER
    assert server.asked == []
    assert (tmp_path / cifar.ARCHIVE).read_bytes() == content


def test_a_wrong_file_that_the_user_put_there_is_named_and_kept(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_archive(server, monkeypatch, "cifar10", archive(cifar_members()))
    (tmp_path / cifar.ARCHIVE).write_bytes(b"mine")
    with pytest.raises(DataError, match=r"cifar-10-python\.tar\.gz: has the MD5 sum .* move it away"):
        fetch.fetch("cifar10", tmp_path)
    assert (tmp_path / cifar.ARCHIVE).read_bytes() == b"mine"


def test_an_archive_that_is_none_leaves_no_folder(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_archive(server, monkeypatch, "cifar10", archive(cifar_members())[:-20])
    with pytest.raises(DataError, match="not a whole archive"):
        fetch.fetch("cifar10", tmp_path)
    assert names(tmp_path) == [cifar.ARCHIVE]
    assert [path.name for path in tmp_path.iterdir()] == [cifar.ARCHIVE]


def test_an_incomplete_folder_is_left_alone(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_archive(server, monkeypatch, "cifar10", archive(cifar_members()))
    (tmp_path / cifar.FOLDER).mkdir()
    (tmp_path / cifar.FOLDER / "test_batch").write_bytes(b"mine")
    with pytest.raises(DataError, match="not complete; move it away"):
        fetch.fetch("cifar10", tmp_path)
    assert server.asked == []
    assert (tmp_path / cifar.FOLDER / "test_batch").read_bytes() == b"mine"


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, fashion_files: Server) -> None:
    (tmp_path / "FashionMNIST").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="cannot be written"):
        fetch.fetch("fashion-mnist", tmp_path, fashion_files.address)


@pytest.mark.parametrize(
    ("name", "mirror", "message"),
    [
        ("fashion-mini", None, "cifar10, fashion-mnist, cinic10"),
        ("cifar", None, "did you mean 'cifar10'"),
        ("cifar10", "example.org/sets", "begins with http"),
        ("cifar10", "file:///sets", "begins with http"),
        ("cifar10", "http://[bad", "could not be downloaded"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, name: str, mirror: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fetch.fetch(name, tmp_path, mirror)
