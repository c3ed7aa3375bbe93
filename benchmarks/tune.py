"""The heuristics' tiles against the best of many, on shapes that they were not fitted to.

    python -m benchmarks.tune --jobs 16 --json results.json
    python -m benchmarks.tune softmax --candidates 200

Each generated loop of the forward and backward of `benchmarks.unseen` is timed with the heuristics' tiles,
with those that mode="max-autotune" tries, and with as many drawn from all around as make `--candidates`. The
best are timed again beside the heuristics', since the least of many noisy times is too small. Needs a GPU.
"""

from __future__ import annotations

import datetime
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import egcompile
from benchmarks.environment import command, needs_gpu, versions
from benchmarks.unseen import UNSEEN
from benchmarks.works import Work
from egcompile.codegen import KernelSource
from egcompile.codegen.neighbours import neighbours, surroundings
from egcompile.ir.buffer import Buffer
from egcompile.ir.types import TensorType
from egcompile.pipeline import launches
from egcompile.runtime.loader import load_once
from egcompile.runtime.source import render_alone
from egcompile.runtime.timing import compile_ahead, microseconds, tensor
from egcompile.schedule.kernel import Kernel
from egcompile.schedule.together import SMALL
from egcompile.target import Target

Result = dict[str, Any]
Task = tuple[str, str, tuple[Buffer, ...]]


def chosen(names: Sequence[str]) -> list[Work]:
    """Those whose title holds one of the names; all for none."""
    return [work for work in UNSEEN if not names or any(name in work.title for name in names)]


def kernels_of(work: Work, target: Target) -> Iterator[Kernel]:
    """The kernels of the work's plan that are more than a launch."""
    xs = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in work.shapes]
    if work.nhwc:
        xs = [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in xs]
    traced = egcompile.trace(work.call, tuple(x.requires_grad_() for x in xs))
    plan = egcompile.optimize(traced, target=target.name)
    for kernel in launches(plan.compiled().schedule):
        if sum(b.distinct_bytes for b in (*kernel.inputs, *kernel.outputs)) > SMALL:
            yield kernel


def candidates(kernel: Kernel, target: Target, count: int, seed: int) -> tuple[list[KernelSource], int]:
    """Sources of a kernel: the heuristics', its neighbours, others; and how many the first two are."""
    near = neighbours(kernel, target)[:count]
    texts = {source.text for source in near}
    drawn = surroundings(kernel, target, count, seed) if len(near) > 1 else ()
    others = [source for source in drawn if source.text not in texts]
    return [*near, *others][:count], len(near)


def task(kernel: Kernel, source: KernelSource, target: Target) -> Task:
    """What another process needs to compile a source: tensors of one element, as aligned and of the types."""
    buffers = (*kernel.inputs, *kernel.outputs)
    points = tuple(Buffer(TensorType((1,), b.type.dtype), (1,), b.offset) for b in buffers)
    return render_alone(source, target), kernel.name, points


def compile_one(text: str, name: str, buffers: Sequence[Buffer]) -> None:
    """Leaves a source's kernels in Triton's cache on disk."""
    device = torch.device("cuda")
    generator = torch.Generator(device)
    compile_ahead([load_once(text)], name, [tensor(b, device, generator) for b in buffers])


def measure(
    work: Work,
    kernel: Kernel,
    sources: Sequence[KernelSource],
    near: int,
    clock: Callable[[Sequence[KernelSource]], list[float]],
) -> Result:
    """Microseconds with the heuristics' tiles, the best neighbour's, and the best of all; or the error."""
    about = {"work": work.title, "kernel": kernel.name, "candidates": len(sources)}
    try:
        times = clock(sources)
        tuned = min(range(near), key=times.__getitem__)
        best = min(range(len(times)), key=times.__getitem__)
        heuristic_us, tuned_us, best_us = clock([sources[i] for i in (0, tuned, best)])
    except Exception as error:
        return about | {"error": f"{type(error).__name__}: {error}"[:300]}
    configs = [asdict(source.config) if source.config else {} for source in sources]
    return about | {
        "failed": sum(map(math.isinf, times)),
        "heuristic_us": heuristic_us,
        "tuned_us": min(tuned_us, heuristic_us),
        "best_us": min(best_us, tuned_us, heuristic_us),
        "heuristic": configs[0],
        "tuned": configs[tuned],
        "best": configs[best],
        "times": [c | {"us": t if math.isfinite(t) else None} for c, t in zip(configs, times, strict=True)],
    }


def line(result: Result) -> str:
    if "error" in result:
        return f"{result['work']} {result['kernel']} failed: {result['error']}"
    h, t, b = result["heuristic_us"], result["tuned_us"], result["best_us"]
    tiles = "/".join(map(str, result["heuristic"].values())), "/".join(map(str, result["best"].values()))
    return (
        f"{result['work'][:36]:37}{result['kernel'][:34]:35}{h:8.1f} us  autotuned {t:8.1f} ({h / t:.2f})"
        f"  best of {result['candidates']:2} {b:8.1f} ({h / b:.2f})  {tiles[0]} -> {tiles[1]}"
    )


def summary(results: Sequence[Result]) -> str:
    """How much longer the heuristics' kernels take: geometric means over kernels, and in all."""
    if not results:
        return "nothing was measured"
    said = [f"heuristics' time over {len(results)} kernels"]
    for name, key in (("autotuned", "tuned_us"), ("best", "best_us")):
        ratios = [r["heuristic_us"] / r[key] for r in results]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        total = sum(r["heuristic_us"] for r in results) / sum(r[key] for r in results)
        said.append(
            f"by the {name}'s: {mean:.3f} (geometric mean), {total:.3f} in all, {max(ratios):.2f} at most"
        )
    return "; ".join(said)


def main(arguments: list[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("works", nargs="*", help="parts of titles, as softmax or 5120; all by default")
    parser.add_argument("--candidates", type=int, default=24, help="tiles of a kernel that are timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop then, with what was measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    needs_gpu(parser)
    start = time.perf_counter()
    target = Target.of(torch.device("cuda"))
    about = {"kind": "tune", "versions": versions(), "candidates": options.candidates, "seed": options.seed}
    about["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    results: list[Result] = []
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        pending = []
        for work in chosen(options.works):
            for kernel in kernels_of(work, target):
                sources, near = candidates(kernel, target, options.candidates, options.seed)
                if near > 1:
                    tasks = [task(kernel, source, target) for source in sources]
                    compiling = [pool.apply_async(compile_one, t) for t in tasks]
                    pending.append((work, kernel, sources, near, compiling))
        count = sum(len(sources) for _, _, sources, _, _ in pending)
        print(f"{len(pending)} kernels, {count} sources, {time.perf_counter() - start:.0f} s", flush=True)
        for i, (work, kernel, sources, near, compiling) in enumerate(pending, 1):
            for compiled in compiling:
                compiled.wait(min(3600.0, max(0.0, start + options.seconds - time.perf_counter())))
            seconds = time.perf_counter() - start
            if seconds >= options.seconds:
                print(f"out of time: {len(pending) - i + 1} kernels were not measured", flush=True)
                break
            result = measure(work, kernel, sources, near, lambda s: microseconds(kernel, s, target))  # noqa: B023
            results.append(result)
            print(f"[{i}/{len(pending)} {seconds:3.0f} s] {line(result)}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")
            torch.cuda.empty_cache()
    print(summary([r for r in results if "error" not in r]))


if __name__ == "__main__":
    main()
