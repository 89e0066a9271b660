import io
import re
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from feddure.experiments import load
from feddure.tracking.console import Progress, summary_table
from feddure.tracking.records import Run


class Clock:
    """Time that passes only when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


FEDERATION = SimpleNamespace(experiment=load("demo", changes={"method": "fedavg", "rounds": 200}))


def record(number, accuracy=None, **more):
    line = {"round": number, "clients": [1, 2, 3, 4], "steps": [5] * 4, "train": {"loss": 0.876}, **more}
    if accuracy is not None:
        line["test"] = {"accuracy": accuracy, "loss": 1.312}
    return line


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)


def pipe():
    return Console(file=io.StringIO(), force_terminal=False)


def written(console):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def show(console, lines, **begin):
    """What is written of these records, a second each."""
    clock = Clock()
    observer = Progress(console, clock)
    observer.begin(200, **begin)
    for line in lines:
        clock.now += 1.0
        observer.round_done(FEDERATION, line, 1.0)
    observer.close()
    return written(console).splitlines()


def test_the_terminal_decides(monkeypatch):
    monkeypatch.delenv("TERM", raising=False)
    assert not Progress(terminal()).bars.disable
    assert Progress(pipe()).bars.disable
    monkeypatch.setenv("TERM", "dumb")
    assert Progress(terminal()).bars.disable


def test_progress_goes_to_standard_error(capsys):
    observer = Progress()
    observer.begin(200)
    observer.round_done(FEDERATION, record(1), 0.1)
    observer.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "round 1/200" in captured.err


def test_plain_lines_for_the_first_round_and_each_evaluation():
    lines = show(pipe(), [record(number, 0.512 if number % 5 == 0 else None) for number in range(1, 11)])
    assert [line.split("  ")[0] for line in lines] == ["round 1/200", "round 5/200", "round 10/200"]
    for part in ("accuracy 51.20\u202f%", "loss 1.31", "train loss 0.88", "4.0 clients/s", "left 0:03:10"):
        assert part in lines[-1]


def test_a_slow_first_round_does_not_spoil_the_time_left():
    console, clock = pipe(), Clock()
    log = Progress(console, clock)
    log.begin(200)
    for number in range(1, 101):
        clock.now += 60.0 if number == 1 else 1.0
        log.round_done(FEDERATION, record(number, 0.5 if number == 10 else None), 1.0)
    assert written(console).splitlines()[-1].endswith("4.0 clients/s  left 0:03:10")


def test_the_time_left_counts_what_is_still_to_come():
    """Of a resumed run the rounds that are left; of several runs those of the runs after it too."""
    (line,) = show(pipe(), [record(191)], done=190)
    assert line.endswith("left 0:00:09")
    (line,) = show(pipe(), [record(191)], done=190, name="FedAvg, seed 0", rounds_after=200)
    assert line.startswith("FedAvg, seed 0  round 191/200")
    assert line.endswith("left 0:03:29")


def test_of_several_runs_a_log_has_a_line_now_and_then_and_one_at_the_end_of_each():
    console, clock = pipe(), Clock()
    log = Progress(console, clock)
    log.begin(200, name="FedAvg, seed 0")
    for number in range(1, 201):
        clock.now += 1.0
        log.round_done(FEDERATION, record(number, 0.5), 1.0)
    rounds = [line.split("  ")[1] for line in written(console).splitlines()]
    assert rounds == [f"round {number}/200" for number in (*range(1, 200, 10), 200)]


def test_what_a_method_does_not_record_or_could_not_compute_is_no_error():
    bare = {"round": 1, "test": {"accuracy": 0.1, "loss": None}, "train": {"loss": None}}
    lines = show(pipe(), [bare, {"round": 2, "test": {"accuracy": 0.1, "loss": 2.0}, "diagnostics": {"x": 1}}])
    assert "accuracy 10.00\u202f%  loss –  train loss –" in lines[0]
    assert "accuracy 10.00\u202f%  loss 2.00" in lines[1]


def test_the_averaged_model_is_shown_beside_the_global_one():
    (line,) = show(pipe(), [record(1, 0.5, test_ema={"accuracy": 0.6, "loss": 1.0})])
    assert "averaged 60.00\u202f%" in line


def test_the_bar_starts_where_the_run_resumes_and_keeps_the_last_evaluation():
    lines = show(terminal(), [record(41, 0.512), record(42)], done=40, name="FedAvg")
    assert "40/200" in lines[0]
    for part in ("FedAvg  round 42/200", "accuracy 51.20\u202f%", "4.0 clients/s", "left 0:02:38"):
        assert part in lines[-1]


def test_one_bar_after_the_other():
    bars = Progress(terminal(), Clock())
    for name in ("first", "second"):
        bars.begin(200, name=name)
        bars.round_done(FEDERATION, record(200, 0.5), 1.0)
        bars.close()
    (task,) = bars.bars.tasks
    assert task.description.startswith("second")


def test_the_table_of_a_run_lists_its_numbers():
    run = Run(Path("[mine]"), load("demo"), [record(1), record(2, 0.6543)], [], {}, {})
    console = pipe()
    console.print(summary_table(run))
    assert "[mine]" in written(console)
    assert re.search(r"accuracy, last evaluation\s+65\.43", written(console))


def test_the_table_of_a_run_opens_with_the_model_to_use_and_what_it_is_known_by():
    records = [record(2, 0.75)]
    records[0]["test"]["confusion"] = [[8, 2], [1, 1]]  # 9 of 12
    console = pipe()
    console.print(summary_table(Run(Path("mine"), load("demo"), records, [], {}, {})))
    found = " ".join(written(console).split())
    assert re.search(r"the model to use 75\.0 %, round 2; 12 images, 95 % interval 46\.8 to 91\.1", found)
    assert "83.3 for always the same answer" in found


def test_a_strangers_accuracy_and_test_set_of_nothing_are_no_error():
    records = [record(2, 1.7)]
    for confusion, known in (([[8, 2], [1, 1]], True), ([[0, 0], [0, 0]], False)):
        records[0]["test"]["confusion"] = confusion
        console = pipe()
        console.print(summary_table(Run(Path("theirs"), load("demo"), records, [], {}, {})))
        assert ("the model to use" in written(console)) == known
