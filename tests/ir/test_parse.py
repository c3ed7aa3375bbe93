"""The text form round-trips: same nodes, same names, same origins, same text."""

import math

import pytest
import torch

from egcompile import ops
from egcompile.ir import Graph, TensorType
from egcompile.ir.parse import parse_graph
from egcompile.ops.opdef import REGISTRY


def sample_graphs() -> list[tuple[str, Graph]]:
    graphs = []
    for op in REGISTRY.values():
        for i, sample in enumerate(op.samples):
            types = [TensorType.parse(text) for text in sample.operands]
            inputs = [ops.input(name=f"x{k}", shape=t.shape, dtype=t.dtype) for k, t in enumerate(types)]
            node = op(*inputs, **sample.attrs)
            outputs = tuple(node) if isinstance(node.type, tuple) else (node,)
            origin = frozenset({"layers.0.mlp", "model.py:12"})
            graphs.append((f"{op.name}-{i}", Graph(tuple(inputs), outputs, (), {node: origin})))
    return graphs


@pytest.mark.parametrize(("name", "graph"), sample_graphs(), ids=[name for name, _ in sample_graphs()])
def test_every_op_round_trips(name: str, graph: Graph) -> None:
    parsed = parse_graph(str(graph))
    assert str(parsed) == str(graph)
    assert parsed.inputs == graph.inputs
    assert parsed.outputs == graph.outputs
    assert parsed.output_names == graph.output_names
    assert parsed.origins == graph.origins


def test_values_that_text_could_blur() -> None:
    x = ops.input(name="layers_0_weight", shape=(), dtype=torch.bfloat16)
    values = [math.inf, -math.inf, -0.0, 1e-5, 0.1 + 0.2, math.nan]
    nodes = [ops.full(value=v, shape=(0, 3), dtype=torch.float32) for v in values]
    graph = Graph((x,), (ops.neg(x), *nodes))
    assert parse_graph(str(graph)).outputs == graph.outputs
    assert str(parse_graph(str(graph))) == str(graph)


def test_projections_are_names() -> None:
    x = ops.input(name="x", shape=(4, 8), dtype=torch.float32)
    w = ops.input(name="w", shape=(8,), dtype=torch.float32)
    y, rstd = ops.rms_norm(x, w, eps=1e-5, cast_first=False)
    graph = Graph((x, w), (ops.add(y, y), rstd), ("y", "rstd"))
    text = str(graph)
    assert "%0, %1: f32[4,8], f32[4,1] = rms_norm(%x, %w, eps=1e-05, cast_first=False)" in text
    assert parse_graph(text).outputs == graph.outputs


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1: expected `graph"),
        ("graph(%x: f32[4]):\n  %0: f32[4] = nonsense(%x)\n  return out0=%0", "line 2: no op 'nonsense'"),
        ("graph(%x: f32[4]):\n  %0: f32[4] = neg(%y)\n  return out0=%0", "line 2: %y is not defined"),
        ("graph(%x: f32[4]):\n  %0: f32[5] = neg(%x)\n  return out0=%0", r"line 2: its type is f32\[4\]"),
        ("graph(%x: f32[4]):\n  %0: f32[4] = neg(%x, a=1)\n  return out0=%0", "no attribute 'a'"),
        ("graph(%x: f32[4]):\n  %x: f32[4] = neg(%x)\n  return out0=%x", "%x is defined already"),
        ("graph(%x: f32[4]):\n  %0: f32[4] = neg(%x)\n  return out0=%1", "line 3: %1 is not defined"),
        ("graph(%x: f32[4]):\n  %0: f32[4] = neg(%x)", "line 2: expected `  return"),
    ],
)
def test_errors_name_the_line(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_graph(text)
