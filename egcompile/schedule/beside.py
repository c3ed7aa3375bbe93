"""Large kernels that go over the same elements, one after the other, become one that reads them once.

A chain's gradients are an example: `x` and a row `w` that was broadcast over it have gradients of the same
work, one written at each point and one summed over the rows. Extraction makes a kernel for each value that it
writes, with what is computed on the way; that neither is on the way to the other, it cannot say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from egcompile.extract.extraction import KernelPlan
from egcompile.ir.node import Node
from egcompile.ops.opdef import Kind
from egcompile.schedule.pairs import Base, bases, in_pairs
from egcompile.schedule.together import SMALL


def beside(kernels: Sequence[KernelPlan], base: Base, kept: Iterable[Node]) -> list[KernelPlan]:
    """`kernels`, in an order in which they can run, with some made one of two; `kept` are read afterwards."""

    def touched(kernel: KernelPlan) -> int:
        return sum(n.tensor.nbytes for n in {*bases(kernel, base), *kernel.writes})

    def fits(first: KernelPlan, second: KernelPlan) -> bool:
        sums = [n for n in first.writes if n.op.kind is Kind.REDUCTION]  # complete after all points alone
        return _alike(first, second) and bases(second, base).isdisjoint(sums)

    def pays(first: KernelPlan, second: KernelPlan, both: KernelPlan) -> bool:
        saved = touched(first) + touched(second) - touched(both)
        return saved > SMALL and 4 * saved >= min(touched(first), touched(second))

    return in_pairs(kernels, base, kept, fits, pays)


def _points(kernel: KernelPlan) -> tuple[int, tuple[object, ...]]:
    """How many elements a kernel goes over, and what it reduces: nothing, or axes of a shape."""
    root = kernel.root
    if root.op.kind is not Kind.REDUCTION:
        return root.tensor.numel, ()
    return root.inputs[0].tensor.numel, (root.inputs[0].shape, root.attr("dims"))


def _alike(first: KernelPlan, second: KernelPlan) -> bool:
    """Whether both are pointwise work on as many elements, reduced by at most one way of reducing."""
    loops = (Kind.POINTWISE, Kind.MOVEMENT, Kind.LEAF)
    for kernel in (first, second):
        roots = [n for n in (*kernel.nodes, kernel.root) if n.op.kind not in loops]
        if any(n is not kernel.root or n.op.kind is not Kind.REDUCTION for n in roots):
            return False
    (points, reduced), (others, also) = _points(first), _points(second)
    values = [n for n in (*first.writes, *second.writes) if n.op.kind is not Kind.REDUCTION]
    whole = all(n.tensor.numel == points for n in values)
    return points == others and whole and (not reduced or not also or reduced == also)
