"""What every textbook twin shares: one client's round, in ordinary PyTorch modules.

A twin is written from the papers' equations and from nothing else: `nn.Module`s, `torch.optim.Adam`, second
derivatives by `create_graph=True`. It is slow and plain; the engine has to agree with it. One object is one
client in one round, so everything that is "fresh each round" is simply made in the constructor.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """The constants and switches of the equations."""

    learning_rate: float = 5e-4  # η = η_s = η_w
    proximal: float = 0.0  # FedProx's μ
    threshold: float = 0.95  # τ of FixMatch, UDA and the ablations without F-reg
    weight: float = 1.0  # λ of FixMatch and UDA
    temperature: float = 0.4  # UDA's sharpening
    h_gradient: str = "full"
    f_reg_input: str = "softmax"
    d_clip: float | None = None
    maml_order: int = 2
    reward: str = "fall"
    reward_on: str = "all"


class Client:
    """A local model θ that starts as a copy of the received model, with an Adam of its own."""

    def __init__(self, received: nn.Module, settings: Settings):
        self.settings = settings
        self.received = received
        self.theta = copy.deepcopy(received).train()
        self.adam = self.new_adam(trained(self.theta).values())

    def step(self, x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> Named:
        """One local step on a labelled batch (x, y) and the two views T_w(u), T_s(u) of an unlabelled one."""
        raise NotImplementedError

    def new_adam(self, parameters: Iterable[Tensor]) -> torch.optim.Adam:
        return torch.optim.Adam(list(parameters), lr=self.settings.learning_rate, betas=(0.9, 0.999), eps=1e-8)

    def predict(self, *groups: Tensor) -> tuple[Tensor, ...]:
        """θ's logits on all groups in one pass: the only pass that moves running statistics."""
        return self.theta(torch.cat(groups)).split([len(group) for group in groups])

    def descend(self, loss: Tensor) -> None:
        """One Adam step of θ on `loss` + (μ/2) ‖θ − θ_global‖²."""
        anchor = dict(self.received.named_parameters())
        distance = sum((p - anchor[name].detach()).square().sum() for name, p in trained(self.theta).items())
        self.adam.zero_grad()
        (loss + self.settings.proximal / 2 * distance).backward()
        self.adam.step()


def trained(module: nn.Module) -> Named:
    """The parameters that learn; a convolution's bias under batch norm does not."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def probe(module: nn.Module, parameters: Named, images: Tensor) -> Tensor:
    """Logits at `parameters` with the statistics of these images alone; running statistics stay untouched."""
    scratch = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return functional_call(module, {**parameters, **scratch}, (images,))


def virtual_step(parameters: Named, loss: Tensor, learning_rate: float) -> Named:
    """One step of plain gradient descent that can itself be differentiated."""
    gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
    return {name: p - learning_rate * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}


def adam_step(adam: torch.optim.Adam, loss: Tensor) -> None:
    """One step of this optimiser on `loss`, leaving the gradients of all other parameters alone."""
    parameters = adam.param_groups[0]["params"]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    adam.step()


def cross_entropy(labels: Tensor, logits: Tensor) -> Tensor:
    """L_ce(y, f) of each sample, in the paper's order of arguments."""
    return F.cross_entropy(logits, labels, reduction="none")


def confident(logits: Tensor, threshold: float) -> Tensor:
    """1 where the largest probability reaches the threshold, else 0."""
    return (logits.softmax(1).max(1).values >= threshold).to(logits.dtype).detach()
