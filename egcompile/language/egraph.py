"""A saturated e-graph as plain data: what extraction reads, with egglog left behind."""

from __future__ import annotations

from dataclasses import dataclass, field

from egcompile.ir.joint import Joint
from egcompile.ir.node import Attr, Node
from egcompile.ir.types import ValueType
from egcompile.ops.opdef import OpDef


@dataclass(frozen=True, slots=True)
class ENode:
    """One e-node: an op over classes. A projection `out(i)` is an e-node over a tuple's class."""

    op: OpDef
    operands: tuple[int, ...]
    attrs: tuple[Attr, ...]


@dataclass(slots=True)
class EClass:
    """Equal ways to compute one value. `origins` are the model's places that asked for it."""

    id: int
    type: ValueType
    nodes: list[ENode] = field(default_factory=list)
    origins: frozenset[str] = frozenset()


@dataclass(frozen=True)
class EGraph:
    """Classes by id, and the class of every node of the joint graph that was put in."""

    classes: dict[int, EClass]
    joint: Joint
    class_of: dict[Node, int]

    @property
    def roots(self) -> tuple[int, ...]:
        return tuple(self.class_of[node] for node in self.joint.graph.outputs)
