"""Gradients where a function has a corner, a tie or a singular point: a decomposition that has an op's value
need not have its gradient there.
"""

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
    "binary_cross_entropy_target": lambda x: F.binary_cross_entropy(x.detach().clamp(0, 1), x.clamp(0, 1)),
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

_FACTORS = torch.tensor([1.0, 10.0, 30.0, 120.0, 1e4, math.inf], dtype=torch.float64)
FAR = torch.cat([-_FACTORS.flip(0), _FACTORS, torch.tensor([math.nan])])
"""Where exponentials under- and overflow, and what is no number."""

SATURATING: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(F, name)
        for name in (
            *("celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu"),
            *("logsigmoid", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softshrink"),
            *("softsign", "tanh", "tanhshrink"),
        )
    },
    "celu_steep": lambda x: F.celu(x, 0.01),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus_steep": lambda x: F.softplus(x, 5.0, 80.0),
    "threshold": lambda x: F.threshold(x, 0.5, 2.0),
    "glu": lambda x: F.glu(torch.cat([x, x])),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(
        x, x.detach() * 0 + 0.5, reduction="none"
    ),
    "soft_margin": lambda x: F.soft_margin_loss(x, x.detach() * 0 + 1, reduction="none"),
    "huber": lambda x: F.huber_loss(x, x.detach() * 0, reduction="none"),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x.detach() * 0, reduction="none"),
    "log1p": lambda x: x.abs().log1p(),
    "expm1": torch.expm1,
    "logaddexp": lambda x: torch.logaddexp(x, x.detach() * 0),
}


def value_and_gradient(
    function: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """By the derived graph, and by eager."""
    x = x.clone().requires_grad_()
    y = function(x)
    ct = torch.linspace(0.5, 1.5, y.numel(), dtype=x.dtype).view(y.shape)
    (expected,) = torch.autograd.grad(y, x, ct)
    traced = trace(function, (x,))
    joint = derive(traced.graph, traced.requires_grad)
    value, gradient = evaluate(joint.graph, [x.detach(), *traced.constants, ct])
    return (value, gradient), (y.detach(), expected)


@pytest.mark.parametrize("name", KINKS)
def test_gradients_are_eagers(name: str) -> None:
    found, expected = value_and_gradient(KINKS[name], GRID)
    torch.testing.assert_close(found[0], expected[0], equal_nan=True)
    tolerance = 1e-7 if name == "hardsigmoid" else 1e-10  # ATen's 1/6 is that of fp32
    torch.testing.assert_close(found[1], expected[1], rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SATURATING)
def test_far_out_values_and_gradients_are_eagers(name: str, dtype: torch.dtype) -> None:
    (value, gradient), (theirs, expected) = value_and_gradient(SATURATING[name], FAR.to(dtype))
    known = ~theirs.isnan() | FAR.isnan()
    torch.testing.assert_close(value[known], theirs[known], rtol=2e-6, atol=1e-6, equal_nan=True)
    known = ~expected.isnan() & ~FAR.isnan()
    torch.testing.assert_close(gradient[known], expected[known], rtol=2e-6, atol=1e-6)
