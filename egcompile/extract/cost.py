"""What a plan costs, in microseconds: launches, bytes through memory, and operations.

Bytes and operations add up. A contraction hides its traffic behind its arithmetic, so its sum is too high,
but by the same amount for each way to compute it.
"""

from __future__ import annotations

import functools

import torch

from egcompile.extract.fusible import Role, Site
from egcompile.ir.buffer import Buffer
from egcompile.ir.node import Attr, topological
from egcompile.ir.types import TensorType, ValueType
from egcompile.ops.opdef import Kind, OpDef
from egcompile.target import Target

GENERATED_GEMM = 1.03
"""A generated contraction's time over cuBLAS's for the contraction alone."""

EPILOGUE_READ = 2.2
EPILOGUE_WORK = 4.0
"""What an epilogue's reads and operations take over those of a loop: no products hide behind them.

Fitted to `benchmarks.gemm` on an H200 (relu, gelu, gelu backward, skip) and to SwiGLU, within a quarter.
"""

REPEATED = 0.1
"""Of a value's cost at each point that it is broadcast to, what is charged where it is computed there again.

Such work, as a column's weight widened, finds room beside a point's own traffic; another launch does not.
"""

EACH_NODE = 1e-3
"""What any computed e-node costs besides: of equal plans, the one with fewer nodes is picked."""

_OPERATIONS = {
    **dict.fromkeys(("reshape", "expand", "permute", "transpose", "slice"), 0.0),  # indices, as of a view
    **dict.fromkeys(("cast", "stop_gradient", "neg", "abs"), 0.5),
    **dict.fromkeys(("div", "sqrt", "rsqrt", "reciprocal", "relu", "relu_backward"), 4.0),
    **dict.fromkeys(("exp", "log", "sigmoid", "tanh", "erf"), 10.0),
    **dict.fromkeys(("sin", "cos", "pow"), 30.0),
}
"""Instructions an element; others have `_DEFINED` where they have a definition, else 1."""

_DEFINED = 16.0

_TWO_PASSES = ("batch_norm", "group_norm")
"""Read their first operand, or what it is computed from, for its statistics, and again to normalize it."""


class Costs:
    """The costs of a target's kernels, in microseconds."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.launch = target.launch * 1e6

    def bytes(self, count: float) -> float:
        return count / self.target.bandwidth * 1e6

    def read(self, site: Site, position: int, operand: Buffer) -> float:
        """An operand from memory, each distinct element once; an embedding reads the rows it picks."""
        if site.op.name == "embedding" and position == 0:
            return self.write(site.type)
        return self.bytes(operand.distinct_bytes)

    def write(self, type: ValueType) -> float:
        return self.bytes(sum(t.nbytes for t in _types(type)))

    def work(self, site: Site, evaluations: float) -> float:
        """A loop op computed for that many elements of its result, or of its operand for a reduction."""
        if site.role is Role.CONSTANT:
            return 0.0
        return EACH_NODE + evaluations * _operations(site.op) / self.target.flops_fp32 * 1e6

    def kernel(self, site: Site) -> float:
        """A named kernel, a contraction or a call, without its traffic; its launch included."""
        operands = [t for operand in site.operands for t in _types(operand)]
        if site.op.flops is None:
            work = self.work(site, max((t.numel for t in operands), default=0))
            again = self.bytes(operands[0].nbytes) if site.op.name in _TWO_PASSES else 0.0
            return self.launch + work + again
        result = _types(site.type)[0]
        products = site.op.flops(*site.operands) / self._rate(result.dtype) * 1e6
        if site.role is not Role.GEMM:
            return EACH_NODE + self.launch + products
        reads = self.bytes(sum(t.nbytes for t in operands[2:])) * (EPILOGUE_READ - 1.0)
        operations = result.numel * _epilogue(site.op, site.operands, site.attrs)
        work = operations * EPILOGUE_WORK / self.target.flops_fp32 * 1e6
        return EACH_NODE + self.launch + GENERATED_GEMM * products + reads + work

    def _rate(self, dtype: torch.dtype) -> float:
        if dtype in (torch.float16, torch.bfloat16):
            return self.target.flops
        return self.target.flops_fp32 / (2.0 if dtype == torch.float64 else 1.0)


def _operations(op: OpDef) -> float:
    return _OPERATIONS.get(op.name, _DEFINED if op.definition is not None else 1.0)


@functools.lru_cache(maxsize=4096)
def _epilogue(op: OpDef, operands: tuple[ValueType, ...], attrs: tuple[Attr, ...]) -> float:
    """Instructions for each element of a named contraction's result, after its products."""
    leaves, results = op.define(operands, attrs)
    total = 0.0
    for node in set(topological(results)) - set(leaves):
        if node.op.kind is Kind.POINTWISE and node.op.definition is not None:
            total += _epilogue(node.op, tuple(i.type for i in node.inputs), node.attrs)
        elif node.op.kind is Kind.POINTWISE:
            total += _operations(node.op)
    return total


def _types(type: ValueType) -> tuple[TensorType, ...]:
    return type if isinstance(type, tuple) else (type,)
