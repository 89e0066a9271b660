"""One competent insider against each aggregation: what is left of the accuracy, and how often it is named.

    python benchmarks/insider.py --json results/insider.json

The demo's problem with FedTutor at five sites, all of which take part. One knows the rules: its updates are 2.9 times
as long as its honest ones, just inside the norm bound of 3 that `federate run` sets.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from common import finish
from torch import Tensor

from feddure import experiments, load_dataset
from feddure.data import partition
from feddure.simulation import attacks
from feddure.simulation.engine import Engine
from feddure.simulation.federation import Federation

STRETCH = 2.9
NOBODY, ROBUST = "nobody", {"mean": "none", "trimmed mean": "trimmed-mean", "median": "median"}
SETTING = {
    "method": "fedtutor",
    "partition.clients": 5,
    "clients_per_round": 5,
    "server.norm_bound": 3.0,
    "attack.kind": "sign-flip",  # says who is hostile; what it sends is replaced
}
Direction = Callable[[Federation, Mapping[str, Tensor], Tensor], Tensor]


def turned(federation: Federation, received: Mapping[str, Tensor], honest: Tensor) -> Tensor:
    return -honest


def against_the_last_move(federation: Federation, received: Mapping[str, Tensor], honest: Tensor) -> Tensor:
    """It remembers the model of the round before."""
    before = getattr(federation, "insider_saw", received["theta"])
    federation.insider_saw = received["theta"].clone()  # type: ignore[attr-defined]
    moved = before - received["theta"]
    return moved if bool(moved.any()) else -honest


def towards_one_class(federation: Federation, received: Mapping[str, Tensor], honest: Tensor) -> Tensor:
    """All of it into the classifier: features are positive, so one row up and the others down."""
    network = federation.server.program.network
    found = torch.zeros_like(honest)
    rows = network.rows(network.parameters.views(found))
    rows -= 1
    rows[0] = 1
    return found


INSIDERS: dict[str, Direction] = {
    "its own, turned round": turned,
    "against the way that the global model went last": against_the_last_move,
    "all into the last layer, towards one class": towards_one_class,
}


def measure(insider: str, robust: str, seed: int, rounds: int) -> dict[str, Any]:
    changes = SETTING | {"rounds": rounds, "seed": seed, "server.robust": ROBUST[robust], "evaluate_every": rounds}
    changes |= {} if insider in INSIDERS else {"attack.kind": "none"}
    experiment = experiments.load("demo", changes=changes)
    dataset = load_dataset(experiment.dataset)
    owned = partition.make(dataset, experiment.partition, experiment.partition_seed)
    federation = Federation(experiment, dataset, owned, Engine(experiment.engine))

    def poison(options: Any, received: Mapping[str, Tensor], upload: dict[str, Tensor], key: Any) -> dict[str, Tensor]:
        honest = upload["theta"] - received["theta"]
        direction = INSIDERS[insider](federation, received, honest)
        return upload | {"theta": received["theta"] + STRETCH * honest.norm() / direction.norm() * direction}

    attacks.poison_upload = poison  # type: ignore[assignment]
    named = 0
    hostile = attacks.attackers(experiment, owned.clients)
    while not federation.finished:
        record = federation.train_round()
        named += any(int(client) in hostile for client in record.get("suspicious", {}))
    accuracy = {"last": record["test"]["accuracy"], "averaged": record["test_ema"]["accuracy"]}
    return {"insider": insider, "aggregation": robust, "seed": seed, "accuracy": accuracy, "rounds_named": named}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    cases = [(insider, robust) for insider in (NOBODY, *INSIDERS) for robust in ROBUST]
    runs = [measure(*case, seed, options.rounds) for case in cases for seed in options.seeds]
    finish({"benchmark": "insider", "rounds": options.rounds, "stretch": STRETCH, "runs": runs}, options.json)


if __name__ == "__main__":
    main()
