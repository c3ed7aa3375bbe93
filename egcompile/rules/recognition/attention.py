"""Attention written out, and keys and values repeated for grouped queries."""

from __future__ import annotations

import math

import torch

from egcompile.ops import bmm, expand, ge, iota, logical_not, mul, reshape, sdpa, softmax, transpose, where
from egcompile.ops.term import Pattern, shape
from egcompile.rules.patterns import has_rank, is_wide, scalar
from egcompile.rules.rule import Bool, Equations, Float, Ints, Tensor, rule


def _repeated(x: Pattern, to: Ints) -> Pattern:
    """`x[B, H_kv, S, D] -> [B, H_kv G, S, D]`, each head G times, as Hugging Face's repeat_kv.

    `to` is [B, H_kv, G, S, D].
    """
    batch, heads, length, width = (shape(x)[i] for i in range(4))
    grouped = reshape(x, (batch, heads, 1, length, width))
    return reshape(expand(grouped, to), (batch, heads * to[2], length, width))


@rule(
    "recognition/sdpa_grouped",
    {
        "q": "f64[2,4,3,8]",
        "k": "f64[2,2,5,8]",
        "v": "f64[2,2,5,8]",
        "to": (2, 2, 2, 5, 8),
        "scale": 0.3,
        "causal": False,
    },
    phase="recognition",
)
def _(q: Tensor, k: Tensor, v: Tensor, to: Ints, scale: Float, causal: Bool) -> Equations:
    "sdpa(q, repeated(k), repeated(v))  ==>  sdpa(q, k, v): it shares the heads of k and v itself"
    left = sdpa(q, _repeated(k, to), _repeated(v, to), scale, causal)
    return {left[0]: sdpa(q, k, v, scale, causal)[0]}, [has_rank(k, 4), has_rank(v, 4)]


_WRITTEN = {"q": "f64[2,2,3,8]", "k": "f64[2,2,5,8]", "v": "f64[2,2,5,8]", "scale": 0.3}


@rule("recognition/sdpa", _WRITTEN, exactness="reassociating", phase="recognition")
def _(q: Tensor, k: Tensor, v: Tensor, scale: Float) -> Equations:
    "softmax(scale q k^T) v  ==>  sdpa(q, k, v).  In fp32 and fp64, where the scores are not rounded between."
    scores = bmm(q, transpose(k))
    left = bmm(softmax(mul(scores, scalar(scale, scores)), 3), v)
    return {left: sdpa(q, k, v, scale, False)[0]}, [has_rank(q, 4), is_wide(q)]


def _masked(scores: Pattern, filled: bool) -> Pattern:
    """`scores[B, H, L, S]` where row >= column, else -inf: by `where(mask)`, or `masked_fill(~mask)`."""
    size = shape(scores)[2], shape(scores)[3]
    row, column = (iota(size, axis, torch.int64) for axis in (0, 1))
    mask = logical_not(ge(row, column)) if filled else ge(row, column)
    mask = expand(reshape(mask, (1, 1, *size)), shape(scores))
    outside = scalar(-math.inf, scores)
    return where(mask, outside, scores) if filled else where(mask, scores, outside)


for _suffix, _filled in (("", False), ("_filled", True)):

    @rule(f"recognition/sdpa_causal{_suffix}", _WRITTEN, exactness="reassociating", phase="recognition")
    def _(q: Tensor, k: Tensor, v: Tensor, scale: Float) -> Equations:
        "softmax(where(row >= column, scale q k^T, -inf)) v  ==>  sdpa(q, k, v, causal=True)"
        scores = bmm(q, transpose(k))
        masked = _masked(mul(scores, scalar(scale, scores)), _filled)
        return {bmm(softmax(masked, 3), v): sdpa(q, k, v, scale, True)[0]}, [has_rank(q, 4), is_wide(q)]
