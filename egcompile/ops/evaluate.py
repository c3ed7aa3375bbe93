"""The reference meaning of nodes: PyTorch, one op at a time, in whatever dtype the graph has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from egcompile.ir.graph import Graph
from egcompile.ir.node import Node, topological
from egcompile.ops.opdef import Kind, OpDef


def call(op: OpDef, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """`op` on tensors: its `evaluate`, or its definition op by op."""
    if op.evaluate is not None:
        return op.evaluate(*operands, **attrs)
    types = tuple(_type_of(x) for x in operands)
    leaves, results = op.define(types, tuple(attrs[name] for name in op.attr_names))
    values = evaluate_nodes(results, dict(zip(leaves, operands, strict=True)))
    return tuple(values) if len(values) > 1 else values[0]


def evaluate_nodes(roots: Sequence[Node], values: Mapping[Node, Any]) -> list[Any]:
    """The values of `roots`, given those of the inputs; raises KeyError for an input without one."""
    known: dict[Node, Any] = dict(values)
    for node in topological(roots):
        if node in known:
            continue
        if node.op.kind is Kind.LEAF and node.op.name == "input":
            raise KeyError(f"no value for input {node.attr('name')!r}")
        attrs = dict(zip(node.op.attr_names, node.attrs, strict=True))
        known[node] = call(node.op, [known[i] for i in node.inputs], attrs)
    return [known[root] for root in roots]


def evaluate(graph: Graph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a graph, by the reference meaning of each op."""
    return evaluate_nodes(graph.outputs, dict(zip(graph.inputs, inputs, strict=True)))


def _type_of(value: Any) -> Any:
    from egcompile.ir.types import TensorType

    return tuple(map(TensorType.of, value)) if isinstance(value, tuple) else TensorType.of(value)
