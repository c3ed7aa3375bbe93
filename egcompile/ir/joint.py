"""A forward graph and its derived backward in one graph."""

from __future__ import annotations

from dataclasses import dataclass

from egcompile.ir.graph import Graph
from egcompile.ir.node import Node


@dataclass(frozen=True, eq=False)
class Joint:
    """`graph.inputs` are the primals, then the cotangents; `graph.outputs` the outputs, then the gradients.

    primals      the forward's inputs, in call order
    cotangents   one input an output that has one; None where an output gets no cotangent
    outputs      the forward's outputs
    gradients    one a primal; None where none is needed or none flows
    """

    graph: Graph
    primals: tuple[Node, ...]
    cotangents: tuple[Node | None, ...]
    outputs: tuple[Node, ...]
    gradients: tuple[Node | None, ...]
