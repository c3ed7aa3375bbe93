"""The importer apart from its rows: names, bindings, constants, origins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from egcompile import ops
from egcompile.errors import TraceError, UnsupportedOp
from egcompile.frontend import Constant, import_fx
from egcompile.frontend.build import broadcast, pointwise, reshape
from egcompile.frontend.constants import Constants, leaf_of
from egcompile.frontend.importer import identifiers
from egcompile.frontend.origins import module_path, origin_of

aten = torch.ops.aten


def graph_of(
    calls: list[tuple[Any, tuple[Any, ...], Any]], placeholders: list[Any], **attributes: Tensor
) -> fx.GraphModule:
    """Calls whose integer arguments name earlier values: placeholders, attributes, then calls."""
    graph = fx.Graph()
    values: list[fx.Node] = []
    for i, example in enumerate(placeholders):
        values.append(graph.placeholder(f"p{i}"))
        values[-1].meta["val"] = example
    root = torch.nn.Module()
    for name, tensor in attributes.items():
        setattr(root, name, tensor)
        values.append(graph.get_attr(name))
    for op, arguments, result in calls:
        values.append(graph.call_function(op, tuple(values[a] for a in arguments)))
        values[-1].meta["val"] = result
    graph.output((values[-1],))
    return fx.GraphModule(root, graph)


def test_names_become_unique_identifiers() -> None:
    found = identifiers(["layers.0.weight", "layers_0.weight", "0.bias", "x", "x", ""])
    assert found == ["layers_0_weight", "layers_0_weight_2", "_0_bias", "x", "x_2", "x_3"]


def test_placeholders_of_one_name_are_one_input() -> None:
    x = torch.rand(2)
    gm = graph_of([(aten.add.Tensor, (0, 1), x)], [x, x])
    graph = import_fx(gm, ["w", "w"]).graph
    assert len(graph.inputs) == 1
    assert graph.outputs[0].inputs == graph.inputs * 2
    with pytest.raises(TraceError, match=r"input w is both f32\[2\] and f32\[3\]"):
        import_fx(graph_of([(aten.add.Tensor, (0, 1), x)], [x, torch.rand(3)]), ["w", "w"])


def test_constants_fold_or_become_inputs() -> None:
    x = torch.rand(3)
    table = torch.tensor([1.0, 2.0, 5.0])
    gm = graph_of([(aten.add.Tensor, (0, 1), x), (aten.add.Tensor, (3, 2), x)], [x], a=torch.ones(3), b=table)
    imported = import_fx(gm, ["x"])
    assert [i.attr("name") for i in imported.graph.inputs] == ["x", "constant_0"]
    assert imported.constants == (table,)
    (found,) = ops.evaluate(imported.graph, [x, *imported.constants])
    torch.testing.assert_close(found, x + 1 + table)


def test_python_values_are_bound_and_returned() -> None:
    gm = graph_of([(aten.neg.default, (0,), torch.rand(2))], [torch.rand(2), 3])
    (output,) = gm.graph.find_nodes(op="output")
    output.args = ((output.args[0][0], None, gm.graph.find_nodes(op="placeholder")[1]),)
    assert import_fx(gm, ["x", Constant(3)]).outputs == (0, Constant(None), Constant(3))


def test_chance_is_not_a_constant() -> None:
    shape = torch.rand(3)
    gm = graph_of([(aten.rand_like.default, (0,), shape)], [], a=torch.ones(3))
    with pytest.raises(UnsupportedOp, match="rand_like"):
        import_fx(gm, [], opaque=False)
    (drawn,) = import_fx(gm, []).graph.outputs
    assert drawn.op.random


def test_equal_work_has_every_origin() -> None:
    x = torch.rand(2)
    gm = graph_of(
        [(aten.exp.default, (0,), x), (aten.exp.default, (0,), x), (aten.add.Tensor, (1, 2), x)], [x]
    )
    calls = gm.graph.find_nodes(op="call_function", target=aten.exp.default)
    for i, node in enumerate(calls):
        node.meta["nn_module_stack"] = {"": ("", "M"), "m": (f"layers.{i}", "M")}
        node.meta["stack_trace"] = f'File "/home/me/model.py", line {40 + i}, in forward\n  y = x.exp()'
    graph = import_fx(gm, ["x"]).graph
    (exp,) = (n for n in graph.nodes if n.op is ops.exp)
    assert graph.origins[exp] == {"layers.0 (model.py:40)", "layers.1 (model.py:41)"}
    assert "# layers.0 (model.py:40), layers.1 (model.py:41)" in str(graph)


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("layers.0.mlp", "layers.0.mlp"),
        ("L['self']._modules['layers']._modules['0']._parameters['weight']", "layers.0.weight"),
        ("L['self'].layers[0].mlp", "layers.0.mlp"),
        ("L['x']", "x"),
        ("L['batch']['ids']", "batch.ids"),
        ("L['self']", ""),
    ],
)
def test_module_paths(source: str, path: str) -> None:
    assert module_path(source) == path


def test_the_origin_is_the_users_line() -> None:
    trace = (
        'File "/home/me/model.py", line 7, in forward\n'
        f'File "{torch.__path__[0]}/nn/functional.py", line 9, in linear'
    )
    assert origin_of({"stack_trace": trace}) == "model.py:7"
    assert origin_of({}) is None


# ---- canonical forms ----


def test_a_commutative_op_has_what_is_broadcast_second() -> None:
    x = ops.input(name="x", shape=(2, 3), dtype=torch.float32)
    row = broadcast(ops.input(name="w", shape=(3,), dtype=torch.float32), (2, 3))
    one = ops.full(value=1.0, shape=(2, 3), dtype=torch.float32)
    assert pointwise(ops.mul, row, x) is ops.mul(x, row)
    assert pointwise(ops.add, one, row) is ops.add(row, one)
    assert pointwise(ops.sub, one, x) is ops.sub(one, x)


def test_leaves_move_for_nothing() -> None:
    row = ops.iota(shape=(5,), axis=0, dtype=torch.int64)
    assert broadcast(reshape(row, (5, 1)), (2, 5, 4)) is ops.iota(shape=(2, 5, 4), axis=1, dtype=torch.int64)
    assert broadcast(ops.full(value=2.0, shape=(), dtype=torch.float32), (3,)).op is ops.full
    assert reshape(row, (1, 5)).op is ops.iota
    joined = ops.iota(shape=(2, 3), axis=0, dtype=torch.int64)
    assert reshape(joined, (6,)).op is ops.reshape


@pytest.mark.parametrize(
    ("value", "leaf"),
    [
        (torch.full((2, 2), 3), "full"),
        (torch.zeros(0), "full"),
        (torch.arange(4).view(1, 4, 1).expand(2, 4, 3), "iota"),
        (torch.tensor([0, 2]), None),
        (torch.tensor([0.0, 1.0]), None),
        (torch.tensor([2**53 + 1] * 2), None),
        (torch.tensor([float("nan")] * 2), None),
    ],
)
def test_leaves_are_recognized(value: Tensor, leaf: str | None) -> None:
    node = leaf_of(value)
    assert (node.op.name if node else None) == leaf
    if node is not None:
        assert torch.equal(ops.evaluate_nodes([node], {})[0], value)


def test_deep_graphs_need_no_deep_recursion() -> None:
    constants = Constants()
    node = ops.input(name="x", shape=(2,), dtype=torch.float32)
    for _ in range(3000):
        node = constants.simplify(ops.sin(node))
    assert not constants.is_constant(node)
