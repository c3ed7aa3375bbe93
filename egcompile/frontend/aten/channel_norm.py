"""Rows for batch and group norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from egcompile import ops
from egcompile.frontend.build import broadcast, cast, operand, reshape
from egcompile.ir import Node, TensorType, accumulate_dtype

aten = torch.ops.aten


def _scale(x: Node, weight: Node | None, value: float) -> Node:
    """The weight or bias `[C]`, or what it is where there is none."""
    return ops.full(value=value, shape=x.shape[1:2], dtype=x.dtype) if weight is None else weight


def _statistic(value: Node, out: TensorType) -> Node:
    """A batch's statistic as it is returned: ATen lets no gradient through it."""
    return ops.stop_gradient(cast(reshape(value, out.shape), out.dtype))


def _group_norm_outputs(
    x: Node, weight: Node | None, bias: Node | None, groups: int, eps: float
) -> tuple[Node, ...]:
    scales = _scale(x, weight, 1.0), _scale(x, bias, 0.0)
    return tuple(ops.group_norm(x, *scales, groups=groups, eps=eps))


def _group_norm(
    out: TensorType,
    x: Node,
    groups: int,
    weight: Node | None,
    bias: Node | None,
    eps: float,
    cudnn_enabled: bool,
) -> Node:
    return _group_norm_outputs(x, weight, bias, groups, eps)[0]


def _native_group_norm(
    out: Sequence[TensorType],
    x: Node,
    weight: Node | None,
    bias: Node | None,
    samples: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
) -> tuple[Node, ...]:
    """ATen differentiates these statistics, unlike those of other norms."""
    y, *statistics = _group_norm_outputs(x, weight, bias, groups, eps)
    return y, *(cast(reshape(s, t.shape), t.dtype) for s, t in zip(statistics, out[1:], strict=True))


def _normalized(x: Node, mean: Node, rstd: Node, weight: Node | None, bias: Node | None) -> Node:
    """With given statistics, so that it is pointwise work alone."""

    def over(vector: Node) -> Node:
        row = (1, *vector.shape, *(1,) * (len(x.shape) - 2))
        return broadcast(reshape(cast(vector, wide.dtype), row), x.shape)

    wide = cast(x, accumulate_dtype(x.dtype))
    y = ops.mul(ops.sub(wide, over(mean)), over(rstd))
    y = y if weight is None else ops.mul(y, over(weight))
    return cast(y if bias is None else ops.add(y, over(bias)), x.dtype)


def _rstd(variance: Node, eps: float) -> Node:
    return ops.rsqrt(ops.add(variance, operand(eps, variance.tensor)))


def _updated(running: Node, value: Node, momentum: float | Node, out: TensorType) -> Node:
    """`(1 - momentum) running + momentum value`, rounded once."""
    value = ops.stop_gradient(value)
    running = cast(running, value.dtype)
    share = operand(momentum, value.tensor)
    if isinstance(momentum, Node):
        rest = ops.sub(operand(1.0, value.tensor), share)
    else:
        rest = operand(1 - momentum, value.tensor)
    return cast(ops.add(ops.mul(value, share), ops.mul(running, rest)), out.dtype)


def _by_batch(
    out: Sequence[TensorType], x: Node, weight: Node | None, bias: Node | None, eps: float
) -> tuple[tuple[Node, Node, Node], Node, Node]:
    """`(y, save_mean, save_rstd)`, and the batch's mean and variance."""
    y, mean, variance = ops.batch_norm(x, _scale(x, weight, 1.0), _scale(x, bias, 0.0), eps=eps)
    saved = _statistic(mean, out[1]), _statistic(_rstd(variance, eps), out[2])
    return (y, *saved), mean, variance


def _by_running(
    out: Sequence[TensorType],
    x: Node,
    weight: Node | None,
    bias: Node | None,
    mean: Node,
    variance: Node,
    eps: float,
) -> tuple[Node, Node, Node]:
    acc = accumulate_dtype(x.dtype)
    rstd = _rstd(cast(variance, acc), eps)
    saved_mean, saved_rstd = (
        _statistic(value, t) if math.prod(t.shape) else operand(0.0, t)  # of no elements on a CPU
        for value, t in zip((mean, rstd), out[1:3], strict=True)
    )
    return _normalized(x, mean, rstd, weight, bias), saved_mean, saved_rstd


def _functional(
    out: Sequence[TensorType],
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node,
    running_var: Node,
    training: bool,
    momentum: float | Node,
    eps: float,
) -> tuple[Node, ...]:
    """`(y, save_mean, save_rstd, running_mean, running_var)`; the running variance is the unbiased one.

    `momentum` may be a number that is not known beforehand.
    """
    if not training:
        kept = _by_running(out, x, weight, bias, running_mean, running_var, eps)
        return *kept, cast(running_mean, out[3].dtype), cast(running_var, out[4].dtype)
    saved, mean, variance = _by_batch(out, x, weight, bias, eps)
    count = math.prod(x.shape) // x.shape[1]
    unbiased = ops.mul(variance, operand(count / max(count - 1, 1), variance.tensor))
    return (
        *saved,
        _updated(running_mean, mean, momentum, out[3]),
        _updated(running_var, unbiased, momentum, out[4]),
    )


def _no_stats(
    out: Sequence[TensorType],
    x: Node,
    weight: Node | None,
    bias: Node | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Node, ...]:
    return _by_batch(out, x, weight, bias, eps)[0]


def _no_training(
    out: Sequence[TensorType],
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node,
    running_var: Node,
    momentum: float,
    eps: float,
) -> tuple[Node, ...]:
    return _by_running(out, x, weight, bias, running_mean, running_var, eps)


CHANNEL_NORM: dict[Any, Any] = {
    aten.group_norm.default: _group_norm,
    aten.native_group_norm.default: _native_group_norm,
    aten._native_batch_norm_legit_functional.default: _functional,
    aten._native_batch_norm_legit.no_stats: _no_stats,
    aten._native_batch_norm_legit_no_training.default: _no_training,
}
