"""Which kernels run in the forward and which in the backward, and what is saved between them.

Extraction has decided already what is stored and what is computed again. Everything that the forward's
outputs need is the forward; what is left is the backward; what it reads of the forward is saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from egcompile.extract.extraction import Extraction, KernelPlan
from egcompile.ir.node import Node


@dataclass(frozen=True)
class Partition:
    """Kernels of the forward and of the backward; `saved`: primals and written values that those read."""

    forward: tuple[KernelPlan, ...]
    backward: tuple[KernelPlan, ...]
    saved: tuple[Node, ...]


def base(extraction: Extraction, node: Node) -> Node:
    """The value in whose memory a value lies: itself, unless it is a view."""
    while node in extraction.views:
        node = extraction.views[node]
    return node


def partition(extraction: Extraction) -> Partition:
    """Saves every written value of the forward that the backward reads; views are made again there."""
    joint = extraction.joint
    maker = {node: kernel for kernel in extraction.kernels for node in kernel.writes}

    def needed(roots: Iterable[Node]) -> set[int]:
        found: set[int] = set()
        stack = [base(extraction, node) for node in roots]
        while stack:
            kernel = maker.get(stack.pop())
            if kernel is not None and id(kernel) not in found:
                found.add(id(kernel))
                stack.extend(base(extraction, node) for node in kernel.reads)
        return found

    early = needed(joint.outputs)
    forward = tuple(kernel for kernel in extraction.kernels if id(kernel) in early)
    backward = tuple(kernel for kernel in extraction.kernels if id(kernel) not in early)
    available = [*joint.primals, *(node for kernel in forward for node in kernel.writes)]
    gradients = [g for g in joint.gradients if g is not None]
    read = {base(extraction, node) for node in (*(n for k in backward for n in k.reads), *gradients)}
    return Partition(forward, backward, tuple(node for node in available if node in read))
