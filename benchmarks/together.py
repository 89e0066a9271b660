"""A step of all clients at once against a lane each: every kernel has the clients as an axis of its grid.

    python benchmarks/together.py [--images 10 20 30 100] [--out results/together.json]

Labels only on ResNet-9, batch norm, Adam: the step that every method's begins with. Convolutions are Triton kernels
(an implicit matrix product a client), the rest is compiled with a leading axis of clients, and one graph holds it all.
Before anything is timed, both ways take five steps from one model and must agree. `TRITON_INTERPRET=1` with
`--check` does the same on a CPU.
"""

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from common import finish, load, make_tasks, noise_images, seconds, spread
from torch import Tensor, nn

from feddure.nn.flat import Layout
from feddure.nn.networks import GlobalMaxPool, Residual
from feddure.nn.optimizers import _adam
from feddure.simulation.engine import Engine
from feddure.simulation.lanes import Task
from feddure.simulation.program import Program, new_module

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SIZES = [(16, 16, 16, 4, 1)] if INTERPRETED else [
    (128, 128, 64, 8, 3), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (64, 64, 64, 4, 5), (64, 64, 128, 4, 3),
    (128, 64, 16, 4, 5),
]  # fmt: skip
CONFIGS = [
    triton.Config({"ROWS": rows, "COLUMNS": columns, "INNER": inner}, num_warps=warps, num_stages=stages)
    for rows, columns, inner, warps, stages in SIZES
]


@triton.autotune(CONFIGS, key=["N", "H", "IN", "OUT", "BACKWARD"])
@triton.jit
def _gather(x, w, y, between, N: tl.constexpr, H: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
            KERNEL: tl.constexpr, BACKWARD: tl.constexpr,
            ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr):  # fmt: skip
    """y [N, H, H, OUT] of x [N, H, H, IN], by w [OUT, taps, IN]; BACKWARD: by w [IN, taps, OUT] the other way round."""
    tile, column, client = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    TAPS: tl.constexpr = KERNEL * KERNEL
    BLOCKS: tl.constexpr = (IN + INNER - 1) // INNER
    pixel = tile * ROWS + tl.arange(0, ROWS)
    valid = pixel < N * H * H
    i, j = pixel // H % H, pixel % H
    outputs = column * COLUMNS + tl.arange(0, COLUMNS)
    x += client * N * H * H * IN
    w += client * between
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(TAPS * BLOCKS):
        tap, inputs = step // BLOCKS, step % BLOCKS * INNER + tl.arange(0, INNER)
        down, right = tap // KERNEL - KERNEL // 2, tap % KERNEL - KERNEL // 2
        if BACKWARD:
            down, right = -down, -right
            at = (inputs[:, None] * TAPS + tap) * OUT + outputs[None, :]
        else:
            at = (outputs[None, :] * TAPS + tap) * IN + inputs[:, None]
        inside = valid & (i + down >= 0) & (i + down < H) & (j + right >= 0) & (j + right < H)
        offsets = (pixel + down * H + right)[:, None] * IN + inputs[None, :]
        a = tl.load(x + offsets, mask=inside[:, None] & (inputs < IN)[None, :], other=0.0)
        b = tl.load(w + at, mask=(inputs < IN)[:, None] & (outputs < OUT)[None, :], other=0.0)
        total += tl.dot(a, b, out_dtype=tl.float32)
    wanted = valid[:, None] & (outputs < OUT)[None, :]
    y += client * N * H * H * OUT
    tl.store(y + pixel[:, None] * OUT + outputs[None, :], total.to(y.dtype.element_ty), mask=wanted)


@triton.autotune(CONFIGS, key=["N", "H", "IN", "OUT", "PARTS"])
@triton.jit
def _weights(x, g, w, N: tl.constexpr, H: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
             KERNEL: tl.constexpr, PARTS: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr):  # fmt: skip
    """The weights' gradient [PARTS, OUT, taps, IN] of x [N, H, H, IN] and g [N, H, H, OUT], by parts of the pixels."""
    FIELD: tl.constexpr = KERNEL * KERNEL * IN
    tile, column, both = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    client, part = (both // PARTS).to(tl.int64), both % PARTS
    outputs = tile * ROWS + tl.arange(0, ROWS)
    field = column * COLUMNS + tl.arange(0, COLUMNS)
    tap, inputs = field // IN, field % IN
    down, right = tap // KERNEL - KERNEL // 2, tap % KERNEL - KERNEL // 2
    x += client * N * H * H * IN
    g += client * N * H * H * OUT
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    SHARE: tl.constexpr = ((N * H * H + PARTS - 1) // PARTS + INNER - 1) // INNER * INNER
    for start in range(0, SHARE, INNER):
        pixel = part * SHARE + start + tl.arange(0, INNER)
        valid = pixel < N * H * H
        i, j = pixel // H % H, pixel % H
        inside = (
            (i[:, None] + down[None, :] >= 0) & (i[:, None] + down[None, :] < H)
            & (j[:, None] + right[None, :] >= 0) & (j[:, None] + right[None, :] < H)
        )  # fmt: skip
        a = tl.load(
            g + pixel[None, :] * OUT + outputs[:, None], mask=valid[None, :] & (outputs < OUT)[:, None], other=0.0
        )
        offsets = (pixel[:, None] + (down * H + right)[None, :]) * IN + inputs[None, :]
        b = tl.load(x + offsets, mask=valid[:, None] & (field < FIELD)[None, :] & inside, other=0.0)
        total += tl.dot(a, b, out_dtype=tl.float32)
    wanted = (outputs < OUT)[:, None] & (field < FIELD)[None, :]
    w += (client * PARTS + part) * OUT * FIELD
    tl.store(w + outputs[:, None] * FIELD + field[None, :], total.to(w.dtype.element_ty), mask=wanted)


# --- convolutions of [clients, images, height, width, channels] by [clients, outputs, kernel, kernel, inputs] --------
@torch.library.custom_op("together::gather", mutates_args=())
def gather(x: Tensor, w: Tensor, backward: bool) -> Tensor:
    clients, images, side, _, channels = x.shape
    outputs = w.shape[-1 if backward else 1]
    y = x.new_empty(clients, images, side, side, outputs)

    def grid(chosen: dict[str, int]) -> tuple[int, int, int]:
        return triton.cdiv(images * side * side, chosen["ROWS"]), triton.cdiv(outputs, chosen["COLUMNS"]), clients

    _gather[grid](x, w, y, w.stride(0), images, side, channels, outputs, w.shape[2], backward)
    return y


@gather.register_fake
def _(x: Tensor, w: Tensor, backward: bool) -> Tensor:
    return x.new_empty(*x.shape[:4], w.shape[-1 if backward else 1])


@torch.library.custom_op("together::weights", mutates_args=())
def weights(x: Tensor, g: Tensor, kernel: int) -> Tensor:
    clients, images, side, _, channels = x.shape
    outputs, field = g.shape[-1], kernel * kernel * channels
    tiles = clients * triton.cdiv(outputs, 128) * triton.cdiv(field, 128)
    parts = max(1, min(264 // tiles, images * side * side // 256))
    w = x.new_empty(clients, parts, outputs, kernel, kernel, channels, dtype=torch.float32)

    def grid(chosen: dict[str, int]) -> tuple[int, int, int]:
        return triton.cdiv(outputs, chosen["ROWS"]), triton.cdiv(field, chosen["COLUMNS"]), clients * parts

    _weights[grid](x, g, w, images, side, channels, outputs, kernel, parts)
    return w.sum(1).to(x.dtype) if parts > 1 else w[:, 0].to(x.dtype)


@weights.register_fake
def _(x: Tensor, g: Tensor, kernel: int) -> Tensor:
    return x.new_empty(x.shape[0], g.shape[-1], kernel, kernel, x.shape[-1])


@torch.library.custom_op("together::convolve", mutates_args=())
def convolve(x: Tensor, w: Tensor) -> Tensor:
    return gather(x, w, False)


@convolve.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:4], w.shape[1])


def _convolve_back(ctx, g: Tensor) -> tuple[Tensor | None, Tensor]:  # type: ignore[no-untyped-def]
    x, w = ctx.saved_tensors
    g = g.contiguous()
    return gather(g, w, True) if ctx.needs_input_grad[0] else None, weights(x, g, w.shape[2])


def _keep(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


torch.library.register_autograd("together::convolve", _convolve_back, setup_context=_keep)


# --- ResNet-9 with an axis of clients -------------------------------------------------------------------------------
def apply(layer: nn.Module, path: str, x: Tensor, named: dict[str, Tensor], seen: dict[str, Tensor]) -> Tensor:
    """What a layer makes of [clients, images, height, width, channels]; means and variances go into `seen`."""
    if isinstance(layer, nn.Conv2d):
        return convolve(x.contiguous(), named[f"{path}.weight"])  # in front of batch norm its bias stays at 0
    if isinstance(layer, nn.BatchNorm2d):
        variance, mean = torch.var_mean(x.float(), (1, 2, 3), correction=0)
        count = x[0, ..., 0].numel()
        seen[f"{path}.running_mean"], seen[f"{path}.running_var"] = mean, variance * (count / (count - 1))
        scale = named[f"{path}.weight"] * (variance + layer.eps).rsqrt()
        shift = named[f"{path}.bias"] - mean * scale
        return (x.float() * scale[:, None, None, None] + shift[:, None, None, None]).to(x.dtype)
    if isinstance(layer, nn.ReLU):
        return x.relu()
    if isinstance(layer, nn.MaxPool2d):
        clients, images, side, _, channels = x.shape
        return x.view(clients, images, side // 2, 2, side // 2, 2, channels).amax((3, 5))
    if isinstance(layer, GlobalMaxPool):
        return x.amax((2, 3))
    if isinstance(layer, nn.Linear):
        return torch.baddbmm(named[f"{path}.bias"][:, None], x, named[f"{path}.weight"].transpose(1, 2))
    if isinstance(layer, Residual):
        return x + apply(layer.inner, f"{path}.inner", x, named, seen)
    if isinstance(layer, nn.Sequential):
        for name, inner in layer.named_children():
            x = apply(inner, f"{path}.{name}" if path else name, x, named, seen)
        return x
    raise TypeError(type(layer).__name__)


class Together:
    """Clients of one program that take the same steps at the same time."""

    def __init__(self, program: Program, tasks: list[Task], module: nn.Module):
        network, count = program.network, len(tasks)
        self.layouts: tuple[Layout, Layout] = network.parameters, network.statistics
        self.compute, self.options, self.module = network.compute, program.experiment.optimizer, module
        received = tasks[0].received
        self.theta = received["theta"].repeat(count, 1)
        self.statistics = received["statistics"].repeat(count, 1)
        self.moments = torch.zeros_like(self.theta), torch.zeros_like(self.theta)
        self.steps, self.rate = self.theta.new_zeros(()), self.theta.new_tensor(self.options.learning_rate)
        self.start = [tensor.clone() for tensor in self._all()]
        # A copy of each, as a captured graph reads them from one place: [steps, clients, images, height, width, C].
        self.images = torch.stack([task.batches.labelled for task in tasks], 1).movedim(-3, -1).contiguous()
        self.labels = torch.stack([task.batches.labels for task in tasks], 1)
        self.batch = self.images[0].clone(), self.labels[0].clone()
        compiled = program.network.compiled
        self.loss = torch.compile(self._loss, dynamic=False) if compiled else self._loss
        self.adam = torch.compile(_adam, dynamic=False) if compiled else _adam

    def _all(self) -> list[Tensor]:
        return [self.theta, self.statistics, *self.moments, self.steps]

    def reset(self) -> None:
        for tensor, start in zip(self._all(), self.start, strict=True):
            tensor.copy_(start)

    def _loss(self, leaves: dict[str, Tensor], images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        seen: dict[str, Tensor] = {}
        logits = apply(self.module, "", images, leaves, seen).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.shape[1]
        return loss, torch.cat([seen[entry.name] for entry in self.layouts[1].entries], 1).detach()

    def step(self) -> None:
        """One step of all clients, in place."""
        layout = self.layouts[0]
        rows = -(-layout.cast // 64) * 64  # every client's weights begin where 16 bytes can be read at once
        cast = self.theta.new_empty(len(self.theta), rows, dtype=self.compute)
        cast[:, : layout.cast].copy_(self.theta[:, : layout.cast])
        leaves = {}
        for entry in layout.trained_entries:
            flat = cast if entry.start < layout.cast else self.theta
            shape = entry.shape if len(entry.shape) < 4 else [entry.shape[place] for place in (0, 2, 3, 1)]
            part = flat[:, entry.start : entry.start + entry.size]
            leaves[entry.name] = part.view(len(flat), *shape).detach().requires_grad_()
        loss, seen = self.loss(leaves, *self.batch)
        gradients = [g.flatten(1) for g in torch.autograd.grad(loss, list(leaves.values()))]
        with torch.no_grad():
            self.steps.add_(1)
            few = sum(entry.start < layout.cast for entry in layout.trained_entries)
            for place, group in zip(layout.groups, (gradients[:few], gradients[few:]), strict=True):
                o, moments = self.options, [moment[:, place] for moment in self.moments]
                constants = (o.beta1, o.beta2, o.epsilon, o.weight_decay)
                self.adam(self.theta[:, place], torch.cat(group, 1), *moments, self.steps, self.rate, *constants)
            self.statistics.lerp_(seen, 0.1)

    def capture(self) -> Callable[[], None]:
        """A function that takes all steps by replays of one graph."""
        for _ in range(3):
            self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()

        def go() -> None:
            for images, labels in zip(self.images, self.labels, strict=True):
                torch._foreach_copy_(list(self.batch), [images, labels])
                graph.replay()

        return go

    def walk(self) -> None:
        """All steps without a graph."""
        for images, labels in zip(self.images, self.labels, strict=True):
            torch._foreach_copy_(list(self.batch), [images, labels])
            self.step()


def build(images: int, options: argparse.Namespace) -> tuple[Engine, list[Task], Together]:
    experiment = load("fedavg-matched", labelled_batch=images, engine__lanes=options.clients, model=options.model)
    dataset = noise_images(options.side)
    engine = Engine(experiment.engine)
    tasks = make_tasks(engine, experiment, dataset, options.clients, options.steps)
    return engine, tasks, Together(engine.program(experiment, dataset), tasks, new_module(experiment, dataset))


def measure(images: int, options: argparse.Namespace) -> dict[str, object]:
    engine, tasks, together = build(images, options)
    engine.lanes.prepare(tasks)
    go = together.walk if options.check else together.capture()
    expected = engine.run(tasks)
    together.reset()
    go()
    apart = {}
    for name, found in (("theta", together.theta), ("statistics", together.statistics)):
        wanted = torch.stack([result.upload[name] for result in expected])
        moved = wanted - tasks[0].received[name]
        apart[name] = float((found - wanted).norm() / moved.norm())
    if options.check:
        return {"images": images, "apart": apart}
    lanes = spread(seconds(lambda: engine.run(tasks), options.repeats), 1e3 / options.steps)
    ours = spread(seconds(go, options.repeats), 1e3 / options.steps)
    engine.release()
    return {
        "images": images, "apart": apart, "lanes_ms": lanes, "together_ms": ours,
        "times_as_fast": lanes["median"] / ours["median"],
    }  # fmt: skip


def warm(options: argparse.Namespace) -> None:
    """Compile the kernels in many processes: what one would take minutes for is then on disk."""
    jobs = [(images, number) for images in options.images for number in range(6)]
    with ProcessPoolExecutor(15, mp_context=torch.multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(_warm, *job, options) for job in jobs]:
            future.result()


def _warm(images: int, number: int, options: argparse.Namespace) -> None:
    layers = [(3, 64, 32), (64, 128, 32), (128, 128, 16), (128, 256, 16), (256, 512, 8), (512, 512, 4)]
    for channels, outputs, side in layers[number : number + 1]:
        x = torch.zeros(options.clients, images, side, side, channels, device="cuda", dtype=torch.bfloat16)
        w = torch.zeros(options.clients, outputs, 3, 3, channels, device="cuda", dtype=torch.bfloat16)
        y = gather(x, w, False)
        weights(x, y, 3)
        if channels > 3:
            gather(y, w, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[10, 20, 30, 100])
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--model", default="resnet9")
    parser.add_argument("--check", action="store_true", help="agreement alone, without a graph")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.check:
        warm(options)
    finish({"benchmark": "together", "cases": [measure(images, options) for images in options.images]}, options.out)


if __name__ == "__main__":
    main()
