"""Experiments: presets, files, changes, and messages a person understands."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from pydantic import Field

import feddure
from feddure import config, experiments, methods
from feddure.errors import ConfigError
from feddure.reports import names
from feddure.studies.grid.store import Cell, Store

GOLDEN = "41d515992dad56e3"

DEFAULTS = {
    "dataset": "fashion-mini",
    "method": "feddure",
    "model": "resnet9",
    "norm": "batch",
    "batch_norm": "aggregate",
    "seed": "0",
    "rounds": "200",
    "clients_per_round": "5",
    "local_steps": "5",
    "labelled_batch": "10",
    "unlabelled_batch": "auto",
    "labelled_cutout": "False",
    "proximal": "",
    "evaluate_every": "5",
    "checkpoint_every": "10",
    "probe_every": "0",
    "partition.setting": "dir-dir",
    "partition.clients": "100",
    "partition.gamma": "0.5",
    "partition.labels_per_class": "",
    "partition.label_fraction": "",
    "partition.seed": "",
    "optimizer.learning_rate": "0.0005",
    "optimizer.beta1": "0.9",
    "optimizer.beta2": "0.999",
    "optimizer.epsilon": "1e-08",
    "server.weight": "total",
    "server.optimizer": "mean",
    "server.learning_rate": "1.0",
    "server.beta1": "0.9",
    "server.beta2": "0.99",
    "server.epsilon": "0.001",
    "server.ema": "",
    "engine.device": "auto",
    "engine.lanes": "auto",
    "engine.precision": "auto",
    "engine.compile": "auto",
    "engine.deterministic": "False",
    "options": "",
    "uda.threshold": "0.8",
    "uda.temperature": "0.4",
    "uda.weight": "1.0",
    "fixmatch.threshold": "0.95",
    "fixmatch.weight": "1.0",
    "fedmatch.optimizer": "original",
    "fedmatch.net": "common",
    "fedmatch.learning_rate": "0.001",
    "fedmatch.threshold": "0.75",
    "fedmatch.helpers": "2",
    "fedmatch.helper_every": "10",
    "fedmatch.lambda_s": "10.0",
    "fedmatch.lambda_i": "0.01",
    "fedmatch.lambda_a": "0.01",
    "fedmatch.lambda_1": "0.0001",
    "fedmatch.lambda_2": "10.0",
    "fedmatch.psi_factor": "0.2",
    "feddure.h_gradient": "full",
    "feddure.f_reg_input": "softmax",
    "feddure.f_reg_memory": "none",
    "feddure.reward": "fall",
    "feddure.d_clip": "",
    "feddure.maml_order": "2",
    "feddure.threshold": "0.95",
    "feddure.reward_on": "all",
}


def refused(match, **arguments):
    with pytest.raises(ConfigError, match=match) as caught:
        experiments.load(**arguments)
    return str(caught.value)


@pytest.mark.parametrize("name", experiments.presets())
def test_presets_are_whole_and_survive_a_round_trip(name, tmp_path):
    experiment = experiments.load(name)
    (tmp_path / "config.yaml").write_text(experiments.to_yaml(experiment))
    assert experiments.load(file=tmp_path / "config.yaml") == experiment
    assert experiments.about(name)


def test_the_papers_numbers():
    paper = experiments.load("aaai24")
    assert (paper.partition.clients, paper.clients_per_round, paper.rounds) == (100, 5, 200)
    assert (paper.local_steps, paper.labelled_batch, paper.optimizer.learning_rate) == (5, 10, 5e-4)
    assert experiments.load("aaai24", changes={"dataset": "cinic10"}).local_steps == 10
    assert experiments.load("aaai24", changes={"dataset": "cinic10"}, sets=["local_steps=3"]).local_steps == 3


@pytest.mark.parametrize(("preset", "dataset"), [("aaai24", "cifar100"), ("cvpr25", "svhn"), ("cvpr25", "cifar10")])
def test_labels_may_be_asked_for_either_way_whatever_the_preset_says(preset, dataset):
    for given, other in (("labels_per_class", "label_fraction"), ("label_fraction", "labels_per_class")):
        value = {"labels_per_class": 2, "label_fraction": 0.05}[given]
        found = experiments.load(preset, changes={"dataset": dataset}, sets=[f"partition.{given}={value}"]).partition
        assert (getattr(found, given), getattr(found, other)) == (value, None)
    assert experiments.load("aaai24-fine").local_steps == "epoch"


def test_the_numbers_of_sages_protocol():
    sage = experiments.load("cvpr25")
    assert (sage.partition.clients, sage.clients_per_round, sage.rounds) == (20, 8, 300)
    assert (sage.local_steps, sage.labelled_batch, sage.unlabelled_batch) == (95, 128, 256)
    assert (sage.optimizer.name, sage.optimizer.learning_rate, sage.optimizer.momentum) == ("sgd", 0.1, 0.9)
    labels_only = experiments.load("cvpr25", changes={"method": "fedavg-matched"})
    assert methods.make(labels_only).steps(250, 2500, 256) == 95


def test_the_published_runs_of_sages_protocol_are_the_presets():
    store = Store(Path(__file__).parents[1] / "results" / "sage-300")
    for method in ("fedtutor", "proxyfl"):
        assert store.find(Cell("", "", experiments.load("cvpr25", changes={"method": method, "seed": 3})))


def test_later_changes_win():
    experiment = experiments.load(
        "demo", changes={"rounds": 7, "seed": None}, sets=["rounds=9", "partition.gamma=5e-1"]
    )
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
        ("options.day=2024-02-30", "options.day", "2024-02-30"),
        ("engine.lanes=4", "engine.lanes", 4),
    ],
)
def test_values_of_set(text, key, value):
    found = experiments.load(sets=[text])
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds", "--set rounds: expected key=value"),
        ("=3", "expected key=value"),
        ("rounds=0", "rounds: 0 was given, expected whole number ≥ 1"),
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
        ("partition.setting=iid", "partition.setting: 'iid' was given, expected iid-iid or iid-dir"),
        ("partition.setting=iid-dri", r"; did you mean 'iid-dir'\?$"),
        ("engine.device=gpu", "expected auto or cpu or cuda$"),
        ("rounds.x=3", "rounds.x: 'rounds' is a field, not a section|rounds"),
        ("local_steps=0", "local_steps: 0 was given, expected epoch or whole number ≥ 1"),
        ("unlabelled_batch=0", "unlabelled_batch: 0 was given"),
        ("engine.lanes=0", "engine.lanes: 0 was given"),
        ("engine.precision=fp16", "engine.precision: 'fp16' was given"),
        ("server.ema=1", "server.ema: 1 was given"),
        ("optimizer.momentum=0.9", "belong to sgd: add optimizer.name=sgd"),
        ("optimizer={name: sgd, nesterov: true}", "nesterov was given without optimizer.momentum"),
        ("clients_per_round=210", r"clients_per_round is 210 but partition.clients is \d+:"),
        ("feddure.maml_order=3", "feddure.maml_order: 3 was given, expected 1 or 2"),
        ("feddure.reword=rise", r"did you mean 'feddure.reward'\?"),
        ("fixmatch.threshold=2", "fixmatch.threshold: 2 was given"),
        ("fixmach.threshold=0.5", r"unknown field 'fixmach'; did you mean 'fixmatch'\?"),
    ],
)
def test_mistakes_are_explained(text, message):
    refused(message, preset="demo", sets=[text])


@pytest.mark.parametrize("options", [{"a": np.float64(0.5)}, {"a": {1: 2, "b": 3}}, {"a": object()}])
def test_options_that_cannot_be_written_are_refused(options):
    refused("options: only texts, numbers", changes={"options": options})


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
    refused("preset 'dmeo' does not exist; there are: aaai24, aaai24-fine, .*; did you mean 'demo'", preset="dmeo")


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


def test_an_empty_section_of_a_file_takes_changes(tmp_path):
    (tmp_path / "config.yaml").write_text("partition:\n")
    assert experiments.load(file=tmp_path / "config.yaml", sets=["partition.gamma=0.3"]).partition.gamma == 0.3


def test_the_callers_own_options_stay_as_they_are():
    given = {"a": {"b": 1}}
    assert experiments.load(changes={"options": given}, sets=["options.a.b=2"]).options == {"a": {"b": 2}}
    assert given == {"a": {"b": 1}}


def test_every_field_has_a_meaning_and_its_values():
    rows = experiments.fields()
    assert len(rows) > 60
    assert all(row.meaning.endswith((".", ")")) for row in rows)
    assert len({row.key for row in rows}) == len(rows)
    allowed = {row.key: row.allowed for row in rows}
    assert allowed["feddure.reward"] == "fall | rise"
    assert allowed["local_steps"] == "epoch | whole number ≥ 1 and ≤ 1,000,000"
    assert allowed["server.ema"] == "number > 0 and < 1 | empty"


def test_configurations_cannot_be_changed_in_place():
    with pytest.raises(Exception, match="frozen"):
        experiments.load("demo").rounds = 3


def same(*sets, preset="demo"):
    """Whether these changes leave the fingerprint as it is."""
    return experiments.fingerprint(experiments.load(preset, sets=sets)) == experiments.fingerprint(
        experiments.load(preset)
    )


def test_the_fingerprint_knows_what_changes_results():
    assert same("engine.lanes=3", "engine.device=cpu", "engine.compile=false", "checkpoint_every=1", "probe_every=1")
    for change in ("seed=1", "rounds=41", "partition.gamma=0.4", "engine.precision=fp64", "options.x=1"):
        assert not same(change)
    for name in ("labelled_clients=0.5", "unlabelled_fraction=0.5", "labelled_as_unlabelled=true"):
        assert not same(f"partition.{name}")


def test_only_the_chosen_methods_options_count():
    assert same("fixmatch.threshold=0.6", "fedmatch.helpers=3", "feddure.reward=fall")
    assert not same("feddure.reward=rise")
    assert same("feddure.reward=rise", "method=fedavg-fixmatch") is False
    on_fixmatch = [
        experiments.load("demo", sets=["method=fedavg-fixmatch", text])
        for text in ("feddure.reward=rise", "fixmatch.threshold=0.95", "fixmatch.threshold=0.6")
    ]
    rise, usual, low = map(experiments.fingerprint, on_fixmatch)
    assert rise == usual != low
    maml = [
        experiments.load("demo", sets=["method=baseline+maml", text])
        for text in ("feddure.maml_order=2", "feddure.maml_order=1", "fixmatch.weight=2")
    ]
    assert len(set(map(experiments.fingerprint, maml))) == 3


def test_gamma_counts_only_where_there_is_a_dirichlet_share():
    for setting, different in (("iid-iid", 1), ("dir-dir", 2), ("pairs", 2)):
        sets = [[f"partition.setting={setting}", f"partition.gamma={gamma}"] for gamma in (0.1, 0.5)]
        assert len({experiments.fingerprint(experiments.load("demo", sets=each)) for each in sets}) == different


def test_new_fields_and_methods_rename_no_cell(monkeypatch):
    """A golden hash: whoever changes it orphans everything that was ever measured."""
    before = experiments.fingerprint(experiments.load("aaai24-fine"))
    assert before.startswith(GOLDEN)

    class Options(feddure.Options):
        strength: float = Field(0.5, description="How much.")

    class New(feddure.Method):
        name, section = "new", "new"

    New.Options = Options
    monkeypatch.setitem(methods.METHODS, "new", New)
    assert experiments.fingerprint(experiments.load("aaai24-fine")) == before
    assert experiments.load("aaai24-fine", sets=["method=new", "new.strength=1"]).new == {"strength": 1.0}


def test_the_defaults_of_the_schema_have_not_moved():
    """Fingerprints leave defaults out: a changed one needs the next `experiments.SCHEMA` (and an update here)."""
    assert experiments.SCHEMA == 2
    defaults = {row.key: row.default for row in experiments.fields()}
    moved = {key: defaults.get(key) for key, value in DEFAULTS.items() if defaults.get(key) != value}
    assert not moved


def test_options_are_kept_where_they_differ_and_written_in_full():
    experiment = experiments.load("demo", sets=["feddure.reward=rise", "feddure.d_clip=null", "fixmatch.threshold=0.6"])
    assert experiment.feddure == {"reward": "rise"}
    tree = yaml.safe_load(experiments.to_yaml(experiment))
    assert tree["feddure"]["reward"] == "rise"
    assert tree["feddure"]["maml_order"] == 2
    assert tree["fixmatch"] == {"threshold": 0.6}
    assert experiments.build(tree) == experiment
    assert experiments.flat(experiment)["uda.temperature"] == 0.4
    assert experiments.differences([experiment, experiments.load("demo")]) == ["fixmatch.threshold", "feddure.reward"]
    assert experiments.changes(config.Experiment()) == {}


class Weighted(feddure.Method):
    name = section = "weighted"

    class Options(feddure.Options):
        weights: dict[str, float] = Field(default_factory=dict, description="By kind.")


def test_an_option_may_be_a_mapping(monkeypatch):
    monkeypatch.setitem(methods.METHODS, "weighted", Weighted)
    plain, one, two = (
        experiments.load("demo", changes={"method": "weighted", "weighted.weights": weights})
        for weights in ({}, {"a": 1.0}, {"b": 2.0})
    )
    assert experiments.flat(one)["weighted.weights"] == {"a": 1.0}
    assert {row.key for row in experiments.fields()} == set(experiments.flat(plain))
    assert experiments.differences([plain, one, two]) == ["weighted.weights"]
    assert names.labels([plain, one, two])[2].endswith("{'b': 2.0}")


class Sharp(feddure.Method):
    class Options(feddure.Options):
        temperature: float = Field(0.5, gt=0, description="Sharpens targets.")

    def step(self, client, batch):
        client.descend(feddure.mean(feddure.cross_entropy(client.model(batch.labelled)[0], batch.labels)))


def test_a_method_of_ones_own_declares_options_the_same_way(monkeypatch):
    monkeypatch.setitem(methods.METHODS, "mine:Sharp", Sharp)
    make = lambda *sets: methods.make(experiments.load("demo", sets=["method=mine:Sharp", *sets]))  # noqa: E731
    assert make().options.temperature == 0.5
    assert make("options.temperature=2").options.temperature == 2.0
    with pytest.raises(ConfigError, match=r"options.temperature: -1 was given"):
        make("options.temperature=-1")
    with pytest.raises(ConfigError, match=r"options\.temprature"):
        make("options.temprature=1")


def test_the_partitions_seed_follows_the_experiments():
    assert experiments.load("demo", sets=["seed=5"]).partition_seed == 5
    assert experiments.load("demo", sets=["seed=5", "partition.seed=2"]).partition_seed == 2


@pytest.mark.parametrize(
    "text",
    [
        "options: {a: &a [x, x], b: &b [*a, *a], c: [*b, *b]}\n",
        "rounds: " + "9" * 5000 + "\n",
        "options: " + "[" * 5000 + "\n",
        "options: 2001-99-99\n",
    ],
)
def test_a_file_that_means_to_exhaust_its_reader_is_one_error(tmp_path, text):
    (tmp_path / "theirs.yaml").write_text(text)
    with pytest.raises(ConfigError, match="not valid YAML"):
        experiments.load(file=tmp_path / "theirs.yaml")
