"""How images are dealt to clients: which carry a label, who gets how many of each class, and the repair.

Everything here is a pure function of its arguments and the seed. The shuffle of a class does not depend on
how many labels are asked for, so that the labels of a smaller share are among those of a larger one.
"""

import heapq
from collections import Counter
from dataclasses import dataclass

import numpy as np

from feddure import config, rng
from feddure.data.dataset import UNKNOWN, Dataset
from feddure.errors import ConfigError

LABELS_PER_CLASS = 5
"""Labels per class and client where neither the options nor the data set say how many."""

MINIMUM = 10
"""No client is brought above this many labelled or unlabelled images by the repair."""

FEDMATCH_MIX = (50, 15, 3, 3, 3, 2, 3, 3, 3, 15)
"""Class mix of FedMatch's client type 0 in hundredths; type k is this rotated by k."""

TRIES = 1000
"""Draws for a pair of clients before `pairs` gives up."""

# Beyond this the shares are even to far below one image, and larger values would overflow.
_LARGEST_GAMMA = 1e9


@dataclass(frozen=True)
class Pools:
    """Shuffled images of each class, those of unknown class last, before anyone owns them."""

    labelled: list[np.ndarray]
    unlabelled: list[np.ndarray]


def choose_labels(dataset: Dataset, options: config.PartitionOptions, clients: int, seed: int) -> Pools:
    """Decide which images carry a label, or say why the request cannot be met."""
    shuffled = []
    for number in (*range(len(dataset.classes)), UNKNOWN):
        members = np.flatnonzero(dataset.labels == number)
        shuffled.append(members[rng.permutation(len(members), "partition", seed, "pool", number)])
    marked = [pool if dataset.labelled is None else pool[dataset.labelled[pool]] for pool in shuffled[:-1]]
    needed = _labels_needed(dataset, options, clients, marked)
    labelled = [pool[:number] for pool, number in zip(marked, needed, strict=True)]
    taken = np.zeros(len(dataset.labels), dtype=bool)
    taken[np.concatenate(labelled)] = True
    return Pools([*labelled, shuffled[-1][:0]], [pool[~taken[pool]] for pool in shuffled])


def labels_per_class(dataset: Dataset, options: config.PartitionOptions) -> int | None:
    """The number of labels per class and client in force; None where something else decides."""
    if options.labels_per_class is None and options.label_fraction is None and dataset.labelled is None:
        return LABELS_PER_CLASS
    return options.labels_per_class


def labelled_clients(options: config.PartitionOptions, clients: int) -> int:
    """How many clients hold labels."""
    return max(1, round(options.labelled_clients * clients))


def hold_out(labels: np.ndarray, share: float, seed: int, *site: int) -> np.ndarray:
    """Positions of a share of the images of known class, stratified; what is left over goes to the largest remainders.

    A class keeps one image at least. A single image is none: its accuracy would tell of it alone.
    """
    key: tuple[rng.Key, ...] = ("partition", seed, "validation", *site)
    pools = [np.flatnonzero(labels == number) for number in np.unique(labels[labels != UNKNOWN])]
    exact = share * np.array([len(pool) for pool in pools])
    counts = np.floor(exact).astype(np.int64)
    missing = round(exact.sum()) - counts.sum()
    for place in np.lexsort((rng.permutation(len(pools), *key), counts - exact))[:missing]:
        counts[place] += counts[place] + 1 < len(pools[place])
    if counts.sum() < 2:
        return np.empty(0, dtype=np.int64)
    chosen = (rng.sample(len(pool), counts[place], *key, "class", place) for place, pool in enumerate(pools))
    return np.sort(np.concatenate([pool[rows] for pool, rows in zip(pools, chosen, strict=True)]))


def even(totals: list[int], clients: int, *key: rng.Key) -> np.ndarray:
    """Counts [client, class]: equal shares; remainders go round, to everyone once before anyone twice.

    The order of the round is drawn anew for each class: in a fixed one, whole groups of clients would end up
    with the same few classes whenever labels are scarce.
    """
    counts = np.empty((clients, len(totals)), dtype=np.int64)
    extra = np.zeros(clients, dtype=np.int64)
    for column, total in enumerate(totals):
        share, rest = divmod(total, clients)
        counts[:, column] = share
        lucky = np.lexsort((rng.permutation(clients, *key, column), extra))[:rest]
        counts[lucky, column] += 1
        extra[lucky] += 1
    return counts


def dirichlet(totals: list[int], clients: int, gamma: float, *key: rng.Key) -> np.ndarray:
    """Counts [client, class]: one Dirichlet draw per class, cut at the floor of the cumulative shares."""
    counts = np.empty((clients, len(totals)), dtype=np.int64)
    for column, total in enumerate(totals):
        cumulative = np.cumsum(_shares(rng.legacy(*key, column), clients, gamma))[:-1]
        cuts = np.minimum(np.floor(cumulative * total).astype(np.int64), total)
        counts[:, column] = np.diff(cuts, prepend=0, append=total)
    return counts


def fedmatch(totals: list[int], clients: int) -> np.ndarray:
    """Counts [client, class] in proportion to the mix of each client's type, by largest remainder.

    Images of unknown class, the last column, go evenly. Of equal remainders the smallest client's comes
    first, then the lowest number; all is done in integers.
    """
    types = np.arange(clients) % len(FEDMATCH_MIX)
    mix = np.stack([np.roll(FEDMATCH_MIX, kind) for kind in range(len(FEDMATCH_MIX))])[types]
    mix = np.column_stack([mix, np.ones(clients, dtype=np.int64)])
    counts = np.zeros((clients, len(totals)), dtype=np.int64)
    for column, total in enumerate(totals):
        share, remainder = np.divmod(total * mix[:, column], mix[:, column].sum())
        order = np.lexsort((counts.sum(axis=1) + share, -remainder))
        share[order[: total - share.sum()]] += 1
        counts[:, column] = share
    return counts


def pairs(pools: list[np.ndarray], clients: int, gamma: float, *key: rng.Key) -> tuple[np.ndarray, np.ndarray]:
    """Images and their owners as in SAGE (CVPR 2025): each two clients divide a chunk of the shuffled images.

    Their lists, in class order and one behind the other, are then cut in the middle, so that all clients are of
    one size: the last classes of the longer list go to the other client.
    """
    images, classes = np.concatenate(pools), np.repeat(np.arange(len(pools)), [len(pool) for pool in pools])
    chunks = np.array_split(rng.permutation(len(images), *key), clients // 2)
    lists = [chunk[_divide(classes[chunk], gamma, *key, number)] for number, chunk in enumerate(chunks)]
    sizes = [len(half) for both in lists for half in np.array_split(both, 2)]
    return images[np.concatenate(lists)], np.repeat(np.arange(clients), sizes)


def deal(pools: list[np.ndarray], counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Images and their owners, each pool cut in client order."""
    owners = [np.repeat(np.arange(len(counts)), column) for column in counts.T]
    return np.concatenate(pools), np.concatenate(owners)


def minimum_size(images: int, clients: int) -> int:
    """The fewest images a client may have: half the mean, rounded up, and at most ten."""
    return min(MINIMUM, -(-images // (2 * clients)))


def repair(owners: np.ndarray, clients: int, *key: rng.Key) -> list[tuple[int, int, int]]:
    """Bring every client to the minimum, in place; returns (from client, to client, number of images).

    Each image comes from the client that is largest at that moment. The minimum is no more than the mean, so
    while somebody lacks images the largest has some to spare: every move helps, no receiver becomes a giver.
    """
    sizes = np.bincount(owners, minlength=clients)
    minimum = minimum_size(len(owners), clients)
    largest = [(-int(size), client) for client, size in enumerate(sizes)]
    heapq.heapify(largest)
    moves: Counter[tuple[int, int]] = Counter()
    for poor in np.flatnonzero(sizes < minimum).tolist():
        for _ in range(minimum - int(sizes[poor])):
            size, rich = largest[0]
            heapq.heapreplace(largest, (size + 1, rich))
            moves[rich, poor] += 1
    gifts: dict[int, list[int]] = {}
    for (rich, poor), number in sorted(moves.items()):
        gifts.setdefault(rich, []).extend([poor] * number)
    for rich, receivers in gifts.items():
        own = np.flatnonzero(owners == rich)
        owners[own[rng.sample(len(own), len(receivers), *key, rich)]] = receivers
    return [(rich, poor, number) for (rich, poor), number in sorted(moves.items())]


def _shares(stream: np.random.RandomState, clients: int, gamma: float) -> np.ndarray:
    """One Dirichlet draw; where a tiny γ underflows, its limit: one client takes all."""
    shares = stream.dirichlet(np.full(clients, min(gamma, _LARGEST_GAMMA)))
    if np.isfinite(shares).all() and shares.sum() > 0.5:
        return shares
    alone = np.zeros(clients)
    alone[int(stream.random_sample() * clients)] = 1.0
    return alone


def _divide(classes: np.ndarray, gamma: float, *key: rng.Key) -> np.ndarray:
    """Places of a chunk's images in the lists of two clients, each in class order, one list behind the other.

    Each class is cut by a Dirichlet draw, in which a client that has its even share gets nothing; all is drawn anew
    until both have at least half of it.
    """
    stream, even = rng.legacy(*key), len(classes) / 2
    for _ in range(TRIES):
        first: list[int] = []
        second: list[int] = []
        for number in np.unique(classes):
            members = np.flatnonzero(classes == number).tolist()
            # A share of 0 would leave nobody to take the class where the other client is full.
            shares = _shares(stream, 2, gamma) + np.finfo(float).tiny
            shares *= [len(first) < even, len(second) < even]
            cut = int(shares[0] / shares.sum() * len(members))
            first += members[:cut]
            second += members[cut:]
        if min(len(first), len(second)) >= even / 2:
            return np.array(first + second)
    raise ConfigError(
        f"--setting pairs (partition.setting): in {TRIES} draws with partition.gamma={gamma:g} one of two "
        f"clients always had less than a quarter of their {len(classes)} images; raise it, or ask for fewer --clients "
        "or more images"
    )


def _labels_needed(
    dataset: Dataset, options: config.PartitionOptions, clients: int, marked: list[np.ndarray]
) -> list[int]:
    """How many labels each class gives."""
    images, classes = len(dataset.labels), len(dataset.classes)
    available = [len(pool) for pool in marked]
    per_client, fraction = labels_per_class(dataset, options), options.label_fraction
    if per_client is not None:
        needed = [per_client * clients] * classes
        name = f"partition.labels_per_class={per_client}"
    elif fraction is not None:
        share, rest = divmod(round(fraction * images), classes)
        needed = [share + (number < rest) for number in range(classes)]
        name = f"partition.label_fraction={fraction:g}"
    else:
        needed = available
        name = f"--clients {clients} (partition.clients)"

    own_clients = options.setting != "sites"
    unlabelled = images - sum(needed)
    short = [number for number in range(classes) if available[number] < needed[number]]
    if short:
        worst = min(short, key=available.__getitem__)
        kind = "images" if dataset.labelled is None else "labelled images"
        raise ConfigError(
            f"{name}: class '{dataset.classes[worst]}' has {available[worst]} {kind} but {needed[worst]} "
            f"labels would be needed; {_advice(dataset, options, clients, available, of_labels=True)}"
        )
    holders = labelled_clients(options, clients) if own_clients else 1
    if sum(needed) < holders:
        raise ConfigError(
            f"{name}: {sum(needed)} of {images} images would be labelled, too few for {holders} clients, "
            "each needs one; ask for fewer --clients or for more labels"
        )
    if own_clients and unlabelled < clients and not options.labelled_as_unlabelled:
        raise ConfigError(
            f"{name}: {unlabelled} of {images} images would be left unlabelled, too few for {clients} "
            f"clients, each needs one; {_advice(dataset, options, clients, available)}"
        )
    return needed


def _advice(
    dataset: Dataset, options: config.PartitionOptions, clients: int, available: list[int], of_labels: bool = False
) -> str:
    """The largest request of the same kind that can be met; what is lacking are labels, or else unlabelled images."""
    images, classes = len(dataset.labels), len(dataset.classes)
    spared = 0 if options.labelled_as_unlabelled else clients
    labels = max(0, min(min(available) * classes, images - spared))
    if labels_per_class(dataset, options) is not None and labels >= clients * classes:
        return f"lower partition.labels_per_class to at most {labels // (clients * classes)}"
    if options.label_fraction is not None and labels >= clients:
        return f"lower partition.label_fraction to at most {labels * 1_000_000 // images / 1_000_000:g}"
    fewer = (
        "ask for fewer --clients, or for fewer labels (--set partition.labels_per_class or partition.label_fraction)"
    )
    if not of_labels:
        fewer += ", or use labelled images as unlabelled ones too (--set partition.labelled_as_unlabelled=true)"
    return fewer
