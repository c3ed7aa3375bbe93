"""Saturation: that it stops, says why, and makes equal only what is equal."""

from __future__ import annotations

import pytest
import torch

from egcompile import ops
from egcompile.derive import derive
from egcompile.errors import SaturationLimit, TypeMismatch
from egcompile.frontend import trace
from egcompile.ir import Graph, Node
from egcompile.ir.joint import Joint
from egcompile.language import EGraph
from egcompile.ops import call
from egcompile.rules.rule import Equations, Float, Rule, Tensor, rule
from egcompile.saturate import Limits, saturate

from .extract.builder import forward_only
from .models import CASES
from .samples import values_of


def _input(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> Node:
    return ops.input(name=name, shape=shape, dtype=dtype)


def _joint(*outputs: Node) -> Joint:
    inputs = [n for n in Graph((), outputs).nodes if n.op is ops.input]
    return forward_only(Graph(tuple(inputs), outputs))


def _only(declare: object) -> dict[str, Rule]:
    assert isinstance(declare, Rule)
    return {declare.name: declare}


def check_classes(egraph: EGraph) -> int:
    """Evaluates every e-node on the values of its operands' classes; how many were compared."""
    primals = egraph.joint.graph.inputs
    low = 0.0 if any(not i.dtype.is_floating_point for i in primals) else -2.0
    inputs = {p.attr("name"): v for p, v in zip(primals, values_of(primals, low, 2.0), strict=True)}
    values: dict[int, object] = {}
    waiting = [(c.id, node) for c in egraph.classes.values() for node in c.nodes]
    compared = 0
    while waiting:
        later = []
        for c, node in waiting:
            if not all(i in values for i in node.operands):
                later.append((c, node))
                continue
            attrs = dict(zip(node.op.attr_names, node.attrs, strict=True))
            if node.op is ops.input:
                value: object = inputs[attrs["name"]]
            else:
                value = call(node.op, [values[i] for i in node.operands], attrs)
            if c in values:
                torch.testing.assert_close(
                    value, values[c], rtol=1e-8, atol=1e-8, msg=lambda m, n=node: f"{n}\n{m}"
                )
                compared += 1
            values.setdefault(c, value)
        assert len(later) < len(waiting), "a class that nothing computes"
        waiting = later
    return compared


@pytest.mark.parametrize("name", CASES)
def test_every_e_node_of_a_models_class_has_one_value(name: str) -> None:
    model, args = CASES[name].make()
    traced = trace(model, args)
    egraph, report = saturate(derive(traced.graph, traced.requires_grad))
    assert report.stopped == "saturated"
    assert report.nodes == sum(len(c.nodes) for c in egraph.classes.values())
    assert report.classes == len(egraph.classes)
    assert check_classes(egraph) >= report.nodes - report.classes


def test_roots_types_and_origins() -> None:
    x, w = _input("x", 4, 8), _input("w", 8, 3)
    y = ops.transpose(ops.transpose(ops.matmul(x, w)))
    graph = Graph((x, w), (y,), origins={y: frozenset({"there"}), y.inputs[0].inputs[0]: frozenset({"here"})})
    egraph, _ = saturate(forward_only(graph))
    (root,) = egraph.roots
    assert root == egraph.class_of[y] == egraph.class_of[y.inputs[0].inputs[0]]
    assert egraph.classes[root].type == y.type
    assert egraph.classes[root].origins == {"here", "there"}
    assert {n.op.name for n in egraph.classes[root].nodes} >= {"matmul", "transpose"}


def test_a_rule_may_ask_for_the_type_of_what_a_rule_has_built() -> None:
    """exp(x) - 1 is built by the first rule and typed in Python; only then can the second match."""
    registry: dict[str, Rule] = {}

    @rule("test/build", {"x": "f64[4]"}, registry=registry)
    def _(x: Tensor) -> Equations:
        return {ops.sin(x): ops.neg(ops.cos(x))}  # not true, and never evaluated

    @rule("test/ask", {"x": "f64[4]"}, registry=registry)
    def _(x: Tensor) -> Equations:
        return {ops.neg(x): ops.mul(x, ops.full(-1.0, ops.shape(x), ops.dtype(x)))}

    egraph, report = saturate(_joint(ops.sin(_input("x", 4))), rules=registry)
    assert {name: matches for name, (matches, _) in report.rules.items()} == {"test/build": 1, "test/ask": 1}
    assert len(egraph.classes[egraph.roots[0]].nodes) == 3


def test_a_limit_is_reported_and_leaves_a_valid_graph() -> None:
    @rule("test/grow", {"x": "f64[4]"}, registry={})
    def grow(x: Tensor) -> Equations:
        return {ops.sin(x): ops.neg(ops.sin(ops.neg(x)))}

    joint = _joint(ops.sin(_input("x", 4)))
    with pytest.warns(SaturationLimit, match="limit of 5 iterations"):
        egraph, report = saturate(joint, rules=_only(grow), limits=Limits(iterations=5))
    assert report.iterations == 5
    with pytest.warns(SaturationLimit, match="limit of 30 e-nodes"):
        egraph, report = saturate(joint, rules=_only(grow), limits=Limits(nodes=30))
    assert report.nodes >= 30
    assert check_classes(egraph)
    with pytest.warns(SaturationLimit, match="seconds"):
        saturate(joint, rules=_only(grow), limits=Limits(seconds=0.0))


def test_only_rules_of_the_phase_and_the_exactness_run() -> None:
    registry: dict[str, Rule] = {}
    for name, options in {
        "test/exact": {},
        "test/early": {"phase": "recognition"},
        "test/rough": {"exactness": "approximate"},
    }.items():

        @rule(name, {"x": "f64[4]"}, registry=registry, **options)
        def _(x: Tensor) -> Equations:
            return {ops.neg(ops.neg(x)): x}

    joint = _joint(ops.neg(ops.neg(_input("x", 4))))
    assert set(saturate(joint, rules=registry)[1].rules) == {"test/exact"}
    _, report = saturate(joint, rules=registry, exactness=("exact", "approximate"))
    assert set(report.rules) == {"test/exact", "test/rough"}


def test_a_rule_that_equates_different_types_is_named() -> None:
    """It forgot the rank: fine for a matrix, wrong for a batch of them."""

    @rule("test/forgets_rank", {"x": "f64[3,4]"}, registry={})
    def wrong(x: Tensor) -> Equations:
        return {ops.transpose(x): ops.permute(x, (1, 0))}

    saturate(_joint(ops.transpose(_input("x", 3, 4))), rules=_only(wrong))
    with pytest.raises(TypeMismatch, match=r"does not permute.*test/forgets_rank"):
        saturate(_joint(ops.transpose(_input("x", 2, 3, 4))), rules=_only(wrong))

    @rule("test/drops_axes", {"x": "f64[3,4]"}, registry={})
    def drops(x: Tensor) -> Equations:
        return {ops.sin(x): ops.sum(x, (0,))}

    with pytest.raises(TypeMismatch, match=r"(?s)different types equal.*= sin\(.*= sum\(.*test/drops_axes"):
        saturate(_joint(ops.sin(_input("x", 3, 4))), rules=_only(drops))


def test_the_report_is_a_short_table() -> None:
    x = _input("x", 4, 8)
    _, report = saturate(_joint(ops.transpose(ops.transpose(x))))
    lines = str(report).splitlines()
    assert lines[0].startswith("saturated after ")
    assert any("movement/transpose_transpose" in line and "matches" in line for line in lines[1:])
    assert all(seconds > 0 for _, seconds in report.rules.values())


def test_a_rule_on_floats_computes() -> None:
    @rule("test/double_scale", {"x": "f64[4]", "a": 2.0, "b": 4.0}, registry={})
    def fold(x: Tensor, a: Float, b: Float) -> Equations:
        scale = ops.full(a, ops.shape(x), ops.dtype(x))
        twice = ops.full(b, ops.shape(x), ops.dtype(x))
        return {ops.mul(ops.mul(x, scale), twice): ops.mul(x, ops.full(a * b, ops.shape(x), ops.dtype(x)))}

    x = _input("x", 4)
    y = ops.mul(ops.mul(x, ops.constant(1.5, x)), ops.constant(-4.0, x))
    egraph, _ = saturate(_joint(y), rules=_only(fold))
    assert check_classes(egraph) == 1
    assert any(n.attrs[0] == -6.0 for c in egraph.classes.values() for n in c.nodes if n.op is ops.full)
