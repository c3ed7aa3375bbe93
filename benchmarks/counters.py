"""What bounds each kernel of the memory-bound work: hardware counters, by Nsight Compute.

    python -m benchmarks.counters --json results.json
    python -m benchmarks.counters softmax 'batch_norm_add_relu 128x256'

A line for each launch of egcompile's forward and backward, in order: its microseconds; megabytes read from
DRAM and written to it, and its throughput; hits in the L2, which each launch finds empty; use of the special
functions (XU), of FMA and ALU, and of the issue slots; occupancy; registers a thread; and what warps wait for
longest, in cycles an instruction and as a share of all waiting. Other percentages than hits are of the peak.
Needs a GPU, and `ncu` on the PATH.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import launch, ncu
from benchmarks.environment import command, needs_gpu, versions
from benchmarks.kernels import function, tensors
from benchmarks.works import Work, chosen, works
from egcompile.runtime.loader import load_once

Result = dict[str, Any]

MARK = "nothing"
"""The kernel that the child launches between forward and backward: the one of benchmarks.launch."""

LONGEST = 60
"""Characters of a kernel's name that are shown; PyTorch's have all their template's arguments."""


def marker() -> Callable[[], None]:
    """Launches `MARK`."""
    kernel, point = getattr(load_once(launch.source(1)), MARK), torch.zeros(1, device="cuda")
    return lambda: kernel[(1,)](point, BLOCK=1)


def step(work: Work, device: str, mark: Callable[[], None]) -> Callable[[], None]:
    """Runs the work's forward, the mark, and its backward; compiled, and warm."""
    call, xs = function("egcompile", work), work.inputs(device)
    assert call
    cotangents = [torch.randn_like(y) for y in tensors(call(*xs))]

    def run() -> None:
        ys = tensors(call(*xs))
        mark()
        torch.autograd.grad(ys, xs, cotangents)

    for _ in range(2):
        run()
    return run


def child(titles: Sequence[str]) -> None:
    """What ncu runs: of each work one step and the mark, between cudaProfilerStart and cudaProfilerStop."""
    mark = marker()
    for title in titles:
        (work,) = (w for w in works() if w.title == title)
        try:
            run = step(work, "cuda", mark)
        except Exception as error:
            print(f"{title}: {type(error).__name__}: {error}", file=sys.stderr)
            run = mark
        torch.cuda.synchronize()
        with torch.cuda.profiler.profile():
            run()
            mark()
            torch.cuda.synchronize()
        torch.cuda.empty_cache()


def row(direction: str, launched: ncu.Launch) -> Result:
    """A launch's values by the keys of `ncu.METRICS`, None where the device has none, and of its stalls."""
    found = {key: launched.values.get(metric) for key, metric in ncu.METRICS.items()}
    stalls = {r: launched.values[m] for r, m in ncu.STALLS.items() if m in launched.values}
    kernel = launched.kernel[:LONGEST]
    return {"direction": direction, "kernel": kernel} | found | {"stalls": stalls}


def rows(launches: Sequence[ncu.Launch]) -> Iterator[list[Result]]:
    """Of each work in turn: the forward's launches up to a mark, and the backward's up to the next."""
    found: list[Result] = []
    directions = itertools.cycle(("forward", "backward"))
    direction = next(directions)
    for launched in launches:
        if launched.kernel != MARK:
            found.append(row(direction, launched))
            continue
        if direction == "backward":
            yield found
            found = []
        direction = next(directions)


def measure(selected: Sequence[Work]) -> list[Result]:
    """The launches of each work, or the error of one that had none; raises RuntimeError where ncu fails."""
    titles = [work.title for work in selected]
    target = [sys.executable, "-m", "benchmarks.counters", "--child", *titles]
    found = list(rows(ncu.launches(target)))
    if len(found) != len(titles):
        raise RuntimeError(f"{len(titles)} works, and the marks of {len(found)}")
    return [
        {"work": title} | ({"launches": launches} if launches else {"error": "it launched nothing"})
        for title, launches in zip(titles, found, strict=True)
    ]


def head() -> str:
    titles = (title for title, _ in ncu.HEADS.values())
    return f"{'kernel':{LONGEST + 1}}{'':9}" + "".join(f"{t:>{len(t) + 2}}" for t in titles) + "  waits for"


def line(result: Result) -> str:
    """One of `rows`, under `head`."""
    said = f"{result['kernel']:{LONGEST + 1}}{result['direction']:9}"
    for key, (title, digits) in ncu.HEADS.items():
        value = result[key]
        said += " " * (len(title) + 2) if value is None else f"{value:{len(title) + 2}.{digits}f}"
    reason, share = ncu.longest(result["stalls"])
    return f"{said}  {reason} {result['stalls'][reason]:.1f} ({share:.0%})" if reason else said.rstrip()


def main(arguments: list[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("works", nargs="*", help="parts of titles, as rms_norm or 8192x4096; all by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    needs_gpu(parser)
    if options.child:
        child(options.child)
        return
    if not shutil.which("ncu"):
        parser.error("there is no ncu on the PATH: counters are read by Nsight Compute")
    if not (selected := chosen(options.works)):
        parser.error(f"no work's title holds {' or '.join(options.works)}")
    about: Result = {"kind": "counters", "model": "memory-bound", "size": "full", "dtype": "bf16"}
    about |= {"device": "cuda", "versions": versions()}
    about["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    results = measure(selected)
    for result in results:
        print(f"\n{result['work']}" + (f" failed: {result['error']}" if "error" in result else f"\n{head()}"))
        for launched in result.get("launches", ()):
            print(line(launched))
    if options.json:
        options.json.write_text(json.dumps([about | {"results": results}], indent=1) + "\n")


if __name__ == "__main__":
    main()
