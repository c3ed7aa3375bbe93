"""Every op's samples as graphs and values: what registry-driven tests run over."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from egcompile import ops
from egcompile.ir import Graph, Node, TensorType
from egcompile.ops.opdef import REGISTRY, OpDef, Sample

SAMPLES: list[tuple[OpDef, Sample]] = [(op, sample) for op in REGISTRY.values() for sample in op.samples]
IDS = [f"{op.name}-{i}" for op in REGISTRY.values() for i, _ in enumerate(op.samples)]


def graph_of(op: OpDef, sample: Sample) -> Graph:
    """The op alone, with all its outputs."""
    types = [TensorType.parse(text) for text in sample.operands]
    inputs = [ops.input(name=f"x{i}", shape=t.shape, dtype=t.dtype) for i, t in enumerate(types)]
    node: Node = op(*inputs, **sample.attrs)
    return Graph(tuple(inputs), tuple(node) if isinstance(node.type, tuple) else (node,))


def values_of(inputs: Sequence[Node], low: float = -2.0, high: float = 2.0) -> list[torch.Tensor]:
    """Uniform values for input nodes; integers have both bounds within."""
    values = []
    for node in inputs:
        if node.dtype.is_floating_point:
            values.append(torch.empty(node.shape, dtype=torch.float64).uniform_(low, high).to(node.dtype))
        elif node.dtype == torch.bool:
            values.append(torch.rand(node.shape) < 0.5)
        else:
            values.append(torch.randint(int(low), int(high) + 1, node.shape, dtype=node.dtype))
    return values
