"""Partitions: every image dealt once, label counts exact, nobody left short, and the same everywhere."""

import io
import json
import zipfile
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from feddure import config
from feddure.data import recipes
from feddure.data.dataset import UNKNOWN, Dataset
from feddure.data.partition import Partition, Repair, _seal, external_imbalance, internal_imbalance, make
from feddure.errors import ConfigError, DataError

FRACTION = {"labels_per_class": None}  # a share of the images, or the data set's own labels
SETTINGS = ("iid-iid", "iid-dir", "dir-dir", "fedmatch", "pairs")
modest = settings(deadline=None, max_examples=60)


def dataset(per_class=(40,) * 10, unknown=0, labelled=None, site=None, sites=(), name="synthetic") -> Dataset:
    """Tiny images, classes interleaved, the same on every machine."""
    labels = np.concatenate([np.repeat(np.arange(len(per_class)), per_class), np.full(unknown, UNKNOWN)])
    order = np.argsort((np.arange(len(labels)) * 7919) % 10_007, kind="stable")
    labels = labels[order].astype(np.int64)
    images = (np.arange(len(labels) * 4) % 251).astype(np.uint8).reshape(-1, 2, 2, 1)
    return Dataset(
        name=name,
        images=images,
        labels=labels,
        test_images=images[:1],
        test_labels=labels[:1],
        classes=tuple(f"class {number}" for number in range(len(per_class))),
        mean=(0.5,),
        std=(0.25,),
        labelled=labelled,
        sites=sites,
        site=site,
    )


def options(**fields) -> config.PartitionOptions:
    return config.PartitionOptions(**{"setting": "dir-dir", "clients": 4, "labels_per_class": 2, **fields})


def totals(counts: np.ndarray) -> list[int]:
    return counts.sum(axis=0).tolist()


def assert_everything_dealt_once(partition: Partition, images: int) -> None:
    dealt = np.concatenate([*partition.labelled, *partition.unlabelled])
    assert sorted(dealt.tolist()) == list(range(images))
    for part in (*partition.labelled, *partition.unlabelled):
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()


def assert_nobody_short(parts: tuple[np.ndarray, ...]) -> None:
    sizes = [len(part) for part in parts]
    assert min(sizes) >= max(1, min(10, sum(sizes) / len(sizes) / 2))


@st.composite
def requests(draw):
    """A data set and options that can be met."""
    setting = draw(st.sampled_from(SETTINGS))
    classes = 10 if setting == "fedmatch" else draw(st.integers(1, 12))
    clients = 2 * draw(st.integers(1, 12)) if setting == "pairs" else draw(st.integers(1, 25))
    per_class = draw(st.lists(st.integers(0, 80), min_size=classes, max_size=classes))
    gamma = draw(st.sampled_from([1e-300, 1e-3, 0.05, 0.5, 3.0, 1e5, 1e308]))
    assume(setting != "pairs" or gamma >= 0.05)  # two clients cannot share one class by smaller ones
    seed = draw(st.integers(0, 2**32))
    unknown = draw(st.sampled_from([0, 0, 1, 30]))
    smallest = min(per_class)
    if draw(st.booleans()):
        assume(smallest >= clients)
        labels = {"labels_per_class": draw(st.integers(1, smallest // clients))}
        number = labels["labels_per_class"] * clients * classes
    else:
        assume(smallest * classes >= clients)
        number = draw(st.integers(clients, smallest * classes))
        labels = {"label_fraction": number / (sum(per_class) + unknown)}
    rest = sum(per_class) + unknown - number
    assume(rest >= clients)
    # Half a class is rounded down: of a few images of many classes, one of two clients might get none at all.
    assume(setting != "pairs" or min(number, rest) // (clients // 2) >= 4 * (classes + 1))
    chosen = config.PartitionOptions(setting=setting, clients=clients, gamma=gamma, **labels)
    return dataset(per_class, unknown), chosen, seed, number


@modest
@given(requests())
def test_every_request_that_can_be_met_is_met_exactly(request_):
    data, chosen, seed, number = request_
    partition = make(data, chosen, seed)
    assert partition.clients == chosen.clients
    assert_everything_dealt_once(partition, len(data.labels))
    labelled, _ = partition.counts(data.labels, len(data.classes))
    assert labelled.sum() == sum(map(len, partition.labelled)) == number
    per_class = totals(labelled)
    assert max(per_class) - min(per_class) <= 1
    assert sorted(per_class, reverse=True) == per_class
    assert_nobody_short(partition.labelled)
    assert_nobody_short(partition.unlabelled)
    for repair in partition.repairs:
        assert repair.number >= 1
        assert repair.from_client != repair.to_client


@modest
@given(requests())
def test_the_same_request_gives_the_same_hash_and_survives_saving(tmp_path_factory, request_):
    data, chosen, seed, _ = request_
    partition = make(data, chosen, seed)
    path = tmp_path_factory.mktemp("partition") / "partition.npz"
    partition.save(path)
    loaded = Partition.load(path, data)
    assert loaded.sha256 == partition.sha256 == make(data, chosen, seed).sha256
    assert loaded.parameters == partition.parameters
    assert loaded.repairs == partition.repairs
    for kind in ("labelled", "unlabelled"):
        for before, after in zip(getattr(partition, kind), getattr(loaded, kind), strict=True):
            np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("setting", ["iid-iid", "iid-dir", "fedmatch"])
def test_iid_labels_are_exactly_n_per_class_and_client(setting):
    labelled, _ = make(dataset(), options(setting=setting), 3).counts(dataset().labels, 10)
    assert (labelled == 2).all()


def test_scarce_labels_do_not_group_clients_by_class():
    data = dataset((200,) * 10)
    partition = make(data, options(setting="iid-iid", clients=40, labels_per_class=None, label_fraction=0.1), 0)
    labelled, _ = partition.counts(data.labels, 10)
    assert totals(labelled) == [20] * 10
    assert len({tuple(row) for row in labelled.tolist()}) > 20


def test_labelled_and_unlabelled_shares_are_independent_draws():
    data = dataset((400,) * 10)
    chosen = options(clients=10, labels_per_class=20)
    partition = make(data, chosen, 1)
    labelled, unlabelled = partition.counts(data.labels, 10)
    assert abs(np.corrcoef(labelled.ravel(), unlabelled.ravel())[0, 1]) < 0.5


def test_both_dirichlet_settings_share_their_unlabelled_images():
    data = dataset()
    same = zip(make(data, options(setting="iid-dir"), 5).unlabelled, make(data, options(), 5).unlabelled, strict=True)
    assert all(np.array_equal(one, other) for one, other in same)


def test_a_smaller_label_share_is_part_of_a_larger_one():
    few, many = (
        set(np.concatenate(make(dataset(), options(labels_per_class=None, label_fraction=share), 0).labelled).tolist())
        for share in (0.1, 0.15)
    )
    assert (len(few), len(many)) == (40, 60)
    assert few < many


def test_fedmatch_gives_each_type_its_mix():
    data = dataset((1000,) * 10)
    partition = make(data, options(setting="fedmatch", clients=20, labels_per_class=10), 0)
    _, unlabelled = partition.counts(data.labels, 10)
    first = np.array([50, 15, 3, 3, 3, 2, 3, 3, 3, 15]) * 4
    for client, row in enumerate(unlabelled):
        np.testing.assert_allclose(row, np.roll(first, client % 10), atol=1)
    assert np.ptp(unlabelled.sum(axis=1)) <= 10


def marked(data: Dataset, per_class: int) -> Dataset:
    """The same data, labels allowed on the first few images of each class."""
    mask = np.zeros(len(data.labels), dtype=bool)
    for number in range(len(data.classes)):
        mask[np.flatnonzero(data.labels == number)[:per_class]] = True
    return Dataset(**{**vars(data), "labelled": mask})


def test_all_marked_labels_are_used_unless_told_otherwise():
    data = marked(dataset((30,) * 3, unknown=50), 11)
    for setting in ("iid-iid", "dir-dir"):
        partition = make(data, options(setting=setting, labels_per_class=None), 0)
        assert_everything_dealt_once(partition, len(data.labels))
        np.testing.assert_array_equal(np.sort(np.concatenate(partition.labelled)), np.flatnonzero(data.labelled))
        assert partition.parameters["labels_per_class"] is None
        assert_nobody_short(partition.unlabelled)


def test_labels_come_from_marked_images_only_and_the_others_become_unlabelled():
    data = marked(dataset((30,) * 3, unknown=50), 11)
    partition = make(data, options(labels_per_class=2), 0)
    assert data.labelled[np.concatenate(partition.labelled)].all()
    assert sum(map(len, partition.labelled)) == 2 * 4 * 3
    assert data.labelled[np.concatenate(partition.unlabelled)].sum() == 33 - 24


def with_sites() -> Dataset:
    data = dataset((12,) * 3, unknown=4)
    site = np.arange(40) % 4
    mask = (data.labels != UNKNOWN) & (site != 2)
    mask[site == 3] = data.labels[site == 3] != UNKNOWN
    return Dataset(**{**vars(data), "labelled": mask, "site": site, "sites": ("north", "east", "south", "west")})


def test_each_site_is_one_client_and_nothing_is_moved():
    data = with_sites()
    partition = make(data, config.PartitionOptions(setting="sites", clients=100), 0)
    assert partition.clients == partition.parameters["clients"] == 4
    assert_everything_dealt_once(partition, 40)
    assert partition.repairs == ()
    assert len(partition.labelled[2]) == 0
    for number in range(4):
        assert (data.site[partition.labelled[number]] == number).all()
        assert (data.site[partition.unlabelled[number]] == number).all()
        assert data.labelled[partition.labelled[number]].all()


def test_fewer_labels_on_sites_stay_with_their_site():
    data = with_sites()
    partition = make(data, config.PartitionOptions(setting="sites", labels_per_class=1), 0)
    labelled, _ = partition.counts(data.labels, 3)
    assert totals(labelled) == [4, 4, 4]
    assert all((data.site[part] == number).all() for number, part in enumerate(partition.labelled))


# --- validation ----------------------------------------------------------------------------------------
@modest
@given(st.lists(st.integers(-1, 5), max_size=120), st.floats(0.01, 0.99), st.integers(0, 99))
def test_images_are_held_out_class_by_class(labels, share, seed):
    labels = np.array(labels, dtype=np.int64)
    held = recipes.hold_out(labels, share, seed)
    assert (held == recipes.hold_out(labels, share, seed)).all()
    assert (np.diff(held) > 0).all()
    assert (labels[held] != UNKNOWN).all()
    found, of = (np.bincount(part, minlength=6) for part in (labels[held], labels[labels != UNKNOWN]))
    assert (found[of > 0] < of[of > 0]).all()
    assert len(held) != 1
    if len(held):
        assert (abs(found - share * of) < 1 + 1e-9).all()


@pytest.mark.parametrize("setting", SETTINGS)
def test_nobody_owns_the_images_set_aside_for_validation(tmp_path, setting):
    data = marked(dataset(unknown=7), 30)
    chosen = options(setting=setting, clients=6, labels_per_class=2)
    partition = make(data, chosen, 5, 0.25)
    held, owned = partition.validation, np.concatenate([*partition.labelled, *partition.unlabelled])
    assert sorted([*owned, *held]) == list(range(len(data.labels)))
    assert data.labelled[held].all()
    assert np.bincount(data.labels[held]).sum() == 75
    assert sum(map(len, partition.labelled)) == 120
    assert make(data, chosen, 5, 0.25).sha256 == partition.sha256
    assert (
        len({make(data, chosen, seed, share).sha256 for seed, share in ((5, 0.25), (6, 0.25), (5, 0.2), (5, 0))}) == 4
    )
    partition.save(tmp_path / "partition.npz")
    loaded = Partition.load(tmp_path / "partition.npz", data)
    assert loaded.sha256 == partition.sha256
    np.testing.assert_array_equal(loaded.validation, held)


def test_without_validation_nothing_changes():
    assert make(dataset(), options(), 0, 0.0).sha256 == make(dataset(), options(), 0).sha256
    assert "validation" not in make(dataset(), options(), 0).parameters


def test_each_site_sets_its_own_labelled_images_aside():
    data = with_sites()
    whole = make(data, config.PartitionOptions(setting="sites"), 0)
    partition = make(data, config.PartitionOptions(setting="sites"), 0, 0.4)
    for number in range(4):
        held = partition.validation[data.site[partition.validation] == number]
        assert sorted([*held, *partition.labelled[number]]) == sorted(whole.labelled[number])
        assert len(held) == round(0.4 * len(whole.labelled[number]))
        assert (partition.unlabelled[number] == whole.unlabelled[number]).all()


def test_validation_that_leaves_too_little_says_so():
    with pytest.raises(ConfigError, match=r"validation: 0\.01 of 30 labelled images is less than two"):
        make(dataset((10,) * 3), options(clients=2, labels_per_class=2), 0, 0.01)
    with pytest.raises(ConfigError, match=r"5 images but 6 labels .*validation: 0\.5 sets 15 images aside"):
        make(dataset((10,) * 3), options(clients=2, labels_per_class=3), 0, 0.5)


def test_repairs_are_recorded_and_explain_the_sizes():
    data = dataset()
    chosen = options(clients=15, gamma=0.01)
    partition = make(data, chosen, 0)
    assert partition.repairs
    assert all(isinstance(repair, Repair) for repair in partition.repairs)
    for kind, per_class in (("labelled", 30), ("unlabelled", 10)):
        dealt = recipes.dirichlet([per_class] * 10, 15, 0.01, "partition", 0, "shares", kind).sum(axis=1)
        for repair in partition.repairs:
            if repair.kind == kind:
                dealt[repair.from_client] -= repair.number
                dealt[repair.to_client] += repair.number
        assert dealt.tolist() == [len(part) for part in getattr(partition, kind)]


GOLDEN = {
    "iid-iid": "4b6158dc16590cf88a06b7462178bd29e0056bbb132e3923a9866ac3e8d0d6fc",
    "iid-dir": "63d75ffbd88ee0bf4420927974a41986bd1c2150104b40618f5ae10f07222b5a",
    "dir-dir": "9281e060fb3d242667ea1c7059d9585650aacc7ea3d60f6ae19b023927cd5172",
    "fedmatch": "0614325c6835d7865087c6813379784124fc0c307194dd10c4fc2aecf4aa4a81",
    "pairs": "3557a9d9517831684be13b134e7e98b64550da92618e4798fb62b64a0b592bcf",
    "sites": "00693f49d65b2a1e2028bb0166c00bafee301a7249004e481009b6827558444a",
}


@pytest.mark.parametrize("setting", GOLDEN)
def test_golden_hashes_guard_the_recipe(setting):
    data = with_sites() if setting == "sites" else dataset((43,) * 10, unknown=7)
    clients = 8 if setting == "pairs" else 7
    chosen = config.PartitionOptions(setting=setting, clients=clients, gamma=0.3, label_fraction=0.17)
    partition = make(data, chosen, 42)
    assert partition.sha256 == GOLDEN[setting]


def test_the_hash_depends_on_the_seed_but_not_on_parameters_without_effect():
    wanted = [options(setting="iid-iid", gamma=gamma, labels_per_class=None) for gamma in (0.1, 0.9)]
    one, other, third = (make(dataset(), wanted[gamma], seed) for gamma, seed in ((0, 0), (1, 0), (0, 1)))
    assert one.sha256 == other.sha256 != third.sha256
    assert one.parameters["labels_per_class"] == 5


@pytest.mark.parametrize(
    ("data", "fields", "message"),
    [
        (
            dataset(),
            {"labels_per_class": 11},
            r"partition.labels_per_class=11: .*has 40 images but 44 labels .*at most 9",
        ),
        (dataset(), {"labels_per_class": 10}, "0 of 400 images would be left unlabelled, .* at most 9"),
        (dataset(), {"labels_per_class": None, "clients": 41}, "partition.labels_per_class=5: .* fewer --clients"),
        (
            dataset(),
            {**FRACTION, "label_fraction": 1.0},
            "partition.label_fraction=1: .* lower partition.label_fraction to at most 0.99",
        ),
        (dataset(), {**FRACTION, "label_fraction": 0.005}, "2 of 400 images .* too few for 4"),
        (dataset(), {"label_fraction": 0.1}, "labels_per_class and partition.label_fraction were both given"),
        (dataset(), {"setting": "sites"}, "--setting sites .*'synthetic' does not say which site owns"),
        (dataset((40,) * 9), {"setting": "fedmatch"}, "--setting fedmatch .* 10 classes, but .* has 9"),
        (dataset((40, 5)), {**FRACTION, "label_fraction": 0.3}, r"'class 1' has 5 images but 7 .* at most 0\.222222"),
        (marked(dataset((30,) * 3), 1), FRACTION, r"--clients 4 .*: 3 of 90 images would be labelled"),
        (marked(dataset((30,) * 3), 1), {}, "has 1 labelled images but 8 labels would be needed"),
        (marked(dataset((30,) * 3), 30), FRACTION, "0 of 90 images would be left unlabelled"),
        (dataset(), {"setting": "sites", "labelled_clients": 0.5}, "labelled_clients 0.5 .* sites .* leave it out"),
        (dataset(), {"setting": "sites", "unlabelled_fraction": 0}, "unlabelled_fraction 0 .* sites .* leave it out"),
        (dataset(), {"setting": "pairs", "clients": 5}, "5 clients: expected an even number"),
        (dataset(), {"setting": "pairs", "labelled_clients": 0.25}, "1 clients with labels .* an even number"),
        (dataset(), {**FRACTION, "label_fraction": 0.002, "labelled_clients": 0.5}, "1 of 400 .* too few for 2"),
    ],
)
def test_requests_that_cannot_be_met_say_so(data, fields, message):
    with pytest.raises(ConfigError, match=message):
        make(data, options(**fields), 0)


# --- clients without labels, fewer unlabelled images, labelled images among them ---------------------------------
def assert_equal(one: tuple[np.ndarray, ...], other: tuple[np.ndarray, ...]) -> None:
    assert [part.tolist() for part in one] == [part.tolist() for part in other]


@pytest.mark.parametrize("setting", SETTINGS)
def test_only_some_clients_hold_the_same_labels(setting):
    data = dataset()
    everyone = make(data, options(setting=setting, clients=12), 5)
    holders = []
    for share in (0.17, 0.5):
        partition = make(data, options(setting=setting, clients=12, labelled_clients=share), 5)
        assert_everything_dealt_once(partition, 400)
        assert_equal(partition.unlabelled, everyone.unlabelled)
        assert sorted(np.concatenate(partition.labelled)) == sorted(np.concatenate(everyone.labelled))
        holding = [part for part in partition.labelled if len(part)]
        assert_nobody_short(tuple(holding))
        assert partition.sha256 != everyone.sha256
        holders.append({client for client, part in enumerate(partition.labelled) if len(part)})
    assert [len(some) for some in holders] == [2, 6]
    assert holders[0] < holders[1]


def test_repairs_among_clients_with_labels_name_these_clients():
    partition = make(dataset(), options(clients=15, gamma=0.01, labelled_clients=0.6), 0)
    moves = [repair for repair in partition.repairs if repair.kind == "labelled"]
    assert moves
    assert all(len(partition.labelled[client]) for move in moves for client in (move.from_client, move.to_client))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_smaller_share_of_unlabelled_images_is_part_of_a_larger_one(setting):
    data = dataset()
    every, half, few, none = (
        make(data, options(setting=setting, unlabelled_fraction=share), 3) for share in (1, 0.5, 0.1, 0)
    )
    for kept in (half, few, none):
        assert_equal(kept.labelled, every.labelled)
    for client in range(4):
        number = len(every.unlabelled[client])
        sizes = [len(kept.unlabelled[client]) for kept in (half, few, none)]
        assert sizes == [round(0.5 * number), round(0.1 * number), 0]
        assert set(few.unlabelled[client]) < set(half.unlabelled[client]) < set(every.unlabelled[client])


@pytest.mark.parametrize("setting", [*SETTINGS, "sites"])
def test_a_clients_labelled_images_are_among_its_unlabelled_ones_too(setting):
    data, number = (with_sites(), 40) if setting == "sites" else (dataset(), 400)
    chosen = {"setting": setting, "labels_per_class": 1}
    apart, both = (make(data, options(**chosen, labelled_as_unlabelled=wanted), 0) for wanted in (False, True))
    assert_equal(apart.labelled, both.labelled)
    assert apart.sha256 != both.sha256
    assert sorted(np.concatenate(both.unlabelled).tolist()) == list(range(number))
    assert_equal(both.unlabelled, tuple(map(np.union1d, apart.labelled, apart.unlabelled)))


def test_with_labelled_images_among_the_unlabelled_all_may_carry_a_label():
    chosen = options(**FRACTION, label_fraction=1.0, labelled_as_unlabelled=True)
    partition = make(dataset(), chosen, 0)
    assert sum(map(len, partition.labelled)) == 400
    assert_equal(partition.labelled, partition.unlabelled)


def test_an_image_with_and_without_its_label_is_one_image_of_a_client():
    labels = np.array([0, 1, 0, 1])
    twice = hand_made([[0], [2, 3]], [[0, 1], [2, 3]])
    assert external_imbalance(twice, labels, 2) == 0


def hand_made(labelled, unlabelled) -> Partition:
    return Partition(tuple(map(np.array, labelled)), tuple(map(np.array, unlabelled)), {})


def test_imbalance_of_a_partition_made_by_hand():
    labels = np.array([0, 0, 1, 1, 0, 1, 1, 1, UNKNOWN])
    partition = hand_made([[0, 1], [2, 4]], [[3, 5], [6, 7, 8]])
    # Client 0: all of class 0 against all of class 1. Client 1: half and half against all of class 1.
    assert internal_imbalance(partition, labels, 2) == pytest.approx((1 + 0.5) / 2)
    # Client 0 holds half and half; client 1, its unknown image left out, a quarter and three quarters.
    assert external_imbalance(partition, labels, 2) == pytest.approx(0.25)


def test_clients_whose_classes_are_unknown_are_left_out():
    labels = np.array([0, 1, UNKNOWN, UNKNOWN, 1])
    nothing = np.array([], dtype=np.int64)
    partition = hand_made([[0], [1], nothing], [[4], [2], [3]])
    assert internal_imbalance(partition, labels, 2) == 1.0
    assert external_imbalance(partition, labels, 2) == 0.5
    alone = hand_made([[0]], [[2]])
    assert internal_imbalance(alone, labels, 2) is None
    assert external_imbalance(alone, labels, 2) is None


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 12), st.integers(0, 99))
def test_external_imbalance_is_the_mean_over_pairs(clients, seed):
    data = dataset()
    partition = make(data, options(clients=clients, gamma=0.2), seed)
    together = np.add(*partition.counts(data.labels, 10))
    mixes = together / together.sum(axis=1, keepdims=True)
    distances = [np.abs(one - other).sum() / 2 for one, other in combinations(mixes, 2)]
    assert external_imbalance(partition, data.labels, 10) == pytest.approx(np.mean(distances))


# --- on disk ---------------------------------------------------------------------------------------------
SMALL = dataset((6,) * 3)


def small() -> Partition:
    return make(SMALL, config.PartitionOptions(clients=2, labels_per_class=1), 0)


def test_equal_partitions_are_equal_files(tmp_path):
    for name in ("one.npz", "two.npz"):
        small().save(tmp_path / name)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.npz", "two.npz"]


def test_numpy_reads_the_file_without_this_package(tmp_path):
    partition = small()
    partition.save(tmp_path / "partition.npz")
    with np.load(tmp_path / "partition.npz", allow_pickle=False) as arrays:
        sizes = arrays["labelled_sizes"]
        parts = np.split(arrays["labelled"], np.cumsum(sizes)[:-1])
        assert json.loads(arrays["about"].item())["sha256"] == partition.sha256
    assert all(np.array_equal(one, other) for one, other in zip(parts, partition.labelled, strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "partition.npz"
    small().save(path)
    return path


@settings(deadline=None, max_examples=100)
@given(position=st.floats(0, 1, exclude_max=True), flip=st.integers(0, 255))
def test_a_changed_byte_anywhere_or_a_file_cut_short_is_an_error(saved, tmp_path_factory, position, flip):
    content = bytearray(saved.read_bytes())
    place = int(position * len(content))
    content[place] ^= flip
    damaged = tmp_path_factory.getbasetemp() / "damaged.npz"
    damaged.write_bytes(content if flip else content[:place])
    with pytest.raises(DataError, match=r"damaged\.npz: not a partition, or damaged"):
        Partition.load(damaged, SMALL)


def rewritten(path: Path, **changes: np.ndarray) -> bytes:
    """The file with other arrays in it, sealed as if it were genuine."""
    with np.load(path) as arrays:
        kept = {**dict(arrays), **changes}
    buffer = io.BytesIO()
    np.savez(buffer, **kept)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = bytes(64)
    content = buffer.getvalue()[:-64]
    return content + _seal(content)


def test_a_file_of_another_format_is_an_error(saved, tmp_path):
    with np.load(saved) as arrays:
        about = {**json.loads(arrays["about"].item()), "format": 99}
    (tmp_path / "later.npz").write_bytes(rewritten(saved, about=np.array(json.dumps(about).encode())))
    with pytest.raises(DataError, match="written in format 99"):
        Partition.load(tmp_path / "later.npz", SMALL)


def test_a_partition_of_another_data_set_is_an_error(saved):
    with pytest.raises(DataError, match=r"made for data set 'synthetic' with fingerprint .* 'other'"):
        Partition.load(saved, dataset((7,) * 3, name="other"))


def test_files_that_cannot_be_read_or_written_are_errors(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        Partition.load(tmp_path / "none.npz", SMALL)
    with pytest.raises(DataError, match="cannot be written"):
        small().save(tmp_path / "missing" / "partition.npz")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(DataError, match="cannot be written"):
        small().save(tmp_path / "folder.npz")
    assert [file.name for file in tmp_path.iterdir()] == ["folder.npz"]
