import json
import math
import os
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddure import experiments
from feddure.errors import RunError
from feddure.experiments import load
from feddure.tracking import records
from feddure.tracking.records import Recorder, Writer, read, read_run, truncate

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def write_rounds(path, rounds):
    with Writer(path) as writer:
        for number in range(1, rounds + 1):
            writer.write({"round": number, "train": {"loss": 1 / number}})


def rounds_of(path):
    return [record["round"] for record in read(path)]


@given(values=st.lists(FINITE, max_size=5))
@settings(deadline=None, max_examples=40)
def test_floats_come_back_exactly(values, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    with Writer(path) as writer:
        writer.write({"round": 1, "train": {str(place): value for place, value in enumerate(values)}})
    assert list(read(path)[0]["train"].values()) == values


def test_each_line_is_on_disk_before_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = Writer(path)
    for number in (1, 2):
        writer.write({"round": number})
        assert rounds_of(path)[-1] == number
    writer.close()


def test_numbers_that_are_not_finite_become_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Writer(path) as writer:
        writer.write({"round": 1, "test": {"loss": math.nan, "per_class": [math.inf, 0.5]}})
    assert read(path) == [{"round": 1, "test": {"loss": None, "per_class": [None, 0.5]}}]
    assert "NaN" not in path.read_text()


@given(cut=st.integers(min_value=0))
@settings(deadline=None, max_examples=60)
def test_a_writer_goes_on_after_a_kill_at_any_byte(cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    write_rounds(path, 4)
    whole = path.read_bytes()
    kept = whole[: cut % (len(whole) + 1)]
    path.write_bytes(kept)
    before = rounds_of(path)
    with Writer(path) as writer:
        writer.write({"round": 9})
    assert rounds_of(path) == [*before, 9]
    assert before == [1, 2, 3, 4][: len(before)]
    assert len(before) >= kept.count(b"\n")


@pytest.mark.parametrize("damage", ['{"round": 2, "tr', "[1, 2]", '{"loss": 1.0}', '{"round": "two"}', "\x00\x00"])
def test_a_damaged_line_before_the_last_is_refused_with_its_number(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"round": 1}}\n{damage}\n{{"round": 3}}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl: line 2 of 3 is damaged"):
        read(path)


def test_truncate_keeps_the_bytes_of_what_stays(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rounds(path, 7)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + b'{"round": 8, "tra')
    truncate(path, 5)
    assert path.read_bytes() == b"".join(lines[:5])
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_kill_while_truncating_leaves_the_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_rounds(path, 5)
    whole = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RunError, match="No space left"):
        truncate(path, 2)
    assert path.read_bytes() == whole
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_resumed_recorder_makes_the_files_of_an_unbroken_run(tmp_path):
    def record(folder, first, last, at_round=0):
        folder.mkdir(exist_ok=True)
        with closing(Recorder(folder, at_round)) as recorder:
            for number in range(first, last + 1):
                recorder.round_done(None, {"round": number, "clients": [4, 2], "steps": [1, 5]}, seconds=0.5)

    record(tmp_path / "unbroken", 1, 9)
    record(tmp_path / "resumed", 1, 6)
    record(tmp_path / "resumed", 5, 9, at_round=4)
    for name in ("metrics.jsonl", "timing.jsonl"):
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()
    assert read(tmp_path / "resumed" / "timing.jsonl")[0] == {"round": 1, "seconds": 0.5, "clients": 2, "steps": 6}


def test_an_empty_file_has_no_records_and_a_missing_one_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    assert read(tmp_path / "metrics.jsonl") == []
    with pytest.raises(RunError, match=r"absent\.jsonl: cannot be read"):
        read(tmp_path / "absent.jsonl")


def make_run(folder, **files):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(experiments.to_yaml(load("demo")))
    write_rounds(folder / "metrics.jsonl", 2)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content)
    return folder


def test_a_run_may_lack_all_but_configuration_and_metrics(tmp_path):
    run = read_run(make_run(tmp_path / "bare"))
    assert (run.name, run.rounds, run.finished) == ("bare", 2, False)
    assert run.experiment == load("demo")
    assert (run.timing, run.environment, run.partition) == ([], {}, {})
    run = read_run(make_run(tmp_path / "full", environment=json.dumps({"gpu": "none"}), partition='{"classes": []}'))
    assert (run.environment, run.partition) == ({"gpu": "none"}, {"classes": []})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("absent", "there is no such folder"),
        ("empty", r"not a run folder, config\.yaml and metrics\.jsonl missing"),
        ("half", r"not a run folder, metrics\.jsonl missing"),
        ("runs", r"runs are inside it: give them by name, for example .*first"),
        ("runs/first/metrics.jsonl", r"a file was given; expected a run's folder, here perhaps .*first$"),
        ("damaged", r"environment\.json: damaged"),
        ("wrong", r"config\.yaml: rounds: 'many' was given"),
    ],
)
def test_what_is_no_run_folder_is_refused_with_the_reason(tmp_path, given, match):
    (tmp_path / "empty").mkdir()
    (make_run(tmp_path / "half") / "metrics.jsonl").unlink()
    make_run(tmp_path / "runs" / "first")
    make_run(tmp_path / "damaged", environment="{")
    (make_run(tmp_path / "wrong") / "config.yaml").write_text("rounds: many\n")
    with pytest.raises(RunError, match=match):
        read_run(tmp_path / given)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize("name", [records.TIMING, records.ENVIRONMENT, records.PARTITION, records.FEDERATION])
def test_a_pipe_in_a_strangers_folder_is_an_error_and_no_wait(tmp_path, name):
    (tmp_path / records.CONFIG).write_text("rounds: 1\n")
    (tmp_path / records.METRICS).write_text('{"round": 1}\n')
    os.mkfifo(tmp_path / name)
    with pytest.raises(RunError, match="not a regular file"):
        read_run(tmp_path)


def test_a_partition_counts_both_kinds_of_images_of_every_client(tmp_path):
    (tmp_path / records.CONFIG).write_text("rounds: 1\n")
    (tmp_path / records.METRICS).write_text('{"round": 1}\n')
    partition = {"classes": ["a", "b"], "labelled": [[1, 1]], "unlabelled": []}
    (tmp_path / records.PARTITION).write_text(json.dumps(partition))
    with pytest.raises(RunError, match="a number for each client and class"):
        read_run(tmp_path)
