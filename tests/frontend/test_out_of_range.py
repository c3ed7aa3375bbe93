"""Indices that are out of range. PyTorch stops there; a plan either does too, or what it computes is NaN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import egcompile
from egcompile.ops import REGISTRY, cross_entropy, cross_entropy_backward
from tests.codegen.harness import build, run

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda x, t: F.cross_entropy(x, t, reduction="none"),
    "ignored": lambda x, t: F.cross_entropy(x, t, reduction="none", ignore_index=2),
    "weighted": lambda x, t: F.cross_entropy(x, t, torch.arange(1, 6.0), reduction="none"),
    "smoothed": lambda x, t: F.cross_entropy(x, t, reduction="none", label_smoothing=0.1),
    "nll": lambda x, t: F.nll_loss(x, t, reduction="none"),
    "nll_weighted": lambda x, t: F.nll_loss(x, t, torch.arange(1, 6.0), reduction="none"),
}
TARGET = torch.tensor([0, 4, 2, 1])


@pytest.mark.parametrize("wrong", [-1, 5, 2**40, -(2**40)])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_class_that_does_not_exist_is_nan(name: str, wrong: int) -> None:
    """That row's alone; eager says so by an error."""
    x, target = torch.randn(4, 5, requires_grad=True), TARGET.clone()
    target[1] = wrong
    with pytest.raises((IndexError, RuntimeError)):
        LOSSES[name](x, target)
    plan = egcompile.optimize(egcompile.trace(LOSSES[name], (x, TARGET)))
    loss = plan(x, target)
    assert loss.isnan().tolist() == [False, True, False, False]
    expected = LOSSES[name](x, TARGET)
    torch.testing.assert_close(loss[[0, 2, 3]], expected[[0, 2, 3]])


def test_a_mean_with_such_a_loss_is_nan() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    plan = egcompile.optimize(egcompile.trace(F.cross_entropy, (x, TARGET)))
    assert plan(x, torch.tensor([0, 1, 2, 5])).isnan()
    assert plan(x, torch.tensor([0, 1, 2, -100])).isfinite(), "-100 is ignored"


@pytest.mark.parametrize("wrong", [-1, 7, 2**40])
def test_the_kernel_does_the_same(wrong: int) -> None:
    def both(x, target, ct):  # type: ignore[no-untyped-def]
        loss, lse = cross_entropy(x, target, ignore_index=3)
        return loss, lse, cross_entropy_backward(x, target, lse, ct, ignore_index=3)

    kernel = build(both, "f32[4,7]", "i64[4]", "f32[4]")
    loss, lse, gradient = run(kernel, [torch.randn(4, 7), torch.tensor([0, wrong, 6, 3]), torch.ones(4)])
    assert loss.isnan().tolist() == [False, True, False, False]
    assert gradient.isnan().all(1).tolist() == loss.isnan().tolist()
    assert lse.isfinite().all()
    assert loss[3] == 0
    assert (gradient[3] == 0).all()


@pytest.mark.parametrize("wrong", [-1, 5])
def test_an_embedding_is_pytorchs_own_and_stops(wrong: int) -> None:
    """Where a plan picks rows by data it calls ATen, which checks: an error, or on a GPU an assertion."""
    assert REGISTRY["embedding"].kind.value == "extern"
    model = nn.Embedding(5, 3)
    plan = egcompile.optimize(egcompile.trace(model, (TARGET,)))
    with pytest.raises((IndexError, RuntimeError)):
        plan(*model.parameters(), torch.tensor([0, wrong]).repeat(2))


@pytest.mark.parametrize("wrong", [-1, 5])
def test_classes_as_ones_and_zeros_are_pytorchs_own_and_stop(wrong: int) -> None:
    plan = egcompile.optimize(egcompile.trace(lambda target: F.one_hot(target, 5), (TARGET,)))
    torch.testing.assert_close(plan(TARGET), F.one_hot(TARGET, 5))
    with pytest.raises((IndexError, RuntimeError)):
        plan(torch.tensor([0, wrong]).repeat(2))
