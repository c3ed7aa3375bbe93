"""The fused functions: values and every order of gradient against PyTorch and finite differences, in fp64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from egcompile import functional as E
from egcompile.errors import TypeMismatch

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def hf_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, r: Tensor, w: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return F.rms_norm(x + r, x.shape[-1:], w, eps), x + r


@dataclass(frozen=True)
class Case:
    """A function of ours, PyTorch's, and the shapes of their operands (None for one left out)."""

    function: Callable[..., Any]
    reference: Callable[..., Any]
    shapes: tuple[tuple[int, ...] | None, ...]


def linear_case(activation: str, *shapes: tuple[int, ...] | None) -> Case:
    return Case(
        lambda x, w, b: E.linear_act(x, w, b, activation),  # type: ignore[arg-type]
        lambda x, w, b: ACTIVATIONS[activation](F.linear(x, w, b)),
        shapes,
    )


TARGET = torch.tensor([1, 4, -100, 0])

CASES = {
    "rms_norm": Case(
        lambda x, w: E.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (5,), w, 1e-5), ((2, 3, 5), (5,))
    ),
    "rms_norm-unweighted": Case(
        lambda x, w: E.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (5,), w, 1e-5), ((3, 5), None)
    ),
    "rms_norm-cast_first": Case(
        lambda x, w: E.rms_norm(x, w, 1e-5, cast_first=True),
        lambda x, w: hf_rms_norm(x, w, 1e-5),
        ((3, 5), (5,)),
    ),
    "add_rms_norm": Case(
        lambda x, r, w: E.add_rms_norm(x, r, w, 1e-5),
        lambda x, r, w: add_rms_norm(x, r, w, 1e-5),
        ((2, 3, 5), (2, 3, 5), (5,)),
    ),
    "add_rms_norm-unweighted": Case(
        lambda x, r, w: E.add_rms_norm(x, r, w, 1e-5),
        lambda x, r, w: add_rms_norm(x, r, w, 1e-5),
        ((3, 5), (3, 5), None),
    ),
    **{f"linear_act-{a}": linear_case(a, (2, 3, 4), (5, 4), (5,)) for a in ACTIVATIONS},
    "linear_act-unbiased": linear_case("gelu", (3, 4), (5, 4), None),
    "linear_act-one row": linear_case("silu", (4,), (5, 4), (5,)),
    "swiglu": Case(E.swiglu, lambda g, u: F.silu(g) * u, ((3, 4), (3, 4))),
    "softmax": Case(E.softmax, lambda x: torch.softmax(x, -1), ((2, 3, 4),)),
    "softmax-first": Case(lambda x: E.softmax(x, 0), lambda x: torch.softmax(x, 0), ((3, 4),)),
    **{
        f"cross_entropy-{reduction}": Case(
            lambda x, reduction=reduction: E.cross_entropy(x, TARGET, reduction=reduction),
            lambda x, reduction=reduction: F.cross_entropy(x, TARGET, reduction=reduction),
            ((4, 5),),
        )
        for reduction in ("none", "mean", "sum")
    },
}


def operands(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    return [None if s is None else torch.randn(s, dtype=dtype, requires_grad=True) for s in case.shapes]


def outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def of_tensors(function: Callable[..., Any], values: list[Tensor | None]) -> Callable[..., Any]:
    """`function` of its operands that are tensors."""

    def call(*tensors: Tensor) -> Any:
        given = iter(tensors)
        return function(*(None if v is None else next(given) for v in values))

    return call


@pytest.mark.parametrize("name", CASES)
def test_against_pytorch(name: str) -> None:
    case = CASES[name]
    values = operands(case)
    tensors = [v for v in values if v is not None]
    ours, theirs = outputs(case.function(*values)), outputs(case.reference(*values))
    cotangents = [torch.randn_like(y) for y in theirs]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(ours, tensors, cotangents),
        torch.autograd.grad(theirs, tensors, cotangents),
        rtol=1e-10,
        atol=1e-10,
    )


@pytest.mark.parametrize("name", CASES)
def test_gradcheck_and_gradgradcheck(name: str) -> None:
    case = CASES[name]
    values = operands(case)
    function = of_tensors(case.function, values)
    tensors = [v for v in values if v is not None]
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.parametrize(
    "name", [n for n, case in CASES.items() if sum(s is not None for s in case.shapes) > 1]
)
def test_frozen_operands(name: str) -> None:
    """With any one operand frozen, the others' gradients are right and it gets none."""
    case = CASES[name]
    count = sum(s is not None for s in case.shapes)
    for frozen in range(count):
        values = operands(case)
        tensors = [v for v in values if v is not None]
        tensors[frozen].requires_grad_(False)
        function = of_tensors(case.function, values)
        assert torch.autograd.gradcheck(function, tensors)
        assert torch.autograd.gradgradcheck(function, tensors)
        sum(y.sum() for y in outputs(function(*tensors))).backward()
        assert tensors[frozen].grad is None


def test_third_order() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    third = {}
    for name, function in (
        ("ours", lambda x: E.rms_norm(x, None, 1e-5)),
        ("theirs", lambda x: F.rms_norm(x, (4,), None, 1e-5)),
    ):
        y = function(x).sin().sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            y = (g * torch.arange(1.0, 5.0, dtype=torch.float64)).sum()
        third[name] = g
    torch.testing.assert_close(third["ours"], third["theirs"], rtol=1e-10, atol=1e-10)


def test_without_gradients() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        assert not E.softmax(x).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(E.softmax(x), torch.softmax(x, -1))
    assert not E.softmax(x.detach()).requires_grad


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 6, dtype=torch.float64).mT,
        lambda: torch.randn(6, 8, dtype=torch.float64)[:, ::2],
        lambda: torch.randn(4, dtype=torch.float64).expand(6, 4),
        lambda: torch.randn(1, 4, dtype=torch.float64),
        lambda: torch.randn(0, 4, dtype=torch.float64),
    ],
    ids=["transposed", "strided", "zero-stride", "one row", "no rows"],
)
def test_layouts_and_edges(make: Callable[[], Tensor]) -> None:
    w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    for function, reference in (
        (lambda x, w: E.linear_act(x, w, None, "gelu"), lambda x, w: F.gelu(F.linear(x, w))),
        (lambda x, w: E.rms_norm(x, w[0], 1e-5), lambda x, w: F.rms_norm(x, (4,), w[0], 1e-5)),
    ):
        x = make().requires_grad_()
        ours, theirs = function(x, w), reference(x, w)
        torch.testing.assert_close(ours, theirs)
        ct = torch.randn_like(theirs)
        torch.testing.assert_close(
            torch.autograd.grad(ours, (x, w), ct), torch.autograd.grad(theirs, (x, w), ct)
        )


def test_rows_that_are_all_ignored_have_no_mean() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    assert E.cross_entropy(logits, torch.tensor([-100, -100])).isnan()


@pytest.mark.parametrize("name", CASES)
def test_disabled_runs_eagerly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGCOMPILE_DISABLE", "1")
    case = CASES[name]
    values = operands(case)
    for ours, theirs in zip(outputs(case.function(*values)), outputs(case.reference(*values)), strict=True):
        assert "PlanFunction" not in type(ours.grad_fn).__name__
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_inside_a_compiled_model(name: str) -> None:
    """Dynamo sees PyTorch's ops, so that the compiler around them can fuse further."""
    torch.compiler.reset()
    case = CASES[name]
    values = operands(case)
    function = of_tensors(case.function, values)
    tensors = [v for v in values if v is not None]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        outputs(compiled(*tensors)), outputs(case.reference(*values)), rtol=1e-12, atol=1e-12
    )


def test_errors() -> None:
    with pytest.raises(TypeMismatch, match=r"matmul of f32\[3,4\] and f32\[6,5\]"):
        E.linear_act(torch.randn(3, 4), torch.randn(5, 6))
    with pytest.raises(TypeMismatch, match="operands differ"):
        E.swiglu(torch.randn(3, 4), torch.randn(3, 5))
    with pytest.raises(TypeMismatch, match="one device"):
        E.swiglu(torch.randn(3, 4), torch.randn(3, 4, device="meta"))
    with pytest.raises(ValueError, match="no activation 'swish'"):
        E.linear_act(torch.randn(3, 4), torch.randn(5, 4), None, "swish")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reduction is"):
        E.cross_entropy(torch.randn(3, 4), torch.zeros(3, dtype=torch.int64), reduction="max")  # type: ignore[arg-type]


def test_a_saved_operand_changed_in_place() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    w = torch.randn(5, 4, requires_grad=True)
    y = E.linear_act(x, w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
