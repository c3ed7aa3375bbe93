"""The zoo itself: equal calls of `make` are equal, and a step's gradients are finite."""

from __future__ import annotations

import pytest
import torch

from tests.models import CASES, Case


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step(case: Case) -> None:
    (model, inputs), (again, same) = case.make(), case.make()
    assert all(torch.equal(a, b) for a, b in zip(inputs, same, strict=True))
    result, repeated = model(*inputs), again(*same)
    loss = result[-1] if isinstance(result, tuple) else result
    assert torch.equal(loss, repeated[-1] if isinstance(repeated, tuple) else repeated)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert bool(parameter.grad.any()), name
