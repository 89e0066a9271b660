"""`feddure predict` as a person and as a script sees it."""

import json

import pytest
from PIL import Image

import commands
import folders
from feddure.errors import ConfigError, DataError, RunError
from feddure.simulation import runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "TensorBoard", folders.Watcher)
        patch.setattr(runs, "write_report", lambda run_folders, out: None)
        return folders.execute(tmp_path_factory.mktemp("cli") / "run", **{"server.ema": 0.5}).folder


@pytest.fixture
def photos(tmp_path):
    """Three images in a folder with a name that looks like markup."""
    folder = tmp_path / "[bold]photos"
    folder.mkdir()
    for number in range(3):
        Image.fromarray(folders.IMAGES.test_images[number, ..., 0]).save(folder / f"{number}.png")
    return folder


def invoke(*arguments, code=0):
    """Standard output and standard error of the command."""
    found = commands.invoke("predict", *arguments, exit_code=code)
    return found.stdout, found.stderr


def as_records(text):
    return [json.loads(line) for line in text.splitlines()]


def test_a_row_an_image(run, photos):
    output, notes = invoke(run, photos)
    for number in range(3):
        (row,) = (line for line in output.splitlines() if line.startswith(str(photos / f"{number}.png")))
        assert row.count(" %") == 3
    assert notes == ""
    assert invoke(run, photos, "--top", 1)[0].count(" %") == 3


def test_a_line_of_json_an_image(run, photos):
    records = as_records(invoke(run, photos, "--json", "--top", 2)[0])
    assert [record["file"] for record in records] == [str(photos / f"{number}.png") for number in range(3)]
    for record in records:
        assert len(record["top"]) == 2
        assert record["top"][0] == {"class": record["class"], "probability": record["probability"]}
        assert record["top"][0]["probability"] >= record["top"][1]["probability"]
    every = as_records(invoke(run, photos, "--json", "--top", 99)[0])
    assert sum(entry["probability"] for entry in every[0]["top"]) == pytest.approx(1, abs=1e-6)


def test_a_table_for_spreadsheets(run, photos, tmp_path):
    (photos / "notes.txt").write_text("hello")
    output, _ = invoke(run, photos, "--csv", tmp_path / "new" / "table.csv", "--json", code=1)
    rows = commands.table(tmp_path / "new" / "table.csv")
    assert list(rows[0]) == ["file", "class", "probability", "a", "b", "c", "d", "error"]
    assert [row["class"] for row in rows[:3]] == [record["class"] for record in as_records(output)[:3]]
    for row in rows[:3]:
        assert max("abcd", key=lambda name: float(row[name])) == row["class"]
        assert row["probability"] == row[row["class"]]
    assert "not an image" in rows[3]["error"]
    assert rows[3]["class"] == ""


def test_an_unreadable_file_is_named_the_others_go_on_and_the_exit_code_is_1(run, photos):
    (photos / "1.png").write_text("no picture")
    output, notes = invoke(run, photos, "--json", code=1)
    good, bad, other = as_records(output)
    assert "class" in good
    assert "class" in other
    assert bad["file"] == str(photos / "1.png")
    assert "not an image" in bad["error"]
    output, notes = invoke(run, photos, code=1)
    assert "1.png: is not an image" in notes
    assert "1 of 3 files could not be read" in notes
    assert "1.png" not in output
    assert "2.png" in output


def test_an_exported_file_says_the_same_and_the_averaged_model_something_else(run, photos, tmp_path):
    wanted = as_records(invoke(run, photos, "--json", "--batch", 2)[0])
    out = tmp_path / "model.safetensors"
    commands.invoke("export", run, "--out", out)
    found = as_records(invoke(out, photos, "--json", "--device", "cpu")[0])
    for one, other in zip(found, wanted, strict=True):
        assert one["class"] == other["class"]
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-4)
    assert as_records(invoke(run, photos, "--json", "--model", "last")[0]) != wanted


def test_folders_of_classes_say_how_good_the_model_is(run, tmp_path):
    for number in range(8):
        path = tmp_path / "tests" / "abcd"[number % 4] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(folders.IMAGES.test_images[number, ..., 0]).save(path)
    *records, last = as_records(invoke(run, tmp_path / "tests", "--json")[0])
    right = sum(record["class"] == record["file"].split("/")[-2] for record in records)
    assert last["evaluation"]["accuracy"] == right / 8
    output, notes = invoke(run, tmp_path / "tests")
    assert f"accuracy {100 * right / 8:.1f} % (" in output
    assert notes == ""
    assert "accuracy" not in invoke(run, tmp_path / "tests" / "a")[0]


def test_a_model_that_is_not_there_is_said_first(run, tmp_path):
    with pytest.raises(RunError, match="nothing"):
        invoke(tmp_path / "nothing.safetensors", tmp_path / "x.png")
    with pytest.raises(DataError, match=r"x\.png"):
        invoke(run, tmp_path / "x.png")


def test_a_table_that_cannot_be_written_is_refused_before_any_image(run, photos, tmp_path, monkeypatch):
    from feddure.serving import predict

    monkeypatch.setattr(predict, "classify", lambda *_, **__: pytest.fail("an image was classified"))
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "x.csv", tmp_path):
        with pytest.raises(ConfigError, match="--csv"):
            invoke(run, photos, "--csv", place)
