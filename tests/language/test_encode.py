"""Graphs as egglog programs: complete, exact in every attribute, and read back as they went in."""

from __future__ import annotations

import math

import egglog.bindings as egglog
import pytest
import torch

import egcompile
from egcompile import ops
from egcompile.ir import Attr, Graph, Node
from egcompile.language import Session, program_text
from egcompile.language.encode import SORTS, literal
from egcompile.ops.opdef import REGISTRY, OpDef, Sample

from ..samples import IDS, SAMPLES, graph_of

READ = {"int": "value_to_i64", "float": "value_to_f64", "bool": "value_to_bool", "str": "value_to_string"}


def _input(name: str, *shape: int) -> Node:
    return ops.input(name=name, shape=shape, dtype=torch.float32)


def _run(text: str) -> egglog.EGraph:
    egraph = egglog.EGraph()
    egraph.run_program(*egraph.parse_program(text))
    return egraph


FLOATS = [1.0, -0.5, 0.1, 1e-05, 1e300, 5e-324, math.pi, math.inf, -math.inf, 2.0**53 + 2]


@pytest.mark.parametrize(
    ("value", "kind"),
    [(0, "int"), (-(2**40), "int"), (True, "bool"), (False, "bool"), ("", "str"), ('a "b"\\c\n', "str")]
    + [(x, "float") for x in FLOATS],
)
def test_literals_are_exact(value: Attr, kind: str) -> None:
    egraph = _run(f"(function held () {SORTS[kind]} :no-merge) (set (held) {literal(value, kind)})")
    (row,) = egraph.freeze().functions["held"].rows
    assert getattr(egraph, READ[kind])(row.output) == value


def test_nan_is_a_literal() -> None:
    x = ops.full(value=math.nan, shape=(2,), dtype=torch.float32)
    session = Session([ops.full])
    session.load([x])
    ((node,),) = session.read().classes.values()
    assert math.isnan(node.attrs[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(("op", "sample"), SAMPLES, ids=IDS)
def test_every_op_is_read_back(op: OpDef, sample: Sample) -> None:
    graph = graph_of(op, sample)
    session = Session({n.op for n in graph.nodes})
    session.load(graph.nodes)
    contents = session.read()
    class_of = {node: contents.class_of[session.encoder.number[node]] for node in graph.nodes}
    assert len(set(class_of.values())) == len(class_of)
    for node, c in class_of.items():
        (enode,) = contents.classes[c]
        assert enode.op is node.op
        assert enode.attrs == node.attrs
        assert enode.operands == tuple(class_of[i] for i in node.inputs)


@pytest.mark.parametrize(("op", "sample"), SAMPLES, ids=IDS)
def test_the_program_of_every_op_runs_alone(op: OpDef, sample: Sample) -> None:
    graph = graph_of(op, sample)
    functions = _run(program_text(graph)).freeze().functions
    tensors = [n for n in graph.nodes if not isinstance(n.type, tuple)]
    assert len(functions["shape"].rows) == len(functions["dtype"].rows) == len(tensors)


def test_program_text_is_readable() -> None:
    x, w = _input("x", 4, 8), _input("w", 8, 3)
    lines = program_text(Graph((x, w), (ops.sum(ops.matmul(x, w), dims=(1,)),))).splitlines()
    assert "(constructor Matmul (Tensor Tensor) Tensor)" in lines
    assert '(set (node 0) (Input "x" (vec-of 4 8) "f32"))' in lines
    assert "(set (node 2) (Matmul (node 0) (node 1)))" in lines
    assert "(set (node 3) (Sum (node 2) (vec-of 1)))" in lines
    assert '(typed 3 "f32[4,1]")' in lines


def test_no_op_has_a_name_of_egglogs() -> None:
    """`log`, `neg` and others are primitives of egglog; all ops together are a program."""
    Session(REGISTRY.values())


def test_a_graph_whose_one_minus_is_in_a_constant() -> None:
    """egglog has no -0.0, which is written as a negation, wherever the graph and the rules have none."""
    x = _input("x", 4)
    minus = ops.full(value=-0.0, shape=(4,), dtype=torch.float32)
    graph = Graph((x,), (ops.maximum(x, minus),))
    _run(program_text(graph))
    for plan in (egcompile.optimize(graph, "cpu", mode) for mode in ("exact", "greedy", "unfused")):
        (y,) = plan.run([torch.full((4,), -1.0)])
        assert torch.signbit(y).all() and not y.any()


def test_equal_work_is_one_class_and_minus_zero_is_not_zero() -> None:
    x = _input("x", 4)
    zero, minus = (ops.full(value=v, shape=(4,), dtype=torch.float32) for v in (0.0, -0.0))
    session = Session(REGISTRY.values())
    session.load([x, zero, minus])
    contents = session.read()
    a, b = (contents.class_of[session.encoder.number[n]] for n in (zero, minus))
    assert a != b
    assert [n.op for n in contents.classes[b]] == [ops.neg]
    assert contents.classes[b][0].operands == (a,)


def test_a_long_chain_of_nodes() -> None:
    x = _input("x", 4)
    nodes = [x]
    for _ in range(3000):
        nodes.append(ops.exp(nodes[-1]))
    session = Session([ops.input, ops.exp])
    session.load(nodes)
    assert session.size() == 3001
