"""What a site allows, whoever asks."""

import pytest
import yaml

import federated
from feddure import experiments, methods
from feddure.errors import ConfigError
from feddure.flower.app.policy import check_policy, check_work
from feddure.simulation.server import Assignment


def asking(**changes):
    return experiments.to_yaml(federated.experiment(changes, federated.SETTINGS.replace("model=cnn ", "")))


@pytest.mark.parametrize("no", [False, "false", "no", 0])
def test_declining_helpers_declines_fedmatch_alone(no):
    for method in methods.METHODS:
        if method == "fedmatch":
            with pytest.raises(ConfigError, match="and helpers=false"):
                check_policy({"helpers": no}, asking(method=method))
        else:
            check_policy({"helpers": no}, asking(method=method))


def test_modules_are_refused_unless_they_are_allowed():
    for changes in ({"method": "a.b:C"}, {"model": "a.b:C"}):
        for node in ({}, {"modules": False}, {"modules": "yes"}):
            with pytest.raises(ConfigError, match="own modules are not allowed at this site; allow them"):
                check_policy(node, asking(**changes))


def test_rounds_of_any_usual_size_are_carried_out():
    def work(steps, batch):
        experiment = federated.experiment(settings=f"model=cnn local_steps={steps} labelled_batch=5")
        check_work(experiment, methods.make(experiment), Assignment(0, 1, 0, steps, batch), 50, 500, 64)

    work(1, 0)
    work(10_000, 1000)
    with pytest.raises(ConfigError, match="asks for 100000 steps on 4101 images"):
        work(100_000, 4096)


@pytest.mark.parametrize("method", ["fedavg", "feddure"])
def test_an_epoch_is_one_over_the_sites_own_images(method):
    """The number of steps in the message is the server's; what was approved is an epoch."""
    experiment = federated.experiment({"method": method}, "model=cnn local_steps=epoch labelled_batch=5")
    found = methods.make(experiment)

    def work(steps, labelled=50, unlabelled=40):
        check_work(experiment, found, Assignment(0, 1, 0, steps, 4), labelled, unlabelled, 64)

    work(10)
    work(10, labelled=30, unlabelled=20)  # a half was taken away since the server was told
    work(10, unlabelled=1)  # images without a label that the server does not believe in yet
    with pytest.raises(ConfigError, match="asks for 1000 local steps, expected 40 at most"):
        work(1000)


def test_a_server_cannot_send_a_few_lines_that_stand_for_gigabytes():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    with pytest.raises(yaml.YAMLError, match="aliases"):
        check_policy({}, "\n".join(lines))
