"""CIFAR's pickled batches, read by an unpickler that can run no code.

A pickle is a program: it may name any function of any module and call it. This reader answers every name
that an array's pickle contains with a stand-in of its own that only writes down what it is given, and
refuses every other name, so that not even numpy's own functions are called.
"""

import pickle
import struct
from collections.abc import Callable
from typing import Any, BinaryIO, ClassVar

import numpy as np

from feddure.errors import DataError


class _StandIn:
    """Takes the place of a function or class named in a pickle."""

    __slots__ = ("answer",)

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.answer = answer

    def __call__(self, *arguments: Any) -> Any:
        return self.answer(*arguments)

    def __setstate__(self, state: Any) -> None:
        # Without this method a pickle could rewrite the stand-in's attributes.
        raise pickle.UnpicklingError("changes a function")


class _Type:
    """A dtype: its code, such as u1; its state (byte order and so on) says nothing about single bytes."""

    __slots__ = ("code",)

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """An array: its shape, type, order and raw bytes."""

    __slots__ = ("fortran", "raw", "shape", "type")

    def __setstate__(self, state: Any) -> None:
        _version, self.shape, self.type, self.fortran, self.raw = state


def _from_buffer(raw: Any, kind: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, kind, order != "C", raw))
    return array


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into pickles of protocol 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encodes as {encoding!r}")
    return text.encode("latin1")


_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")
_ANSWERS: dict[tuple[str, str], Callable[..., Any]] = {
    **{(module, "_reconstruct"): lambda *_: _Array() for module in _MULTIARRAY},
    **{(module, "_frombuffer"): _from_buffer for module in _NUMERIC},
    ("numpy", "ndarray"): lambda *_: _Array(),
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
}


# The Python class behind pickle.Unpickler: the C one keeps a second copy of the 30 MB of pixels.
class _Reader(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ANSWERS:
            raise pickle.UnpicklingError(f"names {module}.{name}, which no CIFAR batch needs; it was not run")
        return _StandIn(_ANSWERS[module, name])

    def _load_bytes(self: Any) -> None:
        # pickle's own function sets aside whatever length a damaged file claims before it reads.
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(self.read(length))

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.BYTEARRAY8[0]: _load_bytes,
    }


def read_batch(file: BinaryIO, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The pixels [images, 3072] and labels [images] of a batch; `where` names the file in errors."""
    try:
        batch = _Reader(file, encoding="bytes").load()
    except Exception as error:  # a damaged pickle fails in every imaginable way, and each means the same
        raise DataError(
            f"{where}: not a readable CIFAR batch ({type(error).__name__}: {error}); "
            "the file is damaged or is something else: delete it and fetch it again"
        ) from None
    try:
        pixels, labels = _fields(batch)
        if len(pixels) != len(labels) or len(pixels) == 0:
            raise ValueError(f"{len(pixels)} images and {len(labels)} labels, expected as many of both")
        return pixels, labels
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None


def _fields(batch: Any) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(batch, dict):
        raise ValueError(f"holds a {type(batch).__name__}, expected a dictionary with data and labels")
    named = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    for key in ("data", "labels"):
        if key not in named:
            raise ValueError(f"has no '{key}'; expected a batch of CIFAR-10 (python version)")
    return _pixels(named["data"]), _labels(named["labels"])


def _pixels(array: Any) -> np.ndarray:
    try:
        kind, shape, raw, fortran = array.type.code, tuple(array.shape), array.raw, array.fortran
    except (AttributeError, TypeError):
        raise ValueError("'data' is not a complete array") from None
    if kind != "u1" or fortran or len(shape) != 2 or shape[1] != 3072 or not isinstance(raw, bytes):
        raise ValueError(f"'data' is {kind} {list(shape)}, expected bytes (u1) in the shape [images, 3072]")
    if shape[0] * shape[1] != len(raw):
        raise ValueError(f"'data' has {len(raw)} bytes, expected {shape[0]} images of 3072")
    return np.frombuffer(raw, dtype=np.uint8).reshape(shape)


def _labels(labels: Any) -> np.ndarray:
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ValueError("'labels' is not a list of whole numbers")
    for position, label in enumerate(labels):
        if not 0 <= label <= 9:
            raise ValueError(f"label {position} is {label}, expected 0 to 9")
    return np.array(labels, dtype=np.int64)
