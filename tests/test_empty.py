"""Tensors without elements: values and gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import egcompile

FUNCTIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "softmax": (lambda x: x.softmax(-1), [(3, 0), (0, 3), (2, 0, 4)]),
    "log_softmax": (lambda x: x.log_softmax(-1), [(3, 0), (0, 3)]),
    "sum": (lambda x: x.sum(-1), [(3, 0), (0, 3), (0,)]),
    "mean": (lambda x: x.mean(-1), [(3, 0), (0, 3)]),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:]), [(0, 4), (2, 0, 4)]),
    "rms_norm": (lambda x: F.rms_norm(x, x.shape[-1:]), [(0, 4), (2, 0, 4)]),
    "group_norm": (lambda x: F.group_norm(x, 2), [(0, 4, 3), (2, 4, 0), (2, 4, 3, 0)]),
    "gelu": (F.gelu, [(0,), (3, 0)]),
    "linear": (lambda x: F.linear(x, torch.ones(5, 4, dtype=x.dtype)), [(0, 4), (2, 0, 4)]),
    "no inner axis": (lambda x: x @ torch.ones(0, 4, dtype=x.dtype), [(3, 0)]),
    "conv2d": (lambda x: F.conv2d(x, torch.ones(2, 3, 1, 1, dtype=x.dtype)), [(0, 3, 4, 4)]),
    "cat": (lambda x: torch.cat([x, x.exp()], 0), [(0, 3), (3, 0)]),
    "transposed": (lambda x: (x.mT * 2).tanh(), [(0, 3), (2, 0, 3)]),
    "broadcast": (lambda x: x + torch.ones(3, 1, dtype=x.dtype), [(0,), (1, 0)]),
}
CASES = [(name, shape) for name, (_, shapes) in FUNCTIONS.items() for shape in shapes]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[f"{n}-{s}" for n, s in CASES])
def test_nothing_is_computed_as_eager_does(name: str, shape: tuple[int, ...]) -> None:
    function = FUNCTIONS[name][0]
    mine, theirs = (torch.zeros(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    got, expected = egcompile.compile(function)(mine), function(theirs)
    torch.testing.assert_close(got, expected, equal_nan=True)
    for y in (got, expected):
        y.sum().backward()
    assert (mine.grad is None) == (theirs.grad is None)
    torch.testing.assert_close(mine.grad, theirs.grad)
