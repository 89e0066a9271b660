"""Convolutions of several clients in one launch: an implicit matrix product a client, in Triton.

Images lie as [clients, images, height, width, channels], weights as [clients, outputs, taps, inputs]; both come and go
as PyTorch's views of that, [clients, images, channels, height, width] and [clients, outputs, inputs, kernel, kernel].
What belongs to clients that are not active is not computed.
"""

import os
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZES = [(16, 16, 16, 4, 1)] if os.environ.get("TRITON_INTERPRET") == "1" else [
    (128, 128, 64, 8, 3), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (64, 64, 64, 4, 5), (64, 64, 128, 4, 3),
    (128, 64, 16, 4, 5),
]  # fmt: skip
CONFIGS = [
    triton.Config({"ROWS": rows, "COLUMNS": columns, "INNER": inner}, num_warps=warps, num_stages=stages)
    for rows, columns, inner, warps, stages in SIZES
]
PROCESSORS = 132
tuned = partial(triton.autotune, CONFIGS, do_bench=partial(triton.testing.do_bench, warmup=2, rep=10))


@tuned(key=["N", "SIDE", "FROM", "IN", "OUT", "STRIDE", "BACKWARD"])
@triton.jit
def _gather(x, w, y, active, x_apart, w_apart, N: tl.constexpr, SIDE: tl.constexpr, FROM: tl.constexpr,
            IN: tl.constexpr, OUT: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
            BACKWARD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr):  # fmt: skip
    """y [N, SIDE, SIDE, OUT] of x [N, FROM, FROM, IN] by w [OUT, taps, IN], or BACKWARD by w [IN, taps, OUT]."""
    tile, column, client = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if tl.load(active + client) == 0:
        return
    TAPS: tl.constexpr = KERNEL * KERNEL
    BLOCKS: tl.constexpr = (IN + INNER - 1) // INNER
    pixel = tile * ROWS + tl.arange(0, ROWS)
    valid = pixel < N * SIDE * SIDE
    image, i, j = pixel // (SIDE * SIDE), pixel // SIDE % SIDE, pixel % SIDE
    outputs = column * COLUMNS + tl.arange(0, COLUMNS)
    x += client * x_apart
    w += client * w_apart
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(TAPS * BLOCKS):
        tap, inputs = step // BLOCKS, step % BLOCKS * INNER + tl.arange(0, INNER)
        down, right = tap // KERNEL, tap % KERNEL
        if BACKWARD:
            row, across = i + PADDING - down, j + PADDING - right
            inside = valid & (row >= 0) & (across >= 0) & (row % STRIDE == 0) & (across % STRIDE == 0)
            row, across = row // STRIDE, across // STRIDE
            at = (inputs[:, None] * TAPS + tap) * OUT + outputs[None, :]
        else:
            row, across = i * STRIDE + down - PADDING, j * STRIDE + right - PADDING
            inside = valid & (row >= 0) & (across >= 0)
            at = (outputs[None, :] * TAPS + tap) * IN + inputs[:, None]
        inside = inside & (row < FROM) & (across < FROM)
        offsets = ((image * FROM + row) * FROM + across)[:, None] * IN + inputs[None, :]
        a = tl.load(x + offsets, mask=inside[:, None] & (inputs < IN)[None, :], other=0.0)
        b = tl.load(w + at, mask=(inputs < IN)[:, None] & (outputs < OUT)[None, :], other=0.0)
        total += tl.dot(a, b, out_dtype=tl.float32)
    y += client * N * SIDE * SIDE * OUT
    wanted = valid[:, None] & (outputs < OUT)[None, :]
    tl.store(y + pixel[:, None] * OUT + outputs[None, :], total.to(y.dtype.element_ty), mask=wanted)


@tuned(key=["N", "SIDE", "FROM", "IN", "OUT", "STRIDE", "PARTS"])
@triton.jit
def _weights(x, g, w, active, x_apart, g_apart, N: tl.constexpr, SIDE: tl.constexpr, FROM: tl.constexpr,
             IN: tl.constexpr, OUT: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
             PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr):  # fmt: skip
    """w [PARTS, OUT, taps, IN], the weights' gradient, of x [N, FROM, FROM, IN] and g [N, SIDE, SIDE, OUT], by parts
    of the pixels."""
    FIELD: tl.constexpr = KERNEL * KERNEL * IN
    PIXELS: tl.constexpr = N * SIDE * SIDE
    SHARE: tl.constexpr = ((PIXELS + PARTS - 1) // PARTS + INNER - 1) // INNER * INNER
    tile, column, both = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    client, part = (both // PARTS).to(tl.int64), both % PARTS
    if tl.load(active + client) == 0:
        return
    outputs = tile * ROWS + tl.arange(0, ROWS)
    field = column * COLUMNS + tl.arange(0, COLUMNS)
    tap, inputs = field // IN, field % IN
    x += client * x_apart
    g += client * g_apart
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, SHARE, INNER):
        pixel = part * SHARE + start + tl.arange(0, INNER)
        valid = pixel < PIXELS
        image, i, j = pixel // (SIDE * SIDE), pixel // SIDE % SIDE, pixel % SIDE
        row = (i * STRIDE - PADDING)[:, None] + (tap // KERNEL)[None, :]
        across = (j * STRIDE - PADDING)[:, None] + (tap % KERNEL)[None, :]
        inside = (row >= 0) & (row < FROM) & (across >= 0) & (across < FROM)
        a = tl.load(
            g + pixel[None, :] * OUT + outputs[:, None], mask=valid[None, :] & (outputs < OUT)[:, None], other=0.0
        )
        offsets = ((image[:, None] * FROM + row) * FROM + across) * IN + inputs[None, :]
        b = tl.load(x + offsets, mask=valid[:, None] & (field < FIELD)[None, :] & inside, other=0.0)
        total += tl.dot(a, b, out_dtype=tl.float32)
    w += both.to(tl.int64) * OUT * FIELD
    wanted = (outputs < OUT)[:, None] & (field < FIELD)[None, :]
    tl.store(w + outputs[:, None] * FIELD + field[None, :], total.to(w.dtype.element_ty), mask=wanted)


def takes(kind: str, *arguments: Any) -> bool:
    """Whether the kernels know this convolution."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    square = all(tensor.shape[-1] == tensor.shape[-2] for tensor in tensors if tensor.dim() > 1)
    return square and tensors[0].dtype in (torch.bfloat16, torch.float16, torch.float32)


def run(kind: str, *arguments: Any) -> Tensor:
    """Logits of images, or the gradient of images or weights."""
    return {"forward": forward, "images": images, "weights": weights}[kind](*arguments)


def forward(x: Tensor, w: Tensor, active: Tensor, stride: int, padding: int) -> Tensor:
    clients, number, channels, side, _ = x.shape
    outputs, kernel = w.shape[1], w.shape[3]
    y = _empty(x, clients, number, outputs, (side + 2 * padding - kernel) // stride + 1)
    return _gathered(x, w, y, active, channels, outputs, stride, padding, False)


def images(g: Tensor, w: Tensor, x: Tensor, active: Tensor, stride: int, padding: int) -> Tensor:
    clients, number, channels, side, _ = x.shape
    y = _empty(g, clients, number, channels, side)
    return _gathered(g, w, y, active, g.shape[2], channels, stride, padding, True)


def _gathered(
    x: Tensor, w: Tensor, y: Tensor, active: Tensor, ins: int, outs: int, stride: int, padding: int, back: bool
) -> Tensor:
    clients, number, _, side, _ = y.shape

    def grid(chosen: dict[str, int]) -> tuple[int, int, int]:
        return triton.cdiv(number * side * side, chosen["ROWS"]), triton.cdiv(outs, chosen["COLUMNS"]), clients

    apart = x.stride(0), w.stride(0)
    _gather[grid](x, w, y, active, *apart, number, side, x.shape[-1], ins, outs, w.shape[3], stride, padding, back)
    return y


def weights(g: Tensor, w: Tensor, x: Tensor, active: Tensor, stride: int, padding: int) -> Tensor:
    clients, number, outputs, side, _ = g.shape
    channels, kernel = w.shape[2], w.shape[3]
    field = kernel * kernel * channels
    tiles = clients * triton.cdiv(outputs, 128) * triton.cdiv(field, 128)
    parts = max(1, min(2 * PROCESSORS // tiles, number * side * side // 256))
    found = x.new_empty(clients, parts, outputs, kernel, kernel, channels, dtype=torch.float32)

    def grid(chosen: dict[str, int]) -> tuple[int, int, int]:
        return triton.cdiv(outputs, chosen["ROWS"]), triton.cdiv(field, chosen["COLUMNS"]), clients * parts

    sizes = number, side, x.shape[-1], channels, outputs, kernel, stride, padding, parts
    _weights[grid](x, g, found, active, x.stride(0), g.stride(0), *sizes)
    return (found.sum(1) if parts > 1 else found[:, 0]).to(x.dtype).movedim(-1, 2)


def _empty(like: Tensor, clients: int, number: int, channels: int, side: int) -> Tensor:
    return like.new_empty(clients, number, side, side, channels).movedim(-1, 2)
