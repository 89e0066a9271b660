"""A site's privacy ledger: counted before an update leaves, kept through kills, and never begun anew in silence."""

import json
import multiprocessing
import threading

import pytest

from feddure.errors import RunError
from feddure.flower.app import ledger as ledgers
from feddure.flower.app.ledger import Ledger
from feddure.simulation import dp


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "state")


def spend(ledger, times=1, noise=4.0, budget=0.0):
    for number in range(times):
        found = ledger.spend(1e-5, budget, noise, run="run", round=number)
    return found


def test_updates_of_all_noises_add_up(ledger):
    assert ledger.account(1e-5).updates == 0
    spend(ledger, 3)
    found = spend(ledger, 2, noise=6.0)
    assert found == ledger.account(1e-5)
    assert found.updates == 5
    assert found.epsilon == pytest.approx(dp.epsilon([(2.0, 1.0, 3), (3.0, 1.0, 2)], 1e-5))


def test_nothing_is_written_beyond_the_budget(ledger):
    with pytest.raises(RunError, match="privacy budget"):
        spend(ledger, 100, budget=8.0)
    before = ledger.account(1e-5, 8.0)
    assert before.epsilon <= 8.0
    with pytest.raises(RunError, match="privacy budget"):
        spend(ledger, budget=8.0)
    with pytest.raises(RunError, match="privacy budget"):
        ledger.account(1e-5, 8.0, noise=4.0)
    assert ledger.account(1e-5, 8.0) == before


def test_only_the_sites_account_can_read_it(ledger, tmp_path):
    spend(ledger, 2)
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "state").iterdir()} == {0}


def cut_line(path, last):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def less_noise(path, last):
    path.write_text(path.read_text().replace('"noise": 4.0', '"noise": 9.0', 1))


DAMAGES = {
    "the ledger is gone": lambda path, last: path.unlink(),
    "its end is gone": cut_line,
    "the last newline is gone": lambda path, last: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path, last: path.write_bytes(b""),
    "a line is changed": less_noise,
    "a line is gone": lambda path, last: path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:])),
    "no JSON": lambda path, last: path.write_bytes(b"x\n" + path.read_bytes()),
    "the second file is gone": lambda path, last: last.unlink(),
    "the second file is empty": lambda path, last: last.write_bytes(b""),
    "an old copy of the ledger": lambda path, last: path.write_bytes(path.read_bytes().partition(b"\n")[0] + b"\n"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_ledger_is_refused(ledger, tmp_path, damage):
    spend(ledger, 3)
    DAMAGES[damage](tmp_path / "state" / ledgers.FILE, tmp_path / "state" / ledgers.LAST)
    for use in (lambda: ledger.account(1e-5), lambda: spend(ledger)):
        with pytest.raises(RunError, match="damaged"):
            use()


def test_a_kill_while_a_line_is_written_or_before_the_second_file(ledger, tmp_path):
    spend(ledger, 2)
    path, last = tmp_path / "state" / ledgers.FILE, tmp_path / "state" / ledgers.LAST
    with path.open("ab") as file:
        file.write(b'{"time": "2026')  # its update never left
    assert ledger.account(1e-5).updates == 2
    assert spend(ledger).updates == 3
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 3
    before = last.read_bytes()
    spend(ledger)
    last.write_bytes(before)  # written, and killed before the second file was
    assert ledger.account(1e-5).updates == 4
    assert spend(ledger).updates == 5


def spend_and_say(folder, saying):
    while True:
        saying.send(Ledger(folder).spend(1e-5, 0.0, 4.0).updates)


def test_kills_lose_no_update_that_left(tmp_path):
    """A process writes, then says so; whatever it said before kill -9 is in the ledger."""
    context, said = multiprocessing.get_context("fork"), 0
    for wanted in range(1, 9):
        hearing, saying = context.Pipe(duplex=False)
        process = context.Process(target=spend_and_say, args=(tmp_path, saying))
        process.start()
        for _ in range(wanted):
            said = hearing.recv()
        process.kill()
        process.join()
        while hearing.poll():
            said = hearing.recv()
        assert said <= Ledger(tmp_path).account(1e-5).updates <= said + 1


def test_two_at_once_are_both_counted(ledger):
    threads = [threading.Thread(target=spend, args=(ledger, 5)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.account(1e-5).updates == 20
