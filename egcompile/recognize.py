"""Recognition: the forward at the level of named ops, before its backward is derived.

Only rules of phase `recognition` run: both of their sides have one gradient, which equal values need not.
"""

from __future__ import annotations

import functools
import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from egcompile.ir.graph import Graph
from egcompile.ir.node import Attr, Node, topological
from egcompile.ir.types import TensorType, ValueType
from egcompile.language.egraph import ENode
from egcompile.language.ruleset import Rest, run_to_rest, session_with, usable
from egcompile.language.session import Session
from egcompile.ops.opdef import Kind, OpDef
from egcompile.rules import RULES
from egcompile.rules.rule import Exactness, Rule

ITERATIONS = 16
"""Named ops make up larger ones (silu, then swiglu): the depth to which that is followed."""


def recognize(
    graph: Graph,
    *,
    exactness: Collection[Exactness] = ("exact", "reassociating"),
    rules: Mapping[str, Rule] = RULES,
) -> Graph:
    """`graph` with the written-out forms of named ops replaced by these; linear in its size."""
    nodes = graph.nodes
    found = usable(rules.values(), "recognition", exactness, {node.op for node in nodes})
    if not found:
        return graph
    session = session_with(nodes, found)
    limit = f"limit of {ITERATIONS} iterations"
    rest = run_to_rest(session, lambda iterations: limit if iterations >= ITERATIONS else "")
    return _rebuild(graph, nodes, session, rest)


def _rebuild(graph: Graph, nodes: Sequence[Node], session: Session, rest: Rest) -> Graph:
    """The graph of the chosen e-nodes. What a class stood for in the model, its node stands for."""
    contents = rest.contents
    class_of = {node: contents.class_of[session.encoder.number[node]] for node in nodes}
    traced = {
        class_of[node]: ENode(node.op, tuple(class_of[i] for i in node.inputs), node.attrs)
        for node in reversed(nodes)
    }
    chosen = choose(contents.classes, rest.types, traced)
    built: dict[int, Node] = {}
    for c, enode in chosen.items():  # operands come first
        operands = tuple(built[i] for i in enode.operands)
        built[c] = Node.make(enode.op, operands, enode.attrs)

    outputs = tuple(built[class_of[o]] for o in graph.outputs)
    origins: dict[Node, frozenset[str]] = {}
    for node in nodes:
        new, origin = built[class_of[node]], graph.origins.get(node, frozenset())
        for named in (new, *new.inputs) if new.op.kind is Kind.PROJECTION else (new,):
            origins[named] = origins.get(named, frozenset()) | origin
    kept = set(topological((*graph.inputs, *outputs)))
    origins = {node: origin for node, origin in origins.items() if node in kept and origin}
    return Graph(graph.inputs, outputs, graph.output_names, origins)


def choose(
    classes: Mapping[int, Sequence[ENode]], types: Mapping[int, ValueType], traced: Mapping[int, ENode]
) -> dict[int, ENode]:
    """An e-node for each class, acyclic, operands before users: one of least depth.

    A recognized op is less deep than its written-out form, or as deep where another operand is the deep
    one; then the larger definition wins, then fewer operands, then the form that was traced.
    """
    depth = _depths(classes)
    chosen: dict[int, ENode] = {}

    def rank(c: int, node: ENode) -> tuple[int, int, bool, str]:
        source = chosen[node.operands[0]] if node.op.kind is Kind.PROJECTION else node
        size = _primitives(source.op, tuple(types[i] for i in source.operands), source.attrs)
        return -size, len(set(source.operands)), node != traced.get(c), repr(node)

    # A projection is as deep as its tuple, and comes after it.
    for c in sorted(depth, key=lambda c: (depth[c], isinstance(types[c], TensorType))):
        least = [
            n for n in classes[c] if all(i in depth for i in n.operands) and _depth(n, depth) == depth[c]
        ]
        chosen[c] = least[0] if len(least) == 1 else min(least, key=lambda n: rank(c, n))
    return chosen


def _depths(classes: Mapping[int, Sequence[ENode]]) -> dict[int, int]:
    """The least depth at which each class can be computed: Dijkstra's algorithm, over e-nodes."""
    enodes = [(c, node) for c, nodes in classes.items() for node in nodes]
    waiting = [len(set(node.operands)) for _, node in enodes]
    users: dict[int, list[int]] = defaultdict(list)
    for i, (_, node) in enumerate(enodes):
        for operand in set(node.operands):
            users[operand].append(i)
    heap = [(0, c) for c, node in enodes if not node.operands]
    heapq.heapify(heap)
    depth: dict[int, int] = {}
    while heap:
        least, c = heapq.heappop(heap)
        if c in depth:
            continue
        depth[c] = least
        for user in users[c]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(heap, (_depth(enodes[user][1], depth), enodes[user][0]))
    return depth


def _depth(node: ENode, depth: Mapping[int, int]) -> int:
    if not node.operands:
        return 0
    step = 0 if node.op.kind is Kind.PROJECTION else 1
    return step + max(depth[i] for i in node.operands)


@functools.lru_cache(maxsize=4096)
def _primitives(op: OpDef, types: tuple[ValueType, ...], attrs: tuple[Attr, ...]) -> int:
    """How many primitive ops an op stands for."""
    if op.definition is None:
        return 1
    leaves, results = op.define(types, attrs)
    inner = set(topological(results)) - set(leaves)
    return sum(_primitives(n.op, tuple(i.type for i in n.inputs), n.attrs) for n in inner)
