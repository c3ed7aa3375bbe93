"""What a launch costs the host: a plan's own way, against Triton's `CompiledKernel.run` with all prepared.

    python -m benchmarks.launch

Microseconds a launch, for kernels of 3, 6 and 12 tensors that do nothing. Needs a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import triton

from benchmarks.environment import needs_gpu
from egcompile.runtime.launch import direct
from egcompile.runtime.loader import load_once

COUNTS = (3, 6, 12)
LAUNCHES = 500
"""In a row: fewer than the driver queues before it waits."""

ROUNDS = 15


def source(count: int) -> str:
    """A module with a kernel of `count` tensors."""
    names = ", ".join(f"x{i}_ptr" for i in range(count))
    body = f"def nothing({names}, BLOCK: tl.constexpr):\n    pass"
    return f"import triton\nimport triton.language as tl\n\n\n@triton.jit\n{body}\n"


def microseconds(launch: Callable[[], None]) -> float:
    """Of the host, a launch: the median of a few rounds, before each of which the device is idle."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            launch()
        times.append((time.perf_counter() - start) / LAUNCHES)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


def measure(count: int) -> tuple[float, float]:
    """Through `direct`, and through `CompiledKernel.run` with pointers, stream and metadata made before."""
    function = load_once(source(count)).nothing
    tensors = [torch.zeros(1024, device="cuda") for _ in range(count)]
    kernel = function[(1,)](*tensors, BLOCK=1024, num_warps=4)
    stream = triton.runtime.driver.active.get_current_stream(torch.cuda.current_device())
    pointers = [x.data_ptr() for x in tensors]
    fixed = (1, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None)
    run, launched = kernel.run, direct(function)

    def through_direct() -> None:
        launched[(1,)](*tensors, BLOCK=1024, num_warps=4)

    def prepared() -> None:
        run(*fixed, *pointers, 1024)

    through_direct()
    return microseconds(through_direct), microseconds(prepared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    needs_gpu(parser)
    for count in COUNTS:
        ours, bound = measure(count)
        ratio = ours / bound
        print(f"{count:2} tensors: direct {ours:.2f} us, prepared run {bound:.2f} us, {ratio:.2f}x")


if __name__ == "__main__":
    main()
