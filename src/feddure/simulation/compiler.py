"""What the first network that is compiled waits for, side by side: the compiler, its workers and a GPU's libraries."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from threading import Thread

import torch
import torch.nn.functional as F


@cache
def start(device: torch.device, dtype: torch.dtype) -> None:
    """Import the compiler; on a GPU have its workers start and the GPU's libraries be loaded meanwhile.

    All of it would happen by itself, one after the other: the workers, which take as long to start as this process
    did, would be asked for by the first network, whose kernels are then compiled one by one.
    """
    if device.type != "cuda":
        _import_compiler()
        return
    loading = Thread(target=_load_libraries, args=(device, dtype), daemon=True)
    loading.start()
    try:
        _import_compiler(with_workers=True)
    finally:
        loading.join()  # nothing may go on beside a capture


def _import_compiler(with_workers: bool = False) -> None:
    """What fails here fails again where the network is compiled, and is told there."""
    with _without_collection():
        if with_workers:
            with suppress(Exception):  # of a PyTorch without this they start when they are needed
                from torch._inductor.async_compile import maybe_warm_pool

                maybe_warm_pool()
        with suppress(Exception):
            for name in ("torch._dynamo", "torch._inductor.compile_fx"):
                import_module(name)


@contextmanager
def _without_collection() -> Iterator[None]:
    """No search for cyclic garbage: imports make objects that stay, and each search goes through them all."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _load_libraries(device: torch.device, dtype: torch.dtype) -> None:
    """A convolution and a product of matrices, which take seconds the first time, without the interpreter's lock."""
    with suppress(RuntimeError):  # the run itself will say what is wrong, such as a lack of memory
        images = torch.zeros(8, 16, 8, 8, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
        F.conv2d(images, images[:, :, :3, :3].contiguous(memory_format=torch.channels_last))
        matrix = torch.zeros(16, 16, dtype=dtype, device=device)
        torch.mm(matrix, matrix)
        torch.cuda.synchronize()
