"""Every random decision is a pure function of who decides what, when.

A decision is keyed by (seed, purpose, round, client, ...). The key is hashed and drives Philox, a
counter-based generator whose raw 64-bit output is the same on every machine, so results depend neither
on the order in which clients are trained nor on the device they are trained on. Only raw bits are
used here: numpy promises those for ever, unlike the streams of its high-level samplers.
"""

import hashlib

import numpy as np

Key = int | str


def _philox(key: tuple[Key, ...]) -> np.random.Philox:
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64))


def bits(size: int, *key: Key) -> np.ndarray:
    """`size` uniform 64-bit integers for this key."""
    return _philox(key).random_raw(size)


def integers(bound: int | np.ndarray, size: int, *key: Key) -> np.ndarray:
    """`size` integers in [0, bound) for this key, as int64; `bound` may be an array that broadcasts."""
    high = bits(size, *key) >> np.uint64(32)
    return ((high * np.asarray(bound, dtype=np.uint64)) >> np.uint64(32)).astype(np.int64)


def permutation(n: int, *key: Key) -> np.ndarray:
    """A uniform permutation of 0..n-1 for this key."""
    return np.argsort(bits(n, *key), kind="stable")


def sample(n: int, size: int, *key: Key) -> np.ndarray:
    """`size` different numbers of 0..n-1 for this key, in drawing order."""
    return permutation(n, *key)[:size]


def legacy(*key: Key) -> np.random.RandomState:
    """numpy's frozen sampler for this key, for the Dirichlet shares of partitions."""
    return np.random.RandomState(_philox(key))
