"""Kernel bodies: the graph that a planned kernel computes, over leaves for what it reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from egcompile.extract.extraction import KernelPlan
from egcompile.ir.buffer import Buffer
from egcompile.ir.graph import Graph
from egcompile.ir.node import Node, topological
from egcompile.ops.core import input as input_op
from egcompile.ops.opdef import Kind
from egcompile.schedule.kernel import Kernel

MOST_WORDS = 4
"""Ops that a kernel's name tells of."""

ALIGNMENT = 16
"""Bytes to which memory accesses are wide; how far a view starts off it is part of a kernel's layout."""

_SILENT = ("cast", "stop_gradient")

_MOVES = ("reshape", "expand")


class Kernels:
    """Kernels by what they compute: equal work on equal layouts is one kernel, launched often.

    views   for each value that lies in another's memory, that other
    """

    def __init__(self, views: Mapping[Node, Node]) -> None:
        self.views = views
        self._known: dict[tuple[object, ...], Kernel] = {}

    def of(
        self, plans: Sequence[KernelPlan], buffers: Mapping[Node, Buffer]
    ) -> tuple[Kernel, tuple[Node, ...], tuple[Node, ...]]:
        """The kernel that runs these plans in one launch, and the values that are its arguments: inputs,
        outputs. What two plans read is passed to each, so that their bodies stay apart.
        """
        moved = functools.partial(self._moved, buffers)
        read: list[Node] = []
        written: list[Node] = []
        names: list[Node] = []
        outputs: list[Node] = []
        for plan in plans:
            leaves: dict[Node, Node] = {}
            writes = _in_order(plan)
            outputs.extend(_body(plan, writes, leaves, len(read), moved))
            read.extend(leaves)
            names.extend(leaves.values())
            written.extend(writes)
        inputs = tuple(_aligned(buffers[node]) for node in read)
        made = tuple(buffers[node] for node in written)
        key = (tuple(outputs), tuple(names), inputs, made)
        if key not in self._known:
            body = Graph(tuple(names), tuple(outputs))
            words = _words(plans[0], body)
            name = f"{words if len(plans) == 1 else f'foreach_{words}'}_{len(self._known)}"
            self._known[key] = Kernel(name, body, inputs, made)
        return self._known[key], tuple(read), tuple(written)

    def _moved(self, buffers: Mapping[Node, Buffer], node: Node) -> bool:
        """Whether `node` is a value in another shape, or repeats one: the kernel reads that, and moves it.

        Where a permute or a slice lies is better said by strides.
        """
        return node in self.views and node.op.name in _MOVES and buffers[node.inputs[0]].is_contiguous


def _in_order(plan: KernelPlan) -> tuple[Node, ...]:
    """What a kernel writes, in an order that its body alone decides: the root's outputs, then operands'."""
    inside = {node: i for i, node in enumerate(plan.nodes)}
    own = [n for n in plan.writes if n is plan.root or n not in inside]
    own.sort(key=lambda n: n.attr("index") if n.op.kind is Kind.PROJECTION else 0)
    side = sorted((n for n in plan.writes if n not in own), key=inside.__getitem__)
    return (*own, *side)


def _body(
    plan: KernelPlan,
    writes: tuple[Node, ...],
    leaves: dict[Node, Node],
    first: int,
    moved: Callable[[Node], bool],
) -> tuple[Node, ...]:
    """The outputs over leaves; `leaves` gets a leaf for each value read, as they are met, `x{first}` on.

    What is `moved` is made from the leaf of its operand, so that this is read, and computed with, once.
    """
    made: dict[Node, Node] = {}

    def leaf(node: Node) -> Node:
        if moved(node):
            return Node.make(node.op, (leaf(node.inputs[0]),), node.attrs)
        if node not in leaves:
            leaves[node] = input_op(name=f"x{first + len(leaves)}", shape=node.shape, dtype=node.dtype)
        return leaves[node]

    def make(root: Node) -> Node:
        stack = [(root, False)]
        while stack:
            node, expanded = stack.pop()
            if node in made:
                continue
            inside = [(node, i) in plan.inlined for i in range(len(node.inputs))]
            if expanded:
                operands = tuple(made[x] if own else leaf(x) for x, own in zip(node.inputs, inside))
                made[node] = Node.make(node.op, operands, node.attrs)
            else:
                stack.append((node, True))
                stack.extend((x, False) for x, own in reversed([*zip(node.inputs, inside)]) if own)
        return made[root]

    inside = set(plan.nodes)

    def result(node: Node) -> Node:
        if node is plan.root or node in inside:
            return make(node)
        root = make(plan.root)
        return root[node.attr("index")] if isinstance(root.type, tuple) else root

    make(plan.root)
    return tuple(map(result, writes))


def _aligned(buffer: Buffer) -> Buffer:
    """A kernel sees a view from its first element on: of the offset only the alignment is left."""
    wide = max(ALIGNMENT // buffer.type.dtype.itemsize, 1)
    return Buffer(buffer.type, buffer.strides, buffer.offset % wide)


def _words(plan: KernelPlan, body: Graph) -> str:
    """The ops that do the work, in order, each named once; movement only where there is nothing else."""
    working = [Kind.POINTWISE, Kind.REDUCTION, Kind.COMPOSITE]
    names = dict.fromkeys(
        n.op.name for n in topological(body.outputs) if n.op.kind in working and n.op.name not in _SILENT
    )
    words = list(names) or [plan.root.op.name]
    if len(words) > MOST_WORDS:
        words = [*words[: MOST_WORDS - 1], words[-1]]
    return "_".join(words)
