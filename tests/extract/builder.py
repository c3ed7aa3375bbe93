"""E-graphs made by hand: the terms of a joint graph, and pairs of terms that are declared equal."""

from __future__ import annotations

from collections.abc import Sequence

from egcompile.ir.graph import Graph
from egcompile.ir.joint import Joint
from egcompile.ir.node import Node, topological
from egcompile.language.egraph import EClass, EGraph, ENode
from egcompile.ops import input


def leaf(name: str, *shape: int, dtype: object = None) -> Node:
    import torch

    return input(name=name, shape=shape, dtype=dtype or torch.float32)


def forward_only(graph: Graph) -> Joint:
    """A joint graph without gradients."""
    none = (None,) * len(graph.outputs)
    return Joint(graph, graph.inputs, none, graph.outputs, (None,) * len(graph.inputs))


def forward(*outputs: Node) -> Joint:
    """A joint graph without gradients; inputs in the order in which they are met."""
    inputs = tuple(n for n in topological(outputs) if n.op is input)
    return forward_only(Graph(inputs, outputs))


def joint(outputs: Sequence[Node], cotangents: Sequence[Node], gradients: dict[Node, Node]) -> Joint:
    """`gradients` maps primals to what is returned for them; other inputs than cotangents are primals."""
    found = [n for n in topological([*outputs, *gradients.values(), *gradients]) if n.op is input]
    primals = tuple(n for n in found if n not in cotangents)
    returned = tuple(gradients.get(p) for p in primals)
    graph = Graph((*primals, *cotangents), (*outputs, *(g for g in returned if g is not None)))
    return Joint(graph, primals, tuple(cotangents), tuple(outputs), returned)


def egraph(made: Joint, equal: Sequence[tuple[Node, Node]] = ()) -> EGraph:
    """Each node a class, but for `equal` ones and what that makes congruent."""
    nodes = topological([*made.graph.inputs, *made.graph.outputs, *(n for pair in equal for n in pair)])
    number = {node: i for i, node in enumerate(nodes)}
    parent = list(range(len(nodes)))

    def find(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for a, b in equal:
        assert a.type == b.type
        parent[find(number[a])] = find(number[b])
    changed = True
    while changed:
        changed = False
        seen: dict[object, int] = {}
        for node, i in number.items():
            key = (node.op.name, node.attrs, tuple(find(number[k]) for k in node.inputs))
            other = find(seen.setdefault(key, i))
            if other != find(i):
                parent[find(i)] = other
                changed = True
    classes: dict[int, EClass] = {}
    for node, i in number.items():
        made_class = classes.setdefault(find(i), EClass(find(i), node.type))
        enode = ENode(node.op, tuple(find(number[k]) for k in node.inputs), node.attrs)
        if enode not in made_class.nodes:
            made_class.nodes.append(enode)
    return EGraph(classes, made, {node: find(i) for node, i in number.items()})
