"""Memory-bound work, forward and backward, against peers and against a copy of as many bytes.

    python -m benchmarks.kernels --jobs 8 --json results.json
    python -m benchmarks.kernels rms_norm softmax --peers eager,egcompile

Device time: each variant's calls over sets of buffers that together exceed the L2 are one CUDA graph, and
all variants of a work are replayed in turn. Shares are of the copy's speed, over the least bytes that the
work must move (`benchmarks.works`). Needs a GPU.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor

from benchmarks.environment import command, needs_gpu, versions
from benchmarks.works import Work, chosen
from egcompile.runtime.timing import ROTATED_BYTES, Replayed

PEERS = "eager,torch.compile,torch.compile:max-autotune-no-cudagraphs,liger,egcompile"

PIECE = 2**28
"""Bytes of one copy: one of 720 MB ran at two thirds of a shorter one's speed."""
Call = Callable[..., Any]
Result = dict[str, Any]


def function(variant: str, work: Work) -> Call | None:
    """The work by a variant; None where a peer has no such function."""
    name, _, mode = variant.partition(":")
    match name:
        case "eager":
            return work.call
        case "torch.compile":
            torch._functorch.config.donated_buffer = False  # backwards are repeated here
            return torch.compile(work.call, mode=mode or None, dynamic=False)
        case "egcompile":
            import egcompile

            return egcompile.compile(work.call, mode=mode or None, dynamic=False)
        case "liger":
            return _liger(work)
    raise ValueError(f"unknown variant {variant!r}")


def _liger(work: Work) -> Call | None:
    from liger_kernel.transformers import functional as liger

    match work.liger:
        case "rms_norm":
            return lambda x, w: liger.liger_rms_norm(x, w, 1e-6, in_place=False)
        case "fused_add_rms_norm":
            return lambda x, r, w: liger.liger_fused_add_rms_norm(x, r, w, 1e-6, in_place=False)
        case "layer_norm":
            return lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5)
        case "softmax":
            return liger.liger_softmax
    return None


def copies(nbytes: float) -> Replayed:
    """Device copies that read and write `nbytes` together, in pieces, as one long one may be slower."""
    half = max(1, int(nbytes / 2) // 2**12) * 2**12
    piece = math.ceil(half / math.ceil(half / PIECE) / 2**12) * 2**12  # aligned, as the first is
    sets = max(2, math.ceil(ROTATED_BYTES / nbytes))
    pairs = [[torch.zeros(half, dtype=torch.uint8, device="cuda") for _ in range(2)] for _ in range(sets)]

    def copy(to: Tensor, source: Tensor) -> None:
        for a, b in zip(to.split(piece), source.split(piece), strict=True):
            a.copy_(b)

    return Replayed([functools.partial(copy, a, b) for a, b in pairs])


def directions(work: Work, call: Call, device: str = "cuda") -> dict[str, Replayed]:
    """The work's forward and backward, as training does them: the forward keeps what its backward needs."""
    nbytes = 2.0 * work.numel * (work.forward + work.backward)
    sets = [work.inputs(device, seed) for seed in range(max(1, math.ceil(ROTATED_BYTES / nbytes)))]
    forward = Replayed([functools.partial(call, *xs) for xs in sets])
    with torch.cuda.stream(forward.stream):
        outputs = [tensors(call(*xs)) for xs in sets]
    cotangents = [[torch.randn_like(y) for y in ys] for ys in outputs]
    torch.cuda.synchronize()

    def backward(i: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs[i], sets[i], cotangents[i], retain_graph=True)

    # a backward runs on the stream of its forward
    calls = [functools.partial(backward, i) for i in range(len(sets))]
    return {"forward": forward, "backward": Replayed(calls, forward.stream)}


def tensors(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def measure(work: Work, variants: Sequence[str], rounds: int) -> list[Result]:
    """A result for each direction: microseconds by variant, and of the copy."""
    runs: dict[str, dict[str, Replayed]] = {}
    errors: dict[str, str] = {}
    for variant in variants:
        torch._dynamo.reset()
        try:
            if (call := function(variant, work)) is not None:
                runs[variant] = directions(work, call)
        except Exception as error:
            errors[variant] = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]
    results = []
    for direction, passes in (("forward", work.forward), ("backward", work.backward)):
        nbytes = 2.0 * work.numel * passes
        timed = {"copy": copies(nbytes)} | {v: r[direction] for v, r in runs.items()}
        samples: dict[str, list[float]] = {v: [] for v in timed}
        for i in range(rounds):
            order = list(timed)[i % len(timed) :] + list(timed)[: i % len(timed)]
            for variant in order:
                samples[variant].append(timed[variant].microseconds())
        rows = {v: _row(times, statistics.median(samples["copy"])) for v, times in samples.items()}
        rows |= {v: {"error": e} for v, e in errors.items()}
        results.append({"work": work.title, "direction": direction, "bytes": nbytes, "variants": rows})
    return results


def _row(times: list[float], copy: float) -> Result:
    ordered = sorted(times)
    at = lambda q: ordered[min(len(ordered) - 1, int(q * len(ordered)))]  # noqa: E731
    middle = statistics.median(times)
    return {"us": middle, "p20": at(0.2), "p80": at(0.8), "share": copy / middle}


def line(result: Result) -> str:
    cells = []
    for variant, row in result["variants"].items():
        name = variant.replace("torch.compile", "compile").replace("max-autotune-no-cudagraphs", "max")
        cells.append(f"{name} " + (f"{row['us']:.1f} ({row['share']:.2f})" if "us" in row else "failed"))
    return f"{result['work']:38}{result['direction']:9}" + "  ".join(cells)


def warm(names: Sequence[str], variants: Sequence[str], share: slice) -> None:
    """Compiles some of the works, so that the caches on disk have their kernels.

    What torch.compile's autotuning finds is not kept: others are at work on the GPU.
    """
    torch._inductor.config.autotune_local_cache = False
    for work in chosen(names)[share]:
        for variant in variants:
            torch._dynamo.reset()
            try:
                if (call := function(variant, work)) is not None:
                    xs = work.inputs("cuda")
                    ys = tensors(call(*xs))
                    torch.autograd.grad(ys, xs, [torch.ones_like(y) for y in ys])
            except Exception as error:
                print(f"{work.title} {variant}: {error}", flush=True)
        torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("works", nargs="*", help="parts of titles, as rms_norm or 8192x4096; all by default")
    parser.add_argument("--peers", default=PEERS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile everything beforehand")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    needs_gpu(parser)
    variants = options.peers.split(",")
    if options.jobs:
        context = multiprocessing.get_context("spawn")
        shares = [(options.works, variants, slice(i, None, options.jobs)) for i in range(options.jobs)]
        with context.Pool(options.jobs) as pool:
            pool.starmap(warm, shares, chunksize=1)
    about = {"kind": "kernels", "model": "memory-bound", "size": "full", "dtype": "bf16", "device": "cuda"}
    about |= {"versions": versions()}
    about["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found: list[Result] = []
    for work in chosen(options.works):
        results = measure(work, variants, options.rounds)
        found += results
        print("\n".join(map(line, results)), flush=True)
        if options.json:
            options.json.write_text(json.dumps([about | {"results": found}], indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
