"""The fused functions: values and every order of gradient against PyTorch and finite differences, in fp64."""

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from egcompile import functional as E
from egcompile import pipeline
from egcompile.errors import TypeMismatch
from egcompile.functional import call
from tests import models

ACTIVATIONS = {"none": lambda x: x} | models.ACTIVATIONS


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
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25], dtype=torch.float64)


def fresh() -> tuple[Tensor, Tensor]:
    """A batch norm's running statistics before a call."""
    mean = torch.linspace(-1, 1, 4, dtype=torch.float64)
    return mean, mean.square() + 0.5


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
    "softmax-scalar": Case(lambda x: E.softmax(x), lambda x: torch.softmax(x, 0), ((),)),
    "layer_norm": Case(
        lambda x, w, b: E.layer_norm(x, (3, 5), w, b),
        lambda x, w, b: F.layer_norm(x, (3, 5), w, b),
        ((2, 3, 5), (3, 5), (3, 5)),
    ),
    "layer_norm-unweighted": Case(
        lambda x: E.layer_norm(x, [5], eps=0.1), lambda x: F.layer_norm(x, [5], eps=0.1), ((4, 5),)
    ),
    "layer_norm-unbiased": Case(
        lambda x, w: E.layer_norm(x, (5,), w), lambda x, w: F.layer_norm(x, (5,), w), ((4, 5), (5,))
    ),
    "group_norm": Case(
        lambda x, w, b: E.group_norm(x, 2, w, b),
        lambda x, w, b: F.group_norm(x, 2, w, b),
        ((2, 4, 2, 3), (4,), (4,)),
    ),
    "group_norm-instances": Case(lambda x: E.group_norm(x, 3), lambda x: F.instance_norm(x), ((2, 3, 4),)),
    "group_norm-rows": Case(
        lambda x, w, b: E.group_norm(x, 2, w, b, 0.1),
        lambda x, w, b: F.group_norm(x, 2, w, b, 0.1),
        ((3, 4), (4,), (4,)),
    ),
    **{
        f"batch_norm-{name}": Case(
            lambda x, w=None, b=None, options=options: E.batch_norm(x, *fresh(), w, b, **options),
            lambda x, w=None, b=None, options=options: F.batch_norm(x, *fresh(), w, b, **options),
            shapes,
        )
        for name, options, shapes in (
            ("training", {"training": True}, ((3, 4, 2, 2), (4,), (4,))),
            ("rows", {"training": True, "momentum": 0.3, "eps": 0.1}, ((5, 4), (4,), (4,))),
            ("evaluation", {}, ((3, 4, 2), (4,), (4,))),
            ("evaluation, no affine", {}, ((3, 4, 2),)),
        )
    },
    "batch_norm-no statistics": Case(
        lambda x, w, b: E.batch_norm(x, None, None, w, b, training=True),
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        ((3, 4, 2), (4,), (4,)),
    ),
    **{
        f"cross_entropy-{name}": Case(
            lambda x, options=options: E.cross_entropy(x, **options),
            lambda x, options=options: F.cross_entropy(x, **options),
            (shape,),
        )
        for name, shape, options in (
            ("weights", (4, 5), {"target": TARGET, "weight": WEIGHT}),
            ("smoothed", (4, 5), {"target": TARGET, "label_smoothing": 0.1, "reduction": "sum"}),
            ("all options", (4, 5), {"target": TARGET, "weight": WEIGHT, "label_smoothing": 0.2}),
            ("pixels", (1, 5, 4), {"target": TARGET[None].abs() % 5, "ignore_index": 4, "reduction": "none"}),
            ("one row", (5,), {"target": TARGET[0]}),
        )
    },
    "cross_entropy-probabilities": Case(
        lambda x, p: E.cross_entropy(x, p, WEIGHT, label_smoothing=0.1),
        lambda x, p: F.cross_entropy(x, p, WEIGHT, label_smoothing=0.1),
        ((4, 5), (4, 5)),
    ),
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


def test_third_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # The solver does not finish the third derivative's program in its usual 30 s either; greedy's is run.
    monkeypatch.setattr(pipeline, "extract", functools.partial(pipeline.extract, time_limit=5.0))
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


@pytest.mark.parametrize("given", [True, False], ids=["counted", "uncounted"])
@pytest.mark.parametrize("momentum", [0.1, 1.0, None], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("disable", ["", "1"], ids=["compiled", "disabled"])
def test_running_statistics(
    disable: str, dtype: torch.dtype, momentum: float | None, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written back in training as `torch.nn.BatchNorm2d` does, without a plan a step, and left alone else."""
    monkeypatch.setenv("EGCOMPILE_DISABLE", disable)
    wide = torch.promote_types(dtype, torch.float32)
    reference = torch.nn.BatchNorm2d(4, momentum=momentum).to(wide)
    twin = copy.deepcopy(reference)
    assert twin.running_mean is not None and twin.running_var is not None
    count = {"num_batches_tracked": twin.num_batches_tracked} if given or momentum is None else {}
    made = call._plan.cache_info().misses
    for training in (True, True, True, False):
        x = torch.randn(3, 4, 2, 5).to(dtype).requires_grad_()
        y = E.batch_norm(
            x, twin.running_mean, twin.running_var, twin.weight, twin.bias, training, momentum, 1e-5, **count
        )
        expected = reference.train(training)(x)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-2
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
        for ours, theirs in zip(y.sum().backward() or [x.grad], torch.autograd.grad(expected.sum(), x)):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert call._plan.cache_info().misses - made <= 2
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for ours, theirs in (
        (twin.running_mean, reference.running_mean),
        (twin.running_var, reference.running_var),
        *([(twin.num_batches_tracked, reference.num_batches_tracked)] if count else []),
    ):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_running_statistics_are_not_saved() -> None:
    """A second call before the first one's backward changes them, and the backward does not read them."""
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    mean, var = fresh()
    first = E.batch_norm(x, mean, var, training=True)
    E.batch_norm(x, mean, var, training=True)
    ct = torch.randn_like(x)
    (found,) = torch.autograd.grad(first, x, ct)
    (expected,) = torch.autograd.grad(F.batch_norm(x, None, None, training=True), x, ct)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", E.__all__)
def test_what_is_no_tensor(name: str) -> None:
    """In the place of each tensor that a function takes; None where that is no choice."""
    function = getattr(E, name)
    parameters = inspect.signature(function).parameters
    tensors = {n: p.annotation for n, p in parameters.items() if p.annotation.startswith("Tensor")}
    assert tensors
    rest = {n: 2 for n, p in parameters.items() if n not in tensors and p.default is p.empty}
    for wrong, annotation in tensors.items():
        for value in (2.0, [1.0], *(() if "None" in annotation else (None,))):
            given = {**rest, **{n: torch.randn(4, 4) for n in tensors}, wrong: value}
            with pytest.raises(TypeMismatch, match=f"{name}: {wrong} is .*, and must be a tensor"):
                function(**given)


def test_errors() -> None:
    with pytest.raises(TypeMismatch, match="softmax: input is None"):
        E.softmax(None)  # type: ignore[arg-type]
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
    x, four = torch.randn(3, 4, 2), torch.ones(4)
    with pytest.raises(TypeMismatch, match=r"layer_norm over \[3\] of f32\[3,4,2\]"):
        E.layer_norm(x, (3,))
    with pytest.raises(TypeMismatch, match=r"with weight f32\[4\]"):
        E.layer_norm(x, (2,), four)
    with pytest.raises(TypeMismatch, match="in 3 groups"):
        E.group_norm(x, 3)
    with pytest.raises(TypeMismatch, match=r"group_norm of f32\[3,4,2\] with bias f32\[3\]"):
        E.group_norm(x, 2, four, four[:3])
    with pytest.raises(TypeMismatch, match="no channels"):
        E.batch_norm(four, None, None, training=True)
    with pytest.raises(ValueError, match="both running statistics"):
        E.batch_norm(x, None, None)
    with pytest.raises(ValueError, match="both running statistics"):
        E.batch_norm(x, four, None, training=True)
    with pytest.raises(ValueError, match="one value a channel"):
        E.batch_norm(x[:1, :, :1], four, four, training=True)
    with pytest.raises(ValueError, match="needs num_batches_tracked"):
        E.batch_norm(x, four, four, training=True, momentum=None)
    with pytest.raises(IndexError, match="axis 3"):
        E.softmax(x, 3)


def test_a_saved_operand_changed_in_place() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    w = torch.randn(5, 4, requires_grad=True)
    y = E.linear_act(x, w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
