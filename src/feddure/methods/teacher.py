"""Pseudo labels from a model that the server sent, frozen for the round: for methods that can take them from there."""

from typing import Literal

from torch import Tensor

from feddure.data.batches import Batch
from feddure.methods.base import Client, Method, State

Source = Literal["local", "global", "average"]
"""Who makes pseudo labels: the client's model while it trains, the global model of this round, or its average."""

DECAY = 0.9
"""Of the average over rounds where `server.ema` says nothing else."""


class WithTeacher(Method):
    """A method whose option `pseudo` says who makes its pseudo labels."""

    @property
    def source(self) -> Source:
        return self.options.pseudo

    @property
    def teacher(self) -> str:
        """The model of `client.frozen` that makes them, where it is not the client's own."""
        return "teacher" if self.source == "average" else "global"

    @property
    def ema(self) -> float | None:  # type: ignore[override]
        return DECAY if self.source == "average" else None

    def broadcast(self, server: State, client: int, round_number: int) -> State:
        sent = super().broadcast(server, client, round_number)
        if self.source != "average":
            return sent
        return sent | {f"teacher.{name}": server[f"averaged.{name}"] for name in ("theta", "statistics")}

    def before_steps(self, client: Client, batches: Batch) -> State:
        """The teacher's logits on the weak views of all steps."""
        return {} if self.source == "local" else {"teacher": client.frozen(self.teacher, batches.weak)}

    def views(self, client: Client, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Logits on x, of whoever makes pseudo labels on T_w(u), and on T_s(u).

        A teacher's are made already, and the weak view is not in the student's pass then.
        """
        if self.source == "local":
            labelled, weak, strong = client.model(batch.labelled, batch.weak, batch.strong)
            return labelled, weak.detach(), strong
        labelled, strong = client.model(batch.labelled, batch.strong)
        return labelled, batch.made["teacher"], strong


def either_is_sure(p: Tensor, q: Tensor, threshold: float) -> Tensor:
    """1 for each image of which one of two models is sure."""
    return ((p.amax(1) >= threshold) | (q.amax(1) >= threshold)).to(p.dtype)


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each sample with a distribution over classes."""
    return -(targets * logits.log_softmax(1)).sum(1)
