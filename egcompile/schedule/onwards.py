"""A norm's kernel goes on with the pointwise work behind it, while its rows are on chip.

A named kernel is planned for itself, and what reads it is another, which reads the rows again: an
activation after a layer norm, or all of a group norm but its moments. Where rows lie together in memory, are
short enough for the chip and many enough to fill it, one kernel does both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from egcompile.extract.extraction import KernelPlan
from egcompile.ir.buffer import Buffer, contiguous_strides
from egcompile.ir.node import Node
from egcompile.ops.opdef import Kind
from egcompile.schedule.beside import MOST_READS, MOST_WRITES, NEAR, place

NORMS = ("group_moments", "layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
"""Named kernels of rows that are the last axes of their first operand."""

LONGEST_ROW = 32768
FEWEST_ROWS = 64

Base = Callable[[Node], Node]


def onwards(
    kernels: Sequence[KernelPlan], base: Base, kept: Iterable[Node], buffers: Mapping[Node, Buffer]
) -> list[KernelPlan]:
    """`kernels`, in an order in which they can run, norms with what follows; `kept` are read afterwards."""
    readers = Counter(b for kernel in kernels for b in {base(node) for node in kernel.reads})
    readers.update(map(base, kept))
    done: list[KernelPlan] = []
    for kernel in kernels:
        for i in reversed(range(max(0, len(done) - NEAR), len(done))):
            if not _follows(done[i], kernel, base, buffers):
                continue
            both = _merged(done[i], kernel, base, readers)
            if both is not None and (at := place(done, i, kernel, base)) is not None:
                done[i] = both
                done.insert(at, done.pop(i))
                break
        else:
            done.append(kernel)
    return done


def _follows(first: KernelPlan, second: KernelPlan, base: Base, buffers: Mapping[Node, Buffer]) -> bool:
    """Whether `first` is a norm of rows on chip, and `second` pointwise work on its points in their order."""
    if first.root.op.name not in NORMS or not isinstance(first.root.type, tuple):
        return False
    if not any(base(node) in first.writes for node in second.reads):
        return False
    points = first.root.inputs[0].tensor.numel
    rows = min(type.numel for type in first.root.type)
    if rows < FEWEST_ROWS or points > rows * LONGEST_ROW:
        return False
    for node in (*second.nodes, second.root):
        moves = node.op.kind is Kind.MOVEMENT and node.op.name not in ("reshape", "expand")
        if moves or node.op.kind not in (Kind.POINTWISE, Kind.MOVEMENT, Kind.LEAF):
            return False
    if any(node.tensor.numel != points for node in second.writes):
        return False
    touched = (*first.reads, *first.writes, *second.reads, *second.writes)
    return all(_in_order(buffers[n]) for n in map(base, touched) if n.tensor.numel == points)


def _in_order(buffer: Buffer) -> bool:
    dense = contiguous_strides(buffer.type.shape)
    return all(n == 1 or a == b for n, a, b in zip(buffer.type.shape, buffer.strides, dense, strict=True))


def _merged(first: KernelPlan, second: KernelPlan, base: Base, readers: Counter[Node]) -> KernelPlan | None:
    """Both as one, which writes what others read of the norm; None for too many tensors."""
    passed = [node for node in second.reads if base(node) in first.writes]
    chain: dict[Node, None] = {}
    for node in passed:
        while node not in first.writes:  # a view of what is no longer read from memory is computed
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
    nodes = (*first.nodes, first.root, *results, *reversed(chain), *second.nodes)
    edges = {(n, i) for n in (*second.nodes, second.root) for i, x in enumerate(n.inputs) if x in passed}
    inside = {(n, 0) for n in (*results, *chain)}
    inlined = first.inlined | second.inlined | edges | inside
    readers.subtract({base(n) for n in passed})
    return replace(second, nodes=tuple(dict.fromkeys(nodes)), inlined=inlined, reads=reads, writes=writes)
