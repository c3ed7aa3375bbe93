"""How much of a step's memory traffic goes through generated kernels, as its plan says; no GPU is needed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

import egcompile
from benchmarks.variants import DTYPES, make_model, place
from benchmarks.zoo import Case
from egcompile.ops import REGISTRY
from egcompile.schedule.kernel import Buffer, Call, Launch, Program


def _nbytes(buffer: Buffer) -> int:
    """Bytes that the buffer occupies: an axis of stride 0 is there once."""
    elements = 1
    for size, stride in zip(buffer.type.shape, buffer.strides, strict=True):
        elements *= size if stride else min(size, 1)
    return elements * buffer.type.dtype.itemsize


def _contracts(step: Launch | Call) -> bool:
    """Whether it is a matrix product, a convolution or attention."""
    if isinstance(step, Call):
        return REGISTRY[step.op].flops is not None or "convolution" in step.op
    return any(node.op.flops is not None for node in step.kernel.body.nodes)


def count(program: Program) -> dict[str, Counter[str]]:
    """Bytes read and written by each kind of step, and the ops that ATen was called for outside products."""
    moved: Counter[str] = Counter()
    called: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for step in program.steps:
        if not isinstance(step, Launch | Call):
            continue
        names = {name for name in (*step.inputs, *step.outputs) if name is not None}
        nbytes = sum(_nbytes(program.buffers[name]) for name in names)
        if isinstance(step, Call) and step.op == "embedding":  # of its table, it reads the rows it gives
            table, *_ = step.inputs
            nbytes += _nbytes(program.buffers[step.outputs[0] or table]) - _nbytes(program.buffers[table])
        kind = "launch" if isinstance(step, Launch) else "call"
        where = f"{'product' if _contracts(step) else 'other'}_{kind}"
        moved[where] += nbytes
        steps[where] += 1
        if where == "other_call":
            called[step.op] += nbytes
    return {"bytes": moved, "steps": steps, "aten": called}


def measure(case: Case, target: str, dtype: str) -> dict[str, Any]:
    """Traces and optimizes the case's step for `target` and counts both programs together."""
    device = torch.device("cpu")
    model = make_model(case, device, DTYPES[dtype])
    batch = place(case, case.batch(0), device, DTYPES[dtype])
    plan = egcompile.optimize(egcompile.trace(model, batch), target=target)
    scheduled = plan.compiled().schedule
    programs = [p for p in (scheduled.forward, scheduled.backward) if p is not None]
    total: dict[str, Counter[str]] = {"bytes": Counter(), "steps": Counter(), "aten": Counter()}
    for program in programs:
        for key, counts in count(program).items():
            total[key].update(counts)
    generated, aten = total["bytes"]["other_launch"], total["bytes"]["other_call"]
    share = generated / (generated + aten) if generated + aten else 1.0
    opaque = sum(s.op.startswith("aten_") for p in programs for s in p.steps if isinstance(s, Call))
    return {"target": target, "share": share, "opaque": opaque, **{k: dict(v) for k, v in total.items()}}


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['share']:.1%} of the bytes outside products and attention move in generated kernels; "
        f"{result['opaque']} opaque nodes",
        f"{'':24}{'steps':>8}{'GB':>10}",
    ]
    for where, nbytes in sorted(result["bytes"].items()):
        lines.append(f"{where.replace('_', ', '):24}{result['steps'][where]:>8}{nbytes / 1e9:>10.3f}")
    for op, nbytes in Counter(result["aten"]).most_common(8):
        lines.append(f"  ATen {op:17}{'':>8}{nbytes / 1e9:>10.3f}")
    return "\n".join(lines)
