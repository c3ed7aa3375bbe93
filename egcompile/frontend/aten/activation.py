"""Rows for activations, in forms whose gradient is finite wherever ATen's is, and ATen's at every corner.

A branch that `where` does not take still gets a cotangent of 0, and 0 times its infinite slope would be NaN:
so exponentials are taken of numbers that are not positive, and products of numbers that are not far out.
"""

from __future__ import annotations

from typing import Any

import torch

from egcompile import ops
from egcompile.frontend.build import Scalar, operand
from egcompile.ir import Node, TensorType

aten = torch.ops.aten


def softplus(x: Node) -> Node:
    """`log(1 + exp(x))` as `max(x, 0) + log1p(exp(-|x|))`, whose two parts have a gradient of 1/2 at 0."""
    zero = operand(0, x.tensor)
    negative = ops.lt(x, zero)
    far = ops.where(negative, zero, x)
    return ops.add(far, ops.log1p(ops.exp(ops.where(negative, x, ops.neg(x)))))


def log_sigmoid(x: Node) -> Node:
    return ops.neg(softplus(ops.neg(x)))


def _softplus(out: TensorType, x: Node, beta: Scalar, threshold: Scalar) -> Node:
    """The identity where `beta x` is beyond the threshold."""
    scaled = x if beta == 1 else ops.mul(x, operand(beta, out))
    soft = softplus(scaled)
    soft = soft if beta == 1 else ops.div(soft, operand(beta, out))
    return ops.where(ops.gt(scaled, operand(threshold, out)), x, soft)


def _mish(out: TensorType, x: Node) -> Node:
    return ops.mul(x, ops.tanh(softplus(x)))


def _elu(out: TensorType, x: Node, alpha: Scalar, scale: Scalar, input_scale: Scalar) -> Node:
    zero = operand(0, out)
    negative = ops.le(x, zero)
    curve = ops.expm1(_times(ops.where(negative, x, zero), input_scale))
    return ops.where(negative, _times(curve, alpha * scale), _times(x, scale))


def _celu(out: TensorType, x: Node, alpha: Scalar) -> Node:
    return _elu(out, x, alpha, 1, 1 / alpha)


def _times(x: Node, factor: Scalar) -> Node:
    return x if factor == 1 else ops.mul(x, operand(factor, x.tensor))


def _leaky_relu(out: TensorType, x: Node, slope: Scalar) -> Node:
    return ops.where(ops.gt(x, operand(0, out)), x, ops.mul(x, operand(slope, out)))


def _hardtanh(out: TensorType, x: Node, low: Scalar, high: Scalar) -> Node:
    """Unlike `clamp`'s, its gradient is 0 at both bounds."""
    upper = ops.where(ops.ge(x, operand(high, out)), operand(high, out), x)
    return ops.where(ops.le(x, operand(low, out)), operand(low, out), upper)


def _hardsigmoid(out: TensorType, x: Node) -> Node:
    """`clamp(x + 3, 0, 6) / 6`, whose gradient is 0 at its two corners."""
    line = ops.add(ops.mul(x, operand(1 / 6, out)), operand(0.5, out))
    upper = ops.where(ops.ge(x, operand(3, out)), operand(1, out), line)
    return ops.where(ops.le(x, operand(-3, out)), operand(0, out), upper)


def _hardswish(out: TensorType, x: Node) -> Node:
    """`x clamp(x + 3, 0, 6) / 6`, whose gradient is 0 at -3 and 1 at 3."""
    zero, bound = operand(0, out), operand(3, out)
    inside = ops.lt(ops.abs(x), bound)
    bent = ops.where(inside, x, zero)  # of an infinity, the slope would be one
    curve = ops.mul(ops.mul(bent, ops.add(bent, bound)), operand(1 / 6, out))
    return ops.where(inside, curve, ops.where(ops.le(x, operand(-3, out)), zero, x))


def _softshrink(out: TensorType, x: Node, lambd: Scalar) -> Node:
    bound, minus = operand(lambd, out), operand(-lambd, out)
    shrunk = ops.where(ops.gt(x, bound), ops.sub(x, bound), ops.add(x, bound))
    inside = ops.logical_and(ops.ge(x, minus), ops.le(x, bound))
    return ops.where(inside, operand(0, out), shrunk)


ACTIVATION: dict[Any, Any] = {
    aten.elu.default: _elu,
    aten.celu.default: _celu,
    aten.hardtanh.default: _hardtanh,
    aten.hardsigmoid.default: _hardsigmoid,
    aten.hardswish.default: _hardswish,
    aten.leaky_relu.default: _leaky_relu,
    aten.log_sigmoid.default: lambda out, x: log_sigmoid(x),
    aten.mish.default: _mish,
    aten.softplus.default: _softplus,
    aten.softshrink.default: _softshrink,
}
