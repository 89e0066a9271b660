"""What is written of the claims: grouped by what they are judged by, what is measured before what is not."""

import csv

from rich.console import Console

import synthetic
from feddure.studies.grid.store import Store
from feddure.studies.paper import plan as reproduce
from feddure.studies.paper.claims_report import all_claims, show_claims, tally, write_claims

METHODS = {"feddure": 57.0, "fedavg-matched": 55.0, "fedmatch": 45.0}


def measured(folder, presets=("aaai24",)):
    """FedDure, FedMatch and labels-only training under IID-DIR, with seeds that differ a little."""
    cells = [
        cell
        for preset in presets
        for cell in reproduce.cells(
            "table1",
            reproduce.Request(preset, ("cifar10",), settings=("iid-dir",), methods=tuple(METHODS), seeds=(0, 1, 2)),
        )
    ]
    return synthetic.filled(folder, cells, lambda cell: METHODS[cell.experiment.method] + int(cell.hash, 16) % 7 / 10)


def printed(store, folder):
    console = Console(width=140)
    with console.capture() as capture:
        for part in show_claims(all_claims(store, folder)):
            console.print(part)
    return capture.get()


def test_claims_are_written_for_each_preset_that_has_cells(tmp_path):
    store = measured(tmp_path, ("aaai24", "aaai24-fine"))
    written = write_claims(tmp_path, store)
    assert {path.name for path in written} == {"claims.csv", "claims-comparisons.csv", "claims.md", "claims.html"}
    with (tmp_path / "claims.csv").open() as file:
        lines = list(csv.DictReader(file))
    gains = {line["preset"]: line["verdict"] for line in lines if line["claim"] == "gain over FedMatch"}
    assert gains == {"aaai24": "does not hold", "aaai24-fine": "does not hold"}
    assert {line["preset"] for line in lines} == {"aaai24", "aaai24-fine", "any"}
    assert all(line["criterion"].endswith(".") for line in lines)
    assert "Preset aaai24-fine" in (tmp_path / "claims.html").read_text()


def test_a_criterion_is_written_once_above_the_claims_it_judges(tmp_path):
    write_claims(tmp_path, measured(tmp_path))
    text, page = ((tmp_path / name).read_text() for name in ("claims.md", "claims.html"))
    for found in (text, page):
        assert found.count("Every difference above 0") == 1
        assert found.count("lies wholly above 0; does not hold if for one") == 1
        group = found[found.index("Every difference above 0") :]
        # Table 1 under IID-DIR alone is a part of the first two, and nothing of the third.
        places = [
            group.index(f"FedDure is ahead of {claim}")
            for claim in ("every semi-supervised rival in every setting on CIFAR-10", "FedMatch and the baseline at",
                          "every semi-supervised rival in every setting on CINIC-10")
        ]  # fmt: skip
        assert places == sorted(places)


def test_the_terminal_lists_what_is_measured_and_counts_the_rest(tmp_path):
    told = printed(measured(tmp_path), tmp_path)
    assert "FedDure is ahead of FedMatch by 15.26" in told
    assert "CINIC-10" not in told
    assert "claims are not measured yet: see claims.html" in told
    assert "29 claims are not measured yet" in printed(Store(tmp_path / "empty"), tmp_path)


def test_the_tally_counts_in_good_english(tmp_path):
    found = all_claims(measured(tmp_path), tmp_path)
    holding = next(claim for claim in found if claim.verdict == "does not hold")
    open_one = next(claim for claim in found if claim.verdict == "undecided")
    absent = [claim for claim in found if claim.verdict == "not measured"][:2]
    assert tally([holding]) == "Of 1 claim 1 does not hold."
    assert tally([holding, open_one]) == "Of 2 claims 1 does not hold, 1 is undecided."
    assert tally([holding, holding, *absent]) == "Of 4 claims 2 do not hold, 2 are not measured."


def test_claims_without_any_measurement_are_no_error(tmp_path):
    assert write_claims(tmp_path, Store(tmp_path))
    assert "Of 29 claims 29 are not measured." in (tmp_path / "claims.md").read_text()
