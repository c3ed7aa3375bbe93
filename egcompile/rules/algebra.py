"""Identities of arithmetic that training graphs need, each in the direction that saves work.

There is no x * 0 = 0 (x may be NaN or infinite), no x - x = 0, and no x / x = 1.
"""

from __future__ import annotations

from egcompile.ops import (
    add,
    cast,
    div,
    dtype,
    expand,
    full,
    mul,
    neg,
    permute,
    pow,
    reciprocal,
    reshape,
    shape,
    sub,
    sum,
    transpose,
    where,
)
from egcompile.rules.attributes import holds, is_far_reaching, numel, round_to
from egcompile.rules.patterns import scalar
from egcompile.rules.rule import DType, Equations, Float, Ints, Tensor, rule

_X = {"x": "f64[3,4]"}

# ---- neutral elements ----


@rule("algebra/mul_one", _X, phase="both")
def _(x: Tensor) -> Equations:
    "x 1  ==>  x"
    return {mul(x, scalar(1.0, x)): x}


@rule("algebra/one_mul", _X, phase="both")
def _(x: Tensor) -> Equations:
    "1 x  ==>  x"
    return {mul(scalar(1.0, x), x): x}


@rule("algebra/div_one", _X, phase="both")
def _(x: Tensor) -> Equations:
    "x / 1  ==>  x"
    return {div(x, scalar(1.0, x)): x}


@rule("algebra/add_zero", _X, phase="both")
def _(x: Tensor) -> Equations:
    "x + 0  ==>  x"
    return {add(x, scalar(0.0, x)): x}


@rule("algebra/zero_add", _X, phase="both")
def _(x: Tensor) -> Equations:
    "0 + x  ==>  x"
    return {add(scalar(0.0, x), x): x}


@rule("algebra/sub_zero", _X, phase="both")
def _(x: Tensor) -> Equations:
    "x - 0  ==>  x"
    return {sub(x, scalar(0.0, x)): x}


@rule("algebra/where_is_condition", {"c": "bool[3,4]"}, phase="both")
def _(c: Tensor) -> Equations:
    "where(c, true, false)  ==>  c"
    return {where(c, scalar(1.0, c), scalar(0.0, c)): c}


# ---- signs ----


@rule("algebra/neg_neg", _X)
def _(x: Tensor) -> Equations:
    "-(-x)  ==>  x"
    return {neg(neg(x)): x}


@rule("algebra/mul_minus_one", _X)
def _(x: Tensor) -> Equations:
    "x (-1)  ==>  -x"
    return {mul(x, scalar(-1.0, x)): neg(x)}


@rule("algebra/add_neg", {"a": "f64[3,4]", "b": "f64[3,4]"})
def _(a: Tensor, b: Tensor) -> Equations:
    "a + (-b)  ==>  a - b"
    return {add(a, neg(b)): sub(a, b)}


@rule("algebra/neg_add", {"a": "f64[3,4]", "b": "f64[3,4]"})
def _(a: Tensor, b: Tensor) -> Equations:
    "(-a) + b  ==>  b - a"
    return {add(neg(a), b): sub(b, a)}


# ---- powers; x^(-1/2) is not rsqrt(x), which is NaN for -inf ----


@rule("algebra/pow_one", _X, phase="both")
def _(x: Tensor) -> Equations:
    "x^1  ==>  x"
    return {pow(x, scalar(1.0, x)): x}


@rule("algebra/square", _X, phase="both")
def _(x: Tensor) -> Equations:
    "x^2  ==>  x x"
    return {pow(x, scalar(2.0, x)): mul(x, x)}


@rule("algebra/cube", _X, exactness="reassociating", phase="both")
def _(x: Tensor) -> Equations:
    "x^3  ==>  (x x) x"
    return {pow(x, scalar(3.0, x)): mul(mul(x, x), x)}


@rule("algebra/pow_minus_one", _X, phase="both")
def _(x: Tensor) -> Equations:
    "x^(-1)  ==>  1 / x"
    return {pow(x, scalar(-1.0, x)): reciprocal(x)}


# ---- constants; their product has no room in fp16, and a float is not exact enough for an int64 ----


@rule("algebra/mul_mul", {"x": "f64[3,4]", "a": 0.3, "b": 7.0}, exactness="reassociating")
def _(x: Tensor, a: Float, b: Float) -> Equations:
    "(x a) b  ==>  x (a b) with constant a, b"
    left = mul(mul(x, scalar(a, x)), scalar(b, x))
    return {left: mul(x, scalar(a * b, x))}, [(is_far_reaching(dtype(x)), True)]


@rule("algebra/div_constant", {"x": "f64[3,4]", "a": 3.0}, exactness="reassociating")
def _(x: Tensor, a: Float) -> Equations:
    "x / a  ==>  x (1 / a) with constant a"
    return {div(x, scalar(a, x)): mul(x, scalar(1.0 / a, x))}


for _op in (add, sub, mul, div):

    @rule(
        f"algebra/{_op.name}_constants",
        {"a": 0.3, "b": 7.0, "s": (3, 4), "d": "f32"},
        exactness="reassociating",
    )
    def _(a: Float, b: Float, s: Ints, d: DType) -> Equations:
        "a op b  ==>  their value, with constant a, b"
        value = {"add": a + b, "sub": a - b, "mul": a * b, "div": a / b}[_op.name]
        return {_op(full(a, s, d), full(b, s, d)): full(value, s, d)}, [(is_far_reaching(d), True)]


@rule(
    "algebra/cast_constant",
    {"a": 0.3, "s": (3, 4), "d": "bf16", "to": "f32"},
    {"a": 0.3, "s": (3, 4), "d": "f32", "to": "bf16"},
    phase="both",
)
def _(a: Float, s: Ints, d: DType, to: DType) -> Equations:
    "cast(a, to)  ==>  a, rounded as it was"
    return {cast(full(a, s, d), to): full(round_to(a, d), s, to)}


for _op, _example in (
    (reshape, {"a": 0.3, "s": (3, 4), "d": "f32", "to": (2, 6)}),
    (expand, {"a": 0.3, "s": (3, 1), "d": "f32", "to": (3, 4)}),
):

    @rule(f"algebra/{_op.name}_constant", _example, phase="both")
    def _(a: Float, s: Ints, d: DType, to: Ints) -> Equations:
        "movement of a constant  ==>  the constant"
        return {_op(full(a, s, d), to): full(a, to, d)}


@rule("algebra/permute_constant", {"a": 0.3, "s": (3, 4), "d": "f32", "p": (1, 0)}, phase="both")
def _(a: Float, s: Ints, d: DType, p: Ints) -> Equations:
    "permute of a constant  ==>  the constant"
    left = permute(full(a, s, d), p)
    return {left: full(a, shape(left), d)}


@rule("algebra/transpose_constant", {"a": 0.3, "s": (3, 4), "d": "f32"}, phase="both")
def _(a: Float, s: Ints, d: DType) -> Equations:
    "transpose of a constant  ==>  the constant"
    left = transpose(full(a, s, d))
    return {left: full(a, shape(left), d)}


@rule(
    "algebra/sum_constant",
    {"a": 0.3, "s": (3, 4), "d": "f64", "dims": (1,)},
    exactness="reassociating",
)
def _(a: Float, s: Ints, d: DType, dims: Ints) -> Equations:
    "sum of a constant  ==>  the constant times the elements summed"
    left = sum(full(a, s, d), dims)
    return {left: full(a * (numel(s) / numel(shape(left))), shape(left), d)}


# ---- casts ----


@rule("algebra/cast_same", {"x": "bf16[3,4]"}, phase="both")
def _(x: Tensor) -> Equations:
    "cast(x, its own dtype)  ==>  x"
    return {cast(x, dtype(x)): x}


@rule(
    "algebra/cast_cast",
    {"x": "bf16[3,4]", "wide": "f32", "to": "bf16"},
    {"x": "bf16[3,4]", "wide": "f32", "to": "f64"},
    {"x": "f32[3,4]", "wide": "f64", "to": "f16"},
    phase="both",
)
def _(x: Tensor, wide: DType, to: DType) -> Equations:
    "cast(cast(x, wide), to)  ==>  cast(x, to), where `wide` holds every value of x's dtype"
    return {cast(cast(x, wide), to): cast(x, to)}, [(holds(dtype(x), wide), True)]
