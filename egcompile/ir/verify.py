"""Checks that a graph is what the stages may assume. `EGCOMPILE_CHECK=1` runs it between passes."""

from __future__ import annotations

from collections.abc import Iterable

from egcompile.errors import TypeMismatch
from egcompile.ir.graph import Graph
from egcompile.ir.joint import Joint
from egcompile.ir.node import Node, topological
from egcompile.ops.opdef import REGISTRY


def verify(graph: Graph, stage: str = "") -> Graph:
    """The graph itself, checked; raises TypeMismatch naming `stage` and the node that is wrong.

    Each node has the type that its op infers, is the interned node of its op, operands and attributes,
    and each input that the outputs reach is declared, once and under one name.
    """
    at = f" after {stage}" if stage else ""
    _verify_inputs(graph.inputs, at)
    if len(graph.output_names) != len(graph.outputs):
        raise TypeMismatch(f"{len(graph.outputs)} outputs have {len(graph.output_names)} names{at}")
    declared = set(graph.inputs)
    for node in graph.nodes:
        _verify_node(node, at)
        if node.op.name == "input" and node not in declared:
            raise TypeMismatch(f"input {node.attr('name')!r} is read but not declared{at}")
    for node in graph.outputs:
        if isinstance(node.type, tuple):
            raise TypeMismatch(f"an output is the tuple {node!r}{at}; return its projections")
    return graph


def verify_joint(joint: Joint, stage: str = "") -> Joint:
    """The joint graph itself, checked as `verify` does, and its parts against each other."""
    graph = verify(joint.graph, stage)
    at = f" after {stage}" if stage else ""
    inputs = (*joint.primals, *(ct for ct in joint.cotangents if ct is not None))
    outputs = (*joint.outputs, *(g for g in joint.gradients if g is not None))
    if graph.inputs != inputs or graph.outputs != outputs:
        raise TypeMismatch(f"the joint graph's inputs or outputs are not its parts{at}")
    _verify_pairs("cotangent", joint.cotangents, joint.outputs, at)
    _verify_pairs("gradient", joint.gradients, joint.primals, at)
    cotangents = {ct for ct in joint.cotangents if ct is not None}
    for node in topological(joint.outputs):
        if node in cotangents:
            raise TypeMismatch(f"an output reads the cotangent {node.attr('name')!r}{at}")
    return joint


def _verify_inputs(inputs: Iterable[Node], at: str) -> None:
    names: set[str] = set()
    for node in inputs:
        if node.op.name != "input":
            raise TypeMismatch(f"declared as an input{at}: {node!r}")
        if node.attr("name") in names:
            raise TypeMismatch(f"two inputs are named {node.attr('name')!r}{at}")
        names.add(node.attr("name"))


def _verify_node(node: Node, at: str) -> None:
    if REGISTRY.get(node.op.name) is not node.op:
        raise TypeMismatch(f"{node.op.name!r} is not the registered op of that name{at}")
    if Node.make(node.op, node.inputs, node.attrs) is not node:
        raise TypeMismatch(f"not interned{at}: {node!r}")
    inferred = node.op.infer(tuple(i.type for i in node.inputs), node.attrs)
    if inferred != node.type:
        raise TypeMismatch(f"{node!r} should be {inferred}{at}")


def _verify_pairs(what: str, values: tuple[Node | None, ...], of: tuple[Node, ...], at: str) -> None:
    if len(values) != len(of):
        raise TypeMismatch(f"{len(of)} values have {len(values)} {what}s{at}")
    for value, like in zip(values, of, strict=True):
        if value is not None and value.type != like.type:
            raise TypeMismatch(f"the {what} of {like.type} is {value.type}{at}")
