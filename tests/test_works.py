"""The memory-bound work of benchmarks.works at small sizes: as near to fp64 as eager is, and no atomics."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import egcompile
from benchmarks.works import Work, works

SMALL = {2: (48, 96), 4: (3, 64, 5, 6)}
"""Shapes by rank; a vector has as many elements as the first input has columns or channels."""

FLOORS = {torch.float32: 1e-6, torch.bfloat16: 1e-3}
"""Errors, relative to the size of the value, below which eager's is chance."""


def _small(work: Work) -> Work:
    first = SMALL[len(work.shapes[0])]
    if work.name == "transposed_chain":
        first = (64, 64)
    return replace(work, shapes=tuple(first if len(s) > 1 else (first[1],) for s in work.shapes))


WORKS = {f"{w.name}{' channels_last' * w.nhwc}": _small(w) for w in works()}


def gradients(results: Sequence[Tensor], inputs: Sequence[Tensor], cts: Sequence[Tensor]) -> list[Tensor]:
    cts = [ct.to(y.dtype) for ct, y in zip(cts, results, strict=True)]
    return [y.detach() for y in results] + list(torch.autograd.grad(results, inputs, cts))


def several(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def errors(values: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    """Root mean squares, relative to the true values'."""
    return [
        ((v.double() - t).square().mean() / t.square().mean().clamp_min(1e-24)).sqrt().item()
        for v, t in zip(values, truth, strict=True)
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU that there is")
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2.0), (torch.bfloat16, 3.0)])
@pytest.mark.parametrize("name", WORKS)
def test_values_and_gradients_are_as_near_as_eagers(name: str, dtype: torch.dtype, most: float) -> None:
    """In Triton's interpreter, against fp64 of the same inputs and cotangents."""
    work = WORKS[name]
    inputs = [x.detach().to(dtype).requires_grad_() for x in work.inputs("cpu")]
    exact = [copy.deepcopy(x.detach()).double().requires_grad_() for x in inputs]
    truths = several(work.call(*exact))
    cts = [torch.randn(y.shape).to(dtype) for y in truths]
    truth = gradients(truths, exact, cts)
    eager = errors(gradients(several(work.call(*inputs)), inputs, cts), truth)
    traced = egcompile.trace(work.call, tuple(inputs))
    plan = egcompile.optimize(traced, target="cuda:90")
    found = several(traced.restore(plan.run([*traced.state, *traced.inputs(inputs)])))
    for error, allowed in zip(errors(gradients(found, inputs, cts), truth), eager, strict=True):
        assert error <= max(most * allowed, FLOORS[dtype])


@pytest.mark.parametrize("name", WORKS)
def test_a_plan_has_no_atomics(name: str) -> None:
    work = WORKS[name]
    traced = egcompile.trace(work.call, tuple(work.inputs("cpu")))
    source = egcompile.optimize(traced, target="cuda:90").source
    assert "tl.store" in source and "atomic" not in source
