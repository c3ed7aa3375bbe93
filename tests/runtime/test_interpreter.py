"""Whole plans for a GPU, their kernels run by Triton's interpreter on CPU tensors, against fp64.

The ATen path of a CPU proves the graphs; this proves what is generated.
"""

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egcompile.api import compile, optimize, trace
from egcompile.frontend import Traced
from egcompile.plan import Plan
from tests.models import CASES

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="kernels run on the GPU that there is, where test_gpu.py runs whole plans",
)

FLOOR = 1e-6
"""Relative error below which a comparison with eager's own error says nothing."""


def loss_of(result: object) -> Tensor:
    loss = result[-1] if isinstance(result, tuple) else result
    assert isinstance(loss, Tensor)
    return loss


def wide(values: Sequence[Tensor]) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in values]


def planned(model: nn.Module, inputs: Sequence[Tensor], mode: str = "exact") -> tuple[Plan, Traced]:
    traced = trace(model, inputs)
    return optimize(traced, target="cuda:90", mode=mode), traced


def run(plan: Plan, traced: Traced, inputs: Sequence[Tensor]) -> object:
    return traced.restore(plan.run([*traced.state, *traced.inputs(inputs)]))


def rmse(values: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    """The error of each value, relative to the size of the true one."""
    return [
        ((v.double() - t).square().mean().sqrt() / t.square().mean().sqrt().clamp_min(1e-12)).item()
        for v, t in zip(values, truth, strict=True)
    ]


@pytest.mark.parametrize("mode", ["exact", "unfused"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_as_right_as_eager(name: str, mode: str) -> None:
    """Loss and every gradient in fp32: at most twice eager's own error against fp64, and a floor."""
    model, inputs = CASES[name].make(torch.float32)
    plan, traced = planned(model, inputs, mode)
    if "libdevice." in plan.source:
        pytest.skip("libdevice needs an NVIDIA GPU")
    parameters = list(model.parameters())

    def values(loss: Tensor, of: Sequence[Tensor]) -> list[Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, of)]

    ours = values(loss_of(run(plan, traced, inputs)), parameters)
    eager = values(loss_of(model(*inputs)), parameters)
    twin = copy.deepcopy(model).double()
    truth = values(loss_of(twin(*wide(inputs))), list(twin.parameters()))
    names = ["loss", *(n for n, _ in model.named_parameters())]
    for what, error, theirs in zip(names, rmse(ours, truth), rmse(eager, truth), strict=True):
        assert error <= 2 * theirs + FLOOR, f"{what}: {error:.2e}, eager {theirs:.2e}"
    assert plan.kernels and all("@triton.jit" in kernel.source for kernel in plan.kernels)


@pytest.mark.parametrize("name", ["residual_block", pytest.param("llama", marks=pytest.mark.slow)])
def test_training_beside_eager(name: str) -> None:
    model, inputs = CASES[name].make(torch.float32)
    twin = copy.deepcopy(model)
    plan, traced = planned(twin, inputs)
    losses: list[list[float]] = [[], []]
    first, second = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, twin))
    for _ in range(50 if name == "residual_block" else 10):
        for optimizer, loss, curve in (
            (first, loss_of(model(*inputs)), losses[0]),
            (second, loss_of(run(plan, traced, inputs)), losses[1]),
        ):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
    assert losses[0][-1] < 0.5 * losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-6)


def test_the_same_inputs_give_the_same_bits() -> None:
    model, inputs = CASES["residual_block"].make(torch.float32)
    plan, traced = planned(model, inputs)
    runs = []
    for _ in range(2):
        loss = loss_of(run(plan, traced, inputs))
        runs.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_second_order_through_kernels() -> None:
    model, inputs = CASES["residual_block"].make(torch.float32)
    plan, traced = planned(model, inputs)
    parameters = list(model.parameters())

    def penalty(loss: Tensor) -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in gradients]).sum(), parameters)

    ours = penalty(loss_of(run(plan, traced, inputs)))
    torch.testing.assert_close(ours, penalty(loss_of(model(*inputs))), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(6, 4, 5).permute(2, 0, 1),
        torch.randn(5, 1, 4).expand(5, 6, 4),
        torch.randn(5, 6, 8)[..., ::2],
        torch.randn(5 * 6 * 4 + 3)[3:].view(5, 6, 4),
    ],
    ids=["permuted", "expanded", "strided", "offset"],
)
def test_inputs_as_they_lie(x: Tensor) -> None:
    """Kernels read an input through its strides, which are part of what is compiled."""

    def function(x: Tensor) -> Tensor:
        return F.gelu(x).sum(1).softmax(-1) * x.mean(1)

    torch.compiler.reset()
    compiled = compile(function, fullgraph=True, options={"target": "cuda:90"})
    x = x.detach().requires_grad_()
    ours, theirs = compiled(x), function(x)
    ct = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(ours, x, ct), torch.autograd.grad(theirs, x, ct), rtol=1e-5, atol=1e-6
    )


CHOICES = {
    "amax of rows": lambda x: F.silu(F.layer_norm(x, x.shape[-1:])).amax(1),
    "amax of columns": lambda x: F.silu(F.layer_norm(x, x.shape[-1:])).amax(0),
    "amin": lambda x: (1 + x.square()).sqrt().amin(1, keepdim=True) * x,
    "less the mean": lambda x: ((x - x.mean(1, keepdim=True)) * x[0]).amax(1),
    "times the mean": lambda x: ((x * x.mean(1, keepdim=True)) * x[0]).amin(1),
    "less the mean, of columns": lambda x: ((x - x.mean(1, keepdim=True)) * x[0]).amax(0),
    "less the mean, of all": lambda x: ((x - x.mean(1, keepdim=True)) * x[0]).amax((0, 1)),
    "times a softmax": lambda x: (torch.softmax(x, 1) * x).amax(1),
    "of a sum": lambda x: (x * x.sum(0) * 0.3).amax(0),
    "maximum": lambda x: torch.maximum(x * 0.3, (x * 0.3).roll(1, 0)),
    "clamp": lambda x: (x * 0.3).clamp(-0.1, 0.1) * x,
}
"""Whose gradient compares a value that is computed with one that was chosen of such."""


@pytest.mark.parametrize("budget", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(64, 33), (16, 512)])
@pytest.mark.parametrize("name", CHOICES)
def test_what_was_chosen_is_found_again(name: str, shape: tuple[int, int], budget: float) -> None:
    """Of 16 bits, one of the two was rounded in memory where the other was computed again."""
    function = CHOICES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
    traced = trace(function, [x])
    ours = loss_of(run(optimize(traced, target="cuda:90", memory_budget=budget), traced, [x]))
    twin = x.detach().double().requires_grad_()
    eager, exact = function(x), function(twin)
    ct = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).half()
    found, theirs = (torch.autograd.grad(y, x, ct.to(y.dtype)) for y in (ours, eager))
    truth = torch.autograd.grad(exact, twin, ct.double())
    (error,), (bound,) = rmse(found, truth), rmse(theirs, truth)
    assert error <= 2 * bound + 1e-4, f"{error:.2e}, eager {bound:.2e}"


def centered(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * x.std(-1, keepdim=True)


MASKED = {
    "is the largest": lambda z: z == z.amax(1, keepdim=True),
    "is the largest of its column": lambda z: z == z.amax(0),
    "is the largest, turned": lambda z: (z.t() == z.amax(1)).t(),
    "is the largest of some": lambda z: z == z.masked_fill(z > 0.5, -9.0).amax(1, keepdim=True),
    "is at least the third": lambda z: z >= z.topk(3, 1).values[:, 2:],
    "is at most the median": lambda z: z <= z.median(1, keepdim=True).values,
    "is not the smallest": lambda z: z != z.min(),
    "is the norm": lambda z: z.abs() == torch.linalg.vector_norm(z, float("inf"), 1, keepdim=True),
    "is a peak": lambda z: z == F.max_pool2d(z[None, None], 3, 1, 1)[0, 0],
    "is not below the largest": lambda z: (z - z.amax(1, keepdim=True)) >= 0,
    "is above the third": lambda z: F.relu(z - z.topk(3, 1).values[:, 2:]) > 0,
    "is the larger of two": lambda z: torch.maximum(z, z[:1] * 0.5) == z,
}
"""What is true of some elements alone, or of all others: a last bit decides."""

EXTREME = {
    "max": lambda z: torch.aminmax(z, dim=1).max,
    "norm": lambda z: torch.linalg.vector_norm(z, float("inf"), 1),
    "least norm": lambda z: torch.linalg.vector_norm(z, -float("inf"), 1),
}
"""Whose derivative is PyTorch's own: it compares what was found with what it was found in."""


@pytest.mark.parametrize(
    "shape, dtype, budget",
    [((13, 37), torch.float16, 1.0), ((3, 16999), torch.float16, 0.0), ((3, 16999), torch.float32, 1.0)],
)
@pytest.mark.parametrize("name", [*MASKED, *EXTREME])
def test_comparisons_see_the_values_that_were_chosen(
    name: str, shape: tuple[int, int], dtype: torch.dtype, budget: float
) -> None:
    """A mask lets through what it should, of the very values that there are, and as much in the backward."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        z = centered(x)
        if name in MASKED:
            return torch.where(MASKED[name](z), z, 0.0), z.detach()
        return EXTREME[name](z), z

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    traced = trace(function, [x])
    ours, values = run(optimize(traced, target="cuda:90", memory_budget=budget), traced, [x])
    z = values.detach().clone().requires_grad_()
    if name in MASKED:
        mask = MASKED[name](z)
        assert torch.equal(ours, torch.where(mask, z, 0.0))
    else:
        mask = torch.autograd.grad(EXTREME[name](z).sum(), z)[0]
    twin = x.detach().double().requires_grad_()
    (theirs,) = torch.autograd.grad((centered(twin) * mask).sum(), twin)
    (found,) = torch.autograd.grad(ours.sum(), x)
    (error,) = rmse([found], [theirs])
    assert error <= (1e-2 if dtype == torch.float16 else 1e-4), f"{error:.2e}"


AGAINST_CONSTANTS = {
    "equal": lambda x: (x == 0.1, x != 0.7),
    "less": lambda x: (x < 1.2, x <= 0.3),
    "more": lambda x: (x > 0.7, x >= 0.1),
    "computed": lambda x: (x * 1.0 > 0.7, x.abs() <= 0.3),
    "clamp": lambda x: (x.clamp(0.2, 0.7),),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", AGAINST_CONSTANTS)
def test_a_constant_is_compared_as_its_dtype_holds_it(name: str, dtype: torch.dtype) -> None:
    """Of values at the bound itself, whose 16 bits lie above or below the decimal that was written."""
    function = AGAINST_CONSTANTS[name]
    x = torch.tensor([0.1, 0.2, 0.3, 0.7, 1.2]).to(dtype).requires_grad_()
    traced = trace(function, [x])
    ours = run(optimize(traced, target="cuda:90"), traced, [x])
    assert isinstance(ours, tuple)
    for found, expected in zip(ours, function(x), strict=True):
        if expected.dtype == torch.bool:
            assert torch.equal(found, expected)
        else:  # the interpreter cuts off what a GPU rounds to bf16, so the gradient alone
            ours_dx, dx = (torch.autograd.grad(y.sum(), x)[0] for y in (found, expected))
            assert torch.equal(ours_dx, dx)


SHIFTED = {
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1, correction=0),
    "var_mean": lambda x: torch.var_mean(x, -1)[0],
    "var over rows": lambda x: x.var(0),
    "var over axes apart": lambda x: x.view(len(x), 11, -1).var((0, 2)),
    "std of a middle axis": lambda x: x.view(len(x), 11, -1).std(1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(len(x)), reduction="none"),
}
"""Of values that differ little beside their size, what depends on the differences alone."""


@pytest.mark.parametrize("width", [33, 33000])
@pytest.mark.parametrize("name", SHIFTED)
def test_what_all_have_in_common_costs_no_digits(name: str, width: int) -> None:
    function = SHIFTED[name]
    noise = torch.randn(6, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = (1e4 + 1e-2 * noise).float()
    traced = trace(function, [x])
    found = loss_of(run(optimize(traced, target="cuda:90"), traced, [x]))
    (error,) = rmse([found], [function(x.double())])
    assert error <= FLOOR
