"""Derivatives of opaque ops: PyTorch's own, traced for the cotangents and operands that are needed.

    aten_cumsum(x, arguments='[..., 0]')    -->    flip(aten_cumsum(flip(ct), ...))

What is traced is ATen again, and imported as the forward is: native where it can be, opaque where not, so
that it can be differentiated again in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from egcompile.errors import EgcompileError, NoGradientRule
from egcompile.frontend import _torch
from egcompile.frontend._torch import OpOverload
from egcompile.frontend.opaque import arguments_of
from egcompile.ir import Graph, Node, TensorType, topological
from egcompile.ops.opdef import Derivative

Import = Callable[[fx.GraphModule, Sequence[str]], Graph]
"""Imports a functional ATen graph whose inputs get these names; raises EgcompileError."""


@dataclass(frozen=True)
class _Traced:
    """The cotangents of `operands` as a graph over the tensors, the results, and the cotangents of some."""

    graph: Graph
    operands: tuple[int, ...]


def derivative_of(overload: OpOverload, keep: frozenset[OpOverload], importer: Import) -> Derivative:
    """The derivative of the opaque op of `overload`; `keep` are the ops that `importer` takes whole."""

    @functools.cache
    def traced(
        types: tuple[TensorType, ...], arguments: str, cotangents: tuple[int, ...], operands: tuple[int, ...]
    ) -> _Traced:
        try:
            gm, flows = _torch.trace_gradients(
                overload,
                types,
                lambda tensors, device: arguments_of(overload, arguments, tensors, device),
                cotangents,
                operands,
                keep,
            )
            names = [str(node.name) for node in gm.graph.find_nodes(op="placeholder")]
            return _Traced(importer(gm, names), tuple(flows))
        except EgcompileError as error:
            raise NoGradientRule(f"the derivative of {overload} cannot be compiled: {error}") from error

    def derivative(node: Node, cotangents: Mapping[int, Node], operands: Sequence[int]) -> dict[int, Node]:
        if not operands:
            return {}
        types = tuple(operand.tensor for operand in node.inputs)
        found = traced(types, node.attr("arguments"), tuple(cotangents), tuple(operands))
        outputs = tuple(node) if isinstance(node.type, tuple) else (node,)
        values = [*node.inputs, *outputs, *cotangents.values()]
        results = substituted(found.graph, values)
        return dict(zip(found.operands, results, strict=True))

    return derivative


def substituted(graph: Graph, values: Sequence[Node]) -> list[Node]:
    """The outputs of `graph` with `values` for its inputs."""
    new: dict[Node, Node] = dict(zip(graph.inputs, values, strict=True))
    for node in topological(graph.outputs):
        if node not in new:
            new[node] = Node.make(node.op, tuple(new[i] for i in node.inputs), node.attrs)
    return [new[output] for output in graph.outputs]
