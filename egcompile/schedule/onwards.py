"""A norm's kernel goes on with the pointwise work behind it, while its rows are on chip or in the L2.

A named kernel is planned for itself, and what reads it is another, which reads the rows again: an
activation after a layer norm, or all of a group norm but its moments. Where rows lie together in memory, are
short enough for the L2 and many enough to fill the GPU, one kernel does both. Likewise where a program holds
a batch norm's rows, which are a channel's planes: all of it, and of its backward, is then one kernel each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from egcompile.extract.extraction import KernelPlan
from egcompile.ir.buffer import Buffer, contiguous_strides
from egcompile.ir.node import Node
from egcompile.ops.opdef import Kind
from egcompile.schedule.pairs import Base, bases, in_pairs

NORMS = ("group_moments", "layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
"""Named kernels of rows that are the last axes of their first operand."""

CHANNEL_NORMS = ("batch_moments", "batch_norm_sums")
"""Named kernels of rows that are a channel's planes, in all samples, of their first operand `[N, C, *]`."""

LONGEST_CHANNEL = 2**14
"""Elements of a row of planes, as many as a program holds."""

LEAST_PLANE_BYTES = 64
"""Of planes that lie apart: smaller ones are not read at full speed."""

LONGEST_ROW_BYTES = 2**17
"""Of the first operand: longer rows of a group norm are faster in two kernels than read again from the L2."""

FEWEST_ROWS = 64
"""With fewer, programs that own a row each would leave most of the GPU idle."""


def onwards(
    kernels: Sequence[KernelPlan], base: Base, kept: Iterable[Node], buffers: Mapping[Node, Buffer]
) -> list[KernelPlan]:
    """`kernels`, in an order in which they can run, norms with what follows; `kept` are read afterwards."""
    return in_pairs(kernels, base, kept, lambda first, second: _follows(first, second, base, buffers))


def _follows(first: KernelPlan, second: KernelPlan, base: Base, buffers: Mapping[Node, Buffer]) -> bool:
    """Whether `first` is a norm of shorter rows, and `second` pointwise work on its points in their order."""
    if bases(second, base).isdisjoint(first.writes) or not _has_short_rows(first.root):
        return False
    points = first.root.inputs[0].tensor.numel
    for node in (*second.nodes, second.root):
        moves = node.op.kind is Kind.MOVEMENT and node.op.name not in ("reshape", "expand")
        if moves or node.op.kind not in (Kind.POINTWISE, Kind.MOVEMENT, Kind.LEAF):
            return False
    if any(node.tensor.numel != points for node in second.writes):
        return False
    touched = (*first.reads, *first.writes, *second.reads, *second.writes)
    return all(_in_order(buffers[n]) for n in touched if base(n).tensor.numel == points)


def _has_short_rows(norm: Node) -> bool:
    """Whether it is a norm of enough rows, each short enough to be on chip, or in the L2, once it is read."""
    if norm.op.name not in (*NORMS, *CHANNEL_NORMS) or not isinstance(norm.type, tuple):
        return False
    x = norm.inputs[0].tensor
    rows = min(type.numel for type in norm.type)
    if rows < FEWEST_ROWS:
        return False
    if norm.op.name in NORMS:
        return x.nbytes <= rows * LONGEST_ROW_BYTES
    plane = math.prod(x.shape[2:]) * x.dtype.itemsize
    return x.numel <= rows * LONGEST_CHANNEL and plane >= LEAST_PLANE_BYTES


def _in_order(buffer: Buffer) -> bool:
    """Whether elements lie in memory as they are numbered, without gaps."""
    dense = contiguous_strides(buffer.type.shape)
    return all(n == 1 or a == b for n, a, b in zip(buffer.type.shape, buffer.strides, dense, strict=True))
