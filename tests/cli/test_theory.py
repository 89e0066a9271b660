"""`feddure theory`, end to end at its smallest size."""

import json

import pytest

from commands import invoke, table
from feddure.errors import ConfigError
from feddure.studies.theory import measure
from feddure.studies.theory import report as theory_report

FILES = ["theory.csv", "theory.html", "theory.json", "theory.md", "theory.png"]


def small(*arguments):
    """Standard output of the smallest study."""
    return invoke("theory", "--largest", 128, "--seeds", 1, *arguments).stdout


def test_json_and_files_say_the_same_and_other_files_stay(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "theory.md").write_text("old")
    report = json.loads(small("--out", tmp_path, "--e", 8, "--json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", *FILES]
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert json.loads((tmp_path / "theory.json").read_text()) == report

    assert report["settings"]["largest"] == 128
    assert report["settings"]["e"] == 8
    assert [found["theorem"] for found in report["findings"]] == [1, 1, 1, 1, 2, 2, 2]
    page = (tmp_path / "theory.md").read_text()
    assert all(found["verdict"] in page for found in report["findings"])
    assert all(note in page for note in report["notes"])
    assert (tmp_path / "theory.png").read_bytes().startswith(b"\x89PNG")

    paper = [row for row in table(tmp_path / "theory.csv") if (row["schedule"], row["arm"]) == ("e/T", "moving")]
    ends = [float(row["smallest_meta_gradient"]) for row in paper if row["step"] == row["horizon"]]
    first = report["findings"][0]
    assert sorted(ends, reverse=True) == pytest.approx([first["first"], first["last"]])


def test_the_page_is_shown_and_the_files_are_named(tmp_path, monkeypatch):
    study = measure.Study(128, 1, *([None] * 4))
    monkeypatch.setattr(measure, "measure", lambda *_, **__: study)
    monkeypatch.setattr(theory_report, "summary", lambda _: {})
    monkeypatch.setattr(theory_report, "write", lambda _, folder, __: (folder / "theory.md").write_text("On ∇_θ L_s."))
    shown = small("--out", tmp_path / "new" / "folder")
    assert "On ∇_θ L_s." in shown
    assert all(f"wrote {tmp_path / 'new' / 'folder' / name}" in shown for name in FILES)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [*(("--largest", number, "expected a power of two of 128 or more") for number in (1000, 64, 0, -128)),
     ("--e", 0, "expected a number above 0")],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused_before_anything_is_made(tmp_path, option, value, message):
    with pytest.raises(ConfigError, match=f"{option} {value}: {message}"):
        invoke("theory", option, value, "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_file_in_the_folders_place_is_refused_before_the_work(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"--out .*taken.* cannot be written"):
        invoke("theory", "--out", tmp_path / "taken")
