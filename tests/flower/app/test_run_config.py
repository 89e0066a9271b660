"""The Flower app that is written, and the run configuration in it."""

import tomllib

import pytest
from flwr.cli.config_utils import load_and_validate
from flwr.supercore.object_ref import load_app, validate

import federated
from feddure.errors import ConfigError
from feddure.flower.app import run_config
from feddure.flower.app.run_config import write_app


def config(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]


def test_every_key_is_there_and_reads_back(tmp_path):
    write_app(tmp_path / "app", federated.DESCRIPTION)
    found = config(tmp_path / "app")
    assert list(found) == list(run_config.KEYS)
    assert run_config.read(found).description == federated.DESCRIPTION


def test_odd_texts_survive(tmp_path):
    name = 'a "b" \\ c\n’'
    write_app(tmp_path, federated.DESCRIPTION.model_copy(update={"name": name}))
    assert run_config.read(config(tmp_path)).description.name == name


def test_flower_accepts_the_app(tmp_path):
    write_app(tmp_path, federated.DESCRIPTION)
    found, warnings = load_and_validate(tmp_path / "pyproject.toml")
    assert found["project"]["dependencies"] == []
    assert warnings == []
    for kind, reference in found["tool"]["flwr"]["app"]["components"].items():
        assert validate(reference)[0], kind
        assert load_app(reference, ImportError) is not None


# --- the run's configuration -------------------------------------------------------------------------------
def test_defaults_are_those_of_an_experiment_with_the_descriptions_sites():
    experiment = run_config.read({"description": federated.DESCRIPTION.to_yaml()}).experiment
    assert (experiment.partition.setting, experiment.partition.clients) == ("sites", 3)
    assert experiment.dataset == "tiny"
    assert experiment.checkpoint_every == 1


def test_a_preset_and_settings():
    given = {"preset": "demo", "settings": "seed=4 optimizer.learning_rate=1e-4", "rounds": 7}
    options = run_config.read(given | {"description": federated.DESCRIPTION.to_yaml()})
    assert (options.experiment.seed, options.experiment.rounds) == (4, 7)
    assert options.experiment.optimizer.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"runfolder": "x"}, r"unknown key 'runfolder'.*did you mean 'run-folder'\?"),
        ({"rounds": "3"}, "run-config rounds: '3' was given, expected a whole number"),
        ({"rounds": True}, "run-config rounds: True was given"),
        ({"resume": 1}, "run-config resume: 1 was given, expected true or false"),
        ({"wait-seconds": -1}, "run-config wait-seconds: -1.0 was given, expected 0 or more"),
        ({"settings": "rounds"}, "expected key=value"),
        ({"settings": "nothing.here=1"}, "unknown field"),
        ({"description": "name: x"}, "run-config description: field 'classes' is missing"),
        ({"settings": "partition.labelled_as_unlabelled=true method=fedavg-sl"}, "labelled_as_unlabelled.* to false"),
    ],
)
def test_mistakes_are_named(given, expected):
    with pytest.raises(ConfigError, match=expected):
        run_config.read({"description": federated.DESCRIPTION.to_yaml()} | given)
