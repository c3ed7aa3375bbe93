"""Norms of channels `[N, C, *]`: their derivatives, and their form as moments and pointwise work.

With x_hat = (x - mean) rstd and g = ct w, over the elements that share statistics:

    dx = rstd (g - mean(g) - x_hat mean(g x_hat)),    dw = sum(ct x_hat),    db = sum(ct)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from egcompile.ops import (
    TensorType,
    accumulate_dtype,
    add,
    batch_moments,
    batch_norm,
    batch_norm_sums,
    cast,
    expand,
    full,
    group_moments,
    group_norm,
    group_norm_sums,
    group_norm_terms,
    mul,
    reshape,
    rsqrt,
    sub,
)
from egcompile.ops.term import AttrFunction, Pattern, dtype, shape
from egcompile.rules.attributes import accumulate
from egcompile.rules.rule import Equations, Float, Int, Tensor, rule, vjp

Shape = tuple[int, ...]
Types = tuple[TensorType, ...]
Attrs = Mapping[str, Any]


def _row(shape: Shape) -> Shape | None:
    return (1, shape[1], *(1,) * (len(shape) - 2)) if len(shape) > 1 else None


def _lead(shape: Shape) -> Shape | None:
    return (*shape[:2], *(1,) * (len(shape) - 2)) if len(shape) > 1 else None


channel_row = AttrFunction("channel_row", ("ints",), "ints", _row)
"""`[N, C, H, W] -> [1, C, 1, 1]`: the shape in which what is per channel is broadcast."""

channel_lead = AttrFunction("channel_lead", ("ints",), "ints", _lead)
"""`[N, C, H, W] -> [N, C, 1, 1]`: the same for what each sample has."""


@dataclass(frozen=True)
class _Channels:
    """Words for `x[N, C, *]`: `wide` is the dtype to compute in, `lead` is `[1, C, 1, 1]` for what is per
    channel, `[N, C, 1, 1]` for what is per group."""

    x: Pattern
    wide: Any
    row: Any
    lead: Any = None
    groups: Any = None

    def widened(self, x: Pattern) -> Pattern:
        return cast(x, self.wide)

    def channel(self, vector: Pattern) -> Pattern:
        """`vector[C]` over `x`."""
        return expand(reshape(vector, self.row), shape(self.x))

    def group(self, column: Pattern) -> Pattern:
        """`column[N, G]` over `x`."""
        samples, channels = shape(self.x)[0], shape(self.x)[1]
        wide = expand(
            reshape(column, (samples, self.groups, 1)), (samples, self.groups, channels / self.groups)
        )
        return expand(reshape(wide, self.lead), shape(self.x))

    def normalized(self, mean: Pattern, rstd: Pattern) -> Pattern:
        """`x_hat`, of statistics that are spread over `x`."""
        return mul(sub(self.widened(self.x), mean), rstd)

    def affine(self, x_hat: Pattern, weight: Pattern, bias: Pattern) -> Pattern:
        scaled = mul(x_hat, self.channel(self.widened(weight)))
        return cast(add(scaled, self.channel(self.widened(bias))), dtype(self.x))


def _rstd(var: Pattern, eps: Any, sizes: Any, wide: Any) -> Pattern:
    return rsqrt(add(var, full(eps, sizes, wide)))


# ---- derivatives ----
def _batch_norm(
    x: Pattern, w: Pattern, b: Pattern, eps: Any, ys: Any, ct: Pattern, wide: Any, row: Any, share: Any
) -> tuple[Pattern, ...]:
    words = _Channels(x, wide, row)
    mean, rstd = ys[1], _rstd(ys[2], eps, shape(w), wide)
    total, along, dw, db = batch_norm_sums(x, mean, rstd, ct, dtype(w))
    each = full(share, shape(w), wide)
    x_hat = words.normalized(words.channel(mean), words.channel(rstd))
    centered = sub(words.widened(ct), words.channel(mul(total, each)))
    inner = sub(centered, mul(x_hat, words.channel(mul(along, each))))
    dx = cast(mul(words.channel(mul(words.widened(w), rstd)), inner), dtype(x))
    return dx, dw, cast(db, dtype(b))


def _group_norm(
    x: Pattern,
    w: Pattern,
    b: Pattern,
    groups: Any,
    eps: Any,
    ys: Any,
    ct: Pattern,
    wide: Any,
    row: Any,
    lead: Any,
    count: Any,
) -> tuple[Pattern, ...]:
    words = _Channels(x, wide, row, lead, groups)
    _, mean, rstd = ys
    sums = group_norm_sums(x, mean, rstd, ct, groups)
    dw, db, mean_ct, mean_along = group_norm_terms(sums[0], sums[1], w, groups, count)
    x_hat = words.normalized(words.group(mean), words.group(rstd))
    g = mul(words.widened(ct), words.channel(words.widened(w)))
    inner = sub(sub(g, words.group(mean_ct)), mul(x_hat, words.group(mean_along)))
    return cast(mul(words.group(rstd), inner), dtype(x)), dw, db


def _per_group(types: Types, attrs: Attrs, index: int) -> float:
    return math.prod(types[0].shape[1:]) / float(attrs["groups"])


_DERIVED: dict[str, Any] = {
    "wide": ("dtype", lambda types, attrs, index: accumulate_dtype(types[0].dtype)),
    "row": ("ints", lambda types, attrs, index: _row(types[0].shape)),
}
_LEAD: dict[str, Any] = {"lead": ("ints", lambda types, attrs, index: _lead(types[0].shape))}


def _share(types: Types, attrs: Attrs, index: int) -> float:
    return types[0].shape[1] / math.prod(types[0].shape)


vjp(batch_norm, _batch_norm, derived={**_DERIVED, "share": ("float", _share)})
vjp(group_norm, _group_norm, derived={**_DERIVED, **_LEAD, "count": ("float", _per_group)})


# ---- as moments and pointwise work ----
_BATCH = {"x": "f32[3,4,2,5]", "w": "f32[4]", "b": "f32[4]", "eps": 1e-5}
_GROUP = _BATCH | {"groups": 2}
_NARROW = {"x": "bf16[3,4,2,5]"}


@rule("fusion/batch_norm_moments", _BATCH, _BATCH | _NARROW)
def _(x: Tensor, w: Tensor, b: Tensor, eps: Float) -> Equations:
    "batch_norm(x, w, b)[0]  ==>  (x - mean) rstd w + b,  of batch_moments(x)"
    words = _Channels(x, accumulate(dtype(x)), channel_row(shape(x)))
    mean, _, rstd = batch_moments(x, eps)
    x_hat = words.normalized(words.channel(mean), words.channel(rstd))
    return {batch_norm(x, w, b, eps)[0]: words.affine(x_hat, w, b)}


@rule("fusion/group_norm_moments", _GROUP, _GROUP | _NARROW)
def _(x: Tensor, w: Tensor, b: Tensor, groups: Int, eps: Float) -> Equations:
    "group_norm(x, w, b)[0]  ==>  (x - mean) rstd w + b,  of group_moments(x)"
    words = _Channels(x, accumulate(dtype(x)), channel_row(shape(x)), channel_lead(shape(x)), groups)
    mean, rstd = group_moments(x, groups, eps)
    x_hat = words.normalized(words.group(mean), words.group(rstd))
    return {group_norm(x, w, b, groups, eps)[0]: words.affine(x_hat, w, b)}


@rule("fusion/batch_norm_mean", _BATCH)
def _(x: Tensor, w: Tensor, b: Tensor, eps: Float) -> Equations:
    "batch_norm(x, w, b)[1]  ==>  batch_moments(x)[0]"
    return {batch_norm(x, w, b, eps)[1]: batch_moments(x, eps)[0]}


@rule("fusion/batch_norm_var", _BATCH)
def _(x: Tensor, w: Tensor, b: Tensor, eps: Float) -> Equations:
    "batch_norm(x, w, b)[2]  ==>  batch_moments(x)[1]"
    return {batch_norm(x, w, b, eps)[2]: batch_moments(x, eps)[1]}


@rule("fusion/batch_norm_rstd", _BATCH, _BATCH | _NARROW)
def _(x: Tensor, w: Tensor, b: Tensor, eps: Float) -> Equations:
    "rsqrt(batch_norm(x, w, b)[2] + eps)  ==>  batch_moments(x)[2]: the end of the kernel that has the sums"
    rstd = _rstd(batch_norm(x, w, b, eps)[2], eps, shape(w), accumulate(dtype(x)))
    return {rstd: batch_moments(x, eps)[2]}


for _statistic, _index in (("mean", 1), ("rstd", 2)):

    @rule(f"fusion/group_norm_{_statistic}", _GROUP)
    def _(x: Tensor, w: Tensor, b: Tensor, groups: Int, eps: Float) -> Equations:
        "group_norm(x, w, b)[i]  ==>  group_moments(x)[i - 1]"
        return {group_norm(x, w, b, groups, eps)[_index]: group_moments(x, groups, eps)[_index - 1]}
