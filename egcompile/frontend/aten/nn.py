"""Rows for what networks are made of: embeddings, norms, softmax. Each is kept whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from egcompile import ops
from egcompile.errors import UnsupportedOp
from egcompile.frontend.build import axis, broadcast, cast, operand, reshape
from egcompile.ir import Node, TensorType, accumulate_dtype

aten = torch.ops.aten


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
        y = op(reshape(cast(x, out.dtype), out.shape or (1,)), dim=axis(dim, len(out.shape)))
        return reshape(y, out.shape)

    return row


def safe_softmax(x: Node, dim: int) -> Node:
    """Softmax, but 0 in rows that are all -inf, with a gradient of 0 there."""
    dead = ops.eq(top := ops.amax(x, dims=(dim,)), operand(-math.inf, top.tensor))
    dead = broadcast(dead, x.shape)
    zero = operand(0, x.tensor)
    return ops.where(dead, zero, ops.softmax(ops.where(dead, zero, x), dim=dim))


def _safe_softmax(out: TensorType, x: Node, dim: int, dtype: torch.dtype | None) -> Node:
    return safe_softmax(cast(x, out.dtype), axis(dim, len(out.shape)))


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
}
