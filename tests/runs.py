"""Running a traced model's plan as its model runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from egcompile.frontend import Traced
from egcompile.plan import Plan


def run(plan: Plan, traced: Traced, *inputs: Tensor) -> Any:
    """A traced model's result; buffers that it changes are written back."""
    values = plan(*traced.state, *traced.inputs(inputs))
    values = values if isinstance(values, tuple) else (values,)
    result = traced.restore(values)
    for i, slot in traced.mutated:
        traced.state[i].copy_(values[slot])
    return result
