"""Reductions of rows with NaN and infinities: as the body says, and as PyTorch does, whatever the tiling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from egcompile.codegen import Config
from egcompile.ir import Node
from egcompile.ops import (
    add,
    amax,
    amin,
    broadcast_to,
    cross_entropy,
    cross_entropy_backward,
    div,
    exp,
    full,
    log,
    log_softmax,
    lt,
    mul,
    reshape,
    slice_,
    softmax,
    sub,
    sum,
    where,
)
from tests.codegen.harness import build, check, run

INF, NAN, LOWEST = math.inf, math.nan, torch.finfo(torch.float32).min
COLUMNS = 70
CONFIGS = {"whole": None, "tiles": Config(block_cols=32), "rows": Config(block_cols=16, block_rows=4)}


def rows() -> torch.Tensor:
    """A row of each kind: where infinities, NaN and the lowest number meet tiles of 16 and 32 columns."""
    x = torch.randn(14, COLUMNS, generator=torch.Generator().manual_seed(0))
    x[1] = -INF
    x[2, :40] = -INF
    x[3, 40:] = -INF
    x[4, 5] = INF
    x[5, 69] = INF
    x[6, 0] = NAN
    x[7, 35] = NAN
    x[8, 69] = NAN
    x[9] = -INF
    x[9, 69] = NAN
    x[10, 20:] = LOWEST
    x[11] = -INF
    x[11, 50] = LOWEST
    x[12, 3], x[12, 60] = NAN, INF
    x[13] = NAN
    return x


def _shifted(x: Node) -> tuple[Node, Node, Node]:
    top = amax(x, dims=(1,))
    return top, (numerator := exp(sub(x, broadcast_to(top, x.shape)))), sum(numerator, dims=(1,))


def _logsumexp(x: Node) -> Node:
    top, _, total = _shifted(x)
    return add(top, log(total))


def _doubled(x: Node) -> tuple[Node, ...]:
    top, _, total = _shifted(x)
    return add(top, top), total


def _difference(x: Node) -> tuple[Node, ...]:
    top, _, total = _shifted(x)
    return sub(x, broadcast_to(top, x.shape)), log(total)


def _one_sided(x: Node) -> Node:
    """The sum reaches only some elements."""
    _, numerator, total = _shifted(x)
    negative = lt(numerator, full(0.5, x.shape, x.dtype))
    return where(negative, numerator, div(numerator, broadcast_to(total, x.shape)))


FORMS: dict[str, Callable[[Node], Any]] = {
    "softmax": lambda x: softmax(x, dim=1),
    "log_softmax": lambda x: log_softmax(x, dim=1),
    "logsumexp": _logsumexp,
    "all": _shifted,
    "top and sum": lambda x: _shifted(x)[::2],
    "numerator": lambda x: _shifted(x)[1],
    "sum": lambda x: _shifted(x)[2],
    "doubled": _doubled,
    "difference": _difference,
    "one-sided": _one_sided,
    "largest": lambda x: amax(x, dims=(1,)),
    "smallest": lambda x: amin(x, dims=(1,)),
    "shifted smallest": lambda x: exp(sub(broadcast_to(amin(x, dims=(1,)), x.shape), x)),
    "part": lambda x: slice_(softmax(x, dim=1), 1, 0, 50, 7),
    "scaled": lambda x: mul(softmax(x, dim=1), x),
    "first axis": lambda x: softmax(reshape(x, (COLUMNS, len(rows()))), dim=0),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_kernel_is_its_body_on_non_finite_rows(form: Callable[..., Any], config: Config | None) -> None:
    kernel = build(form, f"f32[{len(rows())},{COLUMNS}]")
    check(kernel, config, inputs=[rows()], rtol=1e-5, atol=1e-6)


EAGER: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "largest": torch.amax,
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", EAGER)
def test_a_kernel_does_as_pytorch_on_non_finite_rows(name: str, config: Config | None) -> None:
    (got,) = run(build(FORMS[name], f"f32[{len(rows())},{COLUMNS}]"), [rows()], config)
    expected = EAGER[name](rows(), 1)
    torch.testing.assert_close(got.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_cross_entropy_does_as_pytorch_on_non_finite_rows(config: Config | None) -> None:
    def both(x: Node, target: Node, ct: Node) -> tuple[Node, ...]:
        loss, lse = cross_entropy(x, target, ignore_index=3)
        return loss, cross_entropy_backward(x, target, lse, ct, ignore_index=3)

    count = len(rows())
    target = torch.arange(count) * 7 % COLUMNS
    target[7] = 3
    ct = torch.linspace(0.5, 2.0, count)
    loss, gradient = run(
        build(both, f"f32[{count},{COLUMNS}]", f"i64[{count}]", f"f32[{count}]"), [rows(), target, ct], config
    )
    x = rows().requires_grad_()
    expected = torch.nn.functional.cross_entropy(x, target, ignore_index=3, reduction="none")
    (slope,) = torch.autograd.grad(expected, x, ct)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-6, equal_nan=True)
