"""Whole forwards and their derived backwards: against PyTorch, once and twice; and what `derive` promises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from egcompile import ops
from egcompile.derive import derive
from egcompile.errors import NoGradientRule, TypeMismatch
from egcompile.frontend import Traced, trace
from egcompile.ir import Graph, Node, topological
from egcompile.ir.joint import Joint
from egcompile.ir.verify import verify_joint
from egcompile.ops import evaluate
from egcompile.ops.opdef import Kind, OpDef
from egcompile.rules.rule import VJPS, vjp

from .models import CASES


def _input(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> Node:
    return ops.input(name=name, shape=shape, dtype=dtype)


def _values(traced: Traced, args: tuple[Tensor, ...]) -> list[Tensor]:
    return [*traced.state, *traced.inputs(args)]


def _op_names(joint: Joint) -> set[str]:
    return {node.op.name for node in joint.graph.nodes}


# ---- against PyTorch ----
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_models(name: str) -> None:
    model, args = CASES[name].make()
    traced = trace(model, args)
    values = _values(traced, args)
    place = traced.outputs[-1]
    assert isinstance(place, int)
    only_loss = [i == place for i in range(len(traced.graph.outputs))]
    joint = verify_joint(derive(traced.graph, traced.requires_grad, only_loss))
    one = torch.ones((), dtype=torch.float64)
    results = evaluate(joint.graph, [*values, one])

    found = model(*args)
    loss = found[-1] if isinstance(found, tuple) else found
    sources = [v for v, wants in zip(values, traced.requires_grad, strict=True) if wants]
    expected = torch.autograd.grad(loss, sources)
    assert len(expected) == len([g for g in joint.gradients if g is not None])
    torch.testing.assert_close(results[place], loss)
    for mine, theirs in zip(results[len(joint.outputs) :], expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


class AddNormLinearGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(6, 1e-5)
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return nn.functional.gelu(self.linear(self.norm(h))), h


def test_second_order_with_respect_to_primals_and_cotangents() -> None:
    """Nothing that the first backward saves is a constant: its statistics and pre-activations depend on x."""
    model = AddNormLinearGelu().double()
    nn.init.uniform_(model.norm.weight, 0.5, 1.5)
    args = tuple(torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    traced = trace(model, args)
    primals = _values(traced, args)
    first = derive(traced.graph, [True] * len(primals))
    assert {"rms_norm", "rms_norm_backward", "gelu_backward"} <= _op_names(first)
    second = verify_joint(derive(first.graph, [True] * len(first.graph.inputs)))

    cts = [torch.randn_like(y, requires_grad=True) for y in model(*args)]
    once = torch.autograd.grad(model(*args), primals, cts, create_graph=True)
    outer = [torch.randn_like(y) for y in (*model(*args), *once)]
    twice = torch.autograd.grad((*model(*args), *once), [*primals, *cts], outer)
    results = evaluate(second.graph, [*primals, *cts, *outer])
    for mine, theirs in zip(results[len(second.outputs) :], twice, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_third_order() -> None:
    x = _input("x", 3)
    joint = derive(Graph((x,), (ops.mul(ops.mul(x, x), ops.mul(x, x)),)), [True])
    for _ in range(2):
        last = len(joint.graph.outputs) - 1
        needed = [i == 0 for i in range(len(joint.graph.inputs))]
        joint = derive(joint.graph, needed, [i == last for i in range(last + 1)])
    value, one = torch.randn(3).double(), torch.ones(3).double()
    torch.testing.assert_close(evaluate(joint.graph, [value, one, one, one])[-1], 24 * value)


def test_norms_that_cast_first_round_where_eager_rounds() -> None:
    """The weight of Hugging Face's norm multiplies x_hat in bf16, and so its gradient sums rounded x_hat."""
    x, w = _input("x", 4, 64, dtype=torch.bfloat16), _input("w", 64, dtype=torch.bfloat16)
    joint = derive(Graph((x, w), (ops.rms_norm(x, w, eps=1e-5, cast_first=True)[0],)), [True, True])
    assert _op_names(joint) >= {"rms_norm_backward"}
    values = [torch.randn(4, 64).bfloat16().requires_grad_(), torch.rand(64).bfloat16().requires_grad_()]
    wide = values[0].float()
    hat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    y = values[1] * hat.bfloat16()
    ct = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, values, ct)
    _, mine_x, mine_w = evaluate(joint.graph, [*values, ct])
    torch.testing.assert_close(mine_w, dw, rtol=0, atol=0)
    torch.testing.assert_close(mine_x, dx, rtol=2**-8, atol=2**-8)


# ---- recognition on the way ----
def test_written_out_norm_and_swiglu_get_their_kernels_backward() -> None:
    x, w = _input("x", 4, 8), _input("w", 8)
    square = ops.mean(ops.mul(x, x), dims=(1,))
    rstd = ops.rsqrt(ops.add(square, ops.constant(1e-6, square)))
    normed = ops.mul(ops.mul(x, ops.broadcast_to(rstd, x.shape)), ops.broadcast_to(w, x.shape))
    gated = ops.mul(ops.mul(normed, ops.sigmoid(normed)), x)
    joint = derive(Graph((x, w), (gated,)), [True, True])
    assert {"rms_norm_backward", "swiglu_backward"} <= _op_names(joint)
    assert "rsqrt" not in _op_names(joint)


def test_nothing_is_recognized_through_a_detach() -> None:
    """x sigmoid(detach(x)) has the value of silu(x), and another gradient."""
    x = _input("x", 3)
    joint = derive(Graph((x,), (ops.mul(x, ops.sigmoid(ops.stop_gradient(x))),)), [True])
    value, ct = torch.randn(3).double(), torch.randn(3).double()
    y, gradient = evaluate(joint.graph, [value, ct])
    torch.testing.assert_close(y, torch.nn.functional.silu(value))
    torch.testing.assert_close(gradient, ct * torch.sigmoid(value))
    assert "stop_gradient" not in _op_names(joint)


def test_maximum_with_zero_is_not_relu() -> None:
    x = _input("x", 3)
    joint = derive(Graph((x,), (ops.maximum(x, ops.constant(0.0, x)),)), [True])
    _, gradient = evaluate(joint.graph, [torch.tensor([-1.0, 0.0, 1.0]).double(), torch.ones(3).double()])
    assert gradient.tolist() == [0.0, 0.5, 1.0]


# ---- what is derived ----
def test_only_what_is_needed_is_derived() -> None:
    x, w = _input("x", 4, 8), _input("w", 8, 3)
    joint = derive(Graph((x, w), (ops.matmul(x, w),)), [False, True])
    assert joint.gradients[0] is None
    assert "transpose" not in _op_names(joint)  # what dx would read
    assert joint.graph.output_names == ("out0", "grad_w")


def test_integers_and_masked_outputs_have_no_cotangent() -> None:
    x = _input("x", 4)
    counts = ops.cast(x, dtype=torch.int64)
    graph = Graph((x,), (ops.exp(x), counts, ops.sin(x)), ("e", "n", "s"))
    joint = derive(graph, [True])
    assert [ct and ct.attr("name") for ct in joint.cotangents] == ["ct_e", None, "ct_s"]
    joint = derive(graph, [True], [False, True, True])
    assert [ct and ct.attr("name") for ct in joint.cotangents] == [None, None, "ct_s"]
    assert "exp" not in {n.op.name for n in topological([g for g in joint.gradients if g is not None])}


def test_no_path_means_no_gradient() -> None:
    x, y = _input("x", 4), _input("y", 4)
    joint = derive(Graph((x, y), (ops.exp(x), ops.stop_gradient(y))), [True, True])
    assert joint.gradients[1] is None
    assert len(joint.graph.inputs) == 4  # both cotangents are arguments all the same


def test_an_output_that_is_an_input_and_one_returned_twice() -> None:
    x = _input("x", 4)
    y = ops.exp(x)
    joint = derive(Graph((x,), (x, y, y)), [True])
    value, *cts = (torch.randn(4).double() for _ in range(4))
    expected = cts[0] + (cts[1] + cts[2]) * value.exp()
    torch.testing.assert_close(evaluate(joint.graph, [value, *cts])[-1], expected)


def test_cotangents_are_summed_in_the_order_of_their_uses() -> None:
    """add(first use, second use): what the fused norm and skip connection look for."""
    x, w = _input("x", 4, 8), _input("w", 8)
    normed = ops.rms_norm(x, w, eps=1e-5, cast_first=False)[0]
    joint = derive(Graph((x, w), (ops.add(x, ops.exp(normed)),)), [True, False])
    gradient = joint.gradients[0]
    assert gradient is not None and gradient.op is ops.add
    assert [i.op.name for i in gradient.inputs] == ["out", "input"]  # the norm's, then the sum's


def test_an_expand_that_expands_nothing() -> None:
    x = _input("x", 4, 1)
    joint = derive(Graph((x,), (ops.expand(x, shape=(4, 1)),)), [True], rules={})
    assert joint.gradients == joint.cotangents


def test_names_of_a_second_derivative_are_new() -> None:
    x = _input("x", 4)
    first = derive(Graph((x,), (ops.exp(x),)), [True])
    second = derive(first.graph, [True, True])
    assert [i.attr("name") for i in second.graph.inputs] == ["x", "ct_out0", "ct2_out0", "ct_grad_x"]
    assert second.graph.output_names == ("out0", "grad_x", "grad2_x", "grad_ct_out0")


def test_backward_nodes_know_their_forward() -> None:
    x = _input("x", 4)
    y = ops.sin(x)
    z = ops.exp(y)
    graph = Graph((x,), (z,), origins={y: frozenset({"sine"}), z: frozenset({"power"})})
    joint = derive(graph, [True])
    (gradient,) = (g for g in joint.gradients if g is not None)
    assert joint.graph.origins[gradient] == {"sine (backward)"}
    assert joint.graph.origins[y] == {"sine"}


# ---- errors ----
@pytest.fixture
def opaque() -> OpDef:
    return OpDef("opaque", Kind.EXTERN, ("x",), type_rule=lambda x: x, evaluate=lambda x: x)


def test_an_op_without_derivative_is_named_with_its_place(opaque: OpDef) -> None:
    x = _input("x", 4)
    y = opaque(x)
    graph = Graph((x,), (ops.exp(y),), origins={y: frozenset({"model.layer (model.py:3)"})})
    with pytest.raises(NoGradientRule, match=r"opaque has no derivative \(model.layer \(model.py:3\)\)"):
        derive(graph, [True])
    assert derive(graph, [False]).gradients == (None,)


def test_a_row_of_the_wrong_type_is_named(opaque: OpDef) -> None:
    row = vjp(opaque, lambda x, ct: ops.sum(ct, (0,)))
    try:
        x = _input("x", 4)
        with pytest.raises(TypeMismatch, match="the vjp of opaque gives"):
            derive(Graph((x,), (opaque(x),)), [True])
    finally:
        assert VJPS.pop(("opaque", (0,))) is row


# ---- size ----
def _residual_stack(layers: int) -> Graph:
    x, w, v = _input("x", 4, 8), _input("w", 8), _input("v", 8, 8)
    h = x
    for _ in range(layers):
        h = ops.add(h, ops.silu(ops.matmul(ops.rms_norm(h, w, eps=1e-5, cast_first=False)[0], v)))
    return Graph((x, w, v), (h,))


def test_the_joint_graph_is_linear_in_the_forward() -> None:
    sizes = [len(derive(_residual_stack(n), [True] * 3).graph.nodes) for n in (10, 20, 30)]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0]
