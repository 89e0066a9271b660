import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddure.tracking.summary import display_name, duration, mean_of, percent, signed, summarise


def record(number, accuracy=None, ema=None, steps=(5, 5), left_out=()):
    line = {
        "round": number,
        "clients": list(range(len(steps))),
        "steps": list(steps),
        "left_out": list(left_out),
    }
    if accuracy is not None:
        line["test"] = {"accuracy": accuracy, "loss": 1.0}
    if ema is not None:
        line["test_ema"] = {"accuracy": ema, "loss": 1.0}
    return line


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_last_and_mean_of_the_last_ten_evaluations(accuracies):
    metrics = []
    for place, accuracy in enumerate(accuracies):
        metrics += [record(2 * place + 1), record(2 * place + 2, accuracy)]
    found = summarise(metrics)
    last = accuracies[-10:]
    assert found.accuracy_last == accuracies[-1]
    assert found.accuracy_last10 == pytest.approx(sum(last) / len(last))
    assert found.evaluations == len(accuracies)


def test_the_best_evaluation_is_not_reported():
    metrics = [record(1, 0.9), *(record(number, 0.5) for number in range(2, 13))]
    found = summarise(metrics)
    assert (found.accuracy_last, found.accuracy_last10) == (0.5, 0.5)
    assert not any("90" in value for _, value in found.rows())


def test_nothing_yet():
    found = summarise([])
    assert (found.rounds, found.local_steps, found.left_out) == (0, 0, 0)
    assert found.accuracy_last is found.accuracy_last10 is found.mean_local_steps is found.seconds is None
    assert ("accuracy, last evaluation", "–") in found.rows()


def test_steps_clients_and_time_are_totals():
    metrics = [record(1, steps=(5, 10), left_out=(3,)), record(2, steps=(5,), left_out=(1, 2))]
    timing = [{"round": 1, "seconds": 1.5, "clients": 2}, {"round": 2, "seconds": 0.5, "clients": 1}]
    found = summarise(metrics, timing)
    assert (found.local_steps, found.mean_local_steps, found.left_out) == (20, 20 / 3, 3)
    assert (found.seconds, found.clients_per_second) == (2.0, 1.5)


def test_the_averaged_model_has_rows_only_where_there_is_one():
    with_average = summarise([record(1, 0.4, ema=0.5), record(2, 0.6, ema=0.7)])
    assert with_average.accuracy_ema_last == 0.7
    assert with_average.accuracy_ema_last10 == pytest.approx(0.6)
    assert any("averaged" in name for name, _ in with_average.rows())
    assert not any("averaged" in name for name, _ in summarise([record(1, 0.4)]).rows())


def test_a_young_run_says_what_its_mean_is_of():
    assert summarise([record(1, 0.5)]).mean_of == "its only evaluation"
    assert summarise([record(n, 0.5) for n in range(4)]).mean_of == "mean of all 4"
    assert summarise([record(n, 0.5) for n in range(10)]).mean_of == "mean of last 10"
    assert mean_of(5, 20) == "mean of last 10 or fewer"
    assert mean_of(0, 0) == "mean of last 10"  # without test images nobody evaluated


def test_records_may_lack_evaluations_or_a_loss():
    assert summarise([{"round": 1, "diagnostics": {"drift": [1, 2]}, "test": None}]).accuracy_last is None
    assert summarise([{"round": 1, "test": {"accuracy": 0.1, "loss": None}}]).accuracy_last == 0.1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (1.24, "1.2 s"), (14.2, "14 s"), (59.7, "1:00 min"), (85, "1:25 min"), (7410, "2:03 h")],
)
def test_durations_as_people_write_them(seconds, text):
    assert duration(seconds) == text


def test_names_as_people_write_them():
    assert display_name("fedprox-uda") == "FedProx-UDA"
    assert display_name("my.package:Method") == "my.package:Method"
    assert [display_name(name) for name in ("cifar10", "resnet9-slim")] == ["CIFAR-10", "ResNet-9 slim"]
    assert percent(0.669) == "66.90\u202f%"
    assert [signed(value) for value in (1.25, -1.26, -0.04, 0.0)] == ["+1.2", "−1.3", "0.0", "0.0"]


def test_privacy_is_that_of_all_rounds_up_to_the_last():
    spent = [record(number) | {"privacy": {"epsilon": number / 2, "delta": 1e-5}} for number in (1, 2, 3)]
    assert "1.50" in summarise(spent).privacy
    assert "none" in summarise([record(1) | {"privacy": {"epsilon": None, "delta": 1e-5}}]).privacy
    assert summarise([record(1)]).privacy is None
