"""What a loop nest would touch: follows a body from its outputs, as `Tile` does, without writing text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from egcompile.codegen.index import BIJECTIVE, Axis, Index, operand_index, result_index
from egcompile.ir.node import Node
from egcompile.ops.opdef import Kind
from egcompile.schedule.kernel import Buffer

Indices = tuple[Index, ...]


@dataclass(frozen=True, eq=False)
class Write:
    """An output: the value that is computed, at which index, and at which index of the buffer it goes."""

    name: str
    buffer: Buffer
    node: Node
    index: Indices
    where: Indices


def index_axes(index: Indices) -> frozenset[Axis]:
    """The loop axes on which an element's place depends."""
    return frozenset().union(*(i.axes for i in index))


def peel(node: Node) -> tuple[Node, list[Node]]:
    """The value under the reshapes and permutes at the top of `node`, and those, outermost first."""
    movements = []
    while node.op.name in BIJECTIVE:
        movements.append(node)
        node = node.inputs[0]
    return node, movements


def unpeel(index: Indices, movements: list[Node]) -> Indices:
    """Where the peeled movements put the element at `index`."""
    for node in reversed(movements):
        index = result_index(node, index)
    return index


def align(root: Node, known: dict[Node, Indices]) -> Indices | None:
    """An index for `root` under which some node below it has its known index.

    Looks through pointwise ops and movements that lose nothing, so both then share loads. None if there is
    no such node.
    """
    seen: set[Node] = set()

    def search(node: Node) -> Indices | None:
        if node in known:
            return known[node]
        if node in seen:
            return None
        seen.add(node)
        if node.op.kind is Kind.POINTWISE:
            return next((i for operand in node.inputs if (i := search(operand)) is not None), None)
        if node.op.name in BIJECTIVE and (index := search(node.inputs[0])) is not None:
            return result_index(node, index)
        return None

    return search(root)


@dataclass(eq=False)
class Walk:
    """The evaluation of nodes at indices: what is loaded, reduced, and what stands in the way.

    descend    the index at which a reduction's operand is read, given the reduction and its index; None
               where this nest cannot reduce it
    given      reductions whose result is known, and at which index
    loads      input nodes with their indices
    guarded    those of them that may be out of range, where something else is taken
    reductions (reduction, index), operands before users
    blocked    reductions that must be in memory before this nest runs
    known      one index for each node that is visited whole: a loop over the nest meets all its elements
    """

    descend: Callable[[Node, Indices], Indices | None]
    given: Mapping[Node, Indices] = field(default_factory=dict)
    loads: dict[tuple[Node, Indices], None] = field(default_factory=dict)
    guarded: set[tuple[Node, Indices]] = field(default_factory=set)
    reductions: dict[tuple[Node, Indices], None] = field(default_factory=dict)
    blocked: dict[Node, None] = field(default_factory=dict)
    known: dict[Node, Indices] = field(default_factory=dict)
    _seen: set[tuple[Node, Indices]] = field(default_factory=set)

    def fits(self, node: Node, index: Indices) -> bool:
        """Visits `node` at `index`, unless something below it is blocked; then nothing is recorded."""
        trial = Walk(self.descend, self.given)
        trial.visit(node, index)
        if trial.blocked:
            return False
        self.visit(node, index)
        return True

    def visit(self, node: Node, index: Indices, whole: bool = True, guarded: bool = False) -> None:
        if (node, index) in self._seen:
            return
        self._seen.add((node, index))
        if node in self.given and self.given[node] == index:
            return
        if whole and node.op.name not in ("full", "iota"):
            self.known.setdefault(node, index)
        match node.op.kind, node.op.name:
            case Kind.LEAF, "input":
                self.loads[node, index] = None
                if guarded:
                    self.guarded.add((node, index))
            case Kind.LEAF, _:
                pass
            case Kind.POINTWISE, _:
                for operand in node.inputs:
                    self.visit(operand, index, whole, guarded)
            case Kind.MOVEMENT, "pad" | "cat":
                self._shifted(node, index)
            case Kind.MOVEMENT, _:
                whole = whole and node.op.name != "slice"
                self.visit(node.inputs[0], operand_index(node, index), whole, guarded)
            case Kind.REDUCTION, _:
                inner = None if guarded else self.descend(node, index)
                if inner is None:
                    self.blocked[node] = None
                else:
                    self.visit(node.inputs[0], inner, whole)
                    self.reductions[node, index] = None
            case _:
                self.blocked[node] = None

    def _shifted(self, node: Node, index: Indices) -> None:
        axis, start = node.attr("axis"), 0
        for operand in node.inputs:
            if node.op.name == "pad":
                where = (index[axis] + (-node.attr("before"))).digit(node.attr("step"), 0)
            else:
                where = index[axis] + (-start)
                start += operand.shape[axis]
            self.visit(operand, (*index[:axis], where, *index[axis + 1 :]), whole=False, guarded=True)
