"""What the server makes of uploads: means, its own optimisers, averages of the global model."""

import dataclasses

import pytest
import torch

import tiny
from feddure.methods.base import weighted_mean
from feddure.simulation import server
from feddure.simulation.server import Answer


def rounds_of(experiment, images):
    """The global parameters before the first round and after each, and the means of what clients sent."""
    federation = tiny.federation(experiment, images)
    models, means = [federation.server.state["theta"]], []
    for _ in range(experiment.rounds):
        tasks = federation.tasks()
        results = federation.engine.run(tasks)
        sizes = [owned_images(federation, task.client) for task in tasks]
        uploads = [result.upload["theta"] for result in results]
        means.append(sum(size * upload for size, upload in zip(sizes, uploads, strict=True)) / sum(sizes))
        federation.finish_round(tasks, results)
        models.append(federation.server.state["theta"])
    return federation, models, means


def owned_images(federation, client):
    return len(federation.partition.labelled[client]) + len(federation.partition.unlabelled[client])


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-14)


def test_the_mean_itself(images):
    _, models, means = rounds_of(tiny.experiment(rounds=3), images)
    for model, mean in zip(models[1:], means, strict=True):
        close(model, mean)


def test_momentum(images):
    changes = {"server.optimizer": "momentum", "server.learning_rate": 0.7, "server.beta1": 0.6, "rounds": 4}
    _, models, means = rounds_of(tiny.experiment(changes), images)
    velocity = torch.zeros_like(models[0])
    for before, after, mean in zip(models, models[1:], means, strict=False):
        velocity = 0.6 * velocity + (mean - before)
        close(after, before + 0.7 * velocity)


def test_adam(images):
    changes = {
        "server.optimizer": "adam",
        "server.learning_rate": 0.02,
        "server.beta1": 0.8,
        "server.beta2": 0.9,
        "server.epsilon": 1e-3,
        "rounds": 4,
    }
    _, models, means = rounds_of(tiny.experiment(changes), images)
    first = second = torch.zeros_like(models[0])
    for before, after, mean in zip(models, models[1:], means, strict=False):
        change = mean - before
        first = 0.8 * first + 0.2 * change
        second = 0.9 * second + 0.1 * change**2
        close(after, before + 0.02 * first / (second.sqrt() + 1e-3))


def test_the_average_of_the_global_model(images):
    federation, models, _ = rounds_of(tiny.experiment({"server.ema": 0.25, "rounds": 4}), images)
    average = models[0]
    for number, model in enumerate(models[1:], start=1):
        decay = min(0.25, number / (number + 9))  # the start is soon forgotten
        average = decay * average + (1 - decay) * model
    close(federation.server.averaged[0], average)
    found = federation.server.test()
    assert found["test_ema"]["loss"] != found["test"]["loss"]
    assert "test_ema" not in tiny.federation(tiny.experiment(), images).server.test()


def test_server_optimisers_leave_statistics_to_the_mean(images):
    plain = tiny.finished(tiny.experiment(rounds=1), images)
    other = tiny.finished(tiny.experiment({"rounds": 1, "server.optimizer": "adam"}), images)
    assert torch.equal(other.server.state["statistics"], plain.server.state["statistics"])
    assert not torch.equal(other.server.state["theta"], plain.server.state["theta"])


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_a_mean_of_tensors_of_any_shape(shape):
    uploads = [{"value": torch.rand(shape, dtype=torch.float64)} for _ in range(3)]
    expected = (uploads[0]["value"] + 2 * uploads[1]["value"] + 5 * uploads[2]["value"]) / 8
    close(weighted_mean(uploads, [1.0, 2.0, 5.0])["value"], expected)


def without_images(images):
    """What is known of a data set where none of its images are."""
    nothing = {"images": images.images[:0], "labels": images.labels[:0]}
    return dataclasses.replace(
        images, **nothing, test_images=images.test_images[:0], test_labels=images.test_labels[:0]
    )


@pytest.mark.parametrize("method", ["feddure", "fedmatch"])
def test_a_server_without_any_image_makes_the_same_model(images, method):
    experiment = tiny.experiment({"method": method, "server.ema": 0.5, "fedmatch.helper_every": 1}, rounds=3)
    federation = tiny.federation(experiment, images)
    alone = server.Server(
        experiment, without_images(images), federation.server.image_counts, federation.engine, "identity"
    )
    for _ in range(experiment.rounds):
        tasks = federation.tasks()
        results = federation.engine.run(tasks)
        told = [(a.client, a.round, a.steps, a.unlabelled_batch) for a in alone.assignments()]
        assert told == [(task.client, federation.round + 1, task.steps, 6) for task in tasks]
        sent = [alone.broadcast(assignment) for assignment in alone.assignments()]
        uploads = [result.upload for result in results]
        federation.finish_round(tasks, results)
        alone.finish_round(
            [
                server.Answer(task.client, task.steps, received, upload)
                for task, received, upload in zip(tasks, sent, uploads, strict=True)
            ]
        )
    tiny.assert_equal(alone.state, federation.server.state)
    assert all(torch.equal(a, b) for a, b in zip(alone.averaged, federation.server.averaged, strict=True))
    tiny.assert_equal(alone.model_state(), federation.server.model_state())


def test_an_answer_with_a_problem_counts_for_nothing_but_what_was_sent(images):
    experiment = tiny.experiment(rounds=1)
    one, other = (tiny.federation(experiment, images) for _ in range(2))
    whole = answers_of(one)
    lost = dataclasses.replace(whole[1], upload={}, problem="no answer in time")
    record, problems = one.server.finish_round([whole[0], lost, whole[2]])
    other.server.finish_round([whole[0], whole[2]])
    tiny.assert_equal(one.server.state, other.server.state)
    assert problems == {lost.client: "no answer in time"}
    assert record["left_out"] == [lost.client]
    assert record["clients"] == [answer.client for answer in whole]
    assert record["communication"]["down"] == 1.5 * record["communication"]["up"]


def answers_of(federation):
    tasks = federation.tasks()
    return [
        server.Answer(task.client, task.steps, task.received, result.upload)
        for task, result in zip(tasks, federation.engine.run(tasks), strict=True)
    ]


def test_a_variance_below_zero_is_left_out_however_short_the_update(images):
    server = tiny.federation(tiny.experiment({"server.norm_bound": 3.0}), images).server
    assignments = server.assignments()
    answers = [Answer(a.client, 1, server.broadcast(a), dict(server.broadcast(a))) for a in assignments]
    variances = torch.nonzero(server.program.network.variances).flatten()
    assert len(variances)
    for answer in answers:
        answer.upload["theta"] = answer.upload["theta"] + 0.01
        answer.upload["statistics"] = answer.upload["statistics"] + 1.0
    answers[0].upload["statistics"][variances[0]] = -0.5
    record, problems = server.finish_round(answers)
    assert problems == {answers[0].client: "a batch-norm variance is below zero"}
    assert (server.state["statistics"][variances] > 0).all()
    assert "suspicious" not in record


def test_of_two_updates_neither_site_is_called_hostile_alone(images):
    server = tiny.federation(tiny.experiment({"server.norm_bound": 3.0, "clients_per_round": 2}), images).server
    answers = [Answer(a.client, 1, server.broadcast(a), dict(server.broadcast(a))) for a in server.assignments()]
    answers[0].upload["theta"] = answers[0].upload["theta"] + 1e-6  # nearly what it received
    answers[1].upload["theta"] = answers[1].upload["theta"] + 0.1  # honest
    record, _ = server.finish_round(answers)
    assert record["suspicious"].keys() == {str(answer.client) for answer in answers}
    assert len(set(record["suspicious"].values())) == 1


@pytest.mark.parametrize("guilty", [1, 3])
def test_finite_updates_that_make_the_model_infinite_are_left_out(images, guilty):
    """Momentum doubles what is nearly the largest number; who does so alone is left out, the others count."""
    changes = {"server.optimizer": "momentum", "server.learning_rate": 10.0, "server.ema": 0.5}
    one, other = (tiny.federation(tiny.experiment(changes, rounds=1), images) for _ in range(2))
    answers = answers_of(one)
    for place in range(guilty):
        huge = {name: torch.full_like(tensor, 1e308) for name, tensor in answers[place].upload.items()}
        answers[place] = dataclasses.replace(answers[place], upload=huge)
    record, problems = one.server.finish_round(answers)
    other.server.finish_round(answers[guilty:])
    left_out = sorted(answer.client for answer in answers[:guilty])
    assert problems == dict.fromkeys(left_out, "the update makes the model not finite")
    assert record["left_out"] == left_out
    tiny.assert_equal(one.server.state, other.server.state)
    tiny.assert_equal(one.server.moments, other.server.moments)
    assert torch.isfinite(one.server.averaged[0]).all()


@pytest.mark.parametrize(
    ("weights", "expected"), [([5, 4, 90], [5, 4, 15]), ([7, 1], [3, 1]), ([9], [9]), ([2, 3, 3, 2], [2, 3, 3, 2])]
)
def test_no_weight_is_more_than_so_many_times_the_median(weights, expected):
    assert server.capped(weights, 3.0) == expected
    assert server.capped(weights, None) == weights
