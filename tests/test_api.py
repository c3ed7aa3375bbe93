"""The package's functions on whole models: gradients against PyTorch in fp64, and what a plan shows."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egcompile import functional as E
from egcompile.api import compile, optimize, trace
from egcompile.backend import backend
from egcompile.errors import TypeMismatch
from egcompile.plan import Plan
from tests.models import CASES, MLP


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> None:
    torch.compiler.reset()


def loss_of(result: Any) -> Tensor:
    return result[-1] if isinstance(result, tuple) else result


def step(model: Callable[..., Any], parameters: list[Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """All outputs, then the gradient of the loss for each parameter."""
    result = model(*inputs)
    outputs = list(result) if isinstance(result, tuple) else [result]
    return [*outputs, *torch.autograd.grad(loss_of(result), parameters)]


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_compile_matches_eager(name: str) -> None:
    model, inputs = CASES[name].make()
    parameters = list(model.parameters())
    expected = step(model, parameters, inputs)
    compiled = compile(model, fullgraph=True)
    close(step(compiled, parameters, inputs), expected)
    close(step(compiled, parameters, inputs), expected)
    with torch.no_grad():
        close(loss_of(compiled(*inputs)), loss_of(model(*inputs)))


@pytest.mark.parametrize("name", CASES)
def test_a_traced_plan_matches_eager(name: str) -> None:
    model, inputs = CASES[name].make()
    parameters = list(model.parameters())
    traced = trace(model, inputs)
    plan = optimize(traced, target="cpu")
    values = [*traced.state, *traced.inputs(inputs)]

    def run(*inputs: Tensor) -> Any:
        return traced.restore(plan.run(values))

    close(step(run, parameters, inputs), step(model, parameters, inputs))


def block_plan() -> tuple[nn.Module, tuple[Tensor, ...], list[Tensor], Plan]:
    model, inputs = CASES["residual_block"].make()
    traced = trace(model, inputs)
    return model, inputs, [*traced.state, *traced.inputs(inputs)], optimize(traced, target="cpu")


def test_second_order_of_a_model() -> None:
    model, inputs = CASES["mlp_gelu"].make()
    parameters = list(model.parameters())

    def penalty(run: Callable[..., Any]) -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(run(*inputs), parameters, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), parameters)

    close(penalty(compile(model, fullgraph=True)), penalty(model))


def test_the_vjp_is_derived_when_asked_for() -> None:
    _, _, values, plan = block_plan()
    _, loss = plan.run(values)
    (first,) = torch.autograd.grad(loss, values[0])
    assert not plan._vjps
    _, loss = plan.run(values)
    (again,) = torch.autograd.grad(loss, values[0], create_graph=True)
    assert len(plan._vjps) == 1
    close(again, first)


def test_outputs_without_a_cotangent() -> None:
    """The loss alone is foreseen to have one; an output that has one all the same gets its gradient."""
    model, inputs, values, plan = block_plan()
    parameters = list(model.parameters())
    _, loss = plan.run(values)
    torch.autograd.grad(loss, parameters)
    assert [mask for _, mask in plan._compiled] == [(False, True)]
    for _ in range(2):  # the second call is compiled for what the first one met
        h, loss = plan.run(values)
        expected_h, expected_loss = model(*inputs)
        close(
            torch.autograd.grad(h.sin().sum() + loss, parameters),
            torch.autograd.grad(expected_h.sin().sum() + expected_loss, parameters),
        )
    assert [mask for _, mask in plan._compiled] == [(False, True), (True, True)]


@pytest.mark.parametrize("used", [u for n in (1, 2, 3) for u in itertools.combinations(range(3), n)], ids=str)
def test_what_no_used_output_needs_has_no_gradient(used: tuple[int, ...]) -> None:
    """None as in eager, at the first step too; and an infinite derivative of an unused output stays out."""

    def model(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return x * w, (x + v).sqrt(), v * 2

    compiled = compile(model, fullgraph=True)
    leaves = [torch.arange(3.0, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    for _ in range(3):
        theirs, ours = (
            torch.autograd.grad([f(*leaves)[i].sum() for i in used], leaves, allow_unused=True)
            for f in (model, compiled)
        )
        assert [g is None for g in ours] == [g is None for g in theirs]
        close([g for g in ours if g is not None], [g for g in theirs if g is not None])


def test_frozen_parameters() -> None:
    model, inputs = CASES["mlp_silu"].make()
    compiled = compile(model, fullgraph=True)
    for frozen in (["layers.0.weight", "layers.0.bias"], ["layers.2.weight"], []):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        live = [p for p in model.parameters() if p.requires_grad]
        close(step(compiled, live, inputs), step(model, live, inputs))


def test_inputs_that_need_gradients() -> None:
    model, inputs = CASES["mlp_tanh"].make()
    leaves = [x.clone().requires_grad_() for x in inputs]
    close(step(compile(model), leaves, tuple(leaves)), step(model, leaves, tuple(leaves)))


def test_training_beside_eager() -> None:
    model, inputs = CASES["residual_block"].make()
    twin = copy.deepcopy(model)
    losses: dict[str, list[float]] = {}
    for name, owner, run in (("eager", model, model), ("ours", twin, compile(twin, fullgraph=True))):
        optimizer = torch.optim.AdamW(owner.parameters(), lr=1e-2)
        losses[name] = []
        for _ in range(10):
            loss = loss_of(run(*inputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    torch.testing.assert_close(losses["ours"], losses["eager"], rtol=1e-9, atol=0)


def test_a_loss_changed_in_place() -> None:
    """The loss is a view of what a kernel wrote, which its owner must not notice."""
    model, inputs = CASES["residual_block"].make()
    parameters = list(model.parameters())

    def scaled(run: Callable[..., Any]) -> tuple[Tensor, ...]:
        _, loss = run(*inputs)
        loss /= 4
        return loss, *torch.autograd.grad(loss, parameters)

    close(scaled(compile(model, fullgraph=True)), scaled(model))


def test_parameters_stay_the_model_s_own() -> None:
    model, _ = CASES["mlp_relu"].make()
    compiled = compile(model)
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in model.parameters()]
    assert compiled.state_dict().keys() == {f"_orig_mod.{k}" for k in model.state_dict()}


def test_shapes_that_change(caplog: pytest.LogCaptureFixture) -> None:
    model = MLP("gelu").double()
    compiled = compile(model, fullgraph=True)
    parameters = list(model.parameters())
    with caplog.at_level(logging.DEBUG, "egcompile.kernels"):
        for rows in (3, 5, 7, 5, 1, 4):
            inputs = (torch.randn(rows, 12).double(), torch.randn(rows, 5).double())
            close(step(compiled, parameters, inputs), step(model, parameters, inputs))
    assert "recompiling: argument" in caplog.text
    assert "f64[7,12]" in caplog.text and "was f64[5,12]" in caplog.text


def test_a_plan_refuses_other_inputs() -> None:
    model, _, values, plan = block_plan()
    before = copy.deepcopy(model.state_dict())
    names = [node.attr("name") for node in plan.graph.inputs]
    for wrong, message in (
        (values[0].float(), rf"{names[0]}: the plan takes f64\[12\] on cpu, got f32\[12\] on cpu"),
        (values[0][:3], rf"{names[0]}: the plan takes f64\[12\] on cpu, got f64\[3\]"),
        (values[0].to("meta"), "on meta"),
        (values[0].to(torch.complex64), rf"{names[0]}: .*, got c64\[12\]"),
        (values[0].to(torch.complex32), rf"{names[0]}: .*, got torch.complex32\[12\]"),
        (values[0].to_sparse(), rf"{names[0]}: .*, got a tensor of layout torch.sparse_coo"),
        (None, rf"{names[0]}: the plan takes f64\[12\], got None"),
        (2.0, rf"{names[0]}: .*, got 2.0"),
        ([values[0]], rf"{names[0]}: .*, got \["),
    ):
        with pytest.raises(TypeMismatch, match=message):
            plan(wrong, *values[1:])
    with pytest.raises(TypeMismatch, match=r"takes 5 inputs, .*, got 1"):
        plan(values[0])
    close(model.state_dict(), before)


def test_a_plan_copies_inputs_that_lie_otherwise() -> None:
    model, inputs, values, plan = block_plan()
    x = torch.randn(12, 3, 2, dtype=torch.float64).permute(2, 1, 0).requires_grad_()
    outputs = plan(*values[:3], x, values[4])
    assert isinstance(outputs, tuple)
    close(torch.autograd.grad(outputs[1], x), torch.autograd.grad(model(x, inputs[1])[1], x))


@pytest.mark.parametrize(
    "shared",
    [torch.randn(1, 4).expand(3, 4), torch.randn(()).expand(3, 4), torch.randn(6).unfold(0, 4, 1)],
    ids=["expanded", "one element", "windows"],
)
def test_elements_that_share_memory(shared: Tensor) -> None:
    """A plan made for them takes no others; `compile` compiles again."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    w, dense = torch.randn(3, 4), torch.randn(3, 4)
    plan = optimize(trace(function, (shared, w)), target="cpu")
    close(plan(shared, w), shared * w)
    for other in (dense, dense.t().contiguous().t(), torch.randn(3, 1).expand(3, 4)):
        if other.stride() != shared.stride():
            with pytest.raises(TypeMismatch, match=r"x: .* whose elements share memory; .* contiguous x"):
                plan(other, w)
    close(optimize(trace(function, (dense, w)), target="cpu")(shared, w), shared * w)
    compiled = compile(function, fullgraph=True)
    for x in (shared, dense, shared):
        close(compiled(x, w), x * w)


def test_axes_of_one_element_have_any_stride() -> None:
    plan = optimize(trace(lambda x: x * 2, (torch.randn(1, 4)[:, :].expand(1, 4),)), target="cpu")
    close(plan(torch.ones(4, 1).t()), torch.full((1, 4), 2.0))


def test_what_a_plan_shows() -> None:
    *_, plan = block_plan()
    assert "def forward(" in plan.source and "def backward(" in plan.source
    assert [node.attr("name") for node in plan.forward.inputs] == [n.attr("name") for n in plan.graph.inputs]
    assert len(plan.forward.outputs) == 2
    assert len(plan.backward.outputs) == 3  # the parameters; x and r needed none
    assert plan.joint.graph.to_networkx().number_of_nodes() == len(plan.joint.graph.nodes)
    assert plan.diff().startswith("--- derived\n+++ optimized")
    assert all(kernel.name in plan.source for kernel in plan.kernels)
    text = plan.explain()
    assert "fusion/" in text and "norm" in text


def test_a_plan_for_a_gpu_needs_none() -> None:
    model, inputs = CASES["residual_block"].make(torch.float32)
    plan = optimize(trace(model, inputs), target="cuda:90")
    assert plan.kernels
    assert all("@triton.jit" in kernel.source for kernel in plan.kernels)
    compile_only = [kernel.source for kernel in plan.kernels]
    assert all(text.strip() in plan.source for text in compile_only)


def test_disabled_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGCOMPILE_DISABLE", "1")
    model = nn.Linear(3, 4)
    assert compile(model) is model
    y = torch.compile(model, backend=backend)(torch.randn(2, 3))
    assert "PlanFunction" not in type(y.grad_fn).__name__


def test_options() -> None:
    with pytest.raises(ValueError, match="no mode 'fast'"):
        optimize(trace(nn.Linear(3, 4), (torch.randn(2, 3),)), mode="fast")
    with pytest.raises(ValueError, match="unknown target 'tpu'"):
        optimize(trace(nn.Linear(3, 4), (torch.randn(2, 3),)), target="tpu")
    with pytest.raises(Exception, match="no mode 'fast'; there are default, reduce-overhead, max-autotune"):
        compile(nn.Linear(3, 4), mode="fast")(torch.randn(2, 3))


def test_as_a_decorator_and_by_name() -> None:
    @compile
    def function(x: Tensor) -> Tensor:
        return F.gelu(x) * 2

    x = torch.randn(3, dtype=torch.float64)
    close(function(x), F.gelu(x) * 2)
    close(torch.compile(lambda x: x.sin(), backend="egcompile")(x), x.sin())


def test_values_changed_in_place_and_returned_as_they_came() -> None:
    def function(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        count.add_(1)
        return x, x * count

    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    count = torch.zeros((), dtype=torch.float64)
    same, product = compile(function, fullgraph=True)(x, count)
    assert same is x and count == 1
    close(torch.autograd.grad(product.sum(), x), (torch.ones(3, dtype=torch.float64),))


def test_results_are_memory_of_their_own() -> None:
    """Neither an input nor one another, and of one value one may have a gradient and the other none."""

    def same(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), x * 1.0

    x = torch.ones(3, dtype=torch.float64)
    for result in compile(same, fullgraph=True)(x):
        result.add_(1)
    close(x, torch.ones_like(x))

    def twice(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y, y.detach().clone(), 2 * x

    x.requires_grad_()
    first, constant, second = compile(twice, fullgraph=True)(x)
    assert first.requires_grad and not constant.requires_grad
    close(torch.autograd.grad((first + 3 * second).sum(), x), (torch.full_like(x, 8),))
    constant.add_(1)  # `y.detach()` alone is the memory of `y`, as in eager
    close(first, second)


def test_old_values_of_what_changes_in_place() -> None:
    def swap(x: Tensor, y: Tensor) -> Tensor:
        old = x.clone()
        x.copy_(y)
        y.copy_(old)
        return old

    x, y = torch.zeros(3), torch.ones(3)
    close(compile(swap, fullgraph=True)(x, y), torch.zeros(3))
    close((x, y), (torch.ones(3), torch.zeros(3)))


EDGES: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "a lerp to the far end": (lambda x: torch.lerp(x, torch.ones_like(x), 1.0), torch.tensor([1e8, -1e8])),
    "a lerp by data": (lambda x: torch.lerp(1e8 * x, x, x), torch.tensor([1.0, 0.25, 0.75])),
    "an integer beyond 2^53": (lambda x: x + (2**53 + 1), torch.tensor([0, 1])),
    "the largest integer": (
        lambda x: x.masked_fill(x > 0, torch.iinfo(torch.int64).max),
        torch.tensor([0, 1]),
    ),
    "integer products that wrap": (lambda x: (x * 65536) * 65537, torch.tensor([3], dtype=torch.int32)),
    "a hash": (lambda x: (x * 2654435761) * 2654435769, torch.tensor([3])),
    "a power of integers": (lambda x: x**5, torch.tensor([-3, 9])),
    "factors beyond fp16": (lambda x: (x * 300) * 300, torch.tensor([0.1], dtype=torch.float16)),
}


@pytest.mark.parametrize("what", EDGES)
def test_numbers_at_the_edges_of_their_dtypes(what: str) -> None:
    function, x = EDGES[what]
    torch.testing.assert_close(
        compile(function, fullgraph=True)(x), function(x), rtol=1e-6 * x.is_floating_point(), atol=0
    )


def test_a_softmax_in_fp32_has_its_gradient_in_fp32() -> None:
    """Of probabilities rounded to bf16 the gradient would be wrong by half, where one of them is near 1."""
    x = torch.tensor([[9.0, -3, -3.5, -4, 0, 1, -2]], dtype=torch.bfloat16, requires_grad=True)
    ct = torch.tensor([[0.5, -1, 0.25, 2, -0.75, 1, 0.125]], dtype=torch.bfloat16)

    def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(function(x), x, ct)[0]

    def function(x: Tensor) -> Tensor:
        return F.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)

    torch.testing.assert_close(gradient(compile(function, fullgraph=True)), gradient(function))


def test_devices() -> None:
    """Numbers and constants come from the CPU; anything else that lies elsewhere is refused."""

    def function(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale + torch.tensor([1.0, 2.0, 3.0]).to(x.device)

    calls: list[Any] = []

    def looking(gm: Any, inputs: Any) -> Any:
        calls.append(backend(gm, inputs))
        return gm.forward

    x = torch.ones(3, device="meta")
    torch.compile(function, backend=looking, fullgraph=True)(x, torch.tensor(2.0))
    (constant,) = calls[0].imported.constants
    assert calls[0].imported.device == constant.device == x.device
    close(compile(function, fullgraph=True)(torch.ones(3), torch.tensor(2.0)), torch.tensor([3.0, 4.0, 5.0]))
    with pytest.raises(Exception, match="one graph has tensors on cpu, meta"):
        compile(lambda a, b: (a + 1, b + 1))(torch.ones(3), x)


def test_errors_name_the_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mul_(2))

    model = InPlace()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, requires_grad=True).clone()
    with pytest.raises(Exception, match="x requires grad and is changed in place; clone it first"):
        compile(model, fullgraph=True)(x)
    close(model.state_dict(), before)


def test_functions_compose_with_compile() -> None:
    """The fused functions are ordinary ones: Dynamo runs them where it meets them."""
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y = E.softmax(compile(lambda x: x * 3)(x))
    close(torch.autograd.grad(y[:, 0].sum(), x), torch.autograd.grad(torch.softmax(3 * x, -1)[:, 0].sum(), x))


def test_detached_values_are_constants_in_every_order() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def derivatives(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.sum(), x)

    def function(x: Tensor) -> Tensor:
        return x * x.exp().detach() + x**3

    close(derivatives(compile(function, fullgraph=True)), derivatives(function))


def dropout_loss(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(torch.tanh(x @ w), 0.5).sin().sum()


def test_dropout_draws_once_for_every_order() -> None:
    """With one seed, the gradient under create_graph is the same function of the same draw."""
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((64, 32), (32, 16)))
    compiled = compile(dropout_loss, fullgraph=True)
    torch.manual_seed(1)
    first = torch.autograd.grad(compiled(x, w), (x, w))
    torch.manual_seed(1)
    again = torch.autograd.grad(compiled(x, w), (x, w), create_graph=True)
    close(again, first)
    torch.manual_seed(2)
    other = torch.autograd.grad(compiled(x, w), (x, w))
    assert not torch.equal(other[0], first[0])

    def gradient(w: Tensor) -> Tensor:
        torch.manual_seed(1)
        return torch.autograd.grad(compiled(x, w), w, create_graph=True)[0]

    direction = torch.randn_like(w)
    (product,) = torch.autograd.grad((gradient(w) * direction).sum(), w)
    step = 1e-6 * direction
    difference = (gradient(w + step) - gradient(w - step)) / 2e-6
    torch.testing.assert_close(product, difference, rtol=1e-5, atol=1e-6)


def test_two_dropouts_are_two_draws() -> None:
    x = torch.ones(1000, dtype=torch.float64)
    a, b = compile(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)), fullgraph=True)(x)
    assert not torch.equal(a, b)
    assert 350 < int((a == 0).sum()) < 650
    assert set(a.tolist()) == {0.0, 2.0}


def test_batch_norm_keeps_its_statistics() -> None:
    """Buffers changed in place come out as eager leaves them, and carry no gradient."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double()
    twin = copy.deepcopy(model)
    compiled = compile(twin, fullgraph=True)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for _ in range(3):
        for owner, run in ((model, model), (twin, compiled)):
            owner.zero_grad()
            run(x).square().mean().backward()
    close(dict(twin.state_dict()), dict(model.state_dict()))
    close([p.grad for p in twin.parameters()], [p.grad for p in model.parameters()])
    assert not any(buffer.requires_grad for buffer in twin.buffers())
