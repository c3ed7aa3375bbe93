"""Rows for ATen's pointwise ops. A row takes the result's type, then the arguments in schema order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from egcompile import ops
from egcompile.errors import UnsupportedOp
from egcompile.frontend.build import Operand, Scalar, cast, operand, pointwise, result_dtype
from egcompile.ir import Node, TensorType
from egcompile.ops import OpDef

aten = torch.ops.aten
prims = torch.ops.prims


def _unary(op: OpDef) -> Any:
    return lambda out, x: op(operand(x, out))


def _binary(op: OpDef, boolean: OpDef | None = None) -> Any:
    """`op` on both operands promoted; `boolean` is what it means on bool."""

    def row(out: TensorType, a: Operand, b: Operand) -> Node:
        chosen = boolean if boolean is not None and out.dtype == torch.bool else op
        return pointwise(chosen, operand(a, out), operand(b, out))

    return row


def _add(out: TensorType, a: Operand, b: Operand, alpha: Scalar) -> Node:
    op = ops.logical_or if out.dtype == torch.bool else ops.add
    return pointwise(op, operand(a, out), _scaled(out, b, alpha))


def _sub(out: TensorType, a: Operand, b: Operand, alpha: Scalar) -> Node:
    return ops.sub(operand(a, out), _scaled(out, b, alpha))


def _scaled(out: TensorType, x: Operand, alpha: Scalar) -> Node:
    x = operand(x, out)
    return x if alpha == 1 else ops.mul(x, operand(alpha, out))


def _rsub(out: TensorType, a: Operand, b: Operand, alpha: Scalar) -> Node:
    return _sub(out, b, a, alpha)


def _div_mode(out: TensorType, a: Operand, b: Operand, rounding_mode: str | None) -> Node:
    if rounding_mode is not None:
        raise UnsupportedOp(f"div with rounding_mode={rounding_mode!r}")
    return ops.div(operand(a, out), operand(b, out))


def _compare(op: OpDef) -> Any:
    def row(out: TensorType, a: Operand, b: Operand) -> Node:
        like = TensorType(out.shape, result_dtype(a, b))
        return pointwise(op, operand(a, like), operand(b, like))

    return row


def _logical(op: OpDef) -> Any:
    return lambda out, a, b: pointwise(op, _truth(out, a), _truth(out, b))


def _truth(out: TensorType, x: Operand) -> Node:
    """`x != 0` at the shape of `out`."""
    if not isinstance(x, Node) or x.dtype == torch.bool:
        return operand(x, TensorType(out.shape, torch.bool))
    like = TensorType(out.shape, x.dtype)
    return ops.ne(operand(x, like), operand(0, like))


def _bitwise(op: OpDef) -> Any:
    def row(out: TensorType, a: Operand, b: Operand) -> Node:
        _only_bool(out)
        return pointwise(op, operand(a, out), operand(b, out))

    return row


def _bitwise_not(out: TensorType, x: Operand) -> Node:
    _only_bool(out)
    return ops.logical_not(operand(x, out))


def _only_bool(out: TensorType) -> None:
    if out.dtype != torch.bool:
        raise UnsupportedOp(f"bitwise arithmetic on {out}; only bool is known")


def _pow_scalar(out: TensorType, x: Operand, exponent: Scalar) -> Node:
    """Small exponents as ATen's kernel computes them: products, roots and reciprocals."""
    base = operand(x, out)
    if (form := _POWERS.get(float(exponent))) is not None:
        return form(base)
    return _pow(out, x, exponent)


def _constant_of(x: Node, value: Scalar) -> Node:
    """`value` everywhere, whose gradient in `x` is 0 and not none."""
    constant = operand(value, x.tensor)
    if not x.dtype.is_floating_point:
        return constant
    return ops.where(ops.full(value=False, shape=x.shape, dtype=torch.bool), x, constant)


def _logit(out: TensorType, x: Operand, eps: Scalar | None = None) -> Node:
    """`log(x / (1 - x))`; outside of 0 to 1 it and its gradient are NaN, at both ends its gradient is inf."""
    x = operand(x, out)
    if eps is not None:
        x = _clamp(out, x, eps, 1 - eps)
    outside = ops.logical_or(ops.lt(x, operand(0, out)), ops.gt(x, operand(1, out)))
    valid = ops.where(outside, operand(math.nan, out), operand(1, out))
    return ops.mul(ops.sub(ops.log(x), ops.log1p(ops.neg(x))), valid)


def _pow(out: TensorType, a: Operand, b: Operand) -> Node:
    if not out.dtype.is_floating_point:
        raise UnsupportedOp(f"powers of integers, as {out}")
    return ops.pow(operand(a, out), operand(b, out))


_POWERS: dict[float, Callable[[Node], Node]] = {
    0.0: lambda x: _constant_of(x, 1),
    1.0: lambda x: x,
    2.0: lambda x: ops.mul(x, x),
    3.0: lambda x: ops.mul(ops.mul(x, x), x),
    0.5: ops.sqrt,
    -0.5: ops.rsqrt,
    -1.0: ops.reciprocal,
    -2.0: lambda x: ops.reciprocal(ops.mul(x, x)),
}


def _where(out: TensorType, condition: Node, a: Operand, b: Operand) -> Node:
    mask = operand(condition, TensorType(out.shape, torch.bool))
    return ops.where(mask, operand(a, out), operand(b, out))


def _masked_fill(out: TensorType, x: Operand, mask: Node, value: Operand) -> Node:
    return _where(out, mask, value, x)


def _clamp(out: TensorType, x: Operand, low: Operand | None = None, high: Operand | None = None) -> Node:
    """By choice and not by maximum: at a bound the gradient is the operand's own, at NaN 0, as in ATen.

    Of a bound that is NaN the result is too, and neither gets a gradient.
    """
    result = operand(x, out)
    if out.dtype.is_floating_point:
        result = ops.where(ops.eq(result, result), result, ops.stop_gradient(result))
    for bound, outside in ((low, ops.lt), (high, ops.gt)):
        if bound is not None:
            limit = operand(bound, out)
            result = ops.where(outside(result, limit), limit, result)
            if isinstance(bound, Node) and bound.dtype.is_floating_point:
                result = ops.where(ops.ne(limit, limit), ops.stop_gradient(limit), result)
    return result


def _clamp_max(out: TensorType, x: Operand, high: Operand) -> Node:
    return _clamp(out, x, None, high)


def _gelu(out: TensorType, x: Operand, approximate: str) -> Node:
    return {"none": ops.gelu, "tanh": ops.gelu_tanh}[approximate](operand(x, out))


def _addcmul(out: TensorType, x: Operand, a: Operand, b: Operand, value: Scalar) -> Node:
    product = pointwise(ops.mul, operand(a, out), operand(b, out))
    return ops.add(operand(x, out), _scaled(out, product, value))


def _lerp(out: TensorType, a: Operand, b: Operand, weight: Operand) -> Node:
    """Counted from the nearer end, as ATen does: at a weight of 1 it is `b`, however large `a`."""
    a, b, w = operand(a, out), operand(b, out), operand(weight, out)
    difference = ops.sub(b, a)
    near_a = ops.add(a, pointwise(ops.mul, difference, w))
    near_b = ops.sub(b, pointwise(ops.mul, difference, ops.sub(operand(1, out), w)))
    if not isinstance(weight, Node):
        return near_a if abs(weight) < 0.5 else near_b
    return ops.where(ops.lt(ops.abs(w), operand(0.5, out)), near_a, near_b)


def _same(out: TensorType, x: Operand, *_: Any) -> Node:
    """The same values: a copy, or a hint about memory."""
    return operand(x, out)


def _detach(out: TensorType, x: Node) -> Node:
    return ops.stop_gradient(x) if x.dtype.is_floating_point else x


def _is_nan(out: TensorType, x: Node) -> Node:
    return ops.ne(x, x)


def _is_inf(out: TensorType, x: Node) -> Node:
    return ops.eq(ops.abs(x), operand(math.inf, x.tensor))


def _convert(out: TensorType, x: Node, *_: Any) -> Node:
    return cast(x, out.dtype)


POINTWISE: dict[Any, Any] = {
    # ---- arithmetic ----
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.rsub.Tensor: _rsub,
    aten.rsub.Scalar: _rsub,
    aten.mul.Tensor: _binary(ops.mul, boolean=ops.logical_and),
    aten.mul.Scalar: _binary(ops.mul, boolean=ops.logical_and),
    aten.div.Tensor: _binary(ops.div),
    aten.div.Scalar: _binary(ops.div),
    aten.div.Tensor_mode: _div_mode,
    aten.pow.Tensor_Scalar: _pow_scalar,
    aten.pow.Tensor_Tensor: _pow,
    aten.pow.Scalar: _pow,
    aten.addcmul.default: _addcmul,
    aten.lerp.Scalar: _lerp,
    aten.lerp.Tensor: _lerp,
    aten.maximum.default: _binary(ops.maximum),
    aten.minimum.default: _binary(ops.minimum),
    # ---- functions of one value ----
    aten.neg.default: _unary(ops.neg),
    aten.abs.default: _unary(ops.abs),
    aten.reciprocal.default: _unary(ops.reciprocal),
    aten.sqrt.default: _unary(ops.sqrt),
    aten.rsqrt.default: _unary(ops.rsqrt),
    aten.exp.default: _unary(ops.exp),
    aten.log.default: _unary(ops.log),
    aten.logit.default: _logit,
    aten.log1p.default: _unary(ops.log1p),
    aten.expm1.default: _unary(ops.expm1),
    aten.sin.default: _unary(ops.sin),
    aten.cos.default: _unary(ops.cos),
    aten.erf.default: _unary(ops.erf),
    aten.relu.default: _unary(ops.relu),
    aten.sigmoid.default: _unary(ops.sigmoid),
    aten.tanh.default: _unary(ops.tanh),
    aten.silu.default: _unary(ops.silu),
    aten.gelu.default: _gelu,
    # ---- comparison and choice ----
    aten.eq.Tensor: _compare(ops.eq),
    aten.eq.Scalar: _compare(ops.eq),
    aten.ne.Tensor: _compare(ops.ne),
    aten.ne.Scalar: _compare(ops.ne),
    aten.lt.Tensor: _compare(ops.lt),
    aten.lt.Scalar: _compare(ops.lt),
    aten.le.Tensor: _compare(ops.le),
    aten.le.Scalar: _compare(ops.le),
    aten.gt.Tensor: _compare(ops.gt),
    aten.gt.Scalar: _compare(ops.gt),
    aten.ge.Tensor: _compare(ops.ge),
    aten.ge.Scalar: _compare(ops.ge),
    aten.isnan.default: _is_nan,
    aten.isinf.default: _is_inf,
    aten.logical_and.default: _logical(ops.logical_and),
    aten.logical_or.default: _logical(ops.logical_or),
    aten.logical_not.default: lambda out, x: ops.logical_not(_truth(out, x)),
    aten.bitwise_and.Tensor: _bitwise(ops.logical_and),
    aten.bitwise_or.Tensor: _bitwise(ops.logical_or),
    aten.bitwise_not.default: _bitwise_not,
    aten.where.self: _where,
    aten.where.ScalarSelf: _where,
    aten.where.ScalarOther: _where,
    aten.where.Scalar: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_min.Tensor: _clamp,
    aten.clamp_max.default: _clamp_max,
    aten.clamp_max.Tensor: _clamp_max,
    # ---- the same values ----
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.contiguous.default: _same,
    aten.lift_fresh_copy.default: _same,
    aten.lift_fresh.default: _same,
    aten.copy.default: lambda out, x, source, *_: operand(source, out),
    aten.detach.default: _detach,
    # ---- another dtype ----
    aten._to_copy.default: _convert,
    aten.to.dtype: _convert,
    aten.to.dtype_layout: _convert,
    aten.to.device: _convert,
    aten.type_as.default: _convert,
    prims.convert_element_type.default: _convert,
}
