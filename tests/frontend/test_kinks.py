"""Gradients where a function has a corner, a tie or a singular point: a decomposition that has an op's value
need not have its gradient there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from egcompile.derive import derive
from egcompile.frontend import trace
from egcompile.ops import evaluate

GRID = torch.arange(-8, 8.5, 0.5, dtype=torch.float64)[:32]

KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "softplus": F.softplus,
    "threshold": lambda x: F.threshold(x, 0.5, 2.0),
    "clamp": lambda x: x.clamp(-1, 1),
    "sinc": torch.sinc,
    "log_ndtr": torch.special.log_ndtr,
    "log_ndtr_far": lambda x: torch.special.log_ndtr(8 * x),
    "xlogy": lambda x: torch.xlogy(x, x.detach().abs()),
    "xlog1py": lambda x: torch.special.xlog1py(x, x.detach().abs() - 1),
    "entr": torch.special.entr,
    "std": lambda x: (x * 0).std(),
    "std_mean": lambda x: torch.std_mean((x * 0).view(4, 8), 1)[0],
    "norm": lambda x: (x * 0).norm(),
    "normalize": lambda x: F.normalize(x * 0, dim=0),
    "cdist": lambda x: torch.cdist(x[:, None], x[:, None].detach()),
    "dist": lambda x: torch.dist(x, x.detach()),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.clamp(0, 1), (x.detach() > 0).double()),
    "huber": lambda x: F.huber_loss(x, x.detach() * 0),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x.detach() * 0),
    "amax": lambda x: torch.stack([x, x]).amax(0),
    "max_dim": lambda x: torch.stack([x, x]).max(0).values,
    "logaddexp": lambda x: torch.logaddexp(x, x.detach()),
    "fmod": lambda x: torch.fmod(x, 2.0),
    "atan2": lambda x: torch.atan2(x, x * 0),
    "max_pool": lambda x: F.max_pool1d((x * 0)[None, None], 3),
    "logsumexp": lambda x: (x * 0).logsumexp(0),
}


@pytest.mark.parametrize("name", KINKS)
def test_gradients_are_eagers(name: str) -> None:
    function = KINKS[name]
    x = GRID.clone().requires_grad_()
    y = function(x)
    ct = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).view(y.shape)
    (expected,) = torch.autograd.grad(y, x, ct)
    traced = trace(function, (GRID.clone().requires_grad_(),))
    joint = derive(traced.graph, traced.requires_grad)
    value, gradient = evaluate(joint.graph, [GRID, *traced.constants, ct])
    torch.testing.assert_close(value, y.detach(), equal_nan=True)
    tolerance = 1e-7 if name == "hardsigmoid" else 1e-10  # ATen's 1/6 is that of fp32
    torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
