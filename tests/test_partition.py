"""Which kernels are the forward's, what is saved for the backward, and what is made again there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import egcompile
from benchmarks.resnet import bottleneck
from egcompile.extract import Extraction, extract
from egcompile.extract.cost import Costs
from egcompile.ir.node import Node
from egcompile.ops import (
    add,
    cast,
    contract_rows,
    evaluate,
    exp,
    gelu,
    gelu_backward,
    matmul,
    mul,
    neg,
    reshape,
    sin,
    transpose,
)
from egcompile.partition import base, partition
from egcompile.partition.recipes import kernel_cost
from egcompile.plan import Plan
from egcompile.schedule import schedule
from egcompile.target import Target
from tests.extract.builder import egraph, forward, joint, leaf
from tests.extract.random_graphs import RandomCosts, random_joint
from tests.models import CASES
from tests.schedule.interpret import run_schedule

H200 = Target.parse("cuda:90")
X, W = leaf("x", 64, 32), leaf("w", 16, 32)
CT = leaf("ct", 64, 16)
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
PRODUCTS = {"matmul", "bmm", "contract_rows", "sdpa", "convolution"}


def _linear() -> Extraction:
    pre = matmul(X, transpose(W))
    dpre = gelu_backward(CT, pre)
    made = joint([gelu(pre)], [CT], {X: matmul(dpre, W), W: contract_rows(dpre, X)})
    return extract(egraph(made), H200)


def test_saves_what_the_backward_reads_and_nothing_else() -> None:
    parts = partition(_linear(), H200)
    assert [k.root.op.name for k in parts.forward] == ["gelu", "matmul"] or len(parts.forward) == 2
    assert set(parts.saved) == {X, W, matmul(X, transpose(W))}
    assert not {n for k in parts.forward for n in k.reads} & {CT}


def test_primals_are_saved_first() -> None:
    saved = partition(_linear(), H200).saved
    assert set(saved[:2]) == {X, W}


def test_views_are_made_again_and_their_base_is_saved() -> None:
    y = exp(X)
    flat = reshape(y, (2048,))
    ct = leaf("ct", 2048)
    made = joint([flat], [ct], {leaf("z", 2048): mul(ct, flat)})
    found = extract(egraph(made), H200)
    parts = partition(found, H200)
    assert base(found, flat) is y
    assert parts.saved == (y,)


def test_forward_work_that_only_the_backward_needs_runs_there() -> None:
    ct = leaf("ct", 64, 32)
    made = joint([neg(X)], [ct], {X: mul(ct, exp(add(X, X)))})
    parts = partition(extract(egraph(made), H200), H200)
    assert len(parts.forward) == len(parts.backward) == 1
    assert parts.saved == (X,)


def test_without_gradients_there_is_no_backward() -> None:
    found = extract(egraph(forward(exp(X))), H200)
    for budget in (0.0, 1.0):
        parts = partition(found, H200, budget)
        assert parts.backward == parts.saved == parts.recomputed == ()


def test_a_gradient_that_is_a_forward_value_is_saved_or_made_again() -> None:
    z = leaf("z", 64, 32)
    ct = leaf("ct", dtype=torch.float32)
    found = extract(egraph(joint([exp(X)], [ct], {z: exp(X)})), H200)
    assert partition(found, H200).saved == (exp(X),)
    parts = partition(found, H200, 0.0)
    assert parts.saved == (X,)
    assert [kernel.writes for kernel in parts.recomputed] == [(exp(X),)]


# ---- on models ----


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(F.gelu(self.first(x)), 0.4)).square().sum()


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(torch.logcumsumexp((x * self.weight).sin(), 1) @ self.weight.T).sum()


def _float64(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    **{name: functools.partial(case.make) for name, case in CASES.items()},
    "bottleneck": lambda: (bottleneck(8, 2, 1).double(), (_float64(2, 8, 6, 6),)),
    "dropout": lambda: (Dropout().double(), (_float64(8, 16),)),
    "opaque": lambda: (Opaque(), (_float64(6, 5),)),
}


@functools.cache
def _extracted(name: str, target: str = "cuda:90") -> Extraction:
    model, inputs = MODELS[name]()
    return egcompile.optimize(egcompile.trace(model, inputs), target).compiled().extraction


@pytest.mark.parametrize("name", MODELS)
def test_costs_are_those_of_extraction(name: str) -> None:
    found = _extracted(name)
    total = sum(kernel_cost(kernel, found.buffers, Costs(H200)) for kernel in found.kernels)
    assert total == pytest.approx(found.stats.cost, abs=1e-2 * len(found.kernels))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_saved_bytes_fall_with_the_budget(name: str, target: str) -> None:
    found = _extracted(name, target)
    parts = [partition(found, Target.parse(target), budget) for budget in BUDGETS]
    sizes = [p.saved_bytes for p in parts]
    smallest = parts[-1].smallest_bytes
    assert smallest is not None and smallest < sizes[0] == parts[0].fastest_bytes
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == smallest
    for budget, p in zip(BUDGETS, parts, strict=True):
        assert p.saved_bytes <= smallest + budget * (sizes[0] - smallest)
        assert p.saved_bytes == sum(n.tensor.nbytes for n in p.saved if n not in found.joint.primals)
    assert parts[0].cost <= 0.0 and all(p.cost >= parts[0].cost for p in parts)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_random_or_unknown_is_never_made_again(name: str) -> None:
    for budget in BUDGETS:
        again = partition(_extracted(name), H200, budget).recomputed
        nodes = [node for kernel in again for node in (kernel.root, *kernel.nodes)]
        assert not [n for n in nodes if n.op.random or n.op.derivative is not None]


@pytest.mark.parametrize("name", ["dropout", "opaque"])
def test_that_is_saved_under_any_budget(name: str) -> None:
    parts = partition(_extracted(name), H200, 0.0)
    assert parts.smallest_bytes and parts.saved_bytes == parts.smallest_bytes


def test_products_are_made_again_only_where_the_budget_cannot_be_kept_without() -> None:
    found = _extracted("llama")
    counts = [_products(partition(found, H200, budget).recomputed) for budget in BUDGETS]
    assert counts[0] == counts[1] == counts[2] == 0 < counts[-1]
    forward = partition(found, H200).forward
    assert counts[-1] <= _products(forward)


def _products(kernels: Any) -> int:
    return len([k for k in kernels if k.root.op.flops is not None or k.root.op.name in PRODUCTS])


def test_a_norm_is_made_again_from_the_sum_and_the_deviation_that_are_saved() -> None:
    """Not by the kernel that adds: that one reads what the product before it wrote."""
    parts = partition(_extracted("llama"), H200, 0.7)
    norms = [k for k in parts.recomputed if any("norm_y" in _name(n) for n in k.writes)]
    assert norms
    for kernel in norms:
        assert {_name(n) for n in kernel.reads} >= {_name(kernel.writes[0]).replace("_y", "_rstd")}
        assert not any(k.root.op.name == "add_rms_norm" for k in norms)


def _name(node: Node) -> str:
    if isinstance(node.type, tuple) or not node.inputs or not isinstance(node.inputs[0].type, tuple):
        return node.op.name
    op = node.inputs[0].op
    return f"{op.name}_{op.outputs[node.attr('index')]}"


def _step(run: Callable[..., Any], parameters: list[Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    result = run(*inputs)
    outputs = list(result) if isinstance(result, tuple) else [result]
    return [*outputs, *torch.autograd.grad(outputs[-1].sum(), parameters)]


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
@pytest.mark.parametrize(
    "name", ["llama", "llama_hf", "gpt", "mlp_silu", "residual_block", "bottleneck", "opaque"]
)
def test_gradients_are_those_of_eager(name: str, budget: float) -> None:
    torch.compiler.reset()
    model, inputs = MODELS[name]()
    parameters = list(model.parameters())
    expected = _step(model, parameters, inputs)
    compiled = egcompile.compile(model, fullgraph=True, memory_budget=budget)
    torch.testing.assert_close(_step(compiled, parameters, inputs), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("budget", [0.5, 0.0])
@pytest.mark.parametrize("name", ["mlp_gelu", "residual_block"])
def test_second_order(name: str, budget: float) -> None:
    torch.compiler.reset()
    model, inputs = MODELS[name]()
    parameters = list(model.parameters())

    def penalty(run: Callable[..., Any]) -> tuple[Tensor, ...]:
        result = run(*inputs)
        loss = result[-1] if isinstance(result, tuple) else result
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), parameters)

    ours = penalty(egcompile.compile(model, fullgraph=True, memory_budget=budget))
    torch.testing.assert_close(ours, penalty(model), rtol=1e-10, atol=1e-10)


def test_a_backward_sees_the_mask_that_the_forward_drew() -> None:
    w = nn.Parameter(torch.ones(64, 64, dtype=torch.float64))

    def run(x: Tensor) -> Tensor:
        return F.dropout((x * w).exp(), 0.5).exp().log()

    x = _float64(64, 64)
    y = egcompile.compile(run, fullgraph=True, memory_budget=0.0)(x)
    (grad,) = torch.autograd.grad(y.sum(), w)
    assert 0 < int((y == 0).sum()) < y.numel()
    torch.testing.assert_close(grad, y * x, rtol=1e-10, atol=1e-10)


def test_autograd_holds_the_bytes_that_were_predicted() -> None:
    model, inputs = CASES["llama"].make()
    traced = egcompile.trace(model, inputs)
    values = [*traced.state, *traced.inputs(inputs)]
    for budget in (1.0, 0.6, 0.3, 0.0):
        plan = egcompile.optimize(traced, "cpu", memory_budget=budget)
        (loss,) = plan.run(values)
        given = {x.data_ptr() for x in values}
        held = {t.data_ptr(): t.nbytes for t in loss.grad_fn.saved_tensors if t.data_ptr() not in given}  # type: ignore[union-attr]
        assert sum(held.values()) == plan.compiled().partition.saved_bytes


# ---- how values are made again ----


def test_a_loop_is_computed_inside_the_loop_that_reads_it() -> None:
    a, b, ct = leaf("a", 512, 512), leaf("b", 512, 512), leaf("ct", 512, 512)
    total = add(mul(a, b), mul(b, b))
    made = joint([total], [ct], {a: sin(mul(ct, total))})
    found = extract(egraph(made), H200)
    assert partition(found, H200).saved == (total,)
    parts = partition(found, H200, 0.0)
    assert parts.inside == (total,) and not parts.recomputed
    assert set(parts.saved) == {a, b}
    steps = schedule(found, H200, parts)
    assert steps.backward is not None and len(steps.backward.inputs) == 3


def test_what_costs_no_time_is_made_again_without_being_asked() -> None:
    """The unfused plan writes a cast that its reader could make from fewer bytes; an exact plan does not."""
    x = leaf("x", 512, 512, dtype=torch.bfloat16)
    ct = leaf("ct", 512, 512)
    wide = cast(x, torch.float32)
    made = joint([exp(wide)], [ct], {leaf("z", 512, 512): mul(ct, wide)})
    plain = extract(egraph(made), H200, mode="unfused")
    assert partition(plain, H200).saved == (wide,)
    parts = partition(replace(plain, stats=replace(plain.stats, mode="exact")), H200)
    assert (parts.saved, parts.inside) == ((x,), (wide,)) and parts.cost < 0.0


@pytest.mark.parametrize("budget", [0.7, 0.3, 0.0])
@pytest.mark.parametrize("mode", ["exact", "greedy", "unfused"])
@pytest.mark.parametrize("seed", range(12))
def test_random_plans_compute_the_same(
    seed: int, mode: Any, budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("egcompile.extract.extraction.Costs", lambda target: RandomCosts(target, seed))
    made, equal = random_joint(seed, steps=20 + 3 * seed)
    inputs = [torch.randn(n.shape, dtype=n.dtype) for n in made.graph.inputs]
    found = extract(egraph(made, equal), H200, mode=mode)
    parts = partition(found, H200, budget)
    assert parts.saved_bytes <= partition(found, H200).saved_bytes
    count = len(made.primals)
    planned = schedule(found, H200, parts)
    outputs, gradients = run_schedule(planned, len(made.outputs), inputs[:count], inputs[count:])
    results = [*outputs, *(g for g in gradients if g is not None)]
    for a, b in zip(results, evaluate(made.graph, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# ---- how it is asked for ----


@pytest.mark.parametrize("budget", [-0.1, 1.5, float("nan")])
def test_a_budget_is_from_0_to_1(budget: float) -> None:
    model, inputs = CASES["mlp_relu"].make()
    with pytest.raises(ValueError, match="memory_budget"):
        egcompile.compile(model, memory_budget=budget)
    with pytest.raises(ValueError, match="memory_budget"):
        egcompile.optimize(egcompile.trace(model, inputs), "cpu", memory_budget=budget)


def test_the_backend_takes_it_as_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    made = Plan.__init__

    def record(self: Plan, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        plans.append(self)

    monkeypatch.setattr(Plan, "__init__", record)
    model, inputs = CASES["mlp_relu"].make()
    for run in (
        torch.compile(model, backend="egcompile", options={"memory_budget": 0.25}),
        egcompile.compile(model, memory_budget=0.25),
        egcompile.compile(memory_budget=0.25, options={"opaque": False})(model),
    ):
        torch.compiler.reset()
        run(*inputs)
        assert plans.pop().memory_budget == 0.25


def test_explain_reports_what_is_saved_and_made_again() -> None:
    model, inputs = CASES["llama"].make()
    traced = egcompile.trace(model, inputs)
    assert "computed again in the backward\n  none" in egcompile.optimize(traced, "cuda:90").explain()
    plan = egcompile.optimize(traced, "cuda:90", memory_budget=0.4)
    parts, text = plan.compiled().partition, plan.explain()
    section = text[text.index("computed again in the backward") :]
    assert f"{len(parts.recomputed)} kernels" in section and "in the fastest plan" in section
    assert sum(int(line.split(" x ")[0]) for line in section.splitlines() if " x " in line) == len(
        parts.recomputed
    ) + len(parts.inside)
