"""Activations written by hand. A constant is the right operand, where PyTorch puts it."""

from __future__ import annotations

import math
from collections.abc import Callable

from egcompile.ops import (
    add,
    div,
    erf,
    exp,
    gelu,
    gelu_tanh,
    mul,
    neg,
    reciprocal,
    sigmoid,
    silu,
    swiglu,
    tanh,
)
from egcompile.ops.term import Pattern
from egcompile.rules.patterns import scalar
from egcompile.rules.rule import Equations, Tensor, rule

_X = {"x": "f64[3,4]"}

Form = Callable[[Pattern], Pattern]


@rule("recognition/sigmoid_reciprocal", _X, exactness="reassociating", phase="recognition")
def _(x: Tensor) -> Equations:
    "1 / (1 + exp(-x))  ==>  sigmoid(x)"
    return {reciprocal(add(exp(neg(x)), scalar(1.0, x))): sigmoid(x)}


@rule("recognition/sigmoid_div", _X, exactness="reassociating", phase="recognition")
def _(x: Tensor) -> Equations:
    "1 / (1 + exp(-x))  ==>  sigmoid(x)"
    return {div(scalar(1.0, x), add(exp(neg(x)), scalar(1.0, x))): sigmoid(x)}


@rule("recognition/silu", _X, exactness="reassociating", phase="recognition")
def _(x: Tensor) -> Equations:
    "x sigmoid(x)  ==>  silu(x)"
    return {mul(x, sigmoid(x)): silu(x)}


@rule("recognition/silu_left", _X, exactness="reassociating", phase="recognition")
def _(x: Tensor) -> Equations:
    "sigmoid(x) x  ==>  silu(x)"
    return {mul(sigmoid(x), x): silu(x)}


@rule("recognition/silu_div", _X, exactness="reassociating", phase="recognition")
def _(x: Tensor) -> Equations:
    "x / (1 + exp(-x))  ==>  silu(x)"
    return {div(x, add(exp(neg(x)), scalar(1.0, x))): silu(x)}


@rule("recognition/swiglu", {"gate": "bf16[3,4]", "up": "bf16[3,4]"}, phase="recognition")
def _(gate: Tensor, up: Tensor) -> Equations:
    "silu(gate) up  ==>  swiglu(gate, up)"
    return {mul(silu(gate), up): swiglu(gate, up)}


@rule("recognition/swiglu_right", {"gate": "bf16[3,4]", "up": "bf16[3,4]"}, phase="recognition")
def _(gate: Tensor, up: Tensor) -> Equations:
    "up silu(gate)  ==>  swiglu(gate, up)"
    return {mul(up, silu(gate)): swiglu(gate, up)}


def _half_times(x: Pattern, one_plus: Pattern) -> dict[str, Pattern]:
    """The ways to write `x one_plus / 2`, by name."""
    half = scalar(0.5, x)
    return {
        "": mul(mul(x, half), one_plus),
        "_half_second": mul(x, mul(one_plus, half)),
        "_half_last": mul(mul(x, one_plus), half),
    }


_ROOT_HALF = math.sqrt(0.5)
_ERF_ARGUMENTS: dict[str, Form] = {
    "": lambda x: mul(x, scalar(_ROOT_HALF, x)),
    "_div": lambda x: div(x, scalar(math.sqrt(2.0), x)),
}
_HALVES = ("", "_half_second", "_half_last")

for argument, inner in _ERF_ARGUMENTS.items():
    for half in _HALVES:

        @rule(f"recognition/gelu{argument}{half}", _X, exactness="reassociating", phase="recognition")
        def _(x: Tensor) -> Equations:
            "x (1 + erf(x / sqrt(2))) / 2  ==>  gelu(x)"
            one_plus = add(erf(inner(x)), scalar(1.0, x))
            return {_half_times(x, one_plus)[half]: gelu(x)}


_SLOPE, _CUBIC = math.sqrt(2.0 / math.pi), 0.044715


def _cube(x: Pattern) -> Pattern:
    """x^3, as `algebra/cube` writes pow(x, 3)."""
    return mul(mul(x, x), x)


_TANH_ARGUMENTS: dict[str, Form] = {
    "": lambda x: mul(add(x, mul(_cube(x), scalar(_CUBIC, x))), scalar(_SLOPE, x)),
    "_factored": lambda x: mul(
        mul(x, scalar(_SLOPE, x)), add(mul(mul(x, scalar(_CUBIC, x)), x), scalar(1.0, x))
    ),
}

for argument, inner in _TANH_ARGUMENTS.items():
    for half in _HALVES:

        @rule(f"recognition/gelu_tanh{argument}{half}", _X, exactness="reassociating", phase="recognition")
        def _(x: Tensor) -> Equations:
            "x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2  ==>  gelu_tanh(x)"
            one_plus = add(tanh(inner(x)), scalar(1.0, x))
            return {_half_times(x, one_plus)[half]: gelu_tanh(x)}
