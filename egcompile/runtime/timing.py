"""Kernels timed against each other, each as a CUDA graph over rotated buffers, so that no L2 holds them."""

from __future__ import annotations

import functools
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from egcompile.config import logger
from egcompile.runtime.launch import ahead
from egcompile.runtime.loader import load_once
from egcompile.runtime.source import KernelText, render_alone
from egcompile.schedule.kernel import Buffer, Kernel
from egcompile.target import Target

ROTATED_BYTES = 300_000_000
"""What the buffers of all sets hold at least: several times an L2."""

GRAPH_MICROSECONDS = 400
"""What one measurement takes at least."""

ROUNDS = 5
HOPELESS = 1.5
"""Times the best: a kernel that takes this long at first is not measured again."""


def machine() -> str:
    """What a time is true for: the current GPU, and what compiles for it."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


class Replayed:
    """Calls as one CUDA graph, over all sets and as often as makes a measurable time; `microseconds()` is
    of one."""

    def __init__(self, calls: Sequence[Callable[[], Any]], stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.graph = torch.cuda.CUDAGraph()
        self.calls = calls  # the graph reads their tensors
        self.count = len(calls)
        with torch.cuda.stream(self.stream):
            for call in calls:
                call()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for call in calls:
                call()
        self.replays = 1
        self.replays = max(1, math.ceil(GRAPH_MICROSECONDS / max(self.microseconds() * self.count, 1.0)))

    def microseconds(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self.graph.replay()
        begin.record()
        for _ in range(self.replays):
            self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / (self.replays * self.count)


def microseconds(kernel: Kernel, sources: Sequence[KernelText], target: Target) -> list[float]:
    """Device time of one launch by each of `sources`, texts of `kernel`, on the current GPU.

    Infinite for those that Triton does not compile, but the error is raised where that is the first. Raises
    torch.OutOfMemoryError where there is no room for the kernel's arguments.
    """
    modules = [load_once(render_alone(source, target)) for source in sources]
    device = torch.device("cuda", torch.cuda.current_device())
    sets = list(rotated(kernel, device))
    compile_ahead(modules, kernel.name, sets[0])
    graphs: list[Replayed | None] = []
    torch.cuda.synchronize()
    for i, module in enumerate(modules):
        calls = [functools.partial(getattr(module, kernel.name), *xs) for xs in sets]
        try:
            graphs.append(Replayed(calls))
        except TritonError as error:
            if not i:
                raise
            logger("kernels").debug("%s: tiles %d do not compile: %s", kernel.name, i, error)
            graphs.append(None)
    first = [math.inf if graph is None else graph.microseconds() for graph in graphs]
    samples = [[t] for t in first]
    for _ in range(ROUNDS):
        for graph, found in zip(graphs, samples, strict=True):
            if graph is not None and found[0] <= HOPELESS * min(first):
                found.append(graph.microseconds())
    return [statistics.median(found) for found in samples]


def compile_ahead(modules: Sequence[ModuleType], name: str, arguments: Sequence[Tensor]) -> None:
    """Compiles what each module's function `name` launches, in threads; launching raises what fails here."""
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for module in modules:
            with ahead(module):
                getattr(module, name)(*arguments)


def rotated(kernel: Kernel, device: torch.device) -> Iterator[list[Tensor]]:
    """Arguments of a kernel, inputs and outputs, so often that all of them together exceed the L2."""
    generator = torch.Generator(device).manual_seed(0)  # the caller's random state stays as it is
    buffers = (*kernel.inputs, *kernel.outputs)
    nbytes = sum(b.distinct_bytes for b in buffers)
    for _ in range(max(1, math.ceil(ROTATED_BYTES / max(nbytes, 1)))):
        yield [tensor(buffer, device, generator) for buffer in buffers]


def tensor(buffer: Buffer, device: torch.device, generator: torch.Generator) -> Tensor:
    """Normally distributed numbers, or zeros where they are no floating-point ones, with a buffer's strides.

    Its address is a multiple of 16 bytes where the buffer's is: Triton compiles for that.
    """
    shape, strides, dtype = buffer.type.shape, buffer.strides, buffer.type.dtype
    start = buffer.offset % max(1, 16 // dtype.itemsize)
    size = 1 + start + sum((n - 1) * s for n, s in zip(shape, strides) if n)
    memory = torch.zeros(size, dtype=dtype, device=device)
    if dtype.is_floating_point:
        memory.normal_(generator=generator)
    return memory.as_strided(shape, strides, start)
