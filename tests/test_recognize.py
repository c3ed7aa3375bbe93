"""Recognition: named ops over their written-out forms, one choice a class, provenance kept."""

from __future__ import annotations

import torch

from egcompile import ops
from egcompile.ir import Graph, Node
from egcompile.ir.verify import verify
from egcompile.language import ENode
from egcompile.language.types import infer_types
from egcompile.ops import evaluate
from egcompile.recognize import choose, recognize

from .samples import values_of


def _input(name: str, *shape: int) -> Node:
    return ops.input(name=name, shape=shape, dtype=torch.float64)


def _norm(x: Node, w: Node) -> Node:
    square = ops.mean(ops.mul(x, x), dims=(1,))
    rstd = ops.rsqrt(ops.add(square, ops.constant(1e-6, square)))
    return ops.mul(ops.mul(x, ops.broadcast_to(rstd, x.shape)), ops.broadcast_to(w, x.shape))


def _names(graph: Graph) -> list[str]:
    return [n.op.name for n in graph.nodes if n.op.name not in ("input", "out")]


def test_the_larger_op_wins_and_values_stay() -> None:
    x, w = _input("x", 4, 8), _input("w", 8)
    y = _norm(x, w)
    graph = Graph((x, w), (ops.mul(ops.mul(y, ops.sigmoid(y)), x),))
    found = verify(recognize(graph))
    assert _names(found) == ["rms_norm", "swiglu"]
    values = values_of(graph.inputs)
    torch.testing.assert_close(evaluate(found, values), evaluate(graph, values))


def test_a_part_that_is_read_elsewhere_is_computed_there() -> None:
    """The squares are an output too: the norm is one op all the same, and they are one of their own."""
    x, w = _input("x", 4, 8), _input("w", 8)
    found = recognize(Graph((x, w), (_norm(x, w), ops.mul(x, x))))
    assert sorted(_names(found)) == ["mul", "rms_norm"]


def test_origins_follow_to_the_named_op() -> None:
    x, w = _input("x", 4, 8), _input("w", 8)
    y = _norm(x, w)
    found = recognize(Graph((x, w), (y,), ("y",), {y: frozenset({"model.norm"})}))
    assert found.output_names == ("y",)
    (output,) = found.outputs
    assert found.origins[output] == found.origins[output.inputs[0]] == {"model.norm"}


def test_a_graph_without_such_forms_is_itself() -> None:
    x = _input("x", 4, 8)
    graph = Graph((x,), (ops.exp(ops.sin(x)),))
    assert recognize(graph).outputs == graph.outputs
    assert recognize(graph, rules={}) is graph


def test_a_class_equal_to_a_user_of_its_own_is_no_cycle() -> None:
    """x = neg(neg(x)) in one class: the choice takes x, and its users come after it."""
    x = ENode(ops.input, (), ("x", (4,), torch.float64))
    classes = {0: [ENode(ops.neg, (1,), ()), x], 1: [ENode(ops.neg, (0,), ())]}
    types, _ = infer_types(classes, lambda _: "")
    chosen = choose(classes, types, {})
    assert list(chosen.items()) == [(0, x), (1, classes[1][0])]
