"""Lanes in which every kernel has the clients as an axis of its grid, in place of a lane each.

What holds a small step back are hundreds of kernels that are too small for the chip. Here a client's step, with all
that it differentiates, is traced once as it stands in the method's file, gets an axis of clients (`torch.vmap`), is
compiled, and is captured as one graph. Its convolutions are cuDNN's, client after client, or Triton's, all clients in
one launch, whichever is faster for the shape. `use(engine)` puts these lanes in place of an engine's own.
"""

import copy
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from feddure.errors import FeddureError, FeddureWarning, first_line
from feddure.methods.base import Client
from feddure.simulation.engine import Engine
from feddure.simulation.lanes import Lane, Lanes, Result, Task
from feddure.simulation.program import Program

sys.path.insert(0, str(Path(__file__).resolve().parent))
try:
    import together_kernels as kernels
except ImportError:  # no Triton: a CPU
    kernels = None  # type: ignore[assignment]

aten = torch.ops.aten
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = kernels is not None and (torch.cuda.is_available() or INTERPRETED)


# --- convolutions of [clients, images, channels, height, width] by [clients, outputs, inputs, kernel, kernel] --------
def _dense(x: Tensor) -> Tensor:
    """The same values, channels last in memory for each client; how far clients lie apart is free."""
    rows = x.movedim(2, -1)
    return x if rows[0].is_contiguous() else rows.contiguous().movedim(-1, 2)


def _channels_last(like: Tensor, clients: int, images: int, channels: int, *side: int) -> Tensor:
    return like.new_empty(clients, images, *side, channels).movedim(-1, 2)


def _forward(x: Tensor, w: Tensor, active: Tensor, stride: int, padding: int) -> Tensor:
    return torch.stack([aten.convolution(a, b, None, *_rest(stride, padding)) for a, b in zip(x, w, strict=True)])


def _to_images(g: Tensor, w: Tensor, x: Tensor, active: Tensor, stride: int, padding: int) -> Tensor:
    return torch.stack([_back(*each, stride, padding, 0) for each in zip(g, x, w, strict=True)])


def _to_weights(g: Tensor, w: Tensor, x: Tensor, active: Tensor, stride: int, padding: int) -> Tensor:
    return torch.stack([_back(*each, stride, padding, 1) for each in zip(g, x, w, strict=True)])


def _back(g: Tensor, x: Tensor, w: Tensor, stride: int, padding: int, which: int) -> Tensor:
    wanted = [number == which for number in range(3)]
    return aten.convolution_backward(g, x, w, None, *_rest(stride, padding), wanted)[which]


def _rest(stride: int, padding: int) -> tuple:
    return [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1


CUDNN = {"forward": _forward, "images": _to_images, "weights": _to_weights}
CHOSEN: dict[tuple, dict[str, float]] = {}
"""Milliseconds of each way for each kind and shape of convolution."""
WAYS = {"cudnn"} | ({"triton"} if TRITON else set())


def _run(kind: str, *arguments: Any) -> Tensor:
    """The faster way, or the only one that is wanted."""
    ways: dict[str, Callable[[], Tensor]] = {}
    if "cudnn" in WAYS:
        ways["cudnn"] = lambda: CUDNN[kind](*arguments)
    if "triton" in WAYS and kernels.takes(kind, *arguments):
        ways["triton"] = lambda: kernels.run(kind, *arguments)
    ways = ways or {"cudnn": lambda: CUDNN[kind](*arguments)}
    if len(ways) == 1:
        return next(iter(ways.values()))()
    key = (kind, *(tuple(a.shape) if isinstance(a, Tensor) else a for a in arguments))
    if key not in CHOSEN:
        cudnn, triton = (way().double() for way in ways.values())
        if not (apart := float((triton - cudnn).norm() / cudnn.norm())) < 0.02:  # bf16 has 8 bits
            raise SystemExit(f"{key}: Triton's and cuDNN's results are {apart:.2g} apart")
        CHOSEN[key] = {name: _milliseconds(way) for name, way in ways.items()}
    return ways[min(CHOSEN[key], key=CHOSEN[key].__getitem__)]()


def _milliseconds(way: Callable[[], Tensor]) -> float:
    """Of a captured call, as it will run: outside of a graph it is mostly the host that takes time."""
    if not torch.cuda.is_available():
        began = time.perf_counter()
        way()
        return (time.perf_counter() - began) * 1000
    return kernels.triton.testing.do_bench_cudagraph(way)


@torch.library.custom_op("together::forward", mutates_args=())
def forward(x: Tensor, w: Tensor, active: Tensor, stride: int, padding: int) -> Tensor:
    return _dense(_run("forward", x, w, active, stride, padding))


@forward.register_fake
def _(x: Tensor, w: Tensor, active: Tensor, stride: int, padding: int) -> Tensor:
    side = [(size + 2 * padding - kernel) // stride + 1 for size, kernel in zip(x.shape[3:], w.shape[3:], strict=True)]
    return _channels_last(x, len(x), x.shape[1], w.shape[1], *side)


@torch.library.custom_op("together::images", mutates_args=())
def to_images(g: Tensor, w: Tensor, x: Tensor, active: Tensor, stride: int, padding: int) -> Tensor:
    return _dense(_run("images", g, w, x, active, stride, padding))


@to_images.register_fake
def _(g: Tensor, w: Tensor, x: Tensor, active: Tensor, stride: int, padding: int) -> Tensor:
    return _channels_last(x, *x.shape)


@torch.library.custom_op("together::weights", mutates_args=())
def to_weights(g: Tensor, w: Tensor, x: Tensor, active: Tensor, stride: int, padding: int) -> Tensor:
    return _dense(_run("weights", g, w, x, active, stride, padding))


@to_weights.register_fake
def _(g: Tensor, w: Tensor, x: Tensor, active: Tensor, stride: int, padding: int) -> Tensor:
    return _channels_last(w, *w.shape)


# --- from a client's step to one of all ----------------------------------------------------------------------------
class WithClients(fx.Interpreter):
    """Runs a traced step under vmap, with convolutions that know of the axis."""

    def __init__(self, graph: fx.GraphModule, clients: int, active: Tensor):
        super().__init__(graph)
        self.clients, self.active = clients, active

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (aten.view.default, aten._unsafe_view.default):
            target = aten.reshape.default
        if "out" in kwargs:
            return kwargs["out"].copy_(target.overloadpacket(*args))
        if target is aten.convolution.default:
            return self._convolution(*args)
        if target is aten.convolution_backward.default:
            return self._convolution_backward(*args)
        return super().call_function(target, args, kwargs)

    def _convolution(self, x: Tensor, w: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
        y = self._with_axis(forward, x, w, self.active, *_square(*how))
        return y if bias is None else y + bias.view(-1, 1, 1)

    def _convolution_backward(self, g: Tensor, x: Tensor, w: Tensor, bias: Any, *how: Any) -> tuple:
        *how, wanted = how
        stride, padding = _square(*how)
        return (
            self._with_axis(to_images, g, w, x, self.active, stride, padding) if wanted[0] else None,
            self._with_axis(to_weights, g, w, x, self.active, stride, padding) if wanted[1] else None,
            g.sum((0, 2, 3)) if wanted[2] else None,
        )

    def _with_axis(self, operation: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return _Axis.apply(operation, self.clients, *arguments)  # type: ignore[no-untyped-call]


class _Axis(torch.autograd.Function):
    """An operation on all clients, as vmap calls it."""

    @staticmethod
    def forward(operation: Callable[..., Tensor], clients: int, *arguments: Any) -> Tensor:
        raise NotImplementedError("outside vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, places: Any, operation: Callable[..., Tensor], clients: int, *arguments: Any) -> Any:
        whole = [
            argument if not isinstance(argument, Tensor)
            else argument.expand(clients, *argument.shape) if place is None
            else argument.movedim(place, 0)
            for argument, place in zip(arguments, places[2:], strict=True)
        ]  # fmt: skip
        return operation(*[_dense(a) if isinstance(a, Tensor) and a.dim() > 1 else a for a in whole]), 0


def _square(stride: list[int], padding: list[int], dilation: list[int], transposed: bool, extra: Any, groups: int):  # type: ignore[no-untyped-def]
    if len({*stride}) > 1 or len({*padding}) > 1 or {*dilation} != {1} or transposed or groups > 1:
        raise NotImplementedError("a convolution of another kind")
    return stride[0], padding[0]


def tensors_of(client: Client) -> dict[str, Tensor]:
    """All that a step may change of a client, and what it reads beside its batch."""
    found = {"theta": client.theta, "statistics": client.statistics, **client.state}
    if client.proximal:
        found["anchor"] = client.anchor
    found["class counts"] = client.class_counts
    for name, optimizer in {"": client.optimizer, **client.optimizers}.items():
        found |= {f"{name}.{key}": value for key, value in vars(optimizer).items() if isinstance(value, Tensor)}
    return found


def put(client: Client, found: dict[str, Tensor]) -> None:
    client.theta, client.statistics, client.class_counts = found["theta"], found["statistics"], found["class counts"]
    client.anchor = found["anchor"] if client.proximal else client.theta
    client.state.update({name: found[name] for name in client.state})
    for name, optimizer in {"": client.optimizer, **client.optimizers}.items():
        for key, value in list(vars(optimizer).items()):
            if isinstance(value, Tensor):
                setattr(optimizer, key, found[f"{name}.{key}"])


class Wide:
    """As many clients of one method as it has places, side by side in every kernel; those who are done stand still."""

    def __init__(self, program: Program, tasks: list[Task], compiles: bool):
        network = copy.copy(program.network)
        network.stop_compiling()
        plain = Program(program.experiment, network, program.classes, False)
        traced = Lane(0, plain, None)
        self.lanes = [Lane(0, program, None) for _ in tasks]
        every = [tensors_of(lane.client) for lane in self.lanes]
        self.state = {name: torch.stack([found[name] for found in every]) for name in every[0]}
        for place, lane in enumerate(self.lanes):
            put(lane.client, {name: value[place] for name, value in self.state.items()})
        first = [lane._receive(task).step(0) for lane, task in zip(self.lanes, tasks, strict=True)]
        together = map(torch.stack, zip(*(batch.tensors() for batch in first), strict=True))
        self.inputs = [_dense(tensor) if tensor.dim() >= 5 else tensor for tensor in together]
        self.active = torch.ones(len(tasks), dtype=torch.bool, device=network.device)
        self.named: list[tuple[str, torch.Size, int]] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        names, batch = list(self.state), first[0]

        def step(state: list[Tensor], active: Tensor, given: list[Tensor]) -> Tensor:
            before = [value.clone() for value in state]
            put(traced.client, dict(zip(names, state, strict=True)))
            replaced = dict(zip(map(id, batch.tensors()), given, strict=True))
            record = plain.step(traced.client, batch.map(lambda tensor: replaced[id(tensor)]))
            for name, value, old in zip(names, state, before, strict=True):
                if name not in ("anchor", "class counts"):  # which no step changes
                    value.copy_(torch.where(active, value, old))
            self.named = [(name, value.shape, value.numel()) for name, value in record.items()]
            return torch.cat([value.detach().reshape(-1).to(torch.float32) for value in record.values()])

        plain.step(traced.client, batch)  # what a network makes when it is first asked for is made now
        one = [value[0].clone() for value in self.state.values()], self.active[0], [t[0] for t in self.inputs]
        with torch.backends.cudnn.flags(enabled=False):  # batch norm in one form on every device
            alone = make_fx(step, core_aten_decompositions() | NORMS)(*one)
        batched = torch.vmap(lambda *given: WithClients(alone, len(tasks), given[len(names)]).run(*given))
        with torch.no_grad():
            self.graph = make_fx(batched, tracing_mode="fake", _allow_non_fake_inputs=True)(*self._arguments)
        _align(self.graph)
        self._run: Callable[..., Tensor] = torch.compile(self.graph, dynamic=False) if compiles else self.graph

    @property
    def _arguments(self) -> list[Tensor]:
        return [*self.state.values(), self.active, *self.inputs]

    def capture(self) -> None:
        """Let steps be replays of one graph; what the clients hold moves meanwhile."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(3):
                self._run(*self._arguments)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph), torch.no_grad():
            self._record = self._run(*self._arguments)

    def run(self, tasks: list[Task]) -> list[Result]:
        """Train them; no more than there are places."""
        batches = [lane._receive(task) for lane, task in zip(self.lanes, tasks, strict=False)]
        steps = [task.steps for task in tasks] + [0] * (len(self.lanes) - len(tasks))
        at_work = (torch.arange(max(steps)).unsqueeze(1) < torch.tensor(steps)).to(self.active.device)
        rows = []
        for index in range(max(steps)):
            filled = [(self.active, at_work[index])] + [
                (mine[place], given)
                for place, batch in enumerate(batches) if index < steps[place]
                for mine, given in zip(self.inputs, batch.step(index).tensors(), strict=True) if given.numel()
            ]  # fmt: skip
            torch._foreach_copy_([mine for mine, _ in filled], [given for _, given in filled])
            rows.append(self._step())
        recorded = torch.stack(rows, 1)
        return [self._result(place, recorded[place, : task.steps]) for place, task in enumerate(tasks)]

    def _step(self) -> Tensor:
        if self._graph is not None:
            self._graph.replay()
            return self._record.clone()
        with torch.no_grad():
            return self._run(*self._arguments)

    def _result(self, place: int, rows: Tensor) -> Result:
        client, method = self.lanes[place].client, self.lanes[place].program.method
        parts = rows.split([size for *_, size in self.named], dim=1)
        return Result(
            {name: value.clone() for name, value in method.upload(client).items()},
            {name: client.state[name].clone() for name in method.memory},
            {name: part.reshape(len(rows), *shape) for (name, shape, _), part in zip(self.named, parts, strict=True)},
        )


class TogetherLanes(Lanes):
    """Lanes of which those that train the same method on batches of one shape are one wide lane."""

    def __init__(self, device: torch.device, wanted: int | str, compiles: bool):
        super().__init__(device, wanted)
        self.compiles = compiles
        self.seconds = 0.0
        self.wide: dict[tuple, Wide | None] = {}
        self._stream = torch.cuda.Stream(priority=-1) if self.overlaps else None

    def run(self, tasks: list[Task], meanwhile: Callable[[], None] = lambda: None) -> list[Result]:
        results: dict[int, Result] = {}
        self.prepare(tasks)
        groups = self._groups(tasks)
        apart = [index for key, group in groups.items() if self.wide[key] is None for index in group]
        with self._aside():
            for key, group in groups.items():
                if wide := self.wide[key]:
                    group, places = sorted(group, key=lambda index: -tasks[index].steps), len(wide.lanes)
                    for start in range(0, len(group), places):
                        chosen = group[start : start + places]
                        results |= zip(chosen, wide.run([tasks[index] for index in chosen]), strict=True)
        results |= zip(apart, super().run([tasks[index] for index in apart], meanwhile), strict=True)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return [results[index] for index in range(len(tasks))]

    def prepare(self, tasks: list[Task]) -> None:
        for key, group in self._groups(tasks).items():
            if key not in self.wide:
                began = time.perf_counter()
                self.wide[key] = self._made([tasks[index] for index in group[: self.limit]])
                self.seconds += time.perf_counter() - began

    def _made(self, tasks: list[Task]) -> Wide | None:
        """A wide lane for tasks like these; none where the step cannot be traced or has no rule for an axis more."""
        program = tasks[0].program
        try:
            with self._aside():
                wide = Wide(program, tasks, self.compiles)
            if self.overlaps:
                warm(wide.graph)
                wide.capture()
        except (torch.cuda.OutOfMemoryError, FeddureError):
            raise
        except Exception as error:
            warnings.warn(f"'{program.experiment.method}' has a lane a client ({first_line(error)})", FeddureWarning, 2)
            return None
        return wide

    def _groups(self, tasks: list[Task]) -> dict[tuple, list[int]]:
        found: dict[tuple, list[int]] = {}
        for index, task in enumerate(tasks):
            shapes = tuple(tensor.shape[1:] for tensor in task.batches.tensors())
            found.setdefault((id(task.program), shapes), []).append(index)
        return found

    @contextmanager
    def _aside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def release(self) -> None:
        self.wide.clear()
        super().release()


def use(engine: Engine) -> TogetherLanes:
    """Let an engine train all clients of a round in one wide lane."""
    engine.lanes = TogetherLanes(engine.device, engine.options.lanes, bool(engine.compiles))
    return engine.lanes


NORMS = {
    aten.native_batch_norm.default: torch._decomp.decompositions.native_batch_norm,
    aten.native_batch_norm_backward.default: torch._decomp.decompositions.native_batch_norm_backward,
}


def _align(graph: fx.GraphModule) -> None:
    """Let every client's weights begin where 16 bytes can be read at once: rows that are cast get a length for it."""
    for node in list(graph.graph.nodes):
        if node.target is not aten._to_copy.default or node.kwargs.get("dtype") is not torch.bfloat16:
            continue
        value = node.meta["val"]
        missing = -value.shape[-1] % 64 if value.dim() == 2 and value.numel() > 2**16 else 0
        if missing:
            with graph.graph.inserting_before(node):
                padded = graph.graph.call_function(aten.constant_pad_nd.default, (node.args[0], [0, missing]))
            with graph.graph.inserting_after(node):
                cut = graph.graph.call_function(aten.slice.Tensor, (node, 1, 0, value.shape[-1]))
            node.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)
            node.args = (padded,)
    graph.recompile()


def warm(graph: fx.GraphModule) -> None:
    """Compile Triton's kernels in many processes: what one would take minutes for is then on disk."""
    if "triton" not in WAYS:
        return
    names = {"together.forward": "forward", "together.images": "images", "together.weights": "weights"}
    jobs = set()
    for node in graph.graph.nodes:
        kind = names.get(str(node.target).removesuffix(".default"))
        if kind:
            shapes = tuple(tuple(a.meta["val"].shape) if isinstance(a, fx.Node) else a for a in node.args)
            jobs.add((kind, shapes))
    with ProcessPoolExecutor(15, mp_context=torch.multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_warm, *zip(*jobs, strict=True)))


def _warm(kind: str, shapes: tuple) -> None:
    arguments = [
        shape
        if not isinstance(shape, tuple)
        else _dense(torch.zeros(shape, device="cuda", dtype=torch.bfloat16))
        if len(shape) > 1
        else torch.ones(shape, device="cuda", dtype=torch.bool)
        for shape in shapes
    ]
    if kernels.takes(kind, *arguments):
        kernels.run(kind, *arguments)
