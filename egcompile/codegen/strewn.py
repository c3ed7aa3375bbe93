"""Reductions over memory that lies strewn: short runs, with what is kept between them.

A group norm's sums over channels_last images are one: eight channels side by side, then those of the other
groups, then the next pixel. Such a reduction becomes two. The first is over what lies further apart than the
values that are kept, and so reads whole lines of memory; the second, of what lies closer, over few results.
"""

from __future__ import annotations

import math

from egcompile.codegen.nest import SECTOR_BYTES, memory_factors
from egcompile.ir.node import Node, topological
from egcompile.ops.build import reshape_to
from egcompile.ops.opdef import Kind
from egcompile.schedule.kernel import Kernel

SMALL = 2**20
"""Elements that are in the L2 anyway, as those of a finalize: another launch would take longer."""


def in_two(kernel: Kernel) -> dict[Node, Node]:
    """What to replace in the kernel's body: each reduction over strewn memory."""
    new: dict[Node, Node] = {}
    for node in topological(kernel.body.outputs):
        if node.op.kind is Kind.REDUCTION and (halves := _halves(node, kernel)) is not None:
            shape, far, near = halves
            first = node.op(reshape_to(node.inputs[0], shape), dims=far)
            new[node] = reshape_to(node.op(first, dims=near), node.shape)
    return new


def _halves(node: Node, kernel: Kernel) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """A shape of the operand, and its axes to reduce first and then; None where memory is not strewn."""
    operand, dims = node.inputs[0], node.attr("dims")
    if operand.tensor.numel < SMALL:
        return None
    factors = memory_factors(operand, kernel)
    kept = [s for i, axis in enumerate(factors) if i not in dims for n, s in axis if n > 1 and s]
    nearest = min(kept, default=0)
    run = math.prod(n for i in dims for n, s in factors[i] if 0 < s < nearest)
    apart = math.prod(n for i in dims for n, s in factors[i] if s > nearest)
    if run == 1 or apart == 1 or run * operand.dtype.itemsize >= SECTOR_BYTES:
        return None
    shape: list[int] = []
    far: list[int] = []
    near: list[int] = []
    for i, axis in enumerate(factors):
        if i not in dims:
            shape.append(operand.shape[i])
            continue
        for n, s in axis:
            (far if s > nearest else near).append(len(shape))
            shape.append(n)
    return tuple(shape), tuple(far), tuple(near)
