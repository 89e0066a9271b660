"""Configurations: presets, files, changes, and messages a person understands."""

import hashlib
import json

import pytest

from feddure import config
from feddure.errors import ConfigError


def refused(match, **arguments):
    with pytest.raises(ConfigError, match=match) as caught:
        config.load(**arguments)
    return str(caught.value)


@pytest.mark.parametrize("name", config.presets())
def test_presets_are_whole_and_survive_a_round_trip(name, tmp_path):
    experiment = config.load(name)
    (tmp_path / "config.yaml").write_text(experiment.to_yaml())
    assert config.load(file=tmp_path / "config.yaml") == experiment
    assert config.about(name)


def test_the_papers_numbers():
    paper = config.load("aaai24")
    assert (paper.partition.clients, paper.clients_per_round, paper.rounds) == (100, 5, 200)
    assert (paper.local_steps, paper.labelled_batch, paper.optimizer.learning_rate) == (5, 10, 5e-4)
    assert config.load("aaai24", changes={"dataset": "cinic10"}).local_steps == 10
    assert config.load("aaai24", changes={"dataset": "cinic10"}, sets=["local_steps=3"]).local_steps == 3
    assert config.load("aaai24-fine").local_steps == "epoch"


def test_later_changes_win():
    experiment = config.load("demo", changes={"rounds": 7, "seed": None}, sets=["rounds=9", "partition.gamma=5e-1"])
    assert experiment.rounds == 9
    assert experiment.seed == 0
    assert experiment.partition.gamma == 0.5


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("optimizer.learning_rate=5e-4", "optimizer.learning_rate", 5e-4),
        ("server.ema=null", "server.ema", None),
        ("server.ema=.9", "server.ema", 0.9),
        ("engine.compile=false", "engine.compile", False),
        ("local_steps=epoch", "local_steps", "epoch"),
        ("options.note=a=b", "options.note", "a=b"),
        ("options.list=[1, 2]", "options.list", [1, 2]),
        ("engine.lanes=4", "engine.lanes", 4),
    ],
)
def test_values_of_set(text, key, value):
    found = config.load(sets=[text])
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds", "--set rounds: expected key=value"),
        ("=3", "expected key=value"),
        ("rounds=0", "rounds: 0 was given.*greater than or equal to 1"),
        ("rounds=many", "rounds: 'many' was given"),
        ("round=5", "unknown field 'round'; did you mean 'rounds'"),
        ("partition.gama=1", "unknown field 'partition.gama'; did you mean 'partition.gamma'"),
        ("zzzzzz=1", "feddure config --fields"),
        ("optimizer.lr=1", r"'optimizer.lr'; did you mean 'optimizer.learning_rate'\?"),
        ("server.lr=1", r"did you mean 'server.learning_rate'\?"),
        ("lr=1", "did you mean 'optimizer.learning_rate' or 'server.learning_rate' or"),
        ("bs=1", r"did you mean 'labelled_batch' or 'unlabelled_batch'\?"),
        ("epochs=1", r"did you mean 'local_steps' or 'rounds'\?"),
        ("setting=iid-iid", r"did you mean 'partition.setting'\?"),
        ("gamma=1", r"did you mean 'partition.gamma'\?"),
        ("clients=3", r"did you mean 'partition.clients'\?"),
        ("partition.clents=3", r"did you mean 'partition.clients'\?"),
        ("partition.local_steps=3", r"did you mean 'local_steps'\?"),
        ("optimiser.learning_rate=1", r"unknown field 'optimiser'; did you mean 'optimizer'\?"),
        ("partitoin.gamma=1", r"did you mean 'partition'\?"),
        ("partition.gamma=-1", "partition.gamma: -1 was given"),
        ("partition.gamma=inf", "partition.gamma"),
        ("partition.setting=iid", "partition.setting: 'iid' was given.*'iid-iid', 'iid-dir'"),
        ("rounds.x=3", "rounds.x: 'rounds' is a field, not a section|rounds"),
        ("local_steps=0", "local_steps: 0 was given, expected 1 or more"),
        ("unlabelled_batch=0", "unlabelled_batch: 0 was given"),
        ("engine.lanes=0", "engine.lanes: 0 was given"),
        ("engine.precision=fp16", "engine.precision: 'fp16' was given"),
        ("server.ema=1", "server.ema: 1 was given"),
        ("clients_per_round=210", r"clients_per_round is 210 but partition.clients is \d+:"),
        ("feddure.maml_order=3", "feddure.maml_order: 3 was given"),
    ],
)
def test_mistakes_are_explained(text, message):
    refused(message, preset="demo", sets=[text])


def test_every_mistake_is_told_at_once():
    message = refused("rounds", preset="demo", sets=["rounds=0", "seed=-1", "nonsense=3"])
    assert len(message.splitlines()) == 3


def test_labels_given_in_two_ways():
    refused(
        "labels_per_class and partition.label_fraction",
        sets=["partition.labels_per_class=3", "partition.label_fraction=0.1"],
    )


def test_a_preset_and_a_file(tmp_path):
    refused("both given", preset="demo", file=tmp_path / "config.yaml")


def test_an_unknown_preset_lists_the_known_ones():
    refused("preset 'dmeo' does not exist; there are: aaai24, aaai24-fine, demo", preset="dmeo")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rounds: [", "not valid YAML"),
        (b"\xff\xfe\x00", "not valid YAML"),
        (b"just a sentence", "expected a mapping"),
        (b"", "expected a mapping"),
        (b"rounds: 0", "rounds: 0 was given"),
        (b"partition: 3", "partition: 3 was given"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, content, message):
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    refused(message, file=file)


def test_a_file_that_is_not_there(tmp_path):
    refused("cannot be read", file=tmp_path / "none.yaml")
    refused("cannot be read", file=tmp_path)


def test_every_field_has_a_meaning():
    rows = config.fields()
    assert len(rows) > 60
    assert all(meaning.endswith((".", ")")) for _, _, meaning in rows)
    assert len({key for key, _, _ in rows}) == len(rows)


def test_configurations_cannot_be_changed_in_place():
    with pytest.raises(Exception, match="frozen"):
        config.load("demo").rounds = 3


def test_the_fingerprint_knows_what_changes_results():
    base = config.load("demo")
    how = ["engine.lanes=3", "engine.device=cpu", "engine.compile=false", "checkpoint_every=1"]
    assert config.load("demo", sets=how).fingerprint() == base.fingerprint()
    for change in ("seed=1", "rounds=41", "partition.gamma=0.4", "engine.precision=fp64", "options.x=1"):
        assert config.load("demo", sets=[change]).fingerprint() != base.fingerprint()


def test_a_field_that_came_later_changes_no_fingerprint_until_it_is_used():
    base = config.load("demo")
    without = base.model_dump()
    del without["feddure"]["reward_on"]
    assert config.Experiment.model_validate(without).fingerprint() == base.fingerprint()
    old = base.model_dump(exclude={"engine": {"lanes", "compile", "device"}, "checkpoint_every": True})
    for section, name, before in config._ADDED:
        assert old[section].pop(name) == before
    assert base.fingerprint() == hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
    assert config.load("demo", sets=["feddure.reward_on=confident"]).fingerprint() != base.fingerprint()


def test_the_partitions_seed_follows_the_experiments():
    assert config.load("demo", sets=["seed=5"]).partition_seed == 5
    assert config.load("demo", sets=["seed=5", "partition.seed=2"]).partition_seed == 2
