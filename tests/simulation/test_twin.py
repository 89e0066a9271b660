"""The engine against the textbook: whole rounds agree in every parameter and statistic."""

import pytest

import tiny
from feddure.simulation.engine import Engine
from feddure.simulation.federation import run
from oracle.fedavg_twin import Twin

METHODS = ("fedavg", "fedavg-matched", "fedavg-sl", "fedprox-sl")


def assert_rounds_agree(experiment, images, owned=None, tolerance=1e-10):
    """Round after round the engine's global model and mean loss are the twin's."""
    owned = owned or tiny.partition(experiment, images)
    federation = tiny.federation(experiment, images, owned=owned)
    twin = Twin(experiment, images, owned)
    for _ in range(experiment.rounds):
        record = federation.train_round()
        twin.play()
        assert record["clients"] == twin.clients(twin.round)
        assert record["train"]["loss"] == pytest.approx(sum(twin.losses) / len(twin.losses), rel=1e-12)
        tiny.assert_near(federation.server.model_state(), twin.state, tolerance)
    return federation


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("method", METHODS)
def test_rounds_equal_the_textbook(images, method, norm):
    assert_rounds_agree(tiny.experiment(method=method, norm=norm), images)


@pytest.mark.parametrize("lanes", [2, 9])
def test_the_number_of_lanes_changes_nothing(images, lanes):
    experiment = tiny.experiment({"method": "fedprox-sl", "engine.lanes": lanes, "clients_per_round": 4})
    federation = assert_rounds_agree(experiment, images)
    alone = tiny.finished(experiment.model_copy(update={"engine": tiny.experiment().engine}), images)
    tiny.assert_equal(federation.server.state, alone.server.state)


@pytest.mark.parametrize("weight", ["total", "labelled", "uniform"])
def test_each_way_to_weigh_clients(images, weight):
    assert_rounds_agree(tiny.experiment({"server.weight": weight}), images)


def test_a_proximal_term_for_any_method(images):
    assert_rounds_agree(tiny.experiment(method="fedavg-matched", proximal=0.3, local_steps=4), images)


def test_other_constants_of_adam(images):
    changes = {"optimizer.learning_rate": 3e-3, "optimizer.beta1": 0.8, "optimizer.beta2": 0.95}
    assert_rounds_agree(tiny.experiment(changes | {"optimizer.epsilon": 1e-4}), images)


def test_cutout_of_labelled_images(images):
    plain = assert_rounds_agree(tiny.experiment(rounds=1), images)
    cut = assert_rounds_agree(tiny.experiment(rounds=1, labelled_cutout=True), images)
    assert not plain.server.state["theta"].equal(cut.server.state["theta"])


def test_the_residual_network():
    colour = tiny.dataset(size=100, channels=3, side=16)
    experiment = tiny.experiment(model="resnet9-slim", labelled_batch=4, clients_per_round=2)
    assert_rounds_agree(experiment, colour)


def test_one_epoch_of_unlabelled_images_counts_the_steps(images):
    assert_rounds_agree(tiny.experiment(method="fedavg-matched", local_steps="epoch", rounds=1), images)


def test_federations_on_one_engine_equal_each_alone(images):
    other_images = tiny.dataset(size=120, channels=3)
    wanted = [
        (tiny.experiment(), images),
        (tiny.experiment(seed=7), images),
        (tiny.experiment({"partition.setting": "iid-iid", "rounds": 3}), images),
        (tiny.experiment(method="fedavg", local_steps=1, labelled_batch=3), images),
        (tiny.experiment({"server.weight": "uniform"}, proximal=0.5), images),
        (tiny.experiment({"method": "feddure", "optimizer.learning_rate": 1e-3}), images),
        (tiny.experiment({"norm": "group", "server.optimizer": "momentum", "server.ema": 0.5}), images),
        (tiny.experiment(), other_images),
    ]
    engine = Engine(tiny.experiment({"engine.lanes": 3}).engine)
    together = [tiny.federation(experiment, data, engine) for experiment, data in wanted]
    for federation in together:
        run(federation)
    for federation, (experiment, data) in zip(together, wanted, strict=True):
        alone = tiny.finished(experiment, data)
        assert federation.round == alone.round == experiment.rounds
        tiny.assert_equal(federation.server.state, alone.server.state)
        assert federation.server.test() == alone.server.test()
