"""Rows for what networks are made of: embeddings, norms, softmax, losses. Each is kept whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from egcompile import ops
from egcompile.errors import UnsupportedOp
from egcompile.frontend.aten.reduction import reduced
from egcompile.frontend.build import (
    axis,
    broadcast,
    broadcast_shapes,
    cast,
    operand,
    permute,
    reshape,
)
from egcompile.ir import Node, TensorType, accumulate_dtype

aten = torch.ops.aten

NONE, MEAN, SUM = range(3)
"""ATen's numbers for `reduction="none"`, `"mean"` and `"sum"`."""


def _embedding(
    out: TensorType, weight: Node, ids: Node, padding_idx: int, scale_grad_by_freq: bool, sparse: bool
) -> Node:
    if scale_grad_by_freq or sparse:
        raise UnsupportedOp("embedding with scale_grad_by_freq or sparse gradients")
    return ops.embedding(weight, ids, padding_idx=padding_idx)


def _row_norm(
    op: ops.OpDef, x: Node, shape: Sequence[int], scales: Sequence[tuple[Node | None, float]], **attrs: Any
) -> tuple[Node, ...]:
    """A norm over the axes `shape` read as one, and its statistics with those axes of size 1.

    `scales` are the weight and bias, each with the value that it has where there is none.
    """
    width = math.prod(shape)
    leading = x.shape[: len(x.shape) - len(shape)]
    given = [
        ops.full(value=default, shape=(width,), dtype=x.dtype) if scale is None else reshape(scale, (width,))
        for scale, default in scales
    ]
    y, *statistics = op(reshape(x, (*leading, width)), *given, **attrs)
    return reshape(y, x.shape), *(reshape(s, (*leading, *(1,) * len(shape))) for s in statistics)


def _rms_norm_outputs(
    x: Node, shape: Sequence[int], weight: Node | None, eps: float | None
) -> tuple[Node, ...]:
    if eps is None:  # ATen takes the epsilon of the dtype it computes in
        eps = torch.finfo(accumulate_dtype(x.dtype)).eps
    return _row_norm(ops.rms_norm, x, shape, [(weight, 1.0)], eps=eps, cast_first=False)


def _rms_norm(out: TensorType, x: Node, shape: Sequence[int], weight: Node | None, eps: float | None) -> Node:
    return _rms_norm_outputs(x, shape, weight, eps)[0]


def _fused_rms_norm(
    out: Sequence[TensorType], x: Node, shape: Sequence[int], weight: Node | None, eps: float | None
) -> tuple[Node, ...]:
    return _rms_norm_outputs(x, shape, weight, eps)


def _layer_norm_outputs(
    x: Node, shape: Sequence[int], weight: Node | None, bias: Node | None, eps: float
) -> tuple[Node, ...]:
    return _row_norm(ops.layer_norm, x, shape, [(weight, 1.0), (bias, 0.0)], eps=eps)


def _layer_norm(
    out: TensorType,
    x: Node,
    shape: Sequence[int],
    weight: Node | None,
    bias: Node | None,
    eps: float,
    cudnn_enable: bool,
) -> Node:
    return _layer_norm_outputs(x, shape, weight, bias, eps)[0]


def _native_layer_norm(
    out: Sequence[TensorType],
    x: Node,
    shape: Sequence[int],
    weight: Node | None,
    bias: Node | None,
    eps: float,
) -> tuple[Node, ...]:
    """ATen lets no gradient through the statistics that it returns."""
    y, *statistics = _layer_norm_outputs(x, shape, weight, bias, eps)
    return y, *(ops.stop_gradient(cast(s, t.dtype)) for s, t in zip(statistics, out[1:], strict=True))


def _softmax(op: ops.OpDef) -> Any:
    """`softmax(x, dim, dtype)` and `_softmax(x, dim, half_to_float)` cast to the result's dtype first."""

    def row(out: TensorType, x: Node, dim: int, *_: Any) -> Node:
        return op(cast(x, out.dtype), dim=axis(dim, len(out.shape)))

    return row


def safe_softmax(x: Node, dim: int) -> Node:
    """Softmax, but 0 in rows that are all -inf, with a gradient of 0 there."""
    dead = ops.eq(top := ops.amax(x, dims=(dim,)), operand(-math.inf, top.tensor))
    dead = broadcast(dead, x.shape)
    zero = operand(0, x.tensor)
    return ops.where(dead, zero, ops.softmax(ops.where(dead, zero, x), dim=dim))


def _safe_softmax(out: TensorType, x: Node, dim: int, dtype: torch.dtype | None) -> Node:
    return safe_softmax(cast(x, out.dtype), axis(dim, len(out.shape)))


def _reduce_loss(out: TensorType, loss: Node, reduction: int, count: Node | None = None) -> Node:
    """Losses of any shape to `out`; the mean divides by `count` where some are left out."""
    if reduction == NONE:
        return reshape(cast(loss, out.dtype), out.shape)
    if reduction == SUM or count is not None:
        total = reduced(ops.sum, loss, None)
        total = ops.div(total, count) if reduction == MEAN else total
    else:
        total = reduced(ops.mean, loss, None)
    return cast(reshape(total, out.shape), out.dtype)


def _rows(scores: Node, target: Node) -> tuple[Node, Node]:
    """Class scores `[M, C, *]` (or `[C]`) and targets `[M, *]` as rows `[M', C]` and `[M']`."""
    if target.dtype.is_floating_point:
        raise UnsupportedOp("cross_entropy with class probabilities as target; give class indices")
    rank, rows = len(scores.shape), math.prod(target.shape)
    if rank > 2:
        scores = permute(scores, (0, *range(2, rank), 1))
    return reshape(scores, (rows, scores.shape[-1])), reshape(target, (rows,))


def _kept(target: Node, ignore_index: int, dtype: torch.dtype) -> tuple[Node, Node]:
    """Which rows count, and how many they are: bool[M] and [1]."""
    kept = ops.ne(target, operand(ignore_index, target.tensor))
    return kept, ops.sum(ops.cast(kept, dtype=dtype), dims=(0,))


def _cross_entropy(
    out: TensorType,
    logits: Node,
    target: Node,
    weight: Node | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Node:
    if weight is not None or label_smoothing:
        raise UnsupportedOp("cross_entropy with class weights or label smoothing")
    logits, target = _rows(logits, target)
    loss, _ = ops.cross_entropy(logits, target, ignore_index=ignore_index)
    _, count = _kept(target, ignore_index, loss.dtype)
    return _reduce_loss(out, loss, reduction, count)


def _nll_loss(
    out: Sequence[TensorType],
    scores: Node,
    target: Node,
    weight: Node | None,
    reduction: int,
    ignore_index: int,
) -> tuple[Node, Node]:
    """The loss of log-probabilities, and the total weight that the mean divides by (0 for none)."""
    if weight is not None:
        raise UnsupportedOp("nll_loss with class weights")
    scores, target = _rows(scores, target)
    kept, count = _kept(target, ignore_index, scores.dtype)
    column = broadcast(reshape(target, (*target.shape, 1)), scores.shape)
    hit = ops.eq(ops.iota(shape=scores.shape, axis=1, dtype=target.dtype), column)
    picked = ops.sum(ops.where(hit, scores, operand(0, scores.tensor)), dims=(1,))
    picked = ops.neg(reshape(picked, target.shape))
    loss = ops.where(kept, picked, operand(0, picked.tensor))
    total = operand(0, out[1]) if reduction == NONE else reshape(cast(count, out[1].dtype), out[1].shape)
    return _reduce_loss(out[0], loss, reduction, count), total


def _mse_loss(out: TensorType, x: Node, y: Node, reduction: int) -> Node:
    like = TensorType(broadcast_shapes(x.shape, y.shape), out.dtype)
    difference = ops.sub(operand(x, like), operand(y, like))
    return _reduce_loss(out, ops.mul(difference, difference), reduction)


NN: dict[Any, Any] = {
    aten.embedding.default: _embedding,
    aten.rms_norm.default: _rms_norm,
    aten._fused_rms_norm.default: _fused_rms_norm,
    aten.layer_norm.default: _layer_norm,
    aten.native_layer_norm.default: _native_layer_norm,
    aten.softmax.int: _softmax(ops.softmax),
    aten._softmax.default: _softmax(ops.softmax),
    aten._safe_softmax.default: _safe_softmax,
    aten.log_softmax.int: _softmax(ops.log_softmax),
    aten._log_softmax.default: _softmax(ops.log_softmax),
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss_forward.default: _nll_loss,
    aten.mse_loss.default: _mse_loss,
}
