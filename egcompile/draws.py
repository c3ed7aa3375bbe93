"""Random draws in a graph. A derivative that starts again from the inputs must not draw again, so a plan's
forward hands on what it drew.
"""

from __future__ import annotations

from collections.abc import Sequence

from egcompile.differentiable import dependent
from egcompile.errors import NoGradientRule
from egcompile.ir.graph import Graph
from egcompile.ir.node import Node
from egcompile.ops.core import input
from egcompile.ops.opdef import Kind


def draws(graph: Graph) -> tuple[Node, ...]:
    """The values that are drawn at random: outputs of random ops that the graph reads."""
    return tuple(node for node in graph.nodes if _is_drawn(node))


def with_draws_as_outputs(graph: Graph) -> Graph:
    """`graph` with each draw as a further output."""
    drawn = draws(graph)
    names = tuple(f"draw{i}" for i in range(len(drawn)))
    return Graph(graph.inputs, (*graph.outputs, *drawn), (*graph.output_names, *names), graph.origins)


def with_draws_as_inputs(graph: Graph, needed: Sequence[bool]) -> Graph:
    """`graph` with each draw as a further input.

    Raises NoGradientRule where a draw depends on an input in `needed`: its gradient would be lost.
    """
    drawn = draws(graph)
    paths = dependent(graph.nodes, [i for i, need in zip(graph.inputs, needed, strict=True) if need])
    for node in drawn:
        if node in paths:
            op = node.inputs[0].op if node.op.kind is Kind.PROJECTION else node.op
            places = ", ".join(sorted(graph.origins.get(node, ()))) or "unknown place"
            raise NoGradientRule(
                f"{op.name} draws from what needs a gradient ({places}): it has no second derivative"
            )
    leaves = {n: input(name=f"draw{i}", shape=n.shape, dtype=n.dtype) for i, n in enumerate(drawn)}
    graph = Graph(graph.inputs, (*graph.outputs, *leaves.values()), (), graph.origins)
    replaced = graph.rewrite(
        lambda node, operands: leaves.get(node) or Node.make(node.op, operands, node.attrs)
    )
    count = len(graph.outputs) - len(leaves)
    return Graph((*replaced.inputs, *leaves.values()), replaced.outputs[:count], (), replaced.origins)


def _is_drawn(node: Node) -> bool:
    if node.op.kind is Kind.PROJECTION:
        return node.inputs[0].op.random
    return node.op.random and not isinstance(node.type, tuple)
