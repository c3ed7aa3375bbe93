"""A norm's kernel goes on with the pointwise work behind it, while its rows are on chip or in the L2.

A named kernel is planned for itself, and what reads it is another, which reads the rows again: an
activation after a layer norm, or all of a group norm but its moments. Where rows lie together in memory, are
short enough for the L2 and many enough to fill the GPU, one kernel does both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from egcompile.extract.extraction import KernelPlan
from egcompile.ir.buffer import Buffer, contiguous_strides
from egcompile.ir.node import Node
from egcompile.ops.opdef import Kind
from egcompile.schedule.pairs import Base, bases, in_pairs

NORMS = ("group_moments", "layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
"""Named kernels of rows that are the last axes of their first operand."""

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
    if first.root.op.name not in NORMS or not isinstance(first.root.type, tuple):
        return False
    if bases(second, base).isdisjoint(first.writes):
        return False
    points = first.root.inputs[0].tensor.numel
    rows = min(type.numel for type in first.root.type)
    if rows < FEWEST_ROWS or points * first.root.inputs[0].dtype.itemsize > rows * LONGEST_ROW_BYTES:
        return False
    for node in (*second.nodes, second.root):
        moves = node.op.kind is Kind.MOVEMENT and node.op.name not in ("reshape", "expand")
        if moves or node.op.kind not in (Kind.POINTWISE, Kind.MOVEMENT, Kind.LEAF):
            return False
    if any(node.tensor.numel != points for node in second.writes):
        return False
    touched = (*first.reads, *first.writes, *second.reads, *second.writes)
    return all(_in_order(buffers[n]) for n in touched if base(n).tensor.numel == points)


def _in_order(buffer: Buffer) -> bool:
    """Whether elements lie in memory as they are numbered, without gaps."""
    dense = contiguous_strides(buffer.type.shape)
    return all(n == 1 or a == b for n, a, b in zip(buffer.type.shape, buffer.strides, dense, strict=True))
