"""Python numbers in ATen's calls, where they do not fit or leave nothing to differentiate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import egcompile
from egcompile import ops
from tests.frontend.test_aten import CASES, import_call


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("op", [o for o, cases in CASES.items() if o.name().endswith(".Scalar") and cases])
def test_a_number_wraps_around_to_an_integer_s_range(op: Any, dtype: torch.dtype) -> None:
    """Where ATen takes it: some ops refuse, powers and divisions are of floats."""
    x = torch.tensor([0, 1, 2, 100, -1]).to(dtype)
    for number in (300, -1, -129, 2**31 + 5):
        try:
            expected = op(x, number)
        except RuntimeError:
            continue
        if expected.dtype.is_floating_point:
            continue
        imported, inputs = import_call(op, (x, number), {}, expected)
        assert torch.equal(ops.evaluate(imported.graph, inputs)[0], expected)


def test_a_power_of_0_has_a_gradient_of_0() -> None:
    x = torch.tensor([0.0, -1.0, math.inf, math.nan], requires_grad=True)
    y = egcompile.compile(lambda x: x**0)(x)
    assert torch.equal(y, torch.ones(4))
    assert torch.equal(torch.autograd.grad(y, x, torch.ones(4))[0], torch.zeros(4))
