import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from feddure.tracking.tensorboard import TensorBoard, scalars


def record(number, evaluated=True):
    line = {"round": number, "clients": [1], "steps": [5], "train": {"loss": 1.0 / number, "share": None}}
    if evaluated:
        line["test"] = {
            "accuracy": number / 10,
            "loss": 2.0,
            "per_class": [0.25, 0.75],
            "confusion": [[1, 0], [0, 1]],
        }
    return line


def write(folder, rounds, **options):
    board = TensorBoard(folder, **options)
    for number in rounds:
        board.round_done(None, record(number), seconds=0.5)
    board.close()


def curves(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_number_of_a_record_makes_a_curve(tmp_path):
    write(tmp_path, [1, 2], classes=("shirt", "T-shirt/top"))
    found = curves(tmp_path)
    assert found.keys() == {
        "test/accuracy",
        "test/loss",
        "test_per_class/shirt",
        "test_per_class/T-shirt/top",
        "train/loss",
        "seconds",
    }
    assert found["train/loss"] == [(1, 1.0), (2, 0.5)]
    assert found["test_per_class/T-shirt/top"] == [(1, 0.75), (2, 0.75)]


def test_a_resumed_run_replaces_the_rounds_it_runs_again(tmp_path):
    write(tmp_path, [1, 2, 3, 4])
    time.sleep(1.01 - time.time() % 1)  # files are read in the order of their names, which begin with the second
    write(tmp_path, [3, 4, 5])
    found = curves(tmp_path)["test/accuracy"]
    assert [step for step, _ in found] == [1, 2, 3, 4, 5]
    assert found[-1] == (5, 0.5)


def test_closing_without_a_round_leaves_no_file(tmp_path):
    TensorBoard(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        {"round": 1},
        {"round": 1, "train": {"loss": None}, "test": None},
        {"round": 1, "diagnostics": {"drift": [1.0, 2.0]}, "bytes_up": 12},
    ],
)
def test_records_without_numbers_make_no_curves(line):
    assert list(scalars(line)) == []


def test_diagnostics_and_the_averaged_model_have_curves_of_their_own():
    line = {"round": 1, "diagnostics": {"drift": 0.5}, "test_ema": {"accuracy": 0.4, "per_class": [0.3]}}
    assert dict(scalars(line)) == {
        "diagnostics/drift": 0.5,
        "test_ema/accuracy": 0.4,
        "test_ema_per_class/0": 0.3,
    }
