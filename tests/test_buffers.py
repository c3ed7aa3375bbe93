"""Buffers that training changes: after some steps, a compiled model's and a plan's are eager's."""

from __future__ import annotations

import copy

import pytest
import torch

import egcompile
from tests.models import CASES
from tests.runs import run

BUFFERED = [name for name, case in CASES.items() if any(True for _ in case.model().buffers())]


@pytest.mark.parametrize("name", BUFFERED)
def test_a_compiled_model(name: str) -> None:
    torch.compiler.reset()
    model, inputs = CASES[name].make()
    twin = copy.deepcopy(model)
    compiled = egcompile.compile(twin, fullgraph=True)
    for _ in range(3):
        model(*inputs), compiled(*inputs)
    torch.testing.assert_close(
        dict(twin.named_buffers()), dict(model.named_buffers()), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("name", BUFFERED)
def test_a_traced_plan(name: str) -> None:
    model, inputs = CASES[name].make()
    twin = copy.deepcopy(model)
    traced = egcompile.trace(twin, inputs)
    plan = egcompile.optimize(traced)
    for _ in range(3):
        model(*inputs), run(plan, traced, *inputs)
    torch.testing.assert_close(
        dict(twin.named_buffers()), dict(model.named_buffers()), rtol=1e-10, atol=1e-10
    )


def test_some_models_have_buffers_that_change() -> None:
    model, inputs = CASES["bottleneck"].make()
    before = copy.deepcopy(dict(model.named_buffers()))
    model(*inputs)
    assert all(not torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
