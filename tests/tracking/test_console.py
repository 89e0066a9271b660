import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from feddure.config import load
from feddure.tracking.console import MOST_LINES, PlainLog, Progress, console_observer, summary_table
from feddure.tracking.records import Run


class Clock:
    """Time that passes only when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def federation(done=0, rounds=200, **changes):
    return SimpleNamespace(
        experiment=load("demo", changes={"method": "fedavg", "rounds": rounds, **changes}), round=done
    )


def record(number, accuracy=None, **more):
    line = {"round": number, "clients": [1, 2, 3, 4], "steps": [5] * 4, "train": {"loss": 0.876}, **more}
    if accuracy is not None:
        line["test"] = {"accuracy": accuracy, "loss": 1.312}
    return line


def terminal(width=120):
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def pipe():
    return Console(file=io.StringIO(), force_terminal=False)


def written(console):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_the_terminal_decides(monkeypatch):
    monkeypatch.delenv("TERM", raising=False)
    bars = console_observer([federation()], terminal())
    bars.close()
    assert isinstance(bars, Progress)
    assert isinstance(console_observer([federation()], pipe()), PlainLog)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(console_observer([federation()], terminal()), PlainLog)


def test_progress_goes_to_standard_error(capsys):
    watched = federation()
    observer = console_observer([watched])
    observer.round_done(watched, record(1), 0.1)
    observer.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "round 1/200" in captured.err


def test_plain_lines_for_the_first_round_and_each_evaluation():
    console, clock, watched = pipe(), Clock(), federation()
    log = PlainLog([watched], console, clock)
    for number in range(1, 11):
        clock.now += 0.5
        log.round_done(watched, record(number, 0.512 if number % 5 == 0 else None), 0.5)
    log.close()
    lines = written(console).splitlines()
    assert lines == [
        "round 1/200  train loss 0.88  8.0 clients/s  left 0:01:40",
        "round 5/200  accuracy 0.512  loss 1.31  train loss 0.88  8.0 clients/s  left 0:01:38",
        "round 10/200  accuracy 0.512  loss 1.31  train loss 0.88  8.0 clients/s  left 0:01:35",
    ]


def test_a_slow_first_round_does_not_spoil_the_time_left():
    console, clock, watched = pipe(), Clock(), federation(rounds=100)
    log = PlainLog([watched], console, clock)
    for number in range(1, 11):
        clock.now += 60.0 if number == 1 else 1.0
        log.round_done(watched, record(number, 0.5 if number == 10 else None), 1.0)
    assert written(console).splitlines()[-1].endswith("4.0 clients/s  left 0:01:30")


def test_a_resumed_run_counts_only_the_rounds_that_are_left():
    console, clock, watched = pipe(), Clock(), federation(done=190)
    log = PlainLog([watched], console, clock)
    clock.now += 2.0
    log.round_done(watched, record(191), 2.0)
    assert written(console) == "round 191/200  train loss 0.88  2.0 clients/s  left 0:00:18\n"


def test_plain_lines_name_federations_where_there_are_several():
    console, clock = pipe(), Clock()
    watched = [federation(seed=0), federation(seed=1)]
    log = PlainLog(watched, console, clock)
    for one in watched:
        clock.now += 1.0
        log.round_done(one, record(1), 1.0)
    assert [line.split("  ")[0] for line in written(console).splitlines()] == [
        "FedAvg, seed 0",
        "FedAvg, seed 1",
    ]


def test_what_a_method_does_not_record_or_could_not_compute_is_no_error():
    console, watched = pipe(), federation()
    log = PlainLog([watched], console, Clock())
    log.round_done(watched, {"round": 1, "test": {"accuracy": 0.1, "loss": None}, "train": {"loss": None}}, 0.0)
    log.round_done(watched, {"round": 2, "test": {"accuracy": 0.1, "loss": 2.0}, "diagnostics": {"x": [1]}}, 0.0)
    assert "accuracy 0.100  loss –  train loss –" in written(console)
    assert "accuracy 0.100  loss 2.00  –" in written(console)


def test_the_averaged_model_is_shown_beside_the_global_one():
    console, watched = pipe(), federation()
    log = PlainLog([watched], console, Clock())
    log.round_done(watched, record(1, 0.5, test_ema={"accuracy": 0.6, "loss": 1.0}), 0.0)
    assert "averaged 0.600" in written(console)


def test_the_bar_starts_where_the_run_resumes_and_keeps_the_last_evaluation():
    clock, watched = Clock(), federation(done=40)
    console = terminal()
    bars = Progress([watched], console, clock)
    (task,) = bars.bars.tasks
    assert (task.completed, task.total) == (40, 200)
    for number, accuracy in ((41, 0.512), (42, None)):
        clock.now += 2.0
        bars.round_done(watched, record(number, accuracy), 2.0)
    bars.close()
    last = written(console).splitlines()[-1]
    for part in ("round 42/200", "accuracy 0.512", "loss 1.31", "2.0 clients/s", "0:00:04", "left 0:05:16"):
        assert part in last


@pytest.mark.parametrize("number", [2, MOST_LINES, MOST_LINES + 1])
def test_several_federations_have_one_bar_and_few_have_a_line_each(number):
    watched = [federation(done=3, rounds=10, seed=seed) for seed in range(number)]
    bars = Progress(watched, terminal(), Clock())
    bars.round_done(watched[1], record(4, 0.5), 1.0)
    bars.close()
    overall, *lines = bars.bars.tasks
    assert (overall.completed, overall.total) == (3 * number + 1, 10 * number)
    assert len(lines) == (number if number <= MOST_LINES else 0)
    if lines:
        assert [line.completed for line in lines[:2]] == [3, 4]
        assert (lines[0].fields["result"], lines[1].fields["result"]) == ("", "accuracy 0.500  loss 1.31")


def run(name, accuracy, rounds=2, ema=False):
    lines = [record(1), record(2, accuracy)]
    if ema:
        lines[1]["test_ema"] = {"accuracy": 0.75, "loss": 1.0}
    timing = [{"round": 1, "seconds": 1.0, "clients": 4}]
    return Run(Path(name), load("demo", changes={"rounds": rounds}), lines, timing, {}, {})


def printed(table, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_the_table_of_one_run_lists_its_numbers():
    text = printed(summary_table([run("[mine]", 0.6543)]))
    assert "[mine]" in text
    assert re.search(r"accuracy, last evaluation\s+65\.43", text)
    assert re.search(r"local steps\s+40", text)
    assert "averaged" not in text


def test_the_table_of_several_runs_fits_a_terminal():
    text = printed(summary_table([run("a-rather-long-name", 0.5, ema=True), run("short", 0.25, rounds=200)]))
    assert re.search(r"a-rather-long-name\s+2\s+50\.00\s+50\.00\s+75\.00\s+40\s+5\.0\s+1\.0 s", text)
    assert re.search(r"short\s+2 of 200\s+25\.00\s+25\.00\s+–\s+40", text)
