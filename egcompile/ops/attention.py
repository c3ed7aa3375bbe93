"""Scaled dot-product attention: ATen's kernels, and its mathematical definition for second order."""

from __future__ import annotations

import math

import torch

from egcompile.errors import TypeMismatch
from egcompile.ir.node import Node
from egcompile.ir.types import TensorType, accumulate_dtype
from egcompile.ops.build import broadcast_to, cast_to, constant, reshape_to
from egcompile.ops.contraction import bmm
from egcompile.ops.core import full, iota
from egcompile.ops.movement import transpose
from egcompile.ops.opdef import Kind, OpDef, Sample, register
from egcompile.ops.pointwise import add, div, exp, ge, log, mul, sub, where
from egcompile.ops.reduction import amax, sum


def _sdpa_type(
    q: TensorType, k: TensorType, v: TensorType, scale: float, causal: bool
) -> tuple[TensorType, ...]:
    fits = (
        q.rank == k.rank == v.rank == 4
        and q.dtype == k.dtype == v.dtype
        and k.shape[:3] == v.shape[:3]
        and q.shape[0] == k.shape[0]
        and q.shape[1] % k.shape[1] == 0
        and q.shape[3] == k.shape[3]
    )
    if not fits:
        raise TypeMismatch(f"sdpa of {q}, {k} and {v}")
    lse = TensorType(q.shape[:3], accumulate_dtype(q.dtype))
    return TensorType((*q.shape[:3], v.shape[3]), q.dtype), lse


def repeat_heads(x: Node, heads: int) -> Node:
    """`x[B, H_kv, S, D]` with each of its heads repeated, up to `heads`."""
    batch, kv, length, width = x.shape
    grouped = reshape_to(x, (batch, kv, 1, length, width))
    repeated = broadcast_to(grouped, (batch, kv, heads // kv, length, width))
    return reshape_to(repeated, (batch, heads, length, width))


def _sdpa_math(q: Node, k: Node, v: Node, scale: float, causal: bool) -> tuple[Node, Node]:
    acc = accumulate_dtype(q.dtype)
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scores = cast_to(bmm(q, transpose(k)), acc)
    scores = mul(scores, constant(scale, scores))
    if causal:
        rows = iota(shape=scores.shape, axis=2, dtype=torch.int64)
        columns = iota(shape=scores.shape, axis=3, dtype=torch.int64)
        masked = full(value=-math.inf, shape=scores.shape, dtype=acc)
        scores = where(ge(rows, columns), scores, masked)
    top = amax(scores, dims=(3,))
    numerator = exp(sub(scores, broadcast_to(top, scores.shape)))
    total = sum(numerator, dims=(3,))
    weights = cast_to(div(numerator, broadcast_to(total, scores.shape)), q.dtype)
    return bmm(weights, v), reshape_to(add(top, log(total)), q.shape[:3])


def _sdpa_backward_math(
    q: Node, k: Node, v: Node, out: Node, lse: Node, ct: Node, scale: float, causal: bool
) -> tuple[Node, Node, Node]:
    """FlashAttention's backward (Dao et al., 2022) untiled: P from lse, dS = P (dP - sum(ct out))."""
    acc = accumulate_dtype(q.dtype)
    heads = q.shape[1]
    keys, values = repeat_heads(k, heads), repeat_heads(v, heads)
    scores = cast_to(bmm(q, transpose(keys)), acc)
    scores = mul(scores, constant(scale, scores))
    p = exp(sub(scores, broadcast_to(reshape_to(lse, (*q.shape[:3], 1)), scores.shape)))
    if causal:
        rows = iota(shape=scores.shape, axis=2, dtype=torch.int64)
        columns = iota(shape=scores.shape, axis=3, dtype=torch.int64)
        p = where(ge(rows, columns), p, constant(0.0, p))
    delta = sum(mul(cast_to(ct, acc), cast_to(out, acc)), dims=(3,))
    dp = cast_to(bmm(ct, transpose(values)), acc)
    ds = mul(mul(p, sub(dp, broadcast_to(delta, p.shape))), constant(scale, p))
    ds = cast_to(ds, q.dtype)
    dv = _sum_heads(bmm(transpose(cast_to(p, q.dtype)), ct), v)
    return bmm(ds, keys), _sum_heads(bmm(transpose(ds), q), k), dv


def _sum_heads(x: Node, like: Node) -> Node:
    batch, kv, length, width = like.shape
    grouped = reshape_to(x, (batch, kv, x.shape[1] // kv, length, width))
    return reshape_to(sum(grouped, dims=(2,)), like.shape)


_FLAGS = {"scale": "float", "causal": "bool"}
_GQA = Sample(("f64[2,4,6,8]", "f64[2,2,6,8]", "f64[2,2,6,8]"), {"scale": 0.3, "causal": True})
_PLAIN = Sample(("f64[1,2,3,4]", "f64[1,2,5,4]", "f64[1,2,5,4]"), {"scale": 0.5, "causal": False})

sdpa = register(
    OpDef(
        "sdpa",
        Kind.EXTERN,
        ("q", "k", "v"),
        _FLAGS,
        outputs=("out", "lse"),
        type_rule=_sdpa_type,
        definition=_sdpa_math,
        flops=lambda q, k, v: 4 * q.numel * k.shape[2],
        samples=(_GQA, _PLAIN),
    )
)
"""Attention of `q[B, H, L, D]` over `k, v[B, H_kv, S, D]`, H a multiple of H_kv; and the row log-sum-exp."""

sdpa_backward = register(
    OpDef(
        "sdpa_backward",
        Kind.EXTERN,
        ("q", "k", "v", "out", "lse", "ct"),
        _FLAGS,
        outputs=("dq", "dk", "dv"),
        type_rule=lambda q, k, v, out, lse, ct, scale, causal: (q, k, v),
        definition=_sdpa_backward_math,
        flops=lambda q, k, v, out, lse, ct: 10 * q.numel * k.shape[2],
        samples=(
            Sample(
                (*_PLAIN.operands, "f64[1,2,3,4]", "f64[1,2,3]", "f64[1,2,3,4]"),
                {"scale": 0.5, "causal": True},
            ),
        ),
    )
)
