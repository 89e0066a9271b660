"""Time T_s over CIFAR-10 with the same decisions: batched, and one image at a time with Pillow.

    python benchmarks/augment.py --data-dir DATA --json results/augment.json
    python benchmarks/augment.py --data-dir DATA --device cuda

Both sides start from uint8 images and end with a normalised float32 batch; drawing the decisions is not
timed. On CUDA the clock is a pair of device events around each call, after warm-up.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from common import finish, seconds, spread

from feddure import rng
from feddure.data import augment, sources
from feddure.errors import FeddureError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from oracle import augment_twin


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    dataset = sources.load("cifar10", options.data_dir)
    images, side = dataset.images[: options.images], dataset.shape[0]
    normalise = augment.Normalise(dataset.mean, dataset.std)
    raw = rng.bits(len(images) * augment.STRONG_BITS, 0, "benchmark").reshape(len(images), -1)
    decisions = augment.strong_decisions(raw, side)
    on_device = torch.from_numpy(images).to(device)

    def one_by_one() -> np.ndarray:
        return np.stack([augment_twin.strong(image, row) for image, row in zip(images, decisions, strict=True)])

    pillow = seconds(lambda: augment.plain(torch.from_numpy(one_by_one()), normalise), options.pillow_repeats)
    clock = on_cuda if device.type == "cuda" else seconds
    batched = clock(lambda: augment.strong(on_device, decisions, normalise), options.repeats)
    differing = int((augment.strong(on_device, decisions).cpu().numpy() != one_by_one()).sum())

    report = {
        "benchmark": "augment",
        "images": len(images),
        "shape": list(dataset.shape),
        "pillow": summary(pillow, len(images)) | {"version": PIL.__version__},
        "batched": summary(batched, len(images)) | {"device": options.device, "threads": torch.get_num_threads()},
        "speedup": round(statistics.median(pillow) / statistics.median(batched), 1),
        "differing_values": differing,
    }
    finish(report, options.json)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time T_s, batched beside Pillow.")
    data_dir = os.environ.get("FEDDURE_DATA")
    parser.add_argument("--data-dir", type=Path, default=Path(data_dir) if data_dir else None)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of the batched code")
    parser.add_argument("--pillow-repeats", type=int, default=3, help="timed passes of the Pillow loop")
    parser.add_argument("--threads", type=int, help="CPU threads of torch; default: all cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return parser.parse_args()


def on_cuda(work: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds between device events around each repeat, after five to warm up."""
    for _ in range(5):
        work()
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in events]


def summary(times: list[float], images: int) -> dict[str, Any]:
    return {"seconds": spread(times), "images_per_second": round(images / statistics.median(times))}


if __name__ == "__main__":
    try:
        main()
    except FeddureError as error:
        sys.exit(f"error: {error}")
