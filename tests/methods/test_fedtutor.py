"""FedTutor on the engine against its textbook twin, in float64; the server's average that it learns from."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import feddure
import tiny
from feddure import experiments
from feddure.errors import ConfigError
from feddure.methods import fedtutor
from oracle import pairing
from oracle.feddure_twin import TaughtFedDure
from oracle.fedtutor_twin import FedTutor, Lesson
from oracle.pairing import (
    assert_same,
    distance,
    experiment_of,
    federation_of,
    flat_of,
    headed_of,
    module_of,
    settings_of,
    twin_round,
)


def federation(method="fedtutor", **changes):
    """A federation that knows an average unlike its global model."""
    usual = {"fedtutor__threshold": 0.3, "fixmatch__threshold": 0.3, "partition__setting": "dir-dir"}
    made = federation_of(experiment_of(method, **({"fedtutor__calibrate": "none"} | usual | changes)))
    generator = torch.Generator().manual_seed(5)
    made.server.averaged = [
        tensor + 0.1 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
        for tensor in made.server.method.global_model(made.server.state)
    ]
    return made


def twin_of(found, task):
    options = experiments.options(found.experiment, "fedtutor")
    lesson = Lesson(options.targets, options.threshold, options.weight, options.on, options.calibrate, options.strength)
    lesson = replace(lesson, contrast=options.contrast, view=options.view)
    make = headed_of if options.contrast else module_of
    received = make(found, task.received["theta"], task.received["statistics"])
    tutor = received
    if options.tutor == "average":
        tutor = make(found, task.received["teacher.theta"], task.received["teacher.statistics"])
    settings = settings_of(found.experiment, found.server.program.proximal)
    counts = torch.tensor(
        np.bincount(found.dataset.labels[found.partition.labelled[task.client]], minlength=4), dtype=torch.float64
    )
    return FedTutor(received, settings, lesson, tutor, counts, task.batches.weak.flatten(0, 1))


def uploads(found):
    """What the engine's clients send in the next round, and what their twins would."""
    tasks = found.tasks()
    ours = found.engine.run(tasks)
    for task, result in zip(tasks, ours, strict=True):
        twin = twin_of(found, task)
        twin_round(twin, task)
        yield result.upload, dict(zip(("theta", "statistics"), flat_of(found, twin.theta), strict=True))


SWITCHES = [
    {},
    {"tutor": "global"},
    {"targets": "mixed"},
    {"targets": "hard"},
    {"weight": 0.3},
    {"on": "labelled"},
    {"on": "both"},
    {"calibrate": "labelled"},
    {"calibrate": "both", "strength": 0.5},
    {"view": "weak"},
    {"contrast": 0.7},
    {"contrast": 0.7, "view": "weak"},
    {"contrast": 0.7, "targets": "mixed", "tutor": "global", "calibrate": "both"},
]


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_a_round_equals_the_twins(switch, norm):
    changes = {f"fedtutor__{name}": value for name, value in switch.items()}
    for ours, theirs in uploads(federation(norm=norm, clients_per_round=3, engine__lanes=2, **changes)):
        assert set(ours) == {"theta", "statistics"}
        assert_same(ours, theirs)


ALIKE = [switch for switch in SWITCHES[1:] if "contrast" not in switch]  # with it, heads travel too


@pytest.mark.parametrize("switch", [*ALIKE, {"shuffle": True}], ids=str)
def test_every_switch_matters(switch):
    ((usual, _),) = uploads(federation())
    changes = {f"fedtutor__{name}": value for name, value in switch.items()}
    changed = federation(**changes)
    (result,) = changed.engine.run(changed.tasks())
    assert distance(result.upload["theta"], usual["theta"]) > 1e-6


def test_weight_0_still_passes_the_strong_views():
    """Batch norm sees them: the control that tells whether statistics alone would do."""
    silent = federation(fedtutor__weight=0)
    (task,) = silent.tasks()
    (result,) = silent.engine.run([task])
    twin = twin_of(silent, task)
    twin_round(twin, task)
    assert_same(result.upload, dict(zip(("theta", "statistics"), flat_of(silent, twin.theta), strict=True)))


def test_the_average_forgets_its_start():
    """θ̄ after r rounds with δ_r = min(δ, r / (r + 9)); without `server.ema` FedTutor averages all the same."""
    found = federation_of(experiment_of("fedtutor", local_steps=1))
    expected = [tensor.clone() for tensor in found.server.averaged]
    for number in range(1, 5):
        found.train_round()
        decay = min(0.9, number / (number + 9))
        expected = [
            decay * old + (1 - decay) * new
            for old, new in zip(expected, found.server.method.global_model(found.server.state), strict=True)
        ]
    for ours, theirs in zip(found.server.averaged, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert "test_ema" in found.server.test()


def test_what_is_sent():
    received = federation().tasks()[0].received
    assert set(received) == {"theta", "statistics", "teacher.theta", "teacher.statistics"}
    assert set(federation(fedtutor__tutor="global").tasks()[0].received) == {"theta", "statistics"}


def test_clients_without_labelled_or_without_unlabelled_images():
    found = federation(clients_per_round=4)
    empty, part = np.empty(0, dtype=np.int64), found.partition
    found.partition = replace(
        part,
        labelled=(empty, *part.labelled[1:]),
        unlabelled=(part.unlabelled[0], empty, *part.unlabelled[2:]),
    )
    results = found.engine.run(found.tasks())
    assert all(torch.isfinite(result.upload["theta"]).all() for result in results)


class WithSpace(fedtutor.FedTutor):
    """A subclass with heads of its own."""

    def heads(self, features, classes):
        return {"space": torch.nn.Linear(features, 3)}


def test_a_subclass_may_have_heads():
    feddure.register_method("spaced", WithSpace)
    network = tiny.federation(tiny.experiment(method="spaced"), tiny.dataset()).server.program.network
    assert {"head:space.weight", "head:space.bias"} <= {entry.name for entry in network.parameters.entries}


def test_the_contrast_needs_unlabelled_images():
    with pytest.raises(ConfigError, match=r"fedtutor\.on=unlabelled"):
        federation(fedtutor__contrast=1, fedtutor__on="labelled")


@pytest.mark.parametrize("source", ["global", "average"])
@pytest.mark.parametrize("targets", ["hard", "soft"])
def test_fixmatch_with_a_teacher_is_the_same_thing(source, targets):
    """Written apart, they must agree: FixMatch-GPL is FedTutor with hard targets of the global model."""
    ours = federation(fedtutor__tutor=source, fedtutor__targets=targets)
    theirs = federation("fedavg-fixmatch", fixmatch__pseudo=source, fixmatch__targets=targets)
    (one,), (other,) = (made.engine.run(made.tasks()) for made in (ours, theirs))
    assert_same(one.upload, other.upload)


@pytest.mark.parametrize("source", ["global", "average"])
def test_feddure_with_a_teacher_equals_its_twin(source):
    made = federation("feddure", feddure__pseudo=source)
    (task,) = made.tasks()
    (result,) = made.engine.run([task])
    twin = pairing.twin_of(made, task, twin=TaughtFedDure)
    name = "teacher." if source == "average" else ""
    twin.teacher = module_of(made, task.received[f"{name}theta"], task.received[f"{name}statistics"])
    twin_round(twin, task)
    assert_same(result.upload, pairing.upload_of(made, twin))


def test_maml_has_no_teacher():
    with pytest.raises(ConfigError, match=r"fixmatch\.pseudo=local"):
        federation("baseline+maml", fixmatch__pseudo="global")


def test_images_that_are_left_out_are_recorded_with_weight_0():
    def weights(targets):
        made = federation(fedtutor__targets=targets, fedtutor__threshold=1.0)
        return made.engine.run(made.tasks())[0].records["weight"]

    assert 0 < weights("hard").mean() < 1
    assert (weights("soft") == 1).all()


def test_the_average_is_kept_whoever_labels():
    assert federation(fedtutor__tutor="global").server.decay == 0.9
