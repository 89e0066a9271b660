"""Code of a user's own that fails."""

from typing import NoReturn

from feddure.methods import METHODS
from feddure.methods.fedavg import FedAvg


class Raises(FedAvg):
    """Fails in every step, or with `options.at` on that seed in that round alone."""

    title = "Raises"

    def step(self, client, batch):
        if client.key[:2] == tuple(self.experiment.options.get("at", client.key[:2])):
            raise OSError("a mistake\nin several lines")
        return super().step(client, batch)


class Mistaken(FedAvg):
    """Uses a view that it did not ask for."""

    title = "Mistaken"

    def step(self, client, batch):
        assert batch.strong.numel()


def no_data() -> NoReturn:
    """A data set."""
    raise KeyError("images")


def register() -> None:
    """Make the methods known by short names, for a test."""
    METHODS.update(raises=Raises, mistaken=Mistaken)
