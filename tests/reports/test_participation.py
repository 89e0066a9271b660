"""Who took part in a run over sites, as its records tell."""

from pathlib import Path
from typing import Any

from feddure import config
from feddure.reports.participation import participation
from feddure.tracking.records import Run


def run(rounds: list[dict[str, Any]], setting: str = "sites", **about: Any) -> Run:
    metrics = [{"round": number, "federation": found} for number, found in enumerate(rounds, start=1)]
    experiment = config.load(changes={"partition.setting": setting})
    return Run(Path("run"), experiment, metrics, [], {}, {}, about)


def played(*sites: dict[str, Any], away: tuple[str, ...] = (), refused: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"sites": list(sites), "drawn_but_away": list(away), "refused": list(refused)}


def test_each_site_has_a_row_of_counts() -> None:
    first = played({"site": "north", "test_of_received_model": {"accuracy": 0.5}}, {"site": "south", "problem": "late"})
    second = played({"site": "south", "problem": "drawn, but not connected"}, away=("south",), refused=("east: why",))
    about = {"site": "north", "labelled": 1200, "unlabelled": 7, "unreadable": 0}
    found = participation(run([first, second, second], names=["north", "south", "east"], sites=[about]))
    assert found is not None
    north, south, east = found.rows
    assert north[:8] == ["north", "1,200", "7", "0", "1", "1", "0", "0"]
    assert north[8].startswith("50.0")
    assert south[4:8] == ["3", "0", "2", "1"]
    assert east[4:8] == ["0", "0", "0", "0"]
    assert found.notes == [
        "south was never connected.",
        "east was never connected.",
        "Last problem of south: drawn, but not connected",
        "Refused: east: why",
    ]


def test_runs_without_real_sites_have_none() -> None:
    assert participation(run([])) is None
    assert participation(run([played({"site": "client-0"})], setting="iid-iid")) is None
