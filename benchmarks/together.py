"""A step of all clients at once against a lane each: every kernel has the clients as an axis of its grid.

    python benchmarks/together.py fedavg-matched:10+0 fedtutor:10+10 feddure:10+10 --json results/together.json

What holds a small step back are hundreds of kernels that are too small for the chip. Here a client's step, with all
that it differentiates, is traced once as it stands in the method's file, gets an axis of clients (`torch.vmap`), is
compiled, and is captured as one graph. Its convolutions are cuDNN's, client after client, or Triton's, all clients in
one launch, whichever is faster for the shape. Before anything is timed both ways take the same steps, and how far they
end apart is part of the report. `--check` does that alone, on a CPU too (with TRITON_INTERPRET=1 by Triton's kernels).
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import finish, load, make_tasks, noise_images, seconds, spread
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from feddure.methods.base import Client
from feddure.simulation.engine import Engine
from feddure.simulation.lanes import Lane, Task
from feddure.simulation.program import Program, make_network

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


def _forward(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    return torch.stack([aten.convolution(a, b, None, *_rest(stride, padding)) for a, b in zip(x, w, strict=True)])


def _to_images(g: Tensor, w: Tensor, x: Tensor, stride: int, padding: int) -> Tensor:
    return torch.stack([_back(*each, stride, padding, 0) for each in zip(g, x, w, strict=True)])


def _to_weights(g: Tensor, w: Tensor, x: Tensor, stride: int, padding: int) -> Tensor:
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
        return min(seconds(way, 5, 2)) * 1000
    return kernels.triton.testing.do_bench_cudagraph(way)


@torch.library.custom_op("together::forward", mutates_args=())
def forward(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    return _dense(_run("forward", x, w, stride, padding))


@forward.register_fake
def _(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    side = [(size + 2 * padding - kernel) // stride + 1 for size, kernel in zip(x.shape[3:], w.shape[3:], strict=True)]
    return _channels_last(x, len(x), x.shape[1], w.shape[1], *side)


@torch.library.custom_op("together::images", mutates_args=())
def to_images(g: Tensor, w: Tensor, x: Tensor, stride: int, padding: int) -> Tensor:
    return _dense(_run("images", g, w, x, stride, padding))


@to_images.register_fake
def _(g: Tensor, w: Tensor, x: Tensor, stride: int, padding: int) -> Tensor:
    return _channels_last(x, *x.shape)


@torch.library.custom_op("together::weights", mutates_args=())
def to_weights(g: Tensor, w: Tensor, x: Tensor, stride: int, padding: int) -> Tensor:
    return _dense(_run("weights", g, w, x, stride, padding))


@to_weights.register_fake
def _(g: Tensor, w: Tensor, x: Tensor, stride: int, padding: int) -> Tensor:
    return _channels_last(w, *w.shape)


# --- from a client's step to one of all ----------------------------------------------------------------------------
class WithClients(fx.Interpreter):
    """Runs a traced step under vmap, with convolutions that know of the axis."""

    def __init__(self, graph: fx.GraphModule, clients: int):
        super().__init__(graph)
        self.clients = clients

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (aten.view.default, aten._unsafe_view.default):
            target = aten.reshape.default
        if target is aten.convolution.default:
            return self._convolution(*args)
        if target is aten.convolution_backward.default:
            return self._convolution_backward(*args)
        return super().call_function(target, args, kwargs)

    def _convolution(self, x: Tensor, w: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
        y = self._with_axis(forward, x, w, *_square(*how))
        return y if bias is None else y + bias.view(-1, 1, 1)

    def _convolution_backward(self, g: Tensor, x: Tensor, w: Tensor, bias: Any, *how: Any) -> tuple:
        *how, wanted = how
        stride, padding = _square(*how)
        return (
            self._with_axis(to_images, g, w, x, stride, padding) if wanted[0] else None,
            self._with_axis(to_weights, g, w, x, stride, padding) if wanted[1] else None,
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
        return operation(*[_dense(a) if isinstance(a, Tensor) else a for a in whole]), 0


def _square(stride: list[int], padding: list[int], dilation: list[int], transposed: bool, extra: Any, groups: int):  # type: ignore[no-untyped-def]
    if len({*stride}) > 1 or len({*padding}) > 1 or {*dilation} != {1} or transposed or groups > 1:
        raise NotImplementedError("a convolution of another kind")
    return stride[0], padding[0]


def tensors_of(client: Client) -> dict[str, Tensor]:
    """All that a step may change of a client, and what it reads beside its batch."""
    found = {"theta": client.theta, "statistics": client.statistics, "anchor": client.anchor, **client.state}
    found["counts"] = client.class_counts
    for name, optimizer in {"": client.optimizer, **client.optimizers}.items():
        found |= {f"{name}.{key}": value for key, value in vars(optimizer).items() if isinstance(value, Tensor)}
    return found


def put(client: Client, found: dict[str, Tensor]) -> None:
    client.theta, client.statistics, client.class_counts = found["theta"], found["statistics"], found["counts"]
    client.anchor = found["anchor"] if client.proximal else client.theta
    client.state.update({name: found[name] for name in client.state})
    for name, optimizer in {"": client.optimizer, **client.optimizers}.items():
        for key, value in list(vars(optimizer).items()):
            if isinstance(value, Tensor):
                setattr(optimizer, key, found[f"{name}.{key}"])


class Together:
    """Clients of one method that take the same number of steps on batches of the same shape."""

    def __init__(self, experiment: Any, dataset: Any, engine: Engine, tasks: list[Task]):
        network = make_network(experiment, dataset, engine.device, engine.precision, False)
        program = Program(experiment, network, len(dataset.classes), False)
        lane = Lane(0, program, None)
        starts, self.batches = [], []
        for task in tasks:
            self.batches.append(lane._receive(task))
            starts.append({name: value.clone() for name, value in tensors_of(lane.client).items()})
        self.start = {name: torch.stack([start[name] for start in starts]) for name in starts[0]}
        self.state = {name: value.clone() for name, value in self.start.items()}
        steps = [[batch.step(step).tensors() for batch in self.batches] for step in range(tasks[0].steps)]
        self.steps = [
            [_dense(t) if t.dim() >= 5 else t for t in map(torch.stack, zip(*step, strict=True))] for step in steps
        ]
        self.inputs = [tensor.clone(memory_format=torch.preserve_format) for tensor in self.steps[0]]
        one = [value.clone() for value in starts[0].values()], [t[0] for t in self.inputs]
        names, kept = list(starts[0]), dict(tensors_of(lane.client))
        batch = self.batches[0].step(0)

        def step(state: list[Tensor], given: list[Tensor]) -> list[Tensor]:
            put(lane.client, dict(zip(names, state, strict=True)))
            replaced = dict(zip(map(id, batch.tensors()), given, strict=True))
            return [
                value.detach() for value in program.step(lane.client, batch.map(lambda t: replaced[id(t)])).values()
            ]

        with torch.backends.cudnn.flags(enabled=False):  # batch norm in one form on every device
            alone = make_fx(step, core_aten_decompositions() | NORMS)(*one)
        put(lane.client, kept)
        batched = torch.vmap(lambda *given: WithClients(alone, len(tasks)).run(*given))
        flat = [*self.state.values(), *self.inputs]
        with torch.no_grad():
            self.graph = make_fx(batched, tracing_mode="fake")(*flat)
        _align(self.graph)
        self.run: Callable[..., Any] = torch.compile(self.graph, dynamic=False) if engine.compiles else self.graph

    def reset(self) -> None:
        for name, value in self.start.items():
            self.state[name].copy_(value)

    def step(self) -> None:
        with torch.no_grad():
            self.run(*self.state.values(), *self.inputs)

    def walk(self) -> None:
        for given in self.steps:
            torch._foreach_copy_(self.inputs, given)
            self.step()

    def capture(self) -> Callable[[], None]:
        """A function that takes all steps by replays of one graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()

        def go() -> None:
            for given in self.steps:
                torch._foreach_copy_(self.inputs, given)
                graph.replay()

        return go


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


# --- measuring -------------------------------------------------------------------------------------------------------
def warm(graph: fx.GraphModule) -> int:
    """Compile Triton's kernels in many processes: what one would take minutes for is then on disk."""
    names = {"together.forward": "forward", "together.images": "images", "together.weights": "weights"}
    jobs = set()
    for node in graph.graph.nodes:
        kind = names.get(str(node.target).removesuffix(".default"))
        if kind:
            shapes = tuple(tuple(a.meta["val"].shape) if isinstance(a, fx.Node) else a for a in node.args)
            jobs.add((kind, shapes))
    with ProcessPoolExecutor(15, mp_context=torch.multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_warm, *zip(*jobs, strict=True)))
    return len(jobs)


def _warm(kind: str, shapes: tuple) -> None:
    arguments = [
        _dense(torch.zeros(shape, device="cuda", dtype=torch.bfloat16)) if isinstance(shape, tuple) else shape
        for shape in shapes
    ]
    if kernels.takes(kind, *arguments):
        kernels.run(kind, *arguments)


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    method, _, batch = case.partition(":")
    labelled, unlabelled = map(int, batch.split("+"))
    precision = "fp64" if options.check and not INTERPRETED else "auto"
    experiment = load(
        method, labelled_batch=labelled, unlabelled_batch=max(unlabelled, 1), engine__lanes=options.clients,
        engine__precision=precision, model=options.model,
    )  # fmt: skip
    dataset = noise_images(options.side)
    engine = Engine(experiment.engine)
    tasks = make_tasks(engine, experiment, dataset, options.clients, options.steps)
    began = time.perf_counter()
    together = Together(experiment, dataset, engine, tasks)
    report: dict[str, Any] = {"method": method, "batch": batch, "precision": engine.precision}
    report["seconds"] = {"trace": time.perf_counter() - began}
    if not options.check:
        began = time.perf_counter()
        shapes = warm(together.graph) if "triton" in WAYS else 0
        report["seconds"]["kernels"] = time.perf_counter() - began
        engine.lanes.prepare(tasks)
    expected = engine.run(tasks)
    began = time.perf_counter()
    go = together.walk if options.check else together.capture()
    report["seconds"]["compile_and_capture"] = time.perf_counter() - began
    together.reset()
    go()
    report["apart"] = {}
    for name in ("theta", "statistics"):
        wanted = torch.stack([result.upload[name] for result in expected])
        moved = wanted - tasks[0].received[name]
        report["apart"][name] = float((together.state[name] - wanted).norm() / moved.norm())
    if not options.check:
        lanes = spread(seconds(lambda: engine.run(tasks), options.repeats), 1e3 / options.steps)
        ours = spread(seconds(go, options.repeats), 1e3 / options.steps)
        report |= {"lanes_ms": lanes, "together_ms": ours, "times_as_fast": lanes["median"] / ours["median"]}
        report |= {"shapes": shapes, "kernels": _kernels(go, options.steps)}
    engine.release()
    return report


def _kernels(go: Callable[[], None], steps: int) -> dict[str, Any]:
    """Kernels of a step of all: their number, their time, and the largest groups."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        go()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name[:60], []).append(event.device_time)
    largest = sorted(found.items(), key=lambda item: -sum(item[1]))[:15]
    return {
        "a_step": sum(map(len, found.values())) / steps,
        "ms": sum(map(sum, found.values())) / steps / 1e3,
        "largest": [[name, len(times) / steps, sum(times) / steps] for name, times in largest],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["fedavg-matched:10+0", "feddure:10+10"], metavar="METHOD:L+U")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="lanes also receive and send, which many steps hide")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--convolutions", choices=["best", "cudnn", "triton"], default="best")
    parser.add_argument("--check", action="store_true", help="agreement alone, without compiler and graph")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.convolutions != "best":
        WAYS.intersection_update({options.convolutions})
    cases = [measure(case, options) for case in options.cases]
    chosen = [{"convolution": str(key), "ms": ways} for key, ways in CHOSEN.items()]
    finish({"benchmark": "together", "model": options.model, "cases": cases, "convolutions": chosen}, options.json)


if __name__ == "__main__":
    main()
