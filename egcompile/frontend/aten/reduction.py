"""Rows for ATen's reductions and contractions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from egcompile import ops
from egcompile.errors import UnsupportedOp
from egcompile.frontend.build import (
    Scalar,
    axes,
    broadcast,
    broadcast_shapes,
    cast,
    operand,
    permute,
    reshape,
)
from egcompile.ir import Node, TensorType
from egcompile.ir.types import accumulate_dtype
from egcompile.ops import OpDef

aten = torch.ops.aten


def reduced(op: OpDef, x: Node, dims: int | Sequence[int] | None) -> Node:
    """`op` over `dims` (none given: all), which stay with size 1."""
    where = axes(dims, len(x.shape))
    return op(x, dims=where) if where else x


def _reduction(op: OpDef) -> Any:
    def row(out: TensorType, x: Node, dims: Any = None, *_: Any) -> Node:
        return reshape(reduced(op, cast(x, out.dtype), dims), out.shape)

    return row


def _reduction_all(op: OpDef) -> Any:
    """For overloads whose second argument is a dtype."""
    return lambda out, x, *_: reshape(reduced(op, cast(x, out.dtype), None), out.shape)


def variance(x: Node, dims: int | Sequence[int] | None, correction: float) -> tuple[Node, Node]:
    """The variance and the mean over `dims`, which stay with size 1: two passes, as ATen's is stable.

    Over rows both are in one kernel, which sees them and keeps their digits (`egcompile.codegen.moments`).
    Over other axes the mean is rounded in between, and what that leaves of the deviations is taken off again:
    the corrected two-pass algorithm (Chan, Golub and LeVeque, 1983).
    """
    where = axes(dims, len(x.shape))
    count = math.prod(x.shape[d] for d in where)
    if count <= correction:
        raise UnsupportedOp(f"variance of {count} values with correction {correction}")
    mean = reduced(ops.mean, x, dims)
    deviation = ops.sub(x, broadcast(mean, x.shape))
    square = reduced(ops.mean, ops.mul(deviation, deviation), dims)
    if where != tuple(range(len(x.shape) - len(where), len(x.shape))):
        left = reduced(ops.mean, deviation, dims)
        square = ops.maximum(ops.sub(square, ops.mul(left, left)), operand(0, square.tensor))
    return ops.mul(square, operand(count / (count - correction), square.tensor)), mean


def _var(out: TensorType, x: Node, dims: Any, correction: Scalar | None, keepdim: bool) -> Node:
    return reshape(variance(x, dims, 1 if correction is None else correction)[0], out.shape)


def _std(out: TensorType, x: Node, dims: Any, correction: Scalar | None, keepdim: bool) -> Node:
    square = variance(x, dims, 1 if correction is None else correction)[0]
    return reshape(_root(square), out.shape)


def _std_mean(
    out: Sequence[TensorType], x: Node, dims: Any, correction: Scalar | None, keepdim: bool
) -> tuple[Node, ...]:
    square, mean = variance(x, dims, 1 if correction is None else correction)
    return reshape(_root(square), out[0].shape), reshape(mean, out[1].shape)


def _vector_norm(
    out: TensorType, x: Node, ord: Scalar = 2, dims: Any = None, keepdim: bool = False, dtype: Any = None
) -> Node:
    """Of order 1 or 2, summed in fp32 at least; the gradient is 0 where all elements are."""
    if ord not in (1, 2) or not out.dtype.is_floating_point or not x.dtype.is_floating_point:
        raise UnsupportedOp(f"vector norm of order {ord} of {x.tensor}")
    wide = cast(cast(x, out.dtype), accumulate_dtype(out.dtype))
    if ord == 1:
        norm = reduced(ops.sum, ops.abs(wide), dims)
    else:
        norm = _root(reduced(ops.sum, ops.mul(wide, wide), dims))
    return reshape(cast(norm, out.dtype), out.shape)


def _root(square: Node) -> Node:
    """The root of a sum of squares, with a gradient of 0 where that is 0."""
    constant = ops.eq(square, operand(0, square.tensor))
    root = ops.sqrt(ops.where(constant, operand(1, square.tensor), square))
    return ops.where(constant, operand(0, square.tensor), root)


def _var_mean(
    out: Sequence[TensorType], x: Node, dims: Any, correction: Scalar | None, keepdim: bool
) -> tuple[Node, ...]:
    both = variance(x, dims, 1 if correction is None else correction)
    return tuple(reshape(value, t.shape) for value, t in zip(both, out, strict=True))


def _logsumexp(out: TensorType, x: Node, dims: Any, keepdim: bool) -> Node:
    """Relative to the largest element, or to 0 where that is infinite: such a row's is that too."""
    x = cast(x, out.dtype)
    if not x.tensor.numel:  # nothing has no largest element
        return reshape(ops.log(reduced(ops.sum, ops.exp(x), dims)), out.shape)
    top = ops.stop_gradient(reduced(ops.amax, x, dims))
    infinite = ops.eq(ops.abs(top), operand(math.inf, top.tensor))
    top = ops.where(infinite, operand(0, top.tensor), top)
    total = reduced(ops.sum, ops.exp(ops.sub(x, broadcast(top, x.shape))), dims)
    return reshape(ops.add(top, ops.log(total)), out.shape)


def matmul(a: Node, b: Node) -> Node:
    """`torch.matmul`: vectors gain an axis, batch axes broadcast; the result keeps the gained axes."""
    a = reshape(a, (1, *a.shape)) if len(a.shape) == 1 else a
    b = reshape(b, (*b.shape, 1)) if len(b.shape) == 1 else b
    if len(b.shape) == 2:
        return ops.matmul(a, b)
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return ops.bmm(broadcast(a, (*batch, *a.shape[-2:])), broadcast(b, (*batch, *b.shape[-2:])))


def _matmul(out: TensorType, a: Node, b: Node) -> Node:
    return reshape(matmul(a, b), out.shape)


def _linear(out: TensorType, x: Node, weight: Node, bias: Node | None) -> Node:
    weight = reshape(weight, (1, *weight.shape)) if len(weight.shape) == 1 else weight
    y = reshape(matmul(x, permute(weight, (1, 0))), out.shape)
    return y if bias is None else ops.add(y, operand(bias, out))


def _addmm(out: TensorType, x: Node, a: Node, b: Node, beta: Scalar, alpha: Scalar) -> Node:
    """`beta x + alpha (a @ b)`. ATen reads nothing of `x` where beta is 0, not even a NaN."""
    product = matmul(a, b)
    if alpha != 1:
        product = ops.mul(product, operand(alpha, out))
    if beta == 0:
        return product
    x = operand(x, out)
    return ops.add(product, x if beta == 1 else ops.mul(x, operand(beta, out)))


REDUCTION: dict[Any, Any] = {
    aten.sum.default: _reduction_all(ops.sum),
    aten.sum.dim_IntList: _reduction(ops.sum),
    aten.mean.default: _reduction_all(ops.mean),
    aten.mean.dim: _reduction(ops.mean),
    aten.amax.default: _reduction(ops.amax),
    aten.amin.default: _reduction(ops.amin),
    aten.var.correction: _var,
    aten.std.correction: _std,
    aten.std_mean.correction: _std_mean,
    aten.var_mean.correction: _var_mean,
    aten.logsumexp.default: _logsumexp,
    aten.linalg_vector_norm.default: _vector_norm,
}

CONTRACTION: dict[Any, Any] = {
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.mv.default: _matmul,
    aten.dot.default: _matmul,
    aten.matmul.default: _matmul,
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
}
