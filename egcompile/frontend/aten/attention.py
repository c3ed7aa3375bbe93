"""The row for scaled dot-product attention: whole where ATen's fast kernels take it, else its mathematics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from egcompile import ops
from egcompile.errors import UnsupportedOp
from egcompile.frontend.aten.nn import safe_softmax
from egcompile.frontend.build import broadcast, broadcast_shapes, cast, operand, reshape
from egcompile.ir import Node, TensorType, accumulate_dtype, topological
from egcompile.ops.attention import repeat_heads

aten = torch.ops.aten


def _sdpa(
    out: TensorType,
    query: Node,
    key: Node,
    value: Node,
    attn_mask: Node | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Node:
    if dropout_p:
        raise UnsupportedOp(f"scaled_dot_product_attention with dropout_p={dropout_p}")
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    q, k, v = _four_axes(query, key, value, enable_gqa)
    if attn_mask is not None:
        meaning = _constant_mask(attn_mask, (q.shape[2], k.shape[2]))
        if meaning is None:
            return reshape(_masked(q, k, v, _four(attn_mask, out), scale), out.shape)
        is_causal = is_causal or meaning == "causal"
    y, _ = ops.sdpa(q, k, v, scale=scale, causal=is_causal)
    return reshape(y, out.shape)


def masked_attention(
    out: TensorType,
    operands: tuple[Node, Node, Node],
    attn_mask: Node | None,
    is_causal: bool,
    scale: float,
    enable_gqa: bool,
    dropout: Callable[[Node], Node],
) -> Node:
    """Attention by its mathematics, with `dropout` of its weights."""
    q, k, v = _four_axes(*operands, enable_gqa)
    if attn_mask is not None:
        mask = _four(attn_mask, out)
    else:
        size = (1, 1, q.shape[2], k.shape[2])
        rows, columns = (ops.iota(shape=size, axis=axis, dtype=torch.int64) for axis in (2, 3))
        true = ops.full(value=1.0, shape=size, dtype=torch.bool)
        mask = ops.ge(rows, columns) if is_causal else true
    return reshape(_masked(q, k, v, mask, scale, dropout), out.shape)


def _four_axes(q: Node, k: Node, v: Node, enable_gqa: bool) -> tuple[Node, Node, Node]:
    """Operands as `[B, H, L, D]`: leading axes broadcast, then joined or added."""
    kept = 3 if enable_gqa else 2  # with grouped queries the head axes differ on purpose
    batch = broadcast_shapes(*(x.shape[:-kept] for x in (q, k, v)))
    q, k, v = (broadcast(x, (*batch, *x.shape[-kept:])) for x in (q, k, v))
    return _join(q), _join(k), _join(v)


def _join(x: Node) -> Node:
    *leading, heads, length, width = (1,) * (3 - len(x.shape)) + x.shape
    return reshape(x, (math.prod(leading), heads, length, width))


def _four(mask: Node, out: TensorType) -> Node:
    """The mask as a broadcastable `[B, H, L, S]`, batch axes joined as the operands' are."""
    *leading, length, width = mask.shape if len(mask.shape) > 1 else (1, *mask.shape)
    if len(leading) <= 2:
        return reshape(mask, (*(1,) * (2 - len(leading)), *leading, length, width))
    return _join(broadcast(mask, (*out.shape[:-3], leading[-1], length, width)))


def _masked(
    q: Node, k: Node, v: Node, mask: Node, scale: float, dropout: Callable[[Node], Node] = lambda w: w
) -> Node:
    """`softmax(scale q k^T + mask) v`, scores in fp32 at least; a bool mask keeps where it is true."""
    acc = accumulate_dtype(q.dtype)
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scores = cast(ops.bmm(q, ops.transpose(k)), acc)
    scores = ops.mul(scores, operand(scale, scores.tensor))
    if mask.dtype == torch.bool:
        kept = broadcast(mask, scores.shape)
        scores = ops.where(kept, scores, operand(-math.inf, scores.tensor))
    else:
        scores = ops.add(scores, operand(mask, scores.tensor))
    return ops.bmm(dropout(cast(safe_softmax(scores, 3), v.dtype)), v)


def _constant_mask(mask: Node, size: tuple[int, int]) -> str | None:
    """ "causal" or "none" for a mask that depends on no input nor draw and says just that; else None.

    Hugging Face builds its causal mask from `arange` while it is traced, which would keep the attention
    from ATen's fast kernels.
    """
    if any(node.op is ops.input or node.op.random for node in topological([mask])):
        return None
    (value,) = ops.evaluate_nodes([mask], {})
    kept = value if value.dtype == torch.bool else value == 0
    if value.dtype != torch.bool:
        dropped = value <= torch.finfo(value.dtype).min  # or -inf
        if not bool((kept | dropped).all()):
            return None
    if bool(kept.all()):
        return "none"
    causal = torch.ones(size, dtype=torch.bool).tril()
    return "causal" if bool((kept == causal).all()) else None


ATTENTION: dict[Any, Any] = {aten.scaled_dot_product_attention.default: _sdpa}
