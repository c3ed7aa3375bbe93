"""The e-graph as dense tables, without the choices that no plan can use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from egcompile.errors import ExtractionError
from egcompile.extract.fusible import LOOPS, Role, Site
from egcompile.extract.settled import settled
from egcompile.ir.joint import Joint
from egcompile.ir.node import attr_key
from egcompile.ir.types import TensorType, ValueType
from egcompile.language.egraph import EGraph, ENode
from egcompile.ops.opdef import Kind

LARGEST_CYCLE = 300
"""Classes of a cycle up to which choices that only lead round it are found beforehand; beyond, by cuts."""


@dataclass(slots=True)
class Choices:
    """Classes and e-nodes by dense index; a class comes after its operands, cycles aside.

    ids, types, nodes       per class: its id in the e-graph, its type, its e-nodes
    enodes, owner, operands, sites     per e-node: itself, its class, its operands' classes, its site
    consumers               per class: (e-node, operand position) of what reads it
    original                per class: the e-node that the joint graph has for it, None for a new class
    roots                   classes of `joint.graph.outputs`, in order
    """

    joint: Joint
    ids: list[int]
    types: list[ValueType]
    nodes: list[list[int]]
    enodes: list[ENode]
    owner: list[int]
    operands: list[tuple[int, ...]]
    sites: list[Site]
    consumers: list[list[tuple[int, int]]]
    original: list[int | None]
    roots: list[int]

    def tensor(self, c: int) -> TensorType:
        type = self.types[c]
        assert isinstance(type, TensorType)
        return type

    def role(self, n: int) -> Role:
        return self.sites[n].role

    def loops(self, c: int) -> list[int]:
        """The e-nodes of a class that generated loops can compute."""
        return [n for n in self.nodes[c] if self.sites[n].role in LOOPS]

    @property
    def live(self) -> int:
        """Classes with two or more usable e-nodes."""
        return sum(len(nodes) > 1 for nodes in self.nodes)


def choices(egraph: EGraph) -> Choices:
    """The usable part of an e-graph; raises ExtractionError naming an output that nothing can compute."""
    nodes = _reachable(egraph)
    order = _derivable(nodes, ())
    for root, name in zip(egraph.roots, egraph.joint.graph.output_names):
        if root not in order:
            raise ExtractionError(f"nothing computes output {name!r}: each of its e-nodes lacks an operand")
    nodes = {c: [n for n in nodes[c] if all(k in order for k in n.operands)] for c in order}
    nodes = _without_round_trips(nodes, order)
    table = _tables(egraph, nodes, order)
    for c in settled(table):
        for n in table.nodes[c]:
            table.sites[n] = replace(table.sites[n], settled=True)
    return table


def _reachable(egraph: EGraph) -> dict[int, list[ENode]]:
    found: dict[int, list[ENode]] = {}
    stack = list(egraph.roots)
    while stack:
        c = stack.pop()
        if c not in found:
            found[c] = [n for n in egraph.classes[c].nodes if c not in n.operands]
            stack.extend(k for n in found[c] for k in n.operands)
    return found


def _derivable(nodes: dict[int, list[ENode]], banned: Iterable[int]) -> dict[int, int]:
    """The classes that can be computed without the `banned` ones, numbered in an order in which they can."""
    waiting: dict[int, list[list[int]]] = {}
    order: dict[int, int] = {}
    queue: deque[int] = deque()
    refused = set(banned)
    known: set[int] = set()
    for c, alternatives in nodes.items():
        for n in alternatives:
            missing = [k for k in dict.fromkeys(n.operands) if k not in known]
            entry = [len(missing), c]
            if not missing and c not in refused and c not in known:
                known.add(c)
                queue.append(c)
            for k in missing:
                waiting.setdefault(k, []).append(entry)
    while queue:
        c = queue.popleft()
        order[c] = len(order)
        for entry in waiting.get(c, ()):
            entry[0] -= 1
            if not entry[0] and entry[1] not in known and entry[1] not in refused:
                known.add(entry[1])
                queue.append(entry[1])
    return order


def _without_round_trips(nodes: dict[int, list[ENode]], order: dict[int, int]) -> dict[int, list[ENode]]:
    """Drops e-nodes whose operand can only be computed from the e-node's own class.

    x = transpose(y) where y = transpose(x) alone: no plan can use it, and a relaxation would.
    """
    result = dict(nodes)
    for cycle in strong_components({c: _operand_classes(ns) for c, ns in nodes.items()}):
        if not 1 < len(cycle) <= LARGEST_CYCLE:
            continue
        inside = set(cycle)
        part = {c: [_restricted(n, inside) for n in nodes[c]] for c in cycle}
        for c in cycle:
            without = _derivable(part, (c,))
            result[c] = [n for n in nodes[c] if all(k in without or k not in inside for k in n.operands)]
    return result


def _restricted(n: ENode, inside: set[int]) -> ENode:
    return ENode(n.op, tuple(k for k in n.operands if k in inside), n.attrs)


def _operand_classes(alternatives: Sequence[ENode]) -> list[int]:
    return list(dict.fromkeys(k for n in alternatives for k in n.operands))


def strong_components(successors: dict[int, list[int]]) -> list[list[int]]:
    """Tarjan's strongly connected components, each after those that it leads to."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    found: list[list[int]] = []
    for start in successors:
        if start in index:
            continue
        work = [(start, iter(successors[start]))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            v, rest = work[-1]
            for w in rest:
                if w not in index:
                    index[w] = low[w] = len(index)
                    stack.append(w)
                    on_stack.add(w)
                    work.append((w, iter(successors[w])))
                    break
                if w in on_stack:
                    low[v] = min(low[v], index[w])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[v])
                if low[v] == index[v]:
                    component = []
                    while True:
                        w = stack.pop()
                        on_stack.remove(w)
                        component.append(w)
                        if w == v:
                            break
                    found.append(component)
    return found


def _tables(egraph: EGraph, nodes: dict[int, list[ENode]], order: dict[int, int]) -> Choices:
    used: dict[int, list[int]] = {}
    stack = list(egraph.roots)
    while stack:
        c = stack.pop()
        if c not in used:
            used[c] = _operand_classes(nodes[c])
            stack.extend(used[c])
    position: dict[int, int] = {}
    for component in strong_components({c: used[c] for c in sorted(used, key=order.__getitem__)}):
        for c in sorted(component, key=order.__getitem__):
            position[c] = len(position)

    roots = [position[c] for c in egraph.roots]
    table = Choices(egraph.joint, list(position), [], [], [], [], [], [], [], [], roots)
    numbered: dict[tuple[object, ...], int] = {}
    for c in position:
        table.types.append(egraph.classes[c].type)
        table.nodes.append([])
        table.consumers.append([])
    for c, i in position.items():
        leaves = [n for n in nodes[c] if n.op.kind is Kind.LEAF]
        for enode in leaves[:1] or nodes[c]:  # nothing is cheaper than an input or a constant
            n = len(table.enodes)
            operands = tuple(position[k] for k in enode.operands)
            key = (i, enode.op.name, operands, tuple(map(attr_key, enode.attrs)))
            if key in numbered:
                continue
            numbered[key] = n
            table.nodes[i].append(n)
            table.enodes.append(enode)
            table.owner.append(i)
            table.operands.append(operands)
            types = tuple(table.types[k] for k in operands)
            table.sites.append(Site.make(enode.op, enode.attrs, types, table.types[i]))
            for p, k in enumerate(operands):
                table.consumers[k].append((n, p))
    table.original = _original(egraph, position, numbered, table)
    return table


def _original(
    egraph: EGraph, position: dict[int, int], numbered: dict[tuple[object, ...], int], table: Choices
) -> list[int | None]:
    found: list[int | None] = [None] * len(position)
    for node in egraph.joint.graph.nodes:
        c = position.get(egraph.class_of.get(node, -1))
        if c is None or found[c] is not None:
            continue
        operands = tuple(position.get(egraph.class_of[i]) for i in node.inputs)
        found[c] = numbered.get((c, node.op.name, operands, tuple(map(attr_key, node.attrs))))
        if found[c] is None:  # written otherwise in the e-graph, or a round trip
            earlier = (n for n in table.nodes[c] if all(k < c for k in table.operands[n]))
            found[c] = next(earlier, None)
    return found
