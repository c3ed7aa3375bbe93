"""Contraction kernels against cuBLAS and eager epilogues: `python -m benchmarks.gemm --out DIR`.

Each site is one product with what follows it. Every variant is checked against fp64, then all variants of a
site are timed in turn as CUDA graphs of several launches, so that the host's part does not show. Needs a GPU
with Triton; needs no egglog: where it is missing, only the package's code generation is imported.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
try:
    import egcompile  # noqa: F401
except ImportError as error:
    print(f"only code generation is imported: {error}", file=sys.stderr)
    for package in ("egcompile", "egcompile.schedule"):  # without their __init__, which reach the solver
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(ROOT / package.replace(".", "/"))]

from benchmarks.environment import needs_gpu  # noqa: E402
from egcompile import ops  # noqa: E402
from egcompile.codegen import GemmConfig, generate  # noqa: E402
from egcompile.codegen.contraction import Contraction  # noqa: E402
from egcompile.codegen.gemm import default_config  # noqa: E402
from egcompile.ir.graph import Graph  # noqa: E402
from egcompile.ir.node import Node  # noqa: E402
from egcompile.ops.lower import lower  # noqa: E402
from egcompile.runtime.loader import load  # noqa: E402
from egcompile.runtime.source import render_alone  # noqa: E402
from egcompile.schedule.kernel import Buffer, Kernel  # noqa: E402
from egcompile.target import Target  # noqa: E402

Size = tuple[int, int, int]
Request = tuple[str, Size, GemmConfig | None]
SHAPES: list[Size] = [
    (8192, 4096, 4096),
    (4096, 1024, 1024),
    (16384, 768, 3072),
    (8192, 5632, 2048),
    (8192, 2048, 5632),
]
GRAPH_MICROSECONDS = 1000
"""What one graph replay should take at least: many launches of a short kernel."""

_WIDE = GemmConfig(128, 256, 64, 8, 4, 2, descriptors=True, tile_descriptors=True)
CONFIGS = {
    "128x256 s4 /2": _WIDE,
    "128x256 s4 /4": replace(_WIDE, subtiles=4),
    "128x256 s3 /2": replace(_WIDE, num_stages=3),
    "128x256 s3 /4": replace(_WIDE, num_stages=3, subtiles=4),
    "128x256 s4 /2 tiles by pointers": replace(_WIDE, tile_descriptors=False),
    "128x256 s4 /4 not flattened": replace(_WIDE, subtiles=4, flatten=False),
    "128x256 s4 /4 groups of 16": replace(_WIDE, subtiles=4, group_m=16),
    "256x128 s3 /2": replace(_WIDE, block_m=256, block_n=128, num_stages=3),
    "128x128 s4 /2": replace(_WIDE, block_n=128),
    "128x128 s3 /4, 2 an SM": replace(_WIDE, block_n=128, num_warps=4, num_stages=3, subtiles=4, per_sm=2),
}


@dataclass(frozen=True)
class Site:
    """A product and what follows it: as a kernel, as eager PyTorch, and as what eager spends on the product.

    eager     inputs -> outputs, in the kernel's order
    product   inputs -> the bare product
    """

    kernel: Kernel
    eager: Callable[..., tuple[Tensor, ...]]
    product: Callable[..., Tensor]


def _leaf(name: str, dtype: torch.dtype, *shape: int) -> Node:
    node: Node = ops.input(name=name, shape=shape, dtype=dtype)
    return node


def _site(
    inputs: Sequence[Node], outputs: Sequence[Node], eager: Callable[..., Any], product: Callable[..., Any]
) -> Site:
    body = Graph(tuple(inputs), tuple(outputs))
    buffers = [tuple(Buffer.contiguous(n.tensor) for n in nodes) for nodes in (inputs, outputs)]
    return Site(Kernel("gemm", body, *buffers), eager, product)


def _linear(x: Tensor, w: Tensor, *_: Tensor) -> Tensor:
    return x @ w.mT


def plain(m: int, n: int, k: int, dtype: torch.dtype) -> Site:
    x, w = _leaf("x", dtype, m, k), _leaf("w", dtype, n, k)
    return _site([x, w], [ops.matmul(x, ops.transpose(w))], lambda x, w: (_linear(x, w),), _linear)


def bias_gelu(m: int, n: int, k: int, dtype: torch.dtype) -> Site:
    """Both the activation and what the backward reads."""
    x, w, b = _leaf("x", dtype, m, k), _leaf("w", dtype, n, k), _leaf("b", dtype, n)
    y, pre = ops.linear_act(x, ops.transpose(w), b, act="gelu")

    def eager(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        pre = F.linear(x, w, b)
        return F.gelu(pre), pre

    return _site([x, w, b], [y, pre], eager, _linear)


def bias_relu(m: int, n: int, k: int, dtype: torch.dtype) -> Site:
    x, w, b = _leaf("x", dtype, m, k), _leaf("w", dtype, n, k), _leaf("b", dtype, n)
    y = ops.linear_act(x, ops.transpose(w), b, act="relu")[0]
    return _site([x, w, b], [y], lambda x, w, b: (F.relu(F.linear(x, w, b)),), _linear)


def gelu_backward(m: int, n: int, k: int, dtype: torch.dtype) -> Site:
    """The cotangent of the layer before, through its GELU, and its bias's gradient."""
    ct, w, saved = _leaf("ct", dtype, m, k), _leaf("w", dtype, k, n), _leaf("saved", dtype, m, n)
    dpre, dbias = ops.linear_act_backward(ct, w, saved, act="gelu")

    def eager(ct: Tensor, w: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        dpre = torch.ops.aten.gelu_backward(ct @ w, saved)
        return dpre, dpre.sum(0)

    return _site([ct, w, saved], [dpre, dbias], eager, lambda ct, w, saved: ct @ w)


def residual_add(m: int, n: int, k: int, dtype: torch.dtype) -> Site:
    x, w, skip = _leaf("x", dtype, m, k), _leaf("w", dtype, n, k), _leaf("skip", dtype, m, n)
    y = ops.linear_add(x, ops.transpose(w), skip)
    return _site([x, w, skip], [y], lambda x, w, skip: (_linear(x, w) + skip,), _linear)


EPILOGUES: dict[str, Callable[..., Site]] = {
    "none": plain,
    "bias+gelu, pre stored": bias_gelu,
    "bias+relu": bias_relu,
    "gelu backward, dbias": gelu_backward,
    "residual add": residual_add,
}


def inputs_of(site: Site, device: torch.device) -> list[Tensor]:
    """Unit-variance values, weights scaled so that results have unit variance too."""
    values = []
    for node in site.kernel.body.inputs:
        scale = max(node.shape) ** -0.5 if node.attr("name") in ("w", "ct") else 1.0
        values.append((torch.randn(node.shape, device=device) * scale).to(node.dtype))
    return values


def outputs_of(site: Site, device: torch.device) -> list[Tensor]:
    return [
        torch.full(b.type.shape, float("nan"), dtype=b.type.dtype, device=device) for b in site.kernel.outputs
    ]


@dataclass(frozen=True)
class Reference:
    """The outputs in fp64, and eager's root-mean-square errors, at least a little above zero."""

    truth: tuple[Tensor, ...]
    eager: tuple[float, ...]

    @staticmethod
    def of(site: Site, inputs: Sequence[Tensor]) -> Reference:
        truth = site.eager(*(x.double() for x in inputs))
        floors = [1e-7 * t.square().mean().sqrt().item() for t in truth]
        found = [_rms(e, t) for e, t in zip(site.eager(*inputs), truth, strict=True)]
        return Reference(truth, tuple(map(max, found, floors)))

    def errors(self, outputs: Sequence[Tensor]) -> list[float]:
        """Each output's error as a multiple of eager's."""
        return [_rms(o, t) / e for o, t, e in zip(outputs, self.truth, self.eager, strict=True)]


def _rms(a: Tensor, b: Tensor) -> float:
    return (a.double() - b).square().mean().sqrt().item()


def launcher(site: Site, target: Target, config: GemmConfig | None) -> Callable[..., None]:
    source = generate(site.kernel, target, config)
    function: Callable[..., None] = getattr(load(render_alone(source, target)), site.kernel.name)
    return function


def table_config(site: Site, target: Target) -> GemmConfig:
    kernel = replace(site.kernel, body=lower(site.kernel.body))
    return default_config(Contraction.of(kernel), target)


# ---- timing ----


def graphed(run: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
    """A graph of as many launches as fill `GRAPH_MICROSECONDS`, and their number."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    count = max(1, min(50, int(GRAPH_MICROSECONDS / (1000 * start.elapsed_time(stop)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    return graph.replay, count


def interleaved(variants: dict[str, tuple[Callable[[], Any], int]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each variant, one measurement a round; rounds start at another variant each time."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            run, count = variants[name]
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            times[name].append(1000 * start.elapsed_time(stop) / count)
    return times


def host_microseconds(run: Callable[[], Any], launches: int = 50) -> float:
    """What one call costs the host, launched ahead of the device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(launches):
        run()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * seconds / launches


# ---- compiling ahead, in parallel ----


def _compile(request: Request) -> None:
    """Fills Triton's cache with one variant's kernels; a failure shows again in the parent."""
    import triton

    name, size, config = request
    run = triton.JITFunction.run

    def warm(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **{**kwargs, "warmup": True})

    triton.JITFunction.run = warm
    try:
        site = EPILOGUES[name](*size, torch.bfloat16)
        values = [
            torch.empty(b.type.shape, dtype=b.type.dtype, device="meta")
            for b in (*site.kernel.inputs, *site.kernel.outputs)
        ]
        launcher(site, Target.of(torch.device("cuda")), config)(*values)
    except Exception as error:
        print(f"{name} {size}: {type(error).__name__} while compiling ahead", file=sys.stderr)
    finally:
        triton.JITFunction.run = run


def compile_ahead(requests: Sequence[Request], processes: int) -> None:
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(_compile, requests, chunksize=1)


# ---- the run ----


def measure(name: str, size: Size, rounds: int, configs: dict[str, GemmConfig]) -> dict[str, Any]:
    """One site: each variant's times, error ratios and host time; a variant that fails says why."""
    device = torch.device("cuda")
    target = Target.of(device)
    site = EPILOGUES[name](*size, torch.bfloat16)
    inputs = inputs_of(site, device)
    reference = Reference.of(site, inputs)
    table = table_config(site, target)
    tilings: dict[str, GemmConfig | None] = {"table": None}
    tilings |= {label: c for label, c in configs.items() if c != table}
    variants = {"product alone": lambda: site.product(*inputs), "eager": lambda: site.eager(*inputs)}
    rows: dict[str, dict[str, Any]] = {label: {} for label in (*variants, *tilings)}
    runs: dict[str, tuple[Callable[[], Any], int]] = {}
    for label, config in tilings.items():
        rows[label]["config"] = asdict(config or table)
        try:
            function, outputs = launcher(site, target, config), outputs_of(site, device)
            function(*inputs, *outputs)
            torch.cuda.synchronize()
            rows[label]["errors"] = reference.errors(outputs)
            variants[label] = lambda f=function, o=outputs: f(*inputs, *o)  # type: ignore[misc]
        except Exception as error:
            rows[label]["failed"] = _reason(error)
    for label, run in variants.items():
        try:
            runs[label] = graphed(run)
            rows[label]["host_us"] = host_microseconds(run)
        except Exception as error:
            runs.pop(label, None)
            rows[label]["failed"] = _reason(error)
    for label, times in interleaved(runs, rounds).items():
        cuts = statistics.quantiles(times, n=10)
        rows[label] |= {"us": statistics.median(times), "p20": cuts[1], "p80": cuts[7]}
    return {"epilogue": name, "m": size[0], "n": size[1], "k": size[2], "variants": rows}


def _reason(error: Exception) -> str:
    return (
        f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200] if str(error).strip() else ''}"
    )


def table(results: Sequence[dict[str, Any]]) -> str:
    """A line a site: eager, the table's choice and the best tiling, in microseconds."""
    lines = [f"{'site':44} {'product':>8} {'eager':>8} {'table':>8} {'best':>8}  {'error':>6}  best tiling"]
    for r in results:
        rows = r["variants"]
        timed = {label: row["us"] for label, row in rows.items() if "us" in row and "config" in row}
        if not timed:
            lines.append(f"{_title(r):44} no variant ran: {rows['table'].get('failed')}")
            continue
        best = min(timed, key=lambda label: timed[label])
        worst = max(max(row["errors"]) for row in rows.values() if "errors" in row)
        names = ("product alone", "eager", "table")
        cells = [*(rows[name].get("us", math.nan) for name in names), timed[best]]
        lines.append(f"{_title(r):44} {' '.join(f'{c:8.1f}' for c in cells)}  {worst:6.2f}  {best}")
    failed = {
        f"{label}: {row['failed']}"
        for r in results
        for label, row in r["variants"].items()
        if "failed" in row
    }
    return "\n".join([*lines, *(f"failed  {text}" for text in sorted(failed))])


def _title(result: dict[str, Any]) -> str:
    return f"{result['m']}x{result['n']}x{result['k']} {result['epilogue']}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for gemm.json")
    parser.add_argument("--seconds", type=float, default=170, help="no site is begun after so long")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--shapes", nargs="*", help="such as 8192x4096x4096 (M x N x K)")
    parser.add_argument("--epilogues", nargs="*", choices=list(EPILOGUES), default=list(EPILOGUES))
    parser.add_argument("--processes", type=int, default=12, help="that compile ahead; 0 for none")
    options = parser.parse_args(arguments)
    needs_gpu(parser)
    begun = time.perf_counter()
    shapes: list[Any] = [tuple(map(int, s.split("x"))) for s in options.shapes or ()] or SHAPES
    sites = [(name, size) for size in shapes for name in options.epilogues]
    if options.processes:
        requests = [(name, size, c) for name, size in sites for c in (None, *CONFIGS.values())]
        compile_ahead(requests, options.processes)
        print(f"compiled ahead in {time.perf_counter() - begun:.0f} s", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    import triton

    head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    results: list[dict[str, Any]] = []
    for name, size in sites:
        if time.perf_counter() - begun > options.seconds:
            print(f"out of time before {name} {size}")
            break
        try:
            results.append(measure(name, size, options.rounds, CONFIGS))
        except Exception:
            print(f"{name} {size} failed:\n{traceback.format_exc(limit=4)}", flush=True)
            continue
        (options.out / "gemm.json").write_text(json.dumps({**head, "sites": results}, indent=1))
        print(f"{time.perf_counter() - begun:5.0f} s  {_title(results[-1])}", flush=True)
    print(json.dumps(head))
    print(table(results))


if __name__ == "__main__":
    main()
