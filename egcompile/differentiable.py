"""Where cotangents go: along which paths, and through which ops that have no derivative of their own.

An op without a row in `VJPS` for the cotangents that reach it is replaced by its definition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from egcompile.errors import NoGradientRule
from egcompile.ir.graph import Graph
from egcompile.ir.node import Node
from egcompile.ir.types import TensorType, is_differentiable
from egcompile.ops.core import input
from egcompile.ops.opdef import Kind
from egcompile.rules import VJPS, Vjp


def carries_gradient(node: Node) -> bool:
    """Whether any output of a node is of a type that has gradients."""
    types = (node.type,) if isinstance(node.type, TensorType) else node.type
    return any(is_differentiable(t.dtype) for t in types)


def dependent(nodes: Iterable[Node], sources: Collection[Node]) -> set[Node]:
    """The nodes, in topological order, with a differentiable path from one of `sources`; these included."""
    found = {source for source in sources if carries_gradient(source)}
    for node in nodes:
        if carries_gradient(node) and any(node.inputs[i] in found for i in _differentiable(node)):
            found.add(node)
    return found


def gradient_operands(node: Node, cotangents: Collection[int], paths: Collection[Node]) -> list[int]:
    """The positions of the operands that get a cotangent: on a path, and not None in the op's row.

    Raises NoGradientRule for an opaque op that PyTorch has no derivative for.
    """
    positions = [i for i in _differentiable(node) if node.inputs[i] in paths]
    row = row_of(node, cotangents)
    if row is None and node.op.derivative is not None:
        return list(node.op.derivative(node, _examples(node, cotangents), positions))
    if row is None or node.op.variadic:
        return positions
    return [i for i in positions if row.results[i] is not None]


def _examples(node: Node, cotangents: Collection[int]) -> dict[int, Node]:
    outputs = tuple(node) if isinstance(node.type, tuple) else (node,)
    types = {i: outputs[i].tensor for i in sorted(cotangents)}
    return {i: input(name=f"%ct{i}", shape=t.shape, dtype=t.dtype) for i, t in types.items()}


def row_of(node: Node, cotangents: Iterable[int]) -> Vjp | None:
    """The derivative of a node's op for the outputs that have a cotangent."""
    return VJPS.get((node.op.name, tuple(sorted(cotangents))))


def reached(
    nodes: Sequence[Node], paths: Collection[Node], seeds: Iterable[Node]
) -> dict[Node, frozenset[int]]:
    """The nodes that a cotangent reaches, last first, and at which of their outputs."""
    outputs: dict[Node, set[int]] = defaultdict(set)
    for seed in seeds:
        if seed in paths:
            outputs[seed].add(0)
    found: dict[Node, frozenset[int]] = {}
    for node in reversed(nodes):
        if node not in outputs:
            continue
        found[node] = frozenset(outputs[node])
        if node.op.kind is Kind.PROJECTION:
            outputs[node.inputs[0]].add(node.attr("index"))
            continue
        for i in gradient_operands(node, found[node], paths):
            outputs[node.inputs[i]].add(0)
    return found


def with_derivatives(
    graph: Graph, needed: Sequence[bool], wanted: Sequence[bool]
) -> tuple[Graph, set[Node], dict[Node, frozenset[int]]]:
    """`graph` with definitions in place of ops that have no row; its differentiable paths; what is reached.

    `needed` says which inputs get a gradient, `wanted` which outputs have a cotangent. Raises NoGradientRule
    for an op that has neither row nor definition.
    """
    while True:
        nodes = graph.nodes
        paths = dependent(nodes, [i for i, wants in zip(graph.inputs, needed, strict=True) if wants])
        seeds = [o for o, has in zip(graph.outputs, wanted, strict=True) if has]
        found = reached(nodes, paths, seeds)
        missing = {
            node
            for node, outputs in found.items()
            if node.op.kind not in (Kind.LEAF, Kind.PROJECTION)
            and node.op.derivative is None
            and row_of(node, outputs) is None
        }
        if not missing:
            return graph, paths, found
        for node in missing:
            if node.op.definition is None:
                raise NoGradientRule(
                    f"{node.op.name} has no derivative{_at(graph, node)}: {node}\n"
                    "give it a row in egcompile.rules.backward, or detach what it computes"
                )
        graph = _with_definitions(graph, missing)


def _with_definitions(graph: Graph, which: Collection[Node]) -> Graph:
    """`graph` with the definition in place of each of these nodes, which hands on its origin."""
    new: dict[Node, Node] = {}
    parts: dict[Node, tuple[Node, ...]] = {}
    origins: dict[Node, frozenset[str]] = {}

    def note(node: Node, origin: frozenset[str]) -> None:
        if origin:
            origins[node] = origins.get(node, frozenset()) | origin

    for node in graph.nodes:
        origin = graph.origins.get(node, frozenset())
        if node.op.kind is Kind.PROJECTION and node.inputs[0] in parts:
            new[node] = parts[node.inputs[0]][node.attr("index")]
            note(new[node], origin)
            continue
        inputs = tuple(new[i] for i in node.inputs)
        if node not in which:
            new[node] = node if inputs == node.inputs else Node.make(node.op, inputs, node.attrs)
            note(new[node], origin)
            continue
        assert node.op.definition is not None
        result = node.op.definition(*inputs, **dict(zip(node.op.attr_names, node.attrs, strict=True)))
        parts[node] = (result,) if isinstance(result, Node) else tuple(result)
        new[node] = parts[node][0]
        for inner in between(inputs, parts[node]):
            note(inner, origin)
    outputs = tuple(new[o] for o in graph.outputs)
    return Graph(graph.inputs, outputs, graph.output_names, origins)


def between(inputs: Sequence[Node], results: Sequence[Node]) -> set[Node]:
    """The nodes that compute `results` from `inputs`."""
    found: set[Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node not in found and node not in inputs:
            found.add(node)
            stack.extend(node.inputs)
    return found


def _differentiable(node: Node) -> list[int]:
    if not node.op.nondifferentiable:
        return list(range(len(node.inputs)))
    return [i for i, name in enumerate(node.op.operands) if name not in node.op.nondifferentiable]


def _at(graph: Graph, node: Node) -> str:
    origin = graph.origins.get(node)
    return f" ({', '.join(sorted(origin))})" if origin else ""
