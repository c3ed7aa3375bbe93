"""Rows for losses: what each element or row loses, and then ATen's reduction of that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from egcompile import ops
from egcompile.frontend.aten.activation import log_sigmoid
from egcompile.frontend.aten.reduction import reduced
from egcompile.frontend.build import Scalar, broadcast, broadcast_shapes, cast, operand, permute, reshape
from egcompile.ir import Node, TensorType, accumulate_dtype

aten = torch.ops.aten

NONE, MEAN, SUM = range(3)
"""ATen's numbers for `reduction="none"`, `"mean"` and `"sum"`."""


def _reduce_loss(out: TensorType, loss: Node, reduction: int, count: Node | None = None) -> Node:
    """Losses of any shape to `out`; the mean divides by `count` where some are left out."""
    if reduction == NONE:
        return reshape(cast(loss, out.dtype), out.shape)
    if reduction == SUM or count is not None:
        total = reduced(ops.sum, loss, None)
        total = ops.div(total, reshape(count, total.shape)) if reduction == MEAN and count else total
    else:
        total = reduced(ops.mean, loss, None)
    return cast(reshape(total, out.shape), out.dtype)


# ---- of classes ----
def _rows(scores: Node, target: Node) -> tuple[Node, Node]:
    """Class scores `[M, C, *]` (or `[C]`) and targets `[M, *]` as rows `[M', C]` and `[M']`."""
    if (rank := len(scores.shape)) > 2:
        scores = permute(scores, (0, *range(2, rank), 1))
    rows = target.tensor.numel
    return reshape(scores, (rows, scores.shape[-1])), reshape(target, (rows,))


def _weights(target: Node, weight: Node | None, shape: Sequence[int], ignore: int, dtype: Any) -> Node:
    """What each row of `shape` `[M, C]` counts, `[M]`: its class's weight, or 1; 0 where it is ignored."""
    kept = ops.ne(target, operand(ignore, target.tensor))
    if weight is None:
        return ops.cast(kept, dtype=dtype)
    row = _picked(broadcast(cast(weight, dtype), shape), target)
    return ops.where(kept, row, operand(0, row.tensor))


def _picked(scores: Node, target: Node) -> Node:
    """`scores[M, C]` at the class `target[M]` of each row; NaN for a class that does not exist."""
    column = broadcast(reshape(target, (*target.shape, 1)), scores.shape)
    hit = ops.eq(ops.iota(shape=scores.shape, axis=1, dtype=target.dtype), column)
    picked = ops.sum(ops.where(hit, scores, operand(0, scores.tensor)), dims=(1,))
    exists = ops.ge(target, operand(0, target.tensor))
    exists = ops.logical_and(exists, ops.lt(target, operand(scores.shape[1], target.tensor)))
    picked = reshape(picked, target.shape)
    return ops.where(exists, picked, operand(math.nan, picked.tensor))


def _weighted(weights: Node, loss: Node) -> Node:
    """`weights * loss`, but 0 where the weight is, even of a loss that is infinite."""
    zero = operand(0, loss.tensor)
    return ops.where(ops.eq(weights, zero), zero, ops.mul(weights, loss))


def _cross_entropy(
    out: TensorType,
    logits: Node,
    target: Node,
    weight: Node | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Node:
    if target.dtype.is_floating_point:
        return _cross_entropy_of_probabilities(out, logits, target, weight, reduction, label_smoothing)
    classes = logits.shape[min(1, len(logits.shape) - 1)]
    logits, target = _rows(logits, target)
    dtype = accumulate_dtype(logits.dtype)
    weights = _weights(target, weight, logits.shape, ignore_index, dtype)
    count = ops.sum(weights, dims=(0,))
    if weight is None and not label_smoothing:
        loss, _ = ops.cross_entropy(logits, target, ignore_index=ignore_index)
        return _reduce_loss(out, loss, reduction, count)
    scores = ops.log_softmax(cast(logits, dtype), dim=1)
    loss = _weighted(weights, ops.neg(_picked(scores, target)))
    if label_smoothing:
        spread = scores if weight is None else ops.mul(scores, broadcast(cast(weight, dtype), scores.shape))
        every = ops.neg(reshape(ops.sum(spread, dims=(1,)), target.shape))
        kept = ops.ne(target, operand(ignore_index, target.tensor))
        every = ops.where(kept, every, operand(0, every.tensor))
        loss = ops.add(_times(loss, 1 - label_smoothing), _times(every, label_smoothing / classes))
    return _reduce_loss(out, loss, reduction, count)


def _cross_entropy_of_probabilities(
    out: TensorType, logits: Node, target: Node, weight: Node | None, reduction: int, label_smoothing: float
) -> Node:
    """The mean is over all but the classes, whatever their weights."""
    dim = min(1, len(logits.shape) - 1)
    wide = TensorType(logits.shape, accumulate_dtype(logits.dtype))
    scores, target = ops.log_softmax(operand(logits, wide), dim=dim), operand(target, wide)
    if label_smoothing:
        target = _times(target, 1 - label_smoothing)
        target = ops.add(target, operand(label_smoothing / logits.shape[dim], wide))
    if weight is not None:
        along = [1] * len(logits.shape)
        along[dim] = logits.shape[dim]
        scores = ops.mul(scores, operand(reshape(weight, along), wide))
    loss = ops.neg(ops.sum(ops.mul(scores, target), dims=(dim,)))
    return _reduce_loss(out, loss, reduction)


def _times(x: Node, factor: Scalar) -> Node:
    return ops.mul(x, operand(factor, x.tensor))


def _nll_loss(
    out: Sequence[TensorType],
    scores: Node,
    target: Node,
    weight: Node | None,
    reduction: int,
    ignore_index: int,
) -> tuple[Node, Node]:
    """The loss of log-probabilities, and the total weight that the mean divides by (0 for none)."""
    scores, target = _rows(scores, target)
    weights = _weights(target, weight, scores.shape, ignore_index, scores.dtype)
    loss = _weighted(weights, ops.neg(_picked(scores, target)))
    count = ops.sum(weights, dims=(0,))
    total = operand(0, out[1]) if reduction == NONE else reshape(cast(count, out[1].dtype), out[1].shape)
    return _reduce_loss(out[0], loss, reduction, count), ops.stop_gradient(total)


# ---- of each element ----
def _mse_loss(out: TensorType, x: Node, y: Node, reduction: int) -> Node:
    like = TensorType(broadcast_shapes(x.shape, y.shape), out.dtype)
    difference = ops.sub(operand(x, like), operand(y, like))
    return _reduce_loss(out, ops.mul(difference, difference), reduction)


def _bent(
    out: TensorType,
    x: Node,
    y: Node,
    reduction: int,
    bound: Scalar,
    curve: Callable[[Node], Node],
    line: Callable[[Node], Node],
) -> Node:
    """Of the distances below `bound` the `curve`, of others the `line`, infinities among them."""
    like = TensorType(broadcast_shapes(x.shape, y.shape), out.dtype)
    distance = ops.abs(ops.sub(operand(x, like), operand(y, like)))
    near = ops.lt(distance, operand(bound, like))
    bent = ops.where(near, distance, operand(0, like))  # of an infinity, the slope would be one
    return _reduce_loss(out, ops.where(near, curve(bent), line(distance)), reduction)


def _smooth_l1_loss(out: TensorType, x: Node, y: Node, reduction: int, beta: Scalar) -> Node:
    def curve(d: Node) -> Node:
        return ops.div(_times(ops.mul(d, d), 0.5), operand(beta or 1, d.tensor))

    return _bent(out, x, y, reduction, beta, curve, lambda d: ops.sub(d, operand(0.5 * beta, d.tensor)))


def _huber_loss(out: TensorType, x: Node, y: Node, reduction: int, delta: Scalar) -> Node:
    def line(d: Node) -> Node:
        return _times(ops.sub(d, operand(0.5 * delta, d.tensor)), delta)

    return _bent(out, x, y, reduction, delta, lambda d: _times(ops.mul(d, d), 0.5), line)


def _binary_cross_entropy(
    out: TensorType, x: Node, target: Node, weight: Node | None, reduction: int
) -> Node:
    like = TensorType(x.shape, out.dtype)
    loss = ops.binary_cross_entropy(operand(x, like), operand(target, like))
    if weight is not None:
        loss = ops.mul(loss, operand(weight, like))
    return _reduce_loss(out, loss, reduction)


def _binary_cross_entropy_with_logits(
    out: TensorType, x: Node, target: Node, weight: Node | None, pos_weight: Node | None, reduction: int
) -> Node:
    """`(1 - target) x - log_sigmoid(x)`, the latter weighted by `pos_weight` where the target is 1."""
    like = TensorType(x.shape, out.dtype)
    x, target, one = operand(x, like), operand(target, like), operand(1, like)
    positive = log_sigmoid(x)
    if pos_weight is not None:
        extra = ops.mul(ops.sub(operand(pos_weight, like), one), target)
        positive = ops.mul(ops.add(extra, one), positive)
    loss = ops.sub(ops.mul(ops.sub(one, target), x), positive)
    if weight is not None:
        loss = ops.mul(loss, operand(weight, like))
    return _reduce_loss(out, loss, reduction)


LOSS: dict[Any, Any] = {
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss2d_forward.default: _nll_loss,
    aten.mse_loss.default: _mse_loss,
    aten.smooth_l1_loss.default: _smooth_l1_loss,
    aten.huber_loss.default: _huber_loss,
    aten.binary_cross_entropy.default: _binary_cross_entropy,
    aten.binary_cross_entropy_with_logits.default: _binary_cross_entropy_with_logits,
}
