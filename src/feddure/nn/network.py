"""Any `nn.Module` as pure functions of flat parameters.

Three ways to run it: `forward` (batch statistics, and the running ones are updated in place), `probe` (the
statistics of this batch alone, nothing is touched) and `evaluate` (running statistics). `tangent` is the
directional derivative of `probe`; `features` is `forward` with what the last linear layer, the classifier, was given.
All of them take the weights as arguments, so that one compiled program serves every client.

A method's heads are further modules beside the network: their parameters lie in the same flat vector, in full
precision, and stay out of `state_dict`, so that what is exported is the bare network.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from feddure.errors import ConfigError, FeddureWarning
from feddure.nn import tangent
from feddure.nn.affine import AffineNorms
from feddure.nn.flat import Layout, Pieces
from feddure.nn.networks import NORMS

_PIECE, _PIECE_ON_CPU = 512, 100
"""Images that are evaluated at a time: enough to fill a GPU, few enough for a CPU's cache."""

HEAD = "head:"
"""What parameters of heads begin with; no module's own can, since theirs are attributes."""

Named = dict[str, Tensor]
T = TypeVar("T")


class Weights:
    """The weights of one forward pass: leaves to differentiate with respect to."""

    def __init__(self, layout: Layout, cast: Tensor, precise: Tensor, frozen: Named):
        """Leaves of two flat vectors, the two groups of trained tensors."""
        trained = {}
        for entry in layout.trained_entries:
            inside = entry.view(cast) if entry.start < layout.cast else entry.view(precise, layout.cast)
            trained[entry.name] = inside.detach().requires_grad_()
        self.leaves = list(trained.values())
        self.trained = trained
        self.named: Named = {}  # of the network
        self.heads: Named = {}
        for name, tensor in {**trained, **frozen}.items():
            (self.heads if name.startswith(HEAD) else self.named)[name] = tensor


class Network:
    """A module with its parameters and statistics taken out."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        precision: str,
        compiled: bool = False,
        classifier: str = "",
        heads: Mapping[str, nn.Module] | None = None,
    ):
        """`classifier` is the path of the linear layer that makes the logits, where there is one."""
        self.master = torch.float64 if precision == "fp64" else torch.float32
        self.compute = {"fp64": torch.float64, "bf16": torch.bfloat16}.get(precision, torch.float32)
        self.device = device
        self.draws = False  # whether a pass in training draws random numbers
        self.piece = _PIECE if device.type == "cuda" else _PIECE_ON_CPU
        named = _with_heads(module, heads)
        if not any(p.requires_grad for p in named.values()):
            raise ConfigError("the network has no parameter that can be trained")
        frozen = [name for name, parameter in named.items() if not parameter.requires_grad]
        # Batch norm mixes precisions: activations in the network's arithmetic, scale and shift in full.
        precise = _names_of(nn.modules.batchnorm._BatchNorm, module) | {n for n in named if n.startswith(HEAD)}
        self._precise = precise
        self.parameters = Layout(named, precise, frozen)
        self.statistics = Layout({n: b for n, b in module.named_buffers() if b.is_floating_point()})
        of_norms = _names_of(nn.modules.batchnorm._NormBase, module, nn.Module.named_buffers)
        self._own = {entry.name for entry in self.statistics.entries} - of_norms  # buffers of a user's layers
        self._normalisation = _names_of(NORMS, module)
        skeleton = copy.deepcopy(module).to(device)
        _drop_counters(skeleton)
        # Looking for shared tensors in every call is half of what the compiler has to trace.
        self._call = partial(functional_call, tie_weights=_shares(skeleton))
        self._training = skeleton.train()
        self._featuring: nn.Module | None = None  # in training, with a classifier that returns what it was given too
        self._evaluating = copy.deepcopy(skeleton).eval()
        self.classifier = classifier
        self._heads = {name: copy.deepcopy(head).to(device) for name, head in (heads or {}).items()}
        self._probing = _without_statistics(copy.deepcopy(skeleton)).train()
        for name in self._own:
            path, _, last = name.rpartition(".")
            setattr(self._probing.get_submodule(path), last, self._probing.get_buffer(name).to(self.master))
        self._explicit = tangent.supports(self._probing)
        # Layers that are known keep nothing of a pass to themselves.
        self.reentrant = self._explicit and all(map(tangent.supports, self._heads.values()))
        self._forward_mode = True  # until a layer turns out to have none
        self._forward: Callable[..., Tensor]
        self._features: Callable[..., tuple[Tensor, Tensor]]
        self._probe: Callable[..., Tensor]
        self._tangent: Callable[..., tuple[Tensor, Tensor]]
        self._evaluate: Callable[..., Tensor]
        self._affine: AffineNorms | None
        self.stop_compiling()
        if compiled:
            self._compile()

    def _compile(self) -> None:
        torch._dynamo.config.recompile_limit = 64  # one program for each shape of batch
        torch._functorch.config.donated_buffer = False  # C-reg's pass goes back twice
        self.compiled = True
        self._forward = torch.compile(self._run_training, dynamic=False)
        self._features = torch.compile(self._run_featuring, dynamic=False)
        self._probe = torch.compile(self._run_probing, dynamic=False)
        self._affine = AffineNorms(self._evaluating)
        self._evaluate = torch.compile(self._run_affine, dynamic=False)
        if self._explicit:
            self._tangent = torch.compile(self._run_tangent, dynamic=False)

    def stop_compiling(self) -> None:
        """Run the module as it is."""
        self.compiled = False
        self._forward, self._probe, self._tangent = self._run_training, self._run_probing, self._run_tangent
        self._features, self._evaluate = self._run_featuring, self._run_evaluating
        self._affine = None
        self._fused: dict[Callable, Callable] = {}

    def for_thread(self) -> "Network":
        """A copy for another thread, where it is `reentrant`: a pass puts its weights into the modules."""
        modules = (self._training, self._evaluating, self._probing, *self._heads.values())
        shared = [parameter for module in modules for parameter in module.parameters()]  # nobody reads their values
        return copy.deepcopy(self, {id(parameter): parameter for parameter in shared})

    def take(self, module: nn.Module, heads: Mapping[str, nn.Module] | None = None) -> tuple[Tensor, Tensor]:
        """A module's parameters, with those of its heads, and statistics as flat vectors."""
        named = {name: p.detach() for name, p in _with_heads(module, heads).items()}
        return (
            self.parameters.flatten(named, self.master, self.device),
            self.statistics.flatten(dict(module.named_buffers()), self.master, self.device),
        )

    @cached_property
    def ordinary(self) -> Tensor:
        """True where a flat parameter vector is trained and no part of a normalisation layer."""
        found = torch.zeros(self.parameters.size, dtype=torch.bool, device=self.device)
        for entry in self.parameters.trained_entries:
            entry.view(found).fill_(entry.name not in self._normalisation)
        return found

    @cached_property
    def variances(self) -> Tensor:
        """True where a flat vector of statistics holds a variance, which is never below zero."""
        found = torch.zeros(self.statistics.size, dtype=torch.bool, device=self.device)
        for entry in self.statistics.entries:
            entry.view(found).fill_(entry.name.rpartition(".")[2] == "running_var")
        return found

    def rows(self, named: Mapping[str, Tensor]) -> Tensor:
        """The classifier's rows [classes, features] among tensors by name."""
        return named[f"{expect_classifier(self.classifier)}.weight"]

    # --- weights and gradients -----------------------------------------------------------------------
    def weights(self, flat: Tensor) -> Weights:
        """Leaves of a flat parameter vector in the network's arithmetic."""
        cast, precise = self.parameters.groups
        return Weights(self.parameters, flat[cast].to(self.compute), flat[precise], self._frozen(flat))

    def moved(self, flat: Tensor, gradient: Pieces, rate: Tensor) -> Weights:
        """The weights after one plain step of gradient descent: flat − rate · gradient."""
        found = {(at.start, at.stop): self.fuse(_descend)(flat[at], values, rate) for at, values in gradient}
        cast, precise = (found.get((at.start, at.stop), flat[:0]) for at in self.parameters.groups)
        return Weights(self.parameters, cast, precise, self._frozen(flat))

    def leaf_gradients(self, loss: Tensor, weights: Weights, retain: bool = False) -> list[Tensor]:
        """Gradient of `loss` with respect to each leaf of `weights`."""
        return list(torch.autograd.grad(loss, weights.leaves, retain_graph=retain, materialize_grads=True))

    def gradient(self, loss: Tensor, weights: Weights, retain: bool = False) -> Pieces:
        """Gradient of `loss` with respect to the trained parameters, flat; `retain` allows a second one."""
        return self.parameters.gather(self.leaf_gradients(loss, weights, retain))

    def fuse(self, function: Callable[..., T]) -> Callable[..., T]:
        """A function of a few tensors, compiled where the network is; one program for all clients."""
        if not self.compiled:
            return function
        if function not in self._fused:
            self._fused[function] = torch.compile(function, dynamic=False)
        return self._fused[function]

    # --- running the module --------------------------------------------------------------------------
    def forward(self, weights: Weights, statistics: Tensor, images: Tensor) -> Tensor:
        """Logits in training mode; running statistics in `statistics` move on in place."""
        return self._forward(weights.named, self.statistics.views(statistics), images)

    def features(self, weights: Weights, statistics: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """`forward`, and what the classifier was given."""
        if self._featuring is None:  # few methods ask for it
            self._featuring = copy.deepcopy(self._training)
            self._featuring.get_submodule(expect_classifier(self.classifier)).__class__ = _Exposed
        return self._features(weights.named, self.statistics.views(statistics), images)

    def head(self, name: str, weights: Weights, *inputs: Tensor) -> Tensor:
        """The output of a head."""
        if name not in self._heads:
            known = ", ".join(self._heads) or "none"
            raise ConfigError(f"there is no head '{name}' (heads: {known}); name it in the method's `heads`")
        prefix = f"{HEAD}{name}."
        own = {key.removeprefix(prefix): value for key, value in weights.heads.items() if key.startswith(prefix)}
        return functional_call(self._heads[name], own, inputs)

    def probe_with(self, statistics: Tensor) -> None:
        """Let `probe` and `tangent` have this model's buffers, where a layer that is no normalisation has some."""
        for name in self._own:
            self._probing.get_buffer(name).copy_(self.statistics.views(statistics)[name])

    def probe(self, weights: Weights, images: Tensor) -> Tensor:
        """Logits with the statistics of these images alone."""
        return self._probe(weights.named, images)

    def tangent(self, weights: Weights, direction: Sequence[Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
        """`probe` and its derivative along a direction, given leaf by leaf (forward mode; exact).

        Both can be differentiated again with respect to the weights, unless gradients are off.
        """
        along = {name: d for name, d in zip(weights.trained, direction, strict=True) if name in weights.named}
        return self._tangent(weights.named, along, images)

    def evaluate(self, flat: Tensor, statistics: Tensor, images: Tensor) -> Tensor:
        """Logits with the running statistics."""
        with torch.no_grad():
            return self._run_evaluating(self._whole(flat, statistics), images)

    def evaluator(self, flat: Tensor, statistics: Tensor, size: int = 0) -> Callable[[Tensor], Tensor]:
        """`evaluate` for many images, in large pieces; compiled where the network is.

        There a piece is filled up to `size` or to the largest before it, so that one compiled program serves all.
        """
        run, state = self._evaluate, self._whole(flat, statistics)
        if self._affine is not None:
            state = self._affine.state(state)

        def logits(images: Tensor) -> Tensor:
            nonlocal size
            number, size = len(images), max(size, len(images)) if self.compiled else 0
            with torch.no_grad():
                if number < size:
                    images = F.pad(images.movedim(1, -1), (*[0] * 7, size - number)).movedim(-1, 1)  # channels last
                return run(state, images)[:number]

        return logits

    def evaluate_many(self, flat: Tensor, statistics: Tensor, images: Tensor) -> Tensor:
        """`evaluate` for any number of images."""
        logits = self.evaluator(flat, statistics, self.piece)
        pieces = images.split(self.piece)
        return torch.cat([logits(piece.contiguous(memory_format=torch.channels_last)) for piece in pieces])

    def measure_statistics(self, flat: Tensor, statistics: Tensor, batches: list[Tensor]) -> Tensor:
        """Running statistics as the plain mean over these batches' own."""
        weights = self.weights(flat)
        statistics = statistics.clone()
        norms = _norms(self._training)
        momenta = [norm.momentum for norm in norms]
        try:
            with torch.no_grad():
                for number, images in enumerate(batches, start=1):
                    for norm in norms:
                        norm.momentum = 1 / number
                    self._run_training(weights.named, self.statistics.views(statistics), images)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        return statistics

    def state_dict(self, flat: Tensor, statistics: Tensor) -> Named:
        """The module's own state without heads, by name, contiguous."""
        named = {**self.parameters.views(flat), **self.statistics.views(statistics)}
        return {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in named.items()
            if not name.startswith(HEAD)
        }

    # --- details -------------------------------------------------------------------------------------
    def _run_training(self, named: Named, statistics: Named, images: Tensor) -> Tensor:
        given = {**named, **self._buffers(statistics)}
        logits = self._call(self._training, given, (images,)).to(self.master)
        self._keep(statistics, given)
        return logits

    def _run_featuring(self, named: Named, statistics: Named, images: Tensor) -> tuple[Tensor, Tensor]:
        assert self._featuring is not None
        given = {**named, **self._buffers(statistics)}
        logits, features = self._call(self._featuring, given, (images,))
        self._keep(statistics, given)
        return logits.to(self.master), features.to(self.master)

    def _run_probing(self, named: Named, images: Tensor) -> Tensor:
        own = {name: self._probing.get_buffer(name).to(self.compute, copy=True) for name in self._own}
        return self._call(self._probing, {**named, **own}, (images,)).to(self.master)

    def _run_evaluating(self, state: Named, images: Tensor) -> Tensor:
        return self._call(self._evaluating, state, (images,)).to(self.master)

    def _run_affine(self, state: Named, images: Tensor) -> Tensor:
        assert self._affine is not None
        return self._call(self._affine.module, state, (images,)).to(self.master)

    def _run_tangent(self, named: Named, along: Named, images: Tensor) -> tuple[Tensor, Tensor]:
        if self._explicit:
            logits, derivative = tangent.derivative(self._probing, named, along, images)
            return logits.to(self.master), derivative.to(self.master)
        fixed = {name: tensor for name, tensor in named.items() if name not in along}
        moving = {name: named[name] for name in along}

        def logits_at(moving: Named) -> Tensor:
            return self._run_probing({**moving, **fixed}, images)

        if self._forward_mode:
            try:
                both = torch.func.jvp(logits_at, (moving,), (along,))
                return both[0], both[1]
            except (RuntimeError, NotImplementedError) as error:
                self._forward_mode = False
                reason = str(error).strip().partition("\n")[0]
                warnings.warn(
                    f"the network has no forward-mode derivative ({reason}): double backpropagation takes its place",
                    FeddureWarning,
                    stacklevel=2,
                )
        return _by_double_backward(logits_at, moving, along)

    def _whole(self, flat: Tensor, statistics: Tensor) -> Named:
        """Weights without gradients, and statistics."""
        weights = {name: tensor.detach() for name, tensor in self.weights(flat).named.items()}
        return {**weights, **self._buffers(self.statistics.views(statistics))}

    def _buffers(self, statistics: Named) -> Named:
        """What the module is given: buffers of a user's layers in the network's arithmetic."""
        return {n: buffer.to(self.compute) if n in self._own else buffer for n, buffer in statistics.items()}

    def _keep(self, statistics: Named, given: Named) -> None:
        """What a pass in training changed of those, in place or by putting another tensor there."""
        # Clones: a layer may have put one buffer in another's place.
        found = {name: given[name].detach().clone() for name in self._own if given[name] is not statistics[name]}
        for name, value in found.items():
            if value.shape == statistics[name].shape:  # else it is about this batch alone
                statistics[name].copy_(value)

    def _frozen(self, flat: Tensor) -> Named:
        start = self.parameters.trained
        precise, cast = flat[start:], flat[start:].to(self.compute)
        return {
            entry.name: entry.view(precise if entry.name in self._precise else cast, start)
            for entry in self.parameters.frozen_entries
        }


def expect_classifier(path: str) -> str:
    """The path of a network's classifier, if it has one."""
    if not path:
        raise ConfigError(
            "the method asks for features or for the classifier's rows, but the network's logits are not what an "
            "nn.Linear layer returns; end the network's forward with such a layer, or use another method"
        )
    return path


class _Exposed(nn.Linear):
    """A linear layer that returns its input too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x


def _with_heads(module: nn.Module, heads: Mapping[str, nn.Module] | None) -> dict[str, nn.Parameter]:
    """The parameters of a module and of its heads, by name."""
    return dict(module.named_parameters()) | {
        f"{HEAD}{name}.{inner}": parameter
        for name, head in (heads or {}).items()
        for inner, parameter in head.named_parameters()
    }


def _by_double_backward(function: Callable[[Named], Tensor], moving: Named, along: Named) -> tuple[Tensor, Tensor]:
    """A function and its derivative along a direction: J v is the derivative of cᵀ J v with respect to c."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        if not again:
            moving = {name: tensor.detach().requires_grad_() for name, tensor in moving.items()}
        output = function(moving)
        c = torch.zeros_like(output, requires_grad=True)
        rows = torch.autograd.grad(output, list(moving.values()), c, create_graph=True, materialize_grads=True)
        product = torch.stack([(row * along[name]).sum() for name, row in zip(moving, rows, strict=True)]).sum()
        (derivative,) = torch.autograd.grad(product, c, create_graph=again)
    return (output, derivative) if again else (output.detach(), derivative.detach())


def _descend(flat: Tensor, gradient: Tensor, rate: Tensor) -> Tensor:
    return (flat - rate * gradient).to(gradient.dtype)


def _shares(module: nn.Module) -> bool:
    """Whether a parameter or a buffer of the module has two names."""
    return any(
        len(list(named())) < len(list(named(remove_duplicate=False)))
        for named in (module.named_parameters, module.named_buffers)
    )


def _norms(module: nn.Module) -> list[Any]:
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]


def _names_of(layers: Any, module: nn.Module, named: Callable = nn.Module.named_parameters) -> set[str]:
    """Names of the parameters, or buffers, of all layers of these types."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in module.named_modules()
        if isinstance(layer, layers)
        for name, _ in named(layer)
    }


def _drop_counters(module: nn.Module) -> None:
    """num_batches_tracked is an integer that no average of clients means anything for."""
    for norm in _norms(module):
        if norm.momentum is None:
            warnings.warn("batch norm with momentum=None is run with momentum 0.1", FeddureWarning, stacklevel=3)
            norm.momentum = 0.1
        norm.num_batches_tracked = None


def _without_statistics(module: nn.Module) -> nn.Module:
    for norm in _norms(module):
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = None
    return module
