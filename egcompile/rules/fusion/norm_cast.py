"""A norm whose result is cast, as autocast leaves it: written out, the norm and the cast are one loop.

A named norm is a kernel by itself. Its parts are not, and can be computed inside the cast; what the backward
reads, and the sum before the norm, are side outputs there. In fp32 and fp64 no other cast stands between.
"""

from __future__ import annotations

from egcompile.ops import add, cast, dtype, full, layer_norm, mean, mul, rms_norm, rsqrt, shape, sub
from egcompile.ops.term import Pattern
from egcompile.rules.attributes import column, last_axis
from egcompile.rules.patterns import across, is_wide, rows
from egcompile.rules.rule import Bool, Condition, DType, Equations, Float, Tensor, rule


def _rstd(x: Pattern, like: Pattern, eps: Float) -> Pattern:
    """1 / sqrt(mean(x^2) + eps) of each row; `x` has the type of `like`."""
    square = mean(mul(x, x), last_axis(shape(like)))
    return rsqrt(add(square, full(eps, column(shape(like)), dtype(like))))


def _all_wide(x: Pattern, w: Pattern) -> list[Condition]:
    return [is_wide(x), (dtype(w), dtype(x))]


_RMS = {"x": "f32[2,3,8]", "w": "f32[8]", "eps": 1e-5, "first": True, "d": "bf16"}

for _saves in (False, True):

    @rule(f"fusion/rms_norm_cast{'_rstd' if _saves else ''}", _RMS)
    def _(x: Tensor, w: Tensor, eps: Float, first: Bool, d: DType) -> Equations:
        "cast(rms_norm(x, w)[0]), [1]  ==>  cast((x r) w), r = rsqrt(mean(x^2) + eps)"
        norm = rms_norm(x, w, eps, first)
        r = _rstd(x, x, eps)
        y = {cast(norm[0], d): cast(mul(mul(x, across(r, x)), rows(w, x)), d)}
        return {**y, norm[1]: r} if _saves else y, _all_wide(x, w)


_LAYER = {"x": "f32[2,3,8]", "w": "f32[8]", "b": "f32[8]", "eps": 1e-5, "d": "bf16"}

for _saves in (False, True):

    @rule(f"fusion/layer_norm_cast{'_saved' if _saves else ''}", _LAYER)
    def _(x: Tensor, w: Tensor, b: Tensor, eps: Float, d: DType) -> Equations:
        "cast(layer_norm(x, w, b)[0]), [1], [2]  ==>  cast(((x - m) r) w + b), m = mean(x), r = rstd(x - m)"
        norm = layer_norm(x, w, b, eps)
        m = mean(x, last_axis(shape(x)))
        centered = sub(x, across(m, x))
        r = _rstd(centered, x, eps)
        scaled = mul(mul(centered, across(r, x)), rows(w, x))
        y = {cast(norm[0], d): cast(add(scaled, rows(b, x)), d)}
        where = [*_all_wide(x, w), (dtype(b), dtype(x))]
        return {**y, norm[1]: m, norm[2]: r} if _saves else y, where
