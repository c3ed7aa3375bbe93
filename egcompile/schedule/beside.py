"""Large kernels that go over the same elements, one after the other, become one that reads them once.

A chain's gradients are an example: `x` and a row `w` that was broadcast over it have gradients of the same
work, one written at each point and one summed over the rows. Extraction makes a kernel for each value that it
writes, with what is computed on the way; that neither is on the way to the other, it cannot say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from egcompile.extract.extraction import KernelPlan
from egcompile.ir.node import Node
from egcompile.ops.opdef import Kind
from egcompile.schedule.together import SMALL

NEAR = 8
"""Kernels between two that become one, at most: what both read or write stays in memory for as long."""

MOST_READS, MOST_WRITES = 12, 4
"""Tensors of a kernel made of two: each is a pointer and a tile in registers."""

Base = Callable[[Node], Node]


def beside(kernels: Sequence[KernelPlan], base: Base, kept: Iterable[Node]) -> list[KernelPlan]:
    """`kernels`, in an order in which they can run, with some made one of two; `kept` are read afterwards."""
    readers = Counter(b for kernel in kernels for b in {base(node) for node in kernel.reads})
    readers.update(map(base, kept))
    done: list[KernelPlan] = []
    for kernel in kernels:
        for i in reversed(range(max(0, len(done) - NEAR), len(done))):
            if _alike(done[i], kernel) and (at := place(done, i, kernel, base)) is not None:
                both = _merged(done[i], kernel, base, readers)
                if both is not None:
                    done[i] = both
                    done.insert(at, done.pop(i))
                    break
        else:
            done.append(kernel)
    return done


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


def place(done: Sequence[KernelPlan], i: int, kernel: KernelPlan, base: Base) -> int | None:
    """Where among the others the two as one can run: where the first is, or after all; None for nowhere."""
    between = done[i + 1 :]
    read = set(map(base, kernel.reads))
    if all(read.isdisjoint(other.writes) for other in between):
        return i
    made = set(done[i].writes)
    if all(made.isdisjoint(map(base, other.reads)) for other in between):
        return len(done) - 1
    return None


def _merged(first: KernelPlan, second: KernelPlan, base: Base, readers: Counter[Node]) -> KernelPlan | None:
    """Both as one; None where that saves too little, or where the second needs a sum of the first.

    What the first writes for the second alone is not written. `readers` are counted anew.
    """
    passed = [node for node in second.reads if base(node) in first.writes]
    if any(base(node).op.kind is Kind.REDUCTION for node in passed):
        return None
    chain: dict[Node, None] = {}
    for node in passed:  # what is a view of a value that is no longer in memory is computed
        while node not in first.writes:
            if node.op.name != "reshape":
                return None
            chain[node] = None
            node = node.inputs[0]
    dropped = {n for n in map(base, passed) if readers[n] == 1}
    common = {base(n) for n in first.reads} & {base(n) for n in second.reads}
    saved = sum(n.tensor.nbytes for n in (*common, *map(base, passed), *dropped))
    reads = tuple(n for n in dict.fromkeys((*first.reads, *second.reads)) if n not in passed)
    writes = tuple(n for n in (*first.writes, *second.writes) if n not in dropped)
    least = min(_touched(first, base), _touched(second, base))
    if saved <= SMALL or 4 * saved < least or len(reads) > MOST_READS or len(writes) > MOST_WRITES:
        return None
    readers.subtract({*common, *map(base, passed)})
    nodes = (*first.nodes, first.root, *reversed(chain), *second.nodes)
    edges = {(n, i) for n in (*second.nodes, second.root) for i, x in enumerate(n.inputs) if x in passed}
    inlined = first.inlined | second.inlined | edges | {(n, 0) for n in chain}
    nodes = tuple(n for n in dict.fromkeys(nodes) if n is not second.root)
    return replace(second, nodes=nodes, inlined=inlined, reads=reads, writes=writes)


def _touched(kernel: KernelPlan, base: Base) -> int:
    return sum(n.tensor.nbytes for n in {*map(base, kernel.reads), *kernel.writes})
