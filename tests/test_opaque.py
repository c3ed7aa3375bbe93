"""Opaque nodes: ATen ops that no rule knows, with PyTorch's own derivatives, traced and compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import egcompile
from egcompile import ops
from egcompile.derive import derive
from egcompile.errors import NoGradientRule, UnsupportedOp
from egcompile.frontend import Traced, trace
from egcompile.ir.parse import parse_graph
from egcompile.plan import Plan

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def below(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


def ties(*shape: int) -> Tensor:
    return torch.randint(0, 3, shape).double()


def zeros_among(*shape: int) -> Tensor:
    x = real(*shape)
    x[..., 0] = 0.0
    return x


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "cumsum": (lambda x: torch.cumsum(x, 1) * 2, (real(4, 5),)),
    "sort": (lambda x: torch.sort(x, 1).values.sin(), (ties(4, 5),)),
    "topk": (lambda x: torch.topk(x, 2).values.sin(), (ties(4, 5),)),
    "kthvalue": (lambda x: torch.kthvalue(x, 2).values.sin(), (real(4, 5),)),
    "gather": (lambda x, i: x.gather(1, i).sin(), (real(4, 5), below(5, 4, 3))),
    "scatter_add": (lambda x, i, s: x.scatter_add(1, i, s).sin(), (real(4, 5), below(5, 4, 3), real(4, 3))),
    "scatter": (lambda x, i, s: x.scatter(1, i, s).sin(), (real(4, 5), below(5, 4, 1), real(4, 1))),
    "index": (lambda x, i: x[i].sin(), (real(4, 5), below(4, 3))),
    "index_put": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True).sin(),
        (real(4, 5), below(4, 3), real(3, 5)),
    ),
    "index_select": (lambda x, i: x.index_select(1, i).sin(), (real(4, 5), below(5, 3))),
    "prod": (lambda x: x.prod(1), (zeros_among(4, 5),)),
    "prod_all": (lambda x: x.prod(), (real(2, 3),)),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), (real(4, 5),)),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), (real(2, 3, 6), real(2, 3, 3), real(2))),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2, return_indices=True), (real(1, 2, 6, 6),)),
    "grid_sample": (
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
        (real(1, 2, 4, 4), real(1, 3, 3, 2)),
    ),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (real(1, 2, 4, 4),)),
    "interpolate_nearest": (lambda x: F.interpolate(x, size=(7, 3)), (real(1, 2, 4, 4),)),
    "svdvals": (torch.linalg.svdvals, (real(3, 4),)),
    "inv": (torch.linalg.inv, (real(3, 3) + 4 * torch.eye(3, dtype=torch.float64),)),
    "solve": (torch.linalg.solve, (real(3, 3) + 4 * torch.eye(3, dtype=torch.float64), real(3))),
    "cholesky": (lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(3).double()), (real(3, 3),)),
    "unfold": (lambda x: x.unfold(1, 3, 1).sin(), (real(4, 5),)),
    "sort_distinct": (lambda x: torch.sort(x, 1, descending=True).values.sin(), (real(4, 5),)),
    "topk_distinct": (lambda x: torch.topk(x, 2).values.sin(), (real(4, 5),)),
    "pad_reflect": (lambda x: F.pad(x, (2, 1), mode="reflect").sin(), (real(2, 3, 4),)),
    "roll": (lambda x: x.roll((1, 2), (0, 1)).sin(), (real(3, 4),)),
    "flip": (lambda x: x.flip(0, 1).sin(), (real(3, 4),)),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b).sin(), (real(2, 3, 4), real(2, 4, 2))),
    "index_reduce": (
        lambda x, i, s: x.index_reduce(0, i, s, "prod"),
        (real(4, 5), below(4, 3), real(3, 5)),
    ),
    "embedding_bag": (
        lambda w, i, o: F.embedding_bag(i, w, o, mode="sum").sin(),
        (real(5, 3), below(5, 6), torch.tensor([0, 2])),
    ),
    "copysign": (torch.copysign, (zeros_among(4, 5), real(4, 5))),
}
TWICE = (
    "cumsum",
    "sort_distinct",
    "topk_distinct",
    "scatter",
    "index_put",
    "pad_reflect",
    "roll",
    "flip",
    "einsum",
    "index_reduce",
    "solve",
    "kthvalue",
    "inv",
    "cholesky",
    "gather",
    "scatter_add",
    "index",
    "prod",
    "unfold",
)


def run(traced: Traced, plan: Plan, inputs: Sequence[Tensor]) -> Any:
    return traced.restore(plan.run(plan.accept(traced.inputs(inputs))))


def outputs_and_gradients(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    result = function(*leaves)
    outputs = list(result) if isinstance(result, tuple) else [result]
    torch.manual_seed(1)
    pairs = [(y, torch.randn(y.shape, dtype=y.dtype)) for y in outputs if y.requires_grad]
    roots, cotangents = zip(*pairs, strict=True)
    wanting = [x for x in leaves if x.requires_grad]
    return [*outputs, *torch.autograd.grad(roots, wanting, cotangents, allow_unused=True)]


def traced_plan(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Traced, Plan]:
    traced = trace(function, tuple(x.clone().requires_grad_(x.is_floating_point()) for x in inputs))
    return traced, egcompile.optimize(traced, "cpu")


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_eagers(name: str) -> None:
    function, inputs = CASES[name]
    traced, plan = traced_plan(function, inputs)
    found = outputs_and_gradients(lambda *xs: run(traced, plan, xs), inputs)
    for mine, theirs in zip(found, outputs_and_gradients(function, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)
    assert str(parse_graph(str(traced.graph))) == str(traced.graph)


@pytest.mark.parametrize("name", ["cumsum", "gather", "max_pool2d", "embedding_bag"])
def test_through_compile(name: str) -> None:
    function, inputs = CASES[name]
    compiled = egcompile.compile(function, fullgraph=True)
    for mine, theirs in zip(
        outputs_and_gradients(compiled, inputs), outputs_and_gradients(function, inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives(name: str) -> None:
    function, inputs = CASES[name]
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    traced, plan = traced_plan(function, inputs)
    assert torch.autograd.gradgradcheck(lambda *xs: run(traced, plan, xs), leaves, fast_mode=True)


def test_equal_calls_are_one_node_and_others_are_not() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cumsum(x, 0) + torch.cumsum(x, 0) * torch.cumsum(x, 1)

    graph = trace(function, (real(3, 3),)).graph
    assert sorted(n.attr("arguments") for n in graph.nodes if n.op.name == "aten_cumsum") == [
        "[..., 0]",
        "[..., 1]",
    ]


def test_lists_of_tensors_and_missing_ones_are_arguments() -> None:
    def function(x: Tensor, i: Tensor) -> Tensor:
        return x[:, i]

    (node,) = [n for n in trace(function, (real(3, 4), below(4, 2))).graph.nodes if n.op.derivative]
    assert node.attr("arguments") == "[..., [None, ...]]"


def test_only_what_is_needed_is_derived() -> None:
    """The gradient of a scatter's source reads neither the tensor nor its cotangent's other uses."""

    def function(x: Tensor, i: Tensor, s: Tensor) -> Tensor:
        return x.scatter_add(1, i, s)

    graph = trace(function, (real(4, 5), below(5, 4, 3), real(4, 3))).graph
    joint = derive(graph, [False, False, True])
    called = {n.op.name for n in joint.graph.nodes if n.op.derivative}
    assert called == {"aten_scatter_add", "aten_gather"}


def test_integers_have_no_gradient() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sort(x, 1).indices, x * 2

    traced, plan = traced_plan(function, (real(3, 4),))
    indices, _ = run(traced, plan, (real(3, 4).requires_grad_(),))
    assert not indices.requires_grad


def test_an_op_without_a_derivative_says_so() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.igamma(x, x + 1)

    traced, plan = traced_plan(function, (real(3),))
    with pytest.raises(NoGradientRule, match=r"igamma"):
        run(traced, plan, (real(3).requires_grad_(),))


def test_opaque_nodes_can_be_forbidden() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cumsum(x, 0)

    with pytest.raises(UnsupportedOp, match=r"aten.cumsum.default .* at test_opaque.py:\d+"):
        trace(function, (real(3),), opaque=False)
    with pytest.raises(Exception, match=r"aten.cumsum.default has no row"):
        egcompile.compile(function, options={"opaque": False})(real(3))


def test_explain_counts_opaque_nodes() -> None:
    _, plan = traced_plan(CASES["cumsum"][0], CASES["cumsum"][1])
    section = plan.explain().split("\n\n")[2]
    assert section.startswith("opaque\n  2 x aten_cumsum: test_opaque.py:")


# ---- chance ----
def test_two_dropouts_are_two_masks_and_the_backward_draws_nothing() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x, 0.25), F.dropout(x, 0.25)

    x = torch.ones(100, 100, dtype=torch.float64, requires_grad=True)
    traced, plan = traced_plan(function, (x,))
    first, second = run(traced, plan, (x,))
    assert not torch.equal(first, second)
    for y in (first, second):
        assert set(y.unique().tolist()) == {0.0, 1.0 / 0.75}
        assert abs((y != 0).double().mean().item() - 0.75) < 0.03
        state = torch.get_rng_state()
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        assert torch.equal(gradient, y.detach())  # x is 1: the same mask
        assert torch.equal(state, torch.get_rng_state())
    again, _ = run(traced, plan, (x,))
    assert not torch.equal(again, first)


def test_second_derivatives_through_dropout_keep_the_mask() -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).pow(3).sum()

    x = torch.ones(1000, dtype=torch.float64, requires_grad=True)
    traced, plan = traced_plan(function, (x,))
    y = run(traced, plan, (x,))
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(second, 2 * first.detach())  # 3 m^3 and 6 m^3
    assert torch.allclose(first.detach().sum(), 3 * y.detach())


def test_dropout_of_attention() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True)

    inputs = [real(2, 2, 5, 4) for _ in range(3)]
    traced, plan = traced_plan(function, inputs)
    (mask,) = [n for n in traced.graph.nodes if n.op is ops.dropout_mask]
    assert mask.shape == (2, 2, 5, 5)
    outputs_and_gradients(lambda *xs: run(traced, plan, xs), inputs)


def test_a_random_op_is_drawn_once() -> None:
    def function(x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        return x * noise + noise.sin()

    x = real(50).requires_grad_()
    traced, plan = traced_plan(function, (x,))
    y = run(traced, plan, (x,))
    (noise,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, x * noise + noise.sin())


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": lambda x: torch.rand_like(x) + 1,
    "randn_like": lambda x: torch.randn_like(x),
    "randint_like": lambda x: torch.randint_like(x, 1, 9),
    "of a shape": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "of another dtype": lambda x: torch.rand_like(x, dtype=torch.float32) + 1,
    "poisson": lambda x: torch.poisson(x.detach().abs()) + 1,
    "permuted": lambda x: torch.randperm(len(x)) + 1,
    "chosen": lambda x: torch.multinomial(torch.softmax(x, 0), len(x)) + 1,
}


@pytest.mark.parametrize("what", DRAWS)
def test_derivatives_around_a_draw(what: str) -> None:
    """`(x noise)^3` has the derivatives `3 x^2 noise^3` and `6 x noise^3`, of one draw."""
    x = real(6).requires_grad_()
    compiled = egcompile.compile(lambda x: (x * DRAWS[what](x)).pow(3), fullgraph=True)
    y = compiled(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    torch.testing.assert_close(first * x, 3 * y)
    torch.testing.assert_close(second * x, 2 * first)
    torch.testing.assert_close(third * x, second)
    assert not torch.equal(compiled(x), y)


MASKS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(2, 1) > 0.5,
    "randint": lambda: torch.randint(0, 2, (2, 1)).bool(),
    "dropout": lambda: F.dropout(torch.ones(2, 1), 0.5) > 0,
    "added": lambda: torch.where(torch.rand(2, 1) > 0.5, 0.0, -torch.inf).double(),
}


@pytest.mark.parametrize("what", MASKS)
def test_a_drawn_mask_is_drawn_at_each_call(what: str) -> None:
    q, k, v = real(1, 1, 2, 4), real(1, 1, 1, 4), real(1, 1, 1, 4)

    def function(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=MASKS[what]())

    for _ in range(6):  # a mask drawn while it is traced is causal, or none, half of the time
        assert any(node.op.random for node in trace(function, (q,)).graph.nodes)


def test_attention_s_dropout_in_the_backward_is_the_forward_s() -> None:
    """With one seed the gradient is that of one function; with another it is not."""
    q, k, v = (real(1, 2, 5, 4).requires_grad_() for _ in range(3))
    compiled = egcompile.compile(
        lambda *xs: F.scaled_dot_product_attention(*xs, dropout_p=0.5), fullgraph=True
    )

    def seeded(*xs: Tensor) -> Any:
        torch.manual_seed(3)
        return compiled(*xs)

    assert torch.autograd.gradcheck(seeded, (q, k, v))
    assert not torch.equal(compiled(q, k, v), compiled(q, k, v))


class Recurrent(nn.Module):
    """An LSTM cell, unrolled."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], 4)
        for step in x:
            h, c = self.cell(step, (h, c))
        return h.sum() + c.sum()


def test_a_cell_unrolled() -> None:
    model, x = Recurrent().double(), real(3, 2, 3)
    gradients = []
    for function in (model, egcompile.compile(model, fullgraph=True)):
        model.zero_grad()
        function(x).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == 4
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)
