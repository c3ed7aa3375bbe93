"""A graph: named inputs and outputs over shared nodes, and where each node came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from egcompile.ir.node import Node, topological

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True, eq=False)
class Graph:
    """An immutable dataflow graph.

    `origins` keeps, for nodes that came from a model, the set of module paths and source lines
    that gave rise to them. Equal work in two places is one node with two origins.
    """

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    output_names: tuple[str, ...] = ()
    origins: Mapping[Node, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.output_names:
            names = tuple(f"out{i}" for i in range(len(self.outputs)))
            object.__setattr__(self, "output_names", names)

    @property
    def nodes(self) -> list[Node]:
        """Operands before users; inputs first, in call order."""
        return topological((*self.inputs, *self.outputs))

    def rewrite(self, replace: Callable[[Node, tuple[Node, ...]], Node]) -> Graph:
        """A new graph in which each node is `replace(node, its new operands)`; origins follow."""
        new: dict[Node, Node] = {}
        origins: dict[Node, frozenset[str]] = {}
        for node in self.nodes:
            new[node] = replace(node, tuple(new[i] for i in node.inputs))
            if node in self.origins:
                origins[new[node]] = origins.get(new[node], frozenset()) | self.origins[node]
        return Graph(
            tuple(new[i] for i in self.inputs),
            tuple(new[o] for o in self.outputs),
            self.output_names,
            origins,
        )

    def to_networkx(self) -> networkx.MultiDiGraph[Any]:
        """Nodes are numbered as they print, with `op`, `type`, `attrs`, `origins`; edges have `operand`."""
        import networkx

        graph: networkx.MultiDiGraph[Any] = networkx.MultiDiGraph()
        number = {node: i for i, node in enumerate(self.nodes)}
        for node, i in number.items():
            attrs = dict(zip(node.op.attr_names, node.attrs, strict=True))
            origins = sorted(self.origins.get(node, ()))
            graph.add_node(i, op=node.op.name, type=node.type, attrs=attrs, origins=origins)
        for node, i in number.items():
            for position, operand in enumerate(node.inputs):
                graph.add_edge(number[operand], i, operand=position)
        return graph

    def __str__(self) -> str:
        from egcompile.ir.text import graph_text

        return graph_text(self)
