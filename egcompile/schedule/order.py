"""The order of kernels: each after what it reads, and few bytes alive at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from egcompile.errors import ExtractionError
from egcompile.extract.extraction import KernelPlan
from egcompile.ir.node import Node


def order(
    kernels: Sequence[KernelPlan],
    base: Callable[[Node], Node],
    kept: Iterable[Node],
    available: Iterable[Node],
    rank: Callable[[KernelPlan], int],
) -> list[KernelPlan]:
    """Kernels in an order in which they can run, chosen greedily.

    Of those that can run next, the one that allocates least beyond what it lets go; of equal ones, the
    first by `rank`. `kept` are never let go; `available` are there at the start.
    """
    never = set(kept)
    readers: dict[Node, int] = {}
    bases = {id(kernel): {base(node) for node in kernel.reads} for kernel in kernels}
    for kernel in kernels:
        for node in bases[id(kernel)]:
            readers[node] = readers.get(node, 0) + 1
    maker = {node: kernel for kernel in kernels for node in kernel.writes}
    given = set(available)
    waiting = {id(kernel): {id(maker[n]) for n in bases[id(kernel)] if n not in given} for kernel in kernels}
    followers: dict[int, list[KernelPlan]] = {}
    for kernel in kernels:
        for earlier in waiting[id(kernel)]:
            followers.setdefault(earlier, []).append(kernel)

    def growth(kernel: KernelPlan) -> int:
        lost = (n for n in bases[id(kernel)] if readers[n] == 1 and n not in never)
        return sum(n.tensor.nbytes for n in kernel.writes) - sum(n.tensor.nbytes for n in lost)

    done: list[KernelPlan] = []
    ready = [kernel for kernel in kernels if not waiting[id(kernel)]]
    while ready:
        kernel = min(ready, key=lambda k: (growth(k), rank(k)))
        ready.remove(kernel)
        done.append(kernel)
        for node in bases[id(kernel)]:
            readers[node] -= 1
        for follower in followers.get(id(kernel), ()):
            waiting[id(follower)].discard(id(kernel))
            if not waiting[id(follower)]:
                ready.append(follower)
    if len(done) != len(kernels):
        raise ExtractionError("kernels of the plan wait for each other")
    return done


def in_time(
    ordered: Sequence[KernelPlan],
    again: Sequence[KernelPlan],
    base: Callable[[Node], Node],
    returned: Iterable[Node],
) -> list[KernelPlan]:
    """`ordered` with the kernels `again`, each just before the first that reads what it writes."""
    maker = {node: kernel for kernel in again for node in kernel.writes}
    done: dict[int, KernelPlan] = {}

    def make(first: KernelPlan) -> None:
        stack = [(first, False)]
        while stack:
            kernel, expanded = stack.pop()
            if expanded:
                done.setdefault(id(kernel), kernel)
            elif id(kernel) not in done:
                stack.append((kernel, True))
                earlier = (maker.get(base(node)) for node in kernel.reads)
                stack.extend((k, False) for k in earlier if k is not None and k is not kernel)

    for kernel in ordered:
        make(kernel)
    for node in returned:
        if (last := maker.get(base(node))) is not None:
            make(last)
    return list(done.values())
