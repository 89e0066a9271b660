"""Image files and archives from strangers: small files that take no more than stated of memory or time, and never hang.

Each is read in a process of its own with little memory, which is ended where it hangs.
"""

import gzip
import io
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from feddure.data import sources
from feddure.data.sources import images
from feddure.data.sources.fashion import MD5
from feddure.data.sources.layouts import files_below
from feddure.errors import DataError

PROGRAM = """
import resource, sys
from feddure.data.sources.images import Rule, Unreadable, read
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[3]) * 2**20,) * 2)
try:
    print("read", read(sys.argv[1], Rule(int(sys.argv[2]), 3))[0].shape)
except Unreadable as problem:
    print(problem)
"""


def told(path, size=224, megabytes=200, seconds=60):
    """What is said of a file by a process that has little memory to read it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, path, str(size), str(megabytes)],
        capture_output=True, text=True, timeout=seconds, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def png(width, height, rows=b""):
    """A PNG of any size that it says; of its pixels there are as many as `rows` has."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


linux = pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory")


@linux
def test_a_thin_image_is_not_blown_up(tmp_path):
    """1 × 8000 pixels with the shorter side at 224 would be 401 million."""
    for name, width, height in (("tall.png", 1, 8000), ("wide.png", 8000, 1)):
        (tmp_path / name).write_bytes(png(width, height, (b"\0" + bytes(width)) * height))
        assert "read (224, 224, 3)" in told(tmp_path / name)


def test_of_a_long_image_the_middle_counts(tmp_path):
    pixels = np.zeros((4, 400, 3), dtype=np.uint8)
    pixels[:, 199:201] = 255
    Image.fromarray(pixels).save(tmp_path / "long.png")
    found, _ = images.read(tmp_path / "long.png", images.Rule(4, 3))
    assert found[:, 1:3].min() > 200
    assert found[:, 0].max() < 60


@linux
@pytest.mark.parametrize(("width", "height"), [(20_000, 20_000), (8193, 8192), (2**31 - 1, 1)])
def test_too_many_pixels_are_told_as_such_before_any_is_decoded(tmp_path, width, height):
    (tmp_path / "large.png").write_bytes(png(width, height, bytes(1000)))
    said = told(tmp_path / "large.png")
    assert "pixels" in said
    assert "67 million" in said
    assert "damaged" not in said


@linux
def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "folder.png").mkdir()
    for name in ("pipe.png", "zero.png", "folder.png"):
        assert "not a regular file" in told(tmp_path / name)
    assert "cannot be read" in told(tmp_path / "loop.png")
    assert "cannot be read" in told(tmp_path / "gone.png")


@pytest.mark.parametrize("kind", ["EPS", "PPM", "ICO", "PDF", "TGA"])
def test_other_formats_are_not_even_tried(tmp_path, monkeypatch, kind):
    """EPS is a program, which Pillow has Ghostscript run."""
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript ran"))
    Image.new("RGB", (16, 16)).save(tmp_path / "image.png", kind)
    with pytest.raises(images.Unreadable, match="not an image of PNG, JPEG"):
        images.read(tmp_path / "image.png", images.Rule(8, 3))


@pytest.mark.parametrize("kind", images.FORMATS)
def test_whole_files_are_read_and_cut_ones_refused(tmp_path, kind):
    path = tmp_path / "image"
    Image.effect_noise((50, 40), 60).convert("RGB").save(path, kind)
    assert images.read(path, images.Rule(8, 3))[0].shape == (8, 8, 3)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(images.Unreadable):
        images.read(path, images.Rule(8, 3))


def test_a_jpeg_of_very_many_passes_is_refused(tmp_path):
    content = io.BytesIO()
    Image.effect_noise((64, 64), 60).save(content, "JPEG", progressive=True)
    whole = content.getvalue()
    (tmp_path / "fine.jpg").write_bytes(whole)
    images.read(tmp_path / "fine.jpg", images.Rule(8, 3))
    last = whole.rindex(b"\xff\xda")
    (tmp_path / "slow.jpg").write_bytes(whole[:-2] + 1000 * whole[last:-2] + whole[-2:])
    with pytest.raises(images.Unreadable, match="passes"):
        images.read(tmp_path / "slow.jpg", images.Rule(8, 3))


def test_links_that_stand_for_very_many_files(tmp_path):
    """Thirty folders with two links each to the next would be a billion files."""
    for number in range(30):
        (tmp_path / str(number)).mkdir()
        for name in "ab":
            (tmp_path / str(number) / name).symlink_to(tmp_path / str(number + 1))
    with pytest.raises(DataError, match="link"):
        list(files_below(tmp_path / "0"))


def test_very_deep_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(1200):
        Path("d").mkdir()
        os.chdir("d")
    Path("image.png").touch()
    try:
        monkeypatch.chdir(tmp_path)
        assert len(list(files_below(Path("d")))) == 1
    finally:
        deep = tmp_path  # shutil's own recursion would end here
        os.chdir(deep)
        subprocess.run(["rm", "-rf", "d"], check=True)


# --- archives ------------------------------------------------------------------------------------------
def npz(path, **shapes):
    """An archive whose arrays say that they have these shapes, and hold a few bytes."""
    arrays = {"images": (4, 8, 8, 1), "labels": (4,), "test_images": (4, 8, 8, 1), "test_labels": (4,)} | shapes
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, shape in arrays.items():
            content = io.BytesIO()
            kind = "|u1" if "images" in name else "<i8"
            np.lib.format.write_array_header_1_0(content, {"descr": kind, "fortran_order": False, "shape": shape})
            archive.writestr(f"{name}.npy", content.getvalue() + bytes(1000))
    return path


def test_an_archive_that_unpacks_to_more_than_the_memory(tmp_path, monkeypatch):
    with zipfile.ZipFile(npz(tmp_path / "bomb.npz"), "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mean.npy", bytes(20_000_000))
    free = psutil.virtual_memory()._replace(available=10_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(DataError, match="GiB of memory are free"):
        sources.load(f"npz:{tmp_path / 'bomb.npz'}")


def test_an_array_that_says_it_is_huge(tmp_path):
    with pytest.raises(DataError, match=r"huge\.npz"):
        sources.load(f"npz:{npz(tmp_path / 'huge.npz', images=(10**7, 10**4, 10**4, 1))}")


def test_names_of_no_length_are_not_counted_out(tmp_path):
    """A million millions of them take no bytes, until they become a list."""
    with zipfile.ZipFile(npz(tmp_path / "names.npz"), "a") as archive:
        content = io.BytesIO()
        header = {"descr": "<U0", "fortran_order": False, "shape": (10**12,)}
        np.lib.format.write_array_header_1_0(content, header)
        archive.writestr("classes.npy", content.getvalue())
    program = PROGRAM.partition("try:")[0] + _LOAD
    assert "of no length" in _say(program, f"npz:{tmp_path / 'names.npz'}")


def test_an_idx_file_that_unfolds_to_more_than_the_memory(tmp_path):
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for name in MD5:
        with gzip.open(folder / f"{name}.gz", "wb") as file:
            file.write(struct.pack(">4I", 0x803, 4, 28, 28) if "idx3" in name else struct.pack(">2I", 0x801, 4))
            for _ in range(500):
                file.write(bytes(10**6))
    program = PROGRAM.partition("try:")[0] + _LOAD
    assert "more than 3136 bytes" in _say(program, "fashion-mnist", tmp_path)


_LOAD = """
from pathlib import Path
from feddure.data import sources
from feddure.errors import DataError
try:
    sources.load(sys.argv[1], Path(sys.argv[2]))
except DataError as problem:
    print(problem)
"""


def _say(program, name, data_dir="."):
    program = program.replace("import resource", "import feddure.data.sources, resource")  # before memory ends
    command = [sys.executable, "-c", program, name, data_dir, "300"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def test_a_pipe_is_no_archive(tmp_path):
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(DataError, match="not a regular file"):
        sources.load(f"npz:{tmp_path / 'pipe.npz'}")
