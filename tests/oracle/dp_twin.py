"""DP-FedAvg as McMahan et al. (2018) write it: clip each client's update, add them up, add noise, divide by S."""

import copy
import math
from collections.abc import Callable

from feddure import rng
from oracle.fedavg_twin import State, Twin, _floats, train_client


class PrivateTwin(Twin):
    """A federation with private rounds; `draw` gives a round's standard normal numbers by the names of parameters."""

    draw: Callable[[int], State]

    def clients(self, number: int) -> list[int]:
        bits = rng.bits(self.partition.clients, self.experiment.seed, "sample", number).tolist()
        share = self.experiment.clients_per_round / self.partition.clients
        return [client for client, value in enumerate(bits) if value / 2**64 < share]

    def play(self) -> None:
        self.round += 1
        self.losses, self.lengths = [], []
        options, before, drawn = self.experiment.server, self.state, self.draw(self.round)
        total = {name: options.dp_noise * options.dp_clip * drawn[name] for name in before}
        for client in self.clients(self.round):
            local = copy.deepcopy(self.module)
            self.losses += train_client(local, self.batches(client), self.experiment.optimizer, self.proximal)
            change = {name: value - before[name] for name, value in _floats(local.state_dict()).items()}
            length = math.sqrt(sum((value**2).sum().item() for value in change.values()))
            self.lengths.append(length)
            for name, value in change.items():
                total[name] += value if length <= options.dp_clip else value * options.dp_clip / length
        self.receive({name: before[name] + total[name] / self.experiment.clients_per_round for name in before})
