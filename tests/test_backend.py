"""Which plan of a captured graph a call gets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from egcompile.api import compile


def test_a_number_that_a_plan_is_made_for_is_its_to_the_bit() -> None:
    def function(x: Tensor, s: float) -> Tensor:
        return F.pad(x, (1, 1), value=s).reciprocal()

    compiled = compile(function, dynamic=True)
    x = torch.ones(3)
    for s in (0.5, 0.25, 0.0, -0.0, float("nan"), 0.25, 0.0, -0.0):
        torch.testing.assert_close(compiled(x, s), function(x, s), rtol=0, atol=0, equal_nan=True)
