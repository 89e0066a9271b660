"""CIFAR-10 and CIFAR-100 in their real formats, whole, damaged and malicious."""

import hashlib
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddure.data import sources
from feddure.data.sources.cifar import CIFAR10, CIFAR100
from feddure.errors import DataError

PER_BATCH = 4


def pixels(number: int, count: int = PER_BATCH) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (count, 3072), dtype=np.uint8)


def labels(number: int, count: int = PER_BATCH) -> list[int]:
    return [(3 * number + position) % 10 for position in range(count)]


def python2(data: np.ndarray, targets: list[int]) -> bytes:
    """The opcodes that Python 2 wrote: byte strings (U, T), numpy's old module names, protocol 2."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    rows, columns = data.shape
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|")
    kind += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", columns) + b"\x86" + kind
    state += b"\x89T" + struct.pack("<I", data.size) + data.tobytes() + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([target]) for target in targets) + b"e"
    return b"\x80\x02}(" + text(b"labels") + numbers + text(b"data") + array + state + b"u."


def python3(protocol: int) -> Callable[[Any, Any], bytes]:
    def write(data: Any, targets: Any) -> bytes:
        return pickle.dumps({b"data": data, b"labels": targets, b"filenames": [b"a.png"]}, protocol)

    return write


def python3_text_keys(data: Any, targets: Any) -> bytes:
    return pickle.dumps({"data": data, "labels": targets})


STYLES = {
    "python2": python2,
    "protocol2": python3(2),
    "protocol4": python3(4),
    "protocol5": python3(5),
    "text": python3_text_keys,
}


def write_cifar(folder: Path, style: str = "python2") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(CIFAR10.batches):
        (folder / name).write_bytes(STYLES[style](pixels(number), labels(number)))


def write_archive(data_dir: Path, order: tuple[str, ...] = tuple(reversed(CIFAR10.batches))) -> Path:
    folder = data_dir / "made" / CIFAR10.folder
    write_cifar(folder)
    archive = data_dir / CIFAR10.archive
    with tarfile.open(archive, "w:gz") as tar:
        for name in order:
            tar.add(folder / name, f"{CIFAR10.folder}/{name}")
    return archive


def assert_is_cifar(data_dir: Path) -> None:
    dataset = sources.load("cifar10", data_dir)
    flat = np.concatenate([pixels(number) for number in range(6)])
    expected = np.stack([image.reshape(3, 32, 32).transpose(1, 2, 0) for image in flat])
    train = 5 * PER_BATCH
    np.testing.assert_array_equal(dataset.images, expected[:train])
    np.testing.assert_array_equal(dataset.test_images, expected[train:])
    np.testing.assert_array_equal(dataset.labels, np.concatenate([labels(number) for number in range(5)]))
    np.testing.assert_array_equal(dataset.test_labels, labels(5))
    assert dataset.images.flags.c_contiguous
    assert dataset.images.flags.writeable
    assert dataset.classes[3] == "cat"


@pytest.mark.parametrize(
    ("style", "place"),
    [*((style, CIFAR10.folder) for style in STYLES), ("python2", f"cifar10/{CIFAR10.folder}"), ("python2", ".")],
)
def test_batches_of_every_python_are_read_where_people_put_them(tmp_path, style, place):
    write_cifar(tmp_path / place, style)
    assert CIFAR10.find(tmp_path) == tmp_path / place
    assert_is_cifar(tmp_path)


def test_the_archive_is_read_whatever_the_order_of_its_members(tmp_path):
    write_archive(tmp_path)
    assert_is_cifar(tmp_path)


def test_a_missing_batch_is_named(tmp_path):
    write_cifar(tmp_path / CIFAR10.folder)
    (tmp_path / CIFAR10.folder / "data_batch_3").unlink()
    with pytest.raises(DataError, match="data_batch_3 missing"):
        sources.load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable CIFAR batch"),
        (b"no pickle at all", "not a readable CIFAR batch"),
        (python2(pixels(1), labels(1))[:-2000], "not a readable CIFAR batch"),
        (b"\x80\x05\x96" + struct.pack("<Q", 2**62), "not a readable CIFAR batch"),
        (pickle.dumps([1, 2]), "a list, expected a dictionary"),
        (pickle.dumps({b"labels": [1]}), "'data' is NoneType, expected bytes"),
        (pickle.dumps({b"data": b"x", b"labels": [1]}), "'data' is bytes, expected bytes"),
        (python3(2)(pixels(1).astype(np.float32), labels(1)), "f4.*expected bytes"),
        (python3(2)(pixels(1)[:, :3071].copy(), labels(1)), r"\[4, 3071\], expected"),
        (python2(pixels(1), labels(1)[:-1]), "not a list of 4 numbers"),
        (python2(pixels(1), [*labels(1)[:-1], 10]), "label 3 is 10, expected 0 to 9"),
        (python3(2)(pixels(1), [0.5] * 4), "label 0 is 0.5, expected 0 to 9"),
        (python3(2)(pixels(1), "0123"), "not a list of 4 numbers"),
        (python3(4)(pixels(1)[:0], []), "not a list of 0 numbers"),
    ],
)
def test_a_bad_batch_is_one_error_that_names_the_file(tmp_path, content, message):
    write_cifar(tmp_path / CIFAR10.folder)
    bad = tmp_path / CIFAR10.folder / "data_batch_2"
    bad.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        sources.load("cifar10", tmp_path)
    assert str(bad) in str(caught.value)


class Attack:
    """Pickles to a call of `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("function", [os.system, os.mkdir, eval, __import__], ids=lambda function: function.__name__)
def test_a_pickle_that_calls_a_function_runs_nothing(tmp_path, function, protocol):
    marker = tmp_path / "marker"
    argument = {os.system: f"mkdir {marker}", eval: f"__import__('os').mkdir({str(marker)!r})"}.get(
        function, str(marker)
    )
    write_cifar(tmp_path / CIFAR10.folder)
    bad = tmp_path / CIFAR10.folder / "data_batch_1"
    bad.write_bytes(pickle.dumps({"data": Attack(function, argument), "labels": []}, protocol))
    with pytest.raises(DataError, match="it was not run") as caught:
        sources.load("cifar10", tmp_path)
    assert str(bad) in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cnumpy.core.multiarray\nscalar\n.",
        b"cnumpy\nfromfile\n.",
        b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x06\x00\x00\x00rot_13tR.",
        b"c_codecs\nlookup\n.",
        b"cfeddure.data.sources.cifar\nload\n.",
        b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8K\x00K\x01tR.",  # a type whose bytes would be taken for pointers
    ],
)
def test_names_near_the_permitted_ones_are_refused(program):
    with pytest.raises(DataError, match="not a readable CIFAR batch"):
        CIFAR10.read_batch(io.BytesIO(b"\x80\x02" + program), "a file")


def test_a_pickle_cannot_alter_the_type_of_bytes():
    kind = b"cnumpy\ndtype\n(X\x02\x00\x00\x00u1K\x00K\x01tR"
    state = b"(K\x03X\x01\x00\x00\x00|NNNK\x08K\x08K?tb"  # of eight bytes each, and objects
    with pytest.raises(DataError, match="expected a dictionary"):
        CIFAR10.read_batch(io.BytesIO(b"\x80\x02" + kind + state + b"."), "a file")
    assert np.dtype("u1").itemsize == 1
    assert not np.dtype("u1").hasobject


def test_a_pickle_cannot_share_memory_and_then_free_it():
    """The rest of the array would be read as images: whatever the process has put there since."""

    def text(word):
        return b"X" + struct.pack("<I", len(word)) + word

    def state(size):
        kind = b"cnumpy\ndtype\n" + text(b"u1") + b"\x85R"
        raw = b"c_codecs\nencode\n" + text(b"A" * size) + text(b"latin1") + b"\x86R"
        return b"(J" + struct.pack("<i", 1) + b"J" + struct.pack("<i", size) + b"\x85" + kind + b"\x89" + raw + b"tb"

    owner = b"cnumpy.core.multiarray\n_reconstruct\n)Rq\x01" + state(3072) + b"0"
    shared = b"cnumpy.core.numeric\n_frombuffer\n(h\x01" + text(b"u1") + b"(K\x01J" + struct.pack("<i", 3072)
    shared += b"t" + text(b"C") + b"tRq\x020"
    batch = b"}(" + text(b"data") + b"h\x02" + text(b"labels") + b"](K\x00eu."
    with pytest.raises(DataError, match="expected bytes"):
        CIFAR10.read_batch(io.BytesIO(b"\x80\x02" + owner + shared + b"h\x01" + state(4) + b"0" + batch), "a file")


def test_a_label_that_would_be_written_out_without_end():
    """Nine lists of ten, each in the one before, are a thousand million in words."""
    label = []
    for _ in range(5):
        label = [label] * 10
    for wrong, said in ((label, "a list"), (10**6000, "a int"), (True, "a bool"), (11, "11")):
        content = pickle.dumps({"data": pixels(0, 1)[:1], "labels": [wrong]}, 2)
        with pytest.raises(DataError, match=f"label 0 is {said}, expected 0 to 9"):
            CIFAR10.read_batch(io.BytesIO(content), "a file")


@pytest.mark.parametrize("style", ["python2", "protocol2", "protocol5"])
@settings(deadline=None, max_examples=60)
@given(where=st.floats(0, 1), value=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_batch_is_read_or_refused_but_never_crashes(style, where, value, cut):
    whole = bytearray(STYLES[style](pixels(0, 1), labels(0, 1)))
    # Most bytes are pixels, where any value is fine: aim at the few around them.
    outside = [*range(400), *range(max(400, len(whole) - 200), len(whole))]
    position = outside[int(where * (len(outside) - 1))]
    whole[position] = value
    content = bytes(whole[:position] if cut else whole)
    try:
        images, targets = CIFAR10.read_batch(io.BytesIO(content), "a file")
    except DataError:
        return
    assert images.shape == (len(targets), 32, 32, 3)


def cifar100_file(number: int, fine: list[int]) -> bytes:
    content = {"filenames": ["a.png"], "batch_label": "b", "fine_labels": fine, "coarse_labels": [19] * len(fine)}
    return pickle.dumps({**content, "data": pixels(number)}, 2)


@pytest.mark.parametrize("packed", [False, True])
def test_cifar_100_has_its_fine_classes(tmp_path, packed):
    folder = tmp_path / CIFAR100.folder
    folder.mkdir()
    files = {"train": cifar100_file(0, [0, 99, 19, 29]), "test": cifar100_file(1, [1, 2, 3, 4]), "meta": b"x"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if packed:
        with tarfile.open(tmp_path / CIFAR100.archive, "w:gz") as tar:
            tar.add(folder, CIFAR100.folder)
        (folder / "train").unlink()
    dataset = sources.load("cifar100", tmp_path)
    np.testing.assert_array_equal(dataset.images, pixels(0).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    assert [dataset.classes[label] for label in dataset.labels] == ["apple", "worm", "cattle", "dinosaur"]
    assert dataset.test_labels.tolist() == [1, 2, 3, 4]
    assert len(set(dataset.classes)) == 100
    assert list(dataset.classes) == sorted(dataset.classes)
    deviations = sources.find_source("cifar100").deviations(dataset)
    assert deviations[0].startswith("train images found of apple: 1 of 500")
    assert deviations[0].endswith("and 90 more classes")


def test_a_label_beyond_cifar_100s_classes_is_refused(tmp_path):
    (tmp_path / CIFAR100.folder).mkdir()
    for name in CIFAR100.batches:
        (tmp_path / CIFAR100.folder / name).write_bytes(cifar100_file(0, [0, 1, 2, 100]))
    with pytest.raises(DataError, match="label 3 is 100, expected 0 to 99"):
        sources.load("cifar100", tmp_path)


def test_files_that_happen_to_be_called_train_and_test_are_not_taken_for_cifar_100(tmp_path):
    for name in CIFAR100.batches:
        (tmp_path / name).write_bytes(cifar100_file(0, [0, 1, 2, 3]))
    assert CIFAR100.find(tmp_path) is None


def test_a_damaged_archive_is_one_error(tmp_path):
    write_archive(tmp_path, CIFAR10.batches[:-1])
    with pytest.raises(DataError, match="test_batch not in the archive"):
        sources.load("cifar10", tmp_path)
    archive = write_archive(tmp_path)
    for content in (archive.read_bytes()[:-3000], b"not an archive"):
        archive.write_bytes(content)
        with pytest.raises(DataError, match=CIFAR10.archive):
            sources.load("cifar10", tmp_path)


@pytest.mark.skipif("FEDDURE_DATA" not in os.environ, reason="FEDDURE_DATA does not name the real data sets")
@pytest.mark.parametrize("name", ["cifar10", "fashion-mnist"])
def test_the_real_arrays_have_the_official_checksums(name):
    source = sources.find_source(name)
    if source.find(sources.default_data_dir()) is None:
        pytest.skip(f"{name} is not there")
    dataset = sources.load(name)
    assert (len(dataset.images), len(dataset.test_images)) == (source.train, source.test)
    for field, official in source.sha256.items():
        array = np.ascontiguousarray(getattr(dataset, field).astype(np.uint8))
        assert hashlib.sha256(array.tobytes()).hexdigest() == official
