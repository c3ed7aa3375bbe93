"""Two kernels that run soon after one another as one, which passes values on without memory in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from egcompile.extract.extraction import KernelPlan
from egcompile.ir.node import Node
from egcompile.ops.opdef import Kind

NEAR = 8
"""Kernels between two that become one, at most: what both read or write stays in memory for as long."""

MOST_READS, MOST_WRITES = 12, 4
"""Tensors of a kernel made of two: each is a pointer and a tile in registers."""

Base = Callable[[Node], Node]
Fits = Callable[[KernelPlan, KernelPlan], bool]
Pays = Callable[[KernelPlan, KernelPlan, KernelPlan], bool]


def in_pairs(
    kernels: Sequence[KernelPlan],
    base: Base,
    kept: Iterable[Node],
    fits: Fits,
    pays: Pays = lambda first, second, both: True,
) -> list[KernelPlan]:
    """`kernels`, in an order in which they can run, with some made one of two; `kept` are read afterwards.

    fits   whether one loop nest can do the work of the two
    pays   whether the third, which is both, is better than they are
    """
    readers = Counter(n for kernel in kernels for n in bases(kernel, base))
    readers.update(map(base, kept))
    done: list[KernelPlan] = []
    for kernel in kernels:
        for i in reversed(range(max(0, len(done) - NEAR), len(done))):
            first = done[i]
            if not fits(first, kernel) or (at := _place(done, i, kernel, base)) is None:
                continue
            both = _merged(first, kernel, base, readers)
            if both is not None and pays(first, kernel, both):
                readers.subtract([*bases(first, base), *bases(kernel, base)])
                readers.update(bases(both, base))
                done[i] = both
                done.insert(at, done.pop(i))
                break
        else:
            done.append(kernel)
    return done


def bases(kernel: KernelPlan, base: Base) -> set[Node]:
    """What a kernel reads; of a view, what it is a view of."""
    return set(map(base, kernel.reads))


def _place(done: Sequence[KernelPlan], i: int, kernel: KernelPlan, base: Base) -> int | None:
    """Where among the others the two as one can run: where the first is, or after all; None for nowhere."""
    between = done[i + 1 :]
    read = bases(kernel, base)
    if all(read.isdisjoint(other.writes) for other in between):
        return i
    made = set(done[i].writes)
    if all(made.isdisjoint(bases(other, base)) for other in between):
        return len(done) - 1
    return None


def _merged(first: KernelPlan, second: KernelPlan, base: Base, readers: Counter[Node]) -> KernelPlan | None:
    """Both as one; None for too many tensors, or for a view that no index of the first's values can say.

    What the first writes for the second alone is not written.
    """
    passed = [node for node in second.reads if base(node) in first.writes]
    chain: dict[Node, None] = {}
    for node in passed:  # what is a view of a value that is no longer in memory is computed
        while node not in first.writes:
            if node.op.name not in ("reshape", "expand"):
                return None
            chain[node] = None
            node = node.inputs[0]
    dropped = {n for n in map(base, passed) if readers[n] == 1}
    reads = tuple(n for n in dict.fromkeys((*first.reads, *second.reads)) if n not in passed)
    writes = tuple(n for n in (*first.writes, *second.writes) if n not in dropped)
    if len(reads) > MOST_READS or len(writes) > MOST_WRITES:
        return None
    results = [n for n in first.writes if n.op.kind is Kind.PROJECTION]
    nodes = dict.fromkeys((*first.nodes, first.root, *results, *reversed(chain), *second.nodes))
    nodes.pop(second.root, None)
    edges = {(n, i) for n in (*second.nodes, second.root) for i, x in enumerate(n.inputs) if x in passed}
    inlined = first.inlined | second.inlined | edges | {(n, 0) for n in (*results, *chain)}
    return replace(second, nodes=tuple(nodes), inlined=inlined, reads=reads, writes=writes)
