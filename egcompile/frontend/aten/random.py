"""Rows for random ops: a draw, and arithmetic around it that rules know. First comes the key of the call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from egcompile import ops
from egcompile.frontend.aten.attention import ATTENTION, masked_attention
from egcompile.frontend.build import cast, operand
from egcompile.ir import Node, TensorType

aten = torch.ops.aten


def dropout(key: int, x: Node, p: float) -> tuple[Node, Node]:
    """`x * mask / (1 - p)` and the mask, as ATen rounds it: two products."""
    mask = ops.dropout_mask(shape=x.shape, p=p, key=key)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    kept = ops.mul(x, cast(mask, x.dtype))
    return ops.mul(kept, operand(scale, kept.tensor)), mask


def _dropout(key: int, out: TensorType, x: Node, p: float, train: bool) -> Node:
    return dropout(key, x, p)[0] if train and p else x


def _native_dropout(
    key: int, out: Sequence[TensorType], x: Node, p: float, train: bool | None
) -> tuple[Node, ...]:
    if train is False:
        return x, operand(True, out[1])
    return dropout(key, x, p)


def _attention(
    key: int,
    out: TensorType,
    query: Node,
    keys: Node,
    value: Node,
    attn_mask: Node | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Node:
    if not dropout_p:
        whole = ATTENTION[aten.scaled_dot_product_attention.default]
        return whole(out, query, keys, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    return masked_attention(
        out,
        (query, keys, value),
        attn_mask,
        is_causal,
        scale,
        enable_gqa,
        lambda weights: dropout(key, weights, dropout_p)[0],
    )


RANDOM: dict[Any, Any] = {
    aten.dropout.default: _dropout,
    aten.native_dropout.default: _native_dropout,
    aten.scaled_dot_product_attention.default: _attention,
}
