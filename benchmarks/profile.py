"""Where a step's time goes, kernel by kernel: `python -m benchmarks.profile llama`."""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.environment import needs_gpu
from benchmarks.variants import DTYPES, Batches, Training, make_model
from benchmarks.zoo import CASES


def kernel_times(training: Training, batches: Batches, steps: int) -> dict[str, tuple[int, float]]:
    """Kernel name -> launches and device microseconds, a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for i in range(steps):
            training.step(batches(i))
        torch.cuda.synchronize()
    totals: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, spent = totals[event.name]
            totals[event.name] = count + 1, spent + event.device_time
    return {name: (count // steps, spent / steps) for name, (count, spent) in totals.items()}


def host_milliseconds(training: Training, batches: Batches, steps: int) -> float:
    """Host time a step, up to the last launch: above the device's, the device waits for the host."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(steps):
        training.step(batches(i))
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / steps * 1e3


def host_functions(training: Training, batches: Batches, steps: int, top: int) -> None:
    """Prints the functions that the host spends a step in, by their own time; profiling slows it down."""
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):  # the backward in this thread, which is profiled
        profiler.enable()
        for i in range(steps):
            training.step(batches(i))
        profiler.disable()
    torch.cuda.synchronize()
    entries = sorted(pstats.Stats(profiler).stats.items(), key=lambda row: -row[1][2])  # type: ignore[attr-defined]
    for (file, line, function), (_, calls, own, cumulative, _) in entries[:top]:
        where = f"{'/'.join(file.split('/')[-2:])}:{line} {function}"
        each = f"{own / steps * 1e6:10.1f} us {cumulative / steps * 1e6:10.1f} us with callees"
        print(f"{each} {calls / steps:8.1f} x  {where[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", choices=list(CASES))
    parser.add_argument("--modes", default="eager,torch.compile,egcompile")
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--top", type=int, default=30, help="kernels listed a variant")
    parser.add_argument("--host", action="store_true", help="list the host's functions, by cProfile")
    options = parser.parse_args()
    needs_gpu(parser)
    for name in options.models:
        case, device = CASES[name]["full"](), torch.device("cuda")
        batches = Batches(case, device, DTYPES[options.dtype], distinct=4)
        for mode in options.modes.split(","):
            model = make_model(case, device, DTYPES[options.dtype])
            training = Training(mode, model, case.learning_rate)
            for i in range(6):
                training.step(batches(i))
            host = host_milliseconds(training, batches, 5)
            times = kernel_times(training, batches, 4)
            total = sum(spent for _, spent in times.values())
            launches = sum(count for count, _ in times.values())
            print(f"== {name} {mode}: {total / 1e3:.2f} ms on the device, {launches} kernels")
            print(f"   {host:.2f} ms on the host")
            ranked = sorted(times.items(), key=lambda row: -row[1][1])
            for kernel, (count, spent) in ranked[: options.top]:
                print(f"{spent:10.1f} us {count:5d} x  {kernel[:110]}")
            if options.host:
                host_functions(training, batches, 5, options.top)
            del training, model


if __name__ == "__main__":
    main()
