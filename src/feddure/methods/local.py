"""Every client alone: labels only, nothing exchanged. What a site has if it does not join.

A client's model is its own: it starts as everybody's first model and goes on from where the client's last round ended.
The server's model never moves. What is tested are the clients' models, each on the common test set, and their mean is
reported; beside a federation's it answers a site's first question: is joining worth it?
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from feddure.methods.base import Client, State
from feddure.methods.fedavg import FedAvgMatched


class Local(FedAvgMatched):
    """Labels only at each client by itself."""

    name = "local"
    title = "Local"
    memory = ("own_theta", "own_statistics")
    exchanges = False

    def allocate(self, client: Client) -> None:
        client.state["own_theta"] = torch.zeros_like(client.theta)
        client.state["own_statistics"] = torch.zeros_like(client.statistics)

    def start_round(self, client: Client, received: Mapping[str, Tensor]) -> None:
        if "own_theta" in received:
            client.start_from(received["own_theta"])
            client.statistics.copy_(received["own_statistics"])

    def upload(self, client: Client) -> State:
        client.state["own_theta"].copy_(client.theta)
        client.state["own_statistics"].copy_(client.statistics)
        return {}

    def aggregate(self, server: State, uploads: Sequence[State], *arguments) -> State:
        return server

    def client_models(self, memories: Mapping[int, State]) -> dict[int, tuple[Tensor, Tensor]]:
        return {client: (memory["own_theta"], memory["own_statistics"]) for client, memory in memories.items()}
