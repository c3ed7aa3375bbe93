"""Gradients where inputs or cotangents are NaN or infinite, and where elements tie: as eager has them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from egcompile.derive import derive
from egcompile.frontend import trace
from egcompile.ops import evaluate

NAN, INF = math.nan, math.inf
ROWS = torch.tensor(
    [
        [1.0, NAN, 3.0, 3.0],
        [2.0, 2.0, -1.0, 0.0],
        [INF, 1.0, INF, 0.0],
        [-INF, -INF, -INF, -INF],
        [0.0, -0.0, 0.0, 5.0],
        [NAN, NAN, NAN, NAN],
        [-INF, 4.0, 4.0, -2.0],
    ],
    dtype=torch.float64,
)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(1),
    "amax_0": lambda x: x.amax(0, keepdim=True),
    "amin_both": lambda x: x.amin((0, 1)),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max_dim": lambda x: x.max(1).values,
    "min_dim": lambda x: x.min(1).values,
    "aminmax": lambda x: torch.cat([t.reshape(-1) for t in torch.aminmax(x, dim=1)]),
    "maximum": lambda x: torch.maximum(x, x.detach().flip(1)),
    "maximum_self": lambda x: torch.maximum(x, x.flip(1)),
    "minimum": lambda x: torch.minimum(x, x.flip(1)),
    "fmax": lambda x: torch.fmax(x, x.flip(1)),
    "fmin": lambda x: torch.fmin(x, x.flip(1)),
    "relu": torch.relu,
    "sign": lambda x: x.sign() * x,
    "norm_inf": lambda x: x.norm(INF, dim=1),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "logsumexp_0": lambda x: x[:, 1:].logsumexp(0),
    "minus_logsumexp": lambda x: x - x.logsumexp(1, keepdim=True),
    "clamp": lambda x: x.clamp(-1, 3),
    "clamp_min": lambda x: x.clamp_min(2),
    "clamp_max": lambda x: x.clamp(max=2),
    "clamp_tensors": lambda x: x.clamp(torch.full_like(x, -1), x.new_tensor([3, 2, 1, 4])),
    "norm": lambda x: x.norm(dim=1),
    "norm_of_all": lambda x: x[4:5].norm(),
    "norm_1": lambda x: x.norm(1, dim=0),
    "normalize": lambda x: F.normalize(x, dim=1),
    "normalize_0": lambda x: F.normalize(x[4:5] * 0, dim=0),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(len(x)) % 4, reduction="none"),
    "cross_entropy_mean": lambda x: F.cross_entropy(x, torch.arange(len(x)) % 4),
    "cross_entropy_ignored": lambda x: F.cross_entropy(x, torch.arange(len(x)) % 4, ignore_index=1),
    "cross_entropy_smoothed": lambda x: F.cross_entropy(x, torch.arange(len(x)) % 4, label_smoothing=0.1),
    "nll": lambda x: F.nll_loss(x, torch.arange(len(x)) % 4, reduction="none"),
}
COTANGENTS = {"finite": (0.5, 1.5), "zero": (0.0, 0.0), "infinite": (INF, INF), "nan": (NAN, NAN)}
PRODUCTS = ("abs", "amax", "amin", "amax_0", "amin_both", "sign", "norm_inf", "relu", "maximum", "softmax")
"""Functions of which cotangents that are not finite are tested too."""

CALLS = [(n, c) for n in FUNCTIONS for c in COTANGENTS if c in ("finite", "zero") or n in PRODUCTS]


@pytest.mark.parametrize(("name", "cotangent"), CALLS)
def test_values_and_gradients_are_eagers(name: str, cotangent: str) -> None:
    function = FUNCTIONS[name]
    x = ROWS.clone().requires_grad_()
    y = function(x)
    ct = torch.linspace(*COTANGENTS[cotangent], y.numel(), dtype=x.dtype).view(y.shape)
    (expected,) = torch.autograd.grad(y, x, ct)
    traced = trace(function, (x,))
    joint = derive(traced.graph, traced.requires_grad)
    value, gradient = evaluate(joint.graph, [x.detach(), *traced.constants, ct])
    torch.testing.assert_close(value, y.detach(), equal_nan=True)
    torch.testing.assert_close(gradient, expected, equal_nan=True)
