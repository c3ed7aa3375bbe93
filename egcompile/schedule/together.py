"""Small pointwise kernels that do not read each other share a launch, as PyTorch's foreach kernels do.

A kernel that moves a few hundred kilobytes takes as long as its launch does. A model has many of these that
nobody waits for (running statistics, counters, casts of vectors, gradients of biases), so each is held back
until a kernel reads what it writes, or the program ends, and runs with all that wait at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from egcompile.extract.extraction import KernelPlan
from egcompile.ir.node import Node
from egcompile.ops.opdef import Kind

SMALL = 1 << 18
"""Bytes that a kernel reads and writes, up to which its launch is what counts; of a view, all of its base."""

MOST_TENSORS = 240
"""Arguments of one launch: CUDA passes 4 KB of them to any kernel, and Triton adds some of its own."""

Group = tuple[KernelPlan, ...]


def together(kernels: Sequence[KernelPlan], base: Callable[[Node], Node]) -> list[Group]:
    """`kernels`, in an order in which they can run, as groups that a launch each can run.

    Of several kernels in a group each is small, and none reads what another of the group writes.
    """
    groups: list[Group] = []
    waiting = [kernel for kernel in kernels if _is_small(kernel, base)]
    small = set(map(id, waiting))
    unmade = {node for kernel in kernels for node in kernel.writes}
    for kernel in kernels:
        if id(kernel) not in small:
            groups.extend(_released(waiting, _needed(kernel, waiting, base), unmade, base))
            groups.append((kernel,))
            unmade.difference_update(kernel.writes)
    groups.extend(_released(waiting, list(waiting), unmade, base))
    return groups


def _is_small(kernel: KernelPlan, base: Callable[[Node], Node]) -> bool:
    pointwise = (Kind.POINTWISE, Kind.MOVEMENT, Kind.LEAF)
    if any(node.op.kind not in pointwise for node in (kernel.root, *kernel.nodes)):
        return False
    touched = {*map(base, kernel.reads), *kernel.writes}
    fits = len(kernel.reads) + len(kernel.writes) <= MOST_TENSORS
    return fits and sum(node.tensor.nbytes for node in touched) <= SMALL


def _needed(
    kernel: KernelPlan, waiting: Sequence[KernelPlan], base: Callable[[Node], Node]
) -> list[KernelPlan]:
    """Those that `kernel` waits for, through others that wait."""
    read = set(map(base, kernel.reads))
    found = []
    for other in reversed(waiting):
        if not read.isdisjoint(other.writes):
            found.append(other)
            read.update(map(base, other.reads))
    return found[::-1]


def _released(
    waiting: list[KernelPlan], needed: list[KernelPlan], unmade: set[Node], base: Callable[[Node], Node]
) -> Iterator[Group]:
    """Groups that run all of `needed`; others that can run ride along where there is room.

    What they write leaves `unmade`, and they leave `waiting`.
    """
    while needed:
        ready = [k for k in waiting if unmade.isdisjoint(map(base, k.reads))]
        ready.sort(key=lambda k: not any(k is other for other in needed))
        group: list[KernelPlan] = []
        room = MOST_TENSORS
        for kernel in ready:
            tensors = len(kernel.reads) + len(kernel.writes)
            if tensors <= room:
                group.append(kernel)
                room -= tensors
        taken = set(map(id, group))
        waiting[:] = [k for k in waiting if id(k) not in taken]
        needed = [k for k in needed if id(k) not in taken]
        unmade.difference_update(node for kernel in group for node in kernel.writes)
        yield tuple(sorted(group, key=_likeness))


def _likeness(kernel: KernelPlan) -> tuple[str, ...]:
    """Orders the kernels of a group, so that groups of equal work are one kernel."""
    return (kernel.root.op.name, *(str(n.tensor) for n in (*kernel.writes, *kernel.reads)))
