"""RMSNorm written out, as Hugging Face and ATen do, one step a rule.

A step is recognized as a norm whose weight is 1, and the next step takes that up; so variants add up where
they would otherwise multiply. The importer puts a broadcast operand second.

    rsqrt(mean(x^2) + eps)                ->  rms_norm(x, 1)[1]
    x * rstd                              ->  rms_norm(x, 1)[0]       in fp32, or fp64
    cast(normalized)                      ->  rms_norm(x, 1)[0]       in the dtype of the cast
    weight * normalized                   ->  rms_norm(x, weight)[0]  Hugging Face's: cast first
    cast(wide weight * wide normalized)   ->  rms_norm(x, weight)[0]  ATen's: cast last
"""

from __future__ import annotations

from egcompile.ops import add, cast, dtype, full, mean, mul, rms_norm, rsqrt, shape
from egcompile.ops.term import Pattern
from egcompile.rules.attributes import accumulate, last_axis, last_size
from egcompile.rules.patterns import across, is_vector, is_wide, rows, scalar, vector
from egcompile.rules.rule import Condition, DType, Equations, Float, Tensor, rule

_EPS = 1e-5


def _widened(x: Pattern, has_cast: bool) -> tuple[Pattern, list[Condition]]:
    """`x` in the dtype of the statistics: by a cast, or as it is where it has that dtype."""
    return (cast(x, accumulate(dtype(x))), []) if has_cast else (x, [is_wide(x)])


for suffix, has_cast, example in (
    ("", False, {"x": "f64[2,3,8]", "eps": _EPS}),
    ("_cast", True, {"x": "bf16[2,3,8]", "eps": _EPS}),
):

    @rule(f"recognition/rms_norm_rstd{suffix}", example, phase="recognition")
    def _(x: Tensor, eps: Float) -> Equations:
        "rsqrt(mean(x^2) + eps)  ==>  rms_norm(x, 1)[1]"
        wide, where = _widened(x, has_cast)
        square = mean(mul(wide, wide), last_axis(shape(x)))
        one = vector(1.0, x, accumulate(dtype(x)))
        return {rsqrt(add(square, scalar(eps, square))): rms_norm(x, one, eps, True)[1]}, where

    @rule(f"recognition/rms_norm_normalized{suffix}", example, phase="recognition")
    def _(x: Tensor, eps: Float) -> Equations:
        "x rms_norm(x, 1)[1]  ==>  rms_norm(x, 1)[0]"
        wide, where = _widened(x, has_cast)
        norm = rms_norm(x, vector(1.0, x, accumulate(dtype(x))), eps, True)
        return {mul(wide, across(norm[1], x)): norm[0]}, where


@rule(
    "recognition/rms_norm_cast_first",
    {"x": "bf16[2,3,8]", "eps": _EPS, "to": "bf16"},
    {"x": "f32[2,3,8]", "eps": _EPS, "to": "f16"},
    phase="recognition",
)
def _(x: Tensor, eps: Float, to: DType) -> Equations:
    "cast(rms_norm(x, 1)[0], to)  ==>  rms_norm(x, cast(1, to))[0]"
    acc = accumulate(dtype(x))
    y = rms_norm(x, vector(1.0, x, acc), eps, True)[0]
    return {cast(y, to): rms_norm(x, vector(1.0, x, to), eps, True)[0]}, [(accumulate(to), acc)]


@rule(
    "recognition/rms_norm_weight",
    {"x": "bf16[2,3,8]", "w": "bf16[8]", "eps": _EPS},
    {"x": "bf16[2,3,8]", "w": "f32[8]", "eps": _EPS},
    {"x": "f64[3,8]", "w": "f64[8]", "eps": _EPS},
    phase="recognition",
)
def _(x: Tensor, w: Tensor, eps: Float) -> Equations:
    "rms_norm(x, 1)[0] w  ==>  rms_norm(x, w)[0]"
    y = rms_norm(x, full(1.0, last_size(shape(x)), dtype(w)), eps, True)[0]
    return {mul(y, rows(w, x)): rms_norm(x, w, eps, True)[0]}, [is_vector(w, x)]


@rule(
    "recognition/rms_norm_cast_last",
    {"x": "bf16[2,3,8]", "w": "f32[8]", "eps": _EPS},
    phase="recognition",
)
def _(x: Tensor, w: Tensor, eps: Float) -> Equations:
    "cast(rms_norm(x, w)[0], dtype(x)) with a wide w  ==>  rms_norm(x, w, cast_first=False)[0]"
    y = rms_norm(x, w, eps, True)[0]
    return {cast(y, dtype(x)): rms_norm(x, w, eps, False)[0]}, [(dtype(w), accumulate(dtype(x)))]


@rule(
    "recognition/rms_norm_narrow_weight",
    {"x": "bf16[2,3,8]", "w": "bf16[8]", "eps": _EPS},
    phase="recognition",
)
def _(x: Tensor, w: Tensor, eps: Float) -> Equations:
    "rms_norm(x, cast(w), cast_first=False)[0]  ==>  rms_norm(x, w, cast_first=False)[0]: it widens w itself"
    wide = cast(w, accumulate(dtype(x)))
    return {rms_norm(x, wide, eps, False)[0]: rms_norm(x, w, eps, False)[0]}, [
        (accumulate(dtype(w)), accumulate(dtype(x)))
    ]
