"""The floor of a step: its convolutions alone, in bf16, captured as one graph a client on as many streams.

    python benchmarks/floor.py [--out results/floor.json]

A step cannot be faster than the convolutions it must do. For FedDure two counts are timed: passes as they are made one
by one, and with the passes that share weights merged into one convolution (`merged`). FixMatch with a frozen teacher
stands for the large batches of SAGE's protocol.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from common import finish, seconds, spread
from torch import Tensor

RESNET9 = [  # input channels, output channels, side, kernel, stride
    (3, 64, 32, 3, 1), (64, 128, 32, 3, 1), (128, 128, 16, 3, 1), (128, 128, 16, 3, 1), (128, 256, 16, 3, 1),
    (256, 512, 8, 3, 1), (512, 512, 4, 3, 1), (512, 512, 4, 3, 1),
]  # fmt: skip
RESNET8 = [
    (3, 64, 32, 3, 1), (64, 64, 32, 3, 1), (64, 64, 32, 3, 1), (64, 128, 32, 3, 2), (128, 128, 16, 3, 1),
    (64, 128, 32, 1, 2), (128, 256, 16, 3, 2), (256, 256, 8, 3, 1), (128, 256, 16, 1, 2),
]  # fmt: skip

FORWARD, BACKWARD, TANGENT = "forward", "backward", "tangent"
Pass = tuple[str, int]
"""What is computed for how many images: a tangent is the two convolutions that carry a direction along."""


def feddure(x: int, u: int) -> dict[str, list[Pass]]:
    """Convolution passes of one FedDure step on x labelled and u unlabelled images."""
    theta = [(FORWARD, x + 2 * u), (BACKWARD, x + 2 * u)]
    plain = [
        *theta, (FORWARD, u), (BACKWARD, u), (FORWARD, x), (BACKWARD, x), (TANGENT, u), (FORWARD, u), (BACKWARD, u),
        (FORWARD, x), (FORWARD, x),
    ]  # fmt: skip
    merged = [*theta, (FORWARD, x + u), (BACKWARD, u), (FORWARD, x), (BACKWARD, x), (TANGENT, u), (BACKWARD, u),
              (FORWARD, x)]  # fmt: skip
    return {"plain": plain, "merged": merged}


def tutored(x: int, u: int) -> dict[str, list[Pass]]:
    """A student on [x; T_s(u)], its targets from a frozen teacher in evaluation mode."""
    return {"plain": [(FORWARD, x + u), (BACKWARD, x + u), (FORWARD, u)]}


def work(layers: Sequence[tuple[int, ...]], passes: Sequence[Pass]) -> Callable[[], None]:
    """A function that does the convolutions of these passes, one after the other."""
    made: list[tuple[str, Tensor, Tensor, Tensor, int, int]] = []
    for kind, images in passes:
        for inputs, outputs, side, kernel, stride in layers:
            x = _random(images, inputs, side, side)
            w = _random(outputs, inputs, kernel, kernel)
            g = _random(images, outputs, side // stride, side // stride)
            made.append((kind, x, w, g, stride, kernel // 2))

    def go() -> None:
        for kind, x, w, g, stride, padding in made:
            if kind == BACKWARD:
                wanted = [x.shape[1] > 3, True, False]
                torch.ops.aten.convolution_backward(
                    g, x, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, wanted
                )
            else:
                for _ in range(2 if kind == TANGENT else 1):
                    torch.nn.functional.conv2d(x, w, None, stride, padding)

    return go


def flops(layers: Sequence[tuple[int, ...]], passes: Sequence[Pass]) -> float:
    """Floating-point operations of one client's passes."""
    total = 0.0
    for kind, images in passes:
        for place, (inputs, outputs, side, kernel, stride) in enumerate(layers):
            one = 2 * images * outputs * inputs * kernel**2 * (side // stride) ** 2
            total += one * (1 if kind == FORWARD or (kind == BACKWARD and not place) else 2)
    return total


def measure(layers: Sequence[tuple[int, ...]], passes: Sequence[Pass], clients: int) -> dict[str, float]:
    """Milliseconds of one step of all clients, each a graph on a stream of its own."""
    streams = [torch.cuda.Stream() for _ in range(clients)]
    graphs = []
    for stream in streams:
        go = work(layers, passes)
        with torch.cuda.stream(stream):
            for _ in range(3):
                go()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            go()
        graphs.append((stream, graph, go))

    def replay(steps: int = 20) -> None:
        for _ in range(steps):
            for stream, graph, _ in graphs:
                with torch.cuda.stream(stream):
                    graph.replay()

    took = spread([value / 20 for value in seconds(replay, 15, 3)], 1e3)
    return {"ms": took, "tflops": clients * flops(layers, passes) / took["median"] / 1e9}  # type: ignore[dict-item]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    shapes = {
        "feddure 10 + 10": (RESNET9, feddure(10, 10), 5),
        "feddure 10 + 90": (RESNET9, feddure(10, 90), 5),
        "tutored 128 + 256": (RESNET8, tutored(128, 256), 8),
    }
    found = {
        f"{name}, {count}": {"clients": clients} | measure(layers, passes, clients)
        for name, (layers, counts, clients) in shapes.items()
        for count, passes in counts.items()
    }
    finish({"benchmark": "floor", "steps": found}, arguments.out)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)


if __name__ == "__main__":
    main()
