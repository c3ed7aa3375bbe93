"""Expands a kernel's body to primitives: ops with a scalar expression, movement, reductions, contractions."""

from __future__ import annotations

import math

from egcompile.errors import CompileError
from egcompile.ir.graph import Graph
from egcompile.ir.node import Node, topological
from egcompile.ops.build import cast_to, constant
from egcompile.ops.core import full
from egcompile.ops.movement import cat
from egcompile.ops.opdef import Kind


def lower(graph: Graph) -> Graph:
    """`graph` with every definition expanded, casts to their own type and detaches dropped.

    A reduction over axes of size 1 is its operand. What has no elements is gone: a sum or a contraction
    over an empty axis is 0, a mean NaN. Raises CompileError for an op that is one call of ATen, and for an
    empty axis that has no largest element.
    """
    done: dict[Node, tuple[Node, ...]] = {node: (node,) for node in graph.inputs}
    outputs = tuple(_expand(output, done)[0] for output in graph.outputs)
    return Graph(graph.inputs, outputs, graph.output_names, graph.origins)


def _expand(root: Node, done: dict[Node, tuple[Node, ...]]) -> tuple[Node, ...]:
    for node in topological([root]):
        if node not in done:
            done[node] = _lowered(node, tuple(done[i] for i in node.inputs))
    return done[root]


def _lowered(node: Node, operands: tuple[tuple[Node, ...], ...]) -> tuple[Node, ...]:
    if node.op.kind is Kind.PROJECTION:
        return (operands[0][node.attr("index")],)
    inputs = tuple(values[0] for values in operands)
    defined = node.op.kind is Kind.COMPOSITE or (node.op.kind is Kind.POINTWISE and node.op.scalar is None)
    if defined and node.op.definition is not None:
        leaves, results = node.op.define(tuple(i.type for i in inputs), node.attrs)
        bound: dict[Node, tuple[Node, ...]] = {
            leaf: (value,) for leaf, value in zip(leaves, inputs, strict=True)
        }
        return tuple(_expand(result, bound)[0] for result in results)
    if node.op.kind is Kind.EXTERN:
        raise CompileError(f"{node.op.name} runs in ATen and cannot be part of a generated kernel: {node}")
    return (_simplified(node, inputs),)


def _simplified(node: Node, inputs: tuple[Node, ...]) -> Node:
    name = node.op.name
    if name == "stop_gradient":
        return inputs[0]
    if name == "cast":
        return cast_to(inputs[0], node.dtype)
    if node.op.kind is Kind.REDUCTION and node.tensor.numel and not inputs[0].tensor.numel:
        if name in ("amax", "amin"):
            raise CompileError(f"{name} over an empty axis: {node}")
        return constant(math.nan if name == "mean" else 0.0, node)
    if node.op.kind is Kind.REDUCTION and node.shape == inputs[0].shape:
        return inputs[0]
    if node.op.kind is Kind.CONTRACTION and not all(i.tensor.numel for i in inputs):
        return constant(0.0, node)
    if name == "pad" and not inputs[0].tensor.numel:
        return full(value=0.0, shape=node.shape, dtype=node.dtype)
    if name == "cat":
        parts = tuple(i for i in inputs if i.tensor.numel)
        if not parts:
            return full(value=0.0, shape=node.shape, dtype=node.dtype)
        return parts[0] if len(parts) == 1 else cat(*parts, axis=node.attr("axis"))
    attrs = dict(zip(node.op.attr_names, node.attrs, strict=True))
    return node if inputs == node.inputs else node.op(*inputs, **attrs)
