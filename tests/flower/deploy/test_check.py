"""A site's check-up: what passes, what is noted, and what keeps it from training."""

import signal
from pathlib import Path

import pytest
from PIL import Image

from feddure.flower.deploy import certificates
from feddure.flower.deploy import check as checks
from feddure.flower.deploy.check import CheckUp, Level
from feddure.flower.deploy.connection import Reached
from feddure.flower.deploy.layout import Connection, ServerFolder
from feddure.flower.deploy.processes import Ended, free_port, signals_as_ended


def check(folder: ServerFolder, images: Path, site: str = "north", connect: bool = False) -> CheckUp:
    return checks.check(folder.bundle("north"), site, images, connect)


def texts(found: CheckUp, level: Level) -> str:
    return "\n".join(f"{finding.what}: {finding.text}" for finding in found.findings if finding.level == level)


def test_a_sound_site_passes_with_its_counts(made: ServerFolder, images: Path) -> None:
    found = check(made, images)
    assert found.passed
    assert not texts(found, "note")
    assert (found.labelled, found.unlabelled, found.tests) == ({"ash": 3, "elm": 1}, 4, 0)
    assert "2 classes, 2 sites" in texts(found, "ok")


def test_unreadable_files_are_named_and_the_site_still_passes(made: ServerFolder, images: Path) -> None:
    (images / "unlabelled" / "scan.dcm").write_bytes(b"no image")
    found = check(made, images)
    assert found.passed
    assert [file for file, _ in found.unreadable] == ["unlabelled/scan.dcm"]
    assert "1 unreadable file(s) left out" in texts(found, "note")


def test_ctrl_c_while_an_image_is_read_is_not_taken_for_a_damaged_image(
    made: ServerFolder, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "open", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Ended), signals_as_ended():
        check(made, images)


def test_a_class_that_the_federation_does_not_have_is_refused_by_name(made: ServerFolder, images: Path) -> None:
    (images / "labelled" / "elm").rename(images / "labelled" / "elms")
    found = check(made, images)
    assert not found.passed
    assert "no class 'elms'" in texts(found, "problem")
    assert "did you mean 'elm'" in texts(found, "problem")


def test_missing_data_is_a_problem(made: ServerFolder, tmp_path: Path) -> None:
    found = check(made, tmp_path / "nowhere")
    assert not found.passed
    assert "nowhere: there is no such folder" in texts(found, "problem")


@pytest.mark.parametrize(("part", "noted"), [("labelled", "no labelled image"), ("unlabelled", "no unlabelled image")])
def test_images_of_one_kind_only_are_noted(made: ServerFolder, images: Path, part: str, noted: str) -> None:
    (images / part).rename(images.parent / "away")
    found = check(made, images)
    assert found.passed
    assert noted in texts(found, "note")


def test_a_site_that_is_not_in_the_federation_is_a_problem(made: ServerFolder, images: Path) -> None:
    found = check(made, images, site="west")
    assert not found.passed
    assert "no such site" in texts(found, "problem")


def test_a_key_that_is_not_the_one_the_server_knows_is_a_problem(own: ServerFolder, images: Path) -> None:
    certificates.write_private_key(own.bundle("north").key, certificates.make_node_key(), ssh=True)
    found = check(own, images)
    assert not found.passed
    assert "does not belong to" in texts(found, "problem")


def test_a_missing_key_and_one_that_others_can_read_are_problems(own: ServerFolder, images: Path) -> None:
    own.bundle("north").key.chmod(0o644)
    assert "chmod 600" in texts(check(own, images), "problem")
    own.bundle("north").key.unlink()
    assert "node.key: cannot be read" in texts(check(own, images), "problem")


def test_a_damaged_authority_is_a_problem(own: ServerFolder, images: Path) -> None:
    own.bundle("north").authority.write_text("nothing")
    assert "ca.crt: is not a certificate" in texts(check(own, images), "problem")


def test_an_authority_that_ends_soon_is_noted(own: ServerFolder, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "AUTHORITY_DAYS", 20)
    certificates.write_certificate(own.bundle("north").authority, certificates.make_authority("trees")[1])
    found = check(own, images)
    assert found.passed
    assert "ca.crt is valid until" in texts(found, "note")


def test_a_server_that_is_not_there_keeps_the_site_from_training(own: ServerFolder, images: Path) -> None:
    bundle = own.bundle("north")
    bundle.connection.write_text(Connection("north", "127.0.0.1", free_port()).to_yaml())
    found = check(own, images, connect=True)
    assert not found.passed
    assert "server: 127.0.0.1" in texts(found, "problem")


def test_a_server_that_answers_passes(made: ServerFolder, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validity = certificates.validity(certificates.read_certificate(made.certificate))
    monkeypatch.setattr(checks, "reach", lambda *_: Reached("ok", "it answers", validity))
    found = check(made, images, connect=True)
    assert found.passed
    assert "server: it answers until" in texts(found, "ok")


def test_several_problems_are_told_at_once(own: ServerFolder, images: Path) -> None:
    own.bundle("north").key.unlink()
    (images / "labelled" / "oak").mkdir()
    problems = texts(check(own, images), "problem")
    assert "no class 'oak'" in problems
    assert "node.key" in problems


def test_a_wrong_clock_keeps_a_site_from_joining(
    made: ServerFolder, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validity = certificates.validity(certificates.read_certificate(made.authority))
    monkeypatch.setattr(checks, "reach", lambda *_: Reached("ok", "it answers", validity))
    for problem in ("", "this machine's clock is 60 seconds behind"):
        monkeypatch.setattr(checks, "clock_problem", lambda *_, problem=problem: problem)
        found = check(made, images, connect=True)
        assert found.passed is not bool(problem)
        assert (f"clock: {problem}" in texts(found, "problem")) is bool(problem)
