"""A linear layer with the work on its result: bias, activation, skip connection, gate.

A bias that is not there is 0. A rule that gives the pre-activation unions it too, so that storing it in the
forward and recomputing it in the backward are both in the e-graph.
"""

from __future__ import annotations

from egcompile.ops import (
    ACTIVATIONS,
    add,
    dtype,
    linear_act,
    linear_add,
    linear_bias_add,
    linear_swiglu,
    matmul,
    swiglu,
)
from egcompile.rules.patterns import is_vector, rows, vector
from egcompile.rules.rule import Equations, Tensor, rule

_LINEAR = {"x": "bf16[2,3,4]", "w": "bf16[4,5]"}
_BIAS = {**_LINEAR, "b": "bf16[5]"}


@rule("fusion/linear_bias", _BIAS, {"x": "f64[3,4]", "w": "f64[4,5]", "b": "f64[5]"})
def _(x: Tensor, w: Tensor, b: Tensor) -> Equations:
    "x w + b  ==>  linear_act(x, w, b, none)[0]"
    y = matmul(x, w)
    return {add(y, rows(b, y)): linear_act(x, w, b, "none")[0]}, [is_vector(b, y)]


for _act, _row in ACTIVATIONS.items():

    @rule(f"fusion/linear_bias_{_act}", _BIAS)
    def _(x: Tensor, w: Tensor, b: Tensor) -> Equations:
        "pre = x w + b, act(pre)  ==>  linear_act(x, w, b, act)[1], [0]"
        y = matmul(x, w)
        pre = add(y, rows(b, y))
        fused = linear_act(x, w, b, _act)
        return {_row.forward(pre): fused[0], pre: fused[1]}, [is_vector(b, y)]

    @rule(f"fusion/linear_{_act}", _LINEAR)
    def _(x: Tensor, w: Tensor) -> Equations:
        "pre = x w, act(pre)  ==>  linear_act(x, w, 0, act)[1], [0]"
        pre = matmul(x, w)
        fused = linear_act(x, w, vector(0.0, pre, dtype(x)), _act)
        return {_row.forward(pre): fused[0], pre: fused[1]}


_SKIP = {**_LINEAR, "skip": "bf16[2,3,5]"}

for _side in ("", "_left"):

    @rule(f"fusion/linear_add{_side}", _SKIP)
    def _(x: Tensor, w: Tensor, skip: Tensor) -> Equations:
        "x w + skip  ==>  linear_add(x, w, skip): a skip connection, or another product's gradient"
        y = matmul(x, w)
        return {(add(skip, y) if _side else add(y, skip)): linear_add(x, w, skip)}

    @rule(f"fusion/linear_bias_add{_side}", {**_SKIP, "b": "bf16[5]"})
    def _(x: Tensor, w: Tensor, b: Tensor, skip: Tensor) -> Equations:
        "(x w + b) + skip  ==>  linear_bias_add(x, w, b, skip)"
        y = matmul(x, w)
        y = add(y, rows(b, y))
        fused = linear_bias_add(x, w, b, skip)
        return {(add(skip, y) if _side else add(y, skip)): fused}, [is_vector(b, y)]


@rule("fusion/linear_swiglu", {**_LINEAR, "gate": "bf16[2,3,5]"})
def _(x: Tensor, w: Tensor, gate: Tensor) -> Equations:
    "up = x w, swiglu(gate, up)  ==>  linear_swiglu(x, w, gate)[1], [0]"
    up = matmul(x, w)
    fused = linear_swiglu(x, w, gate)
    return {swiglu(gate, up): fused[0], up: fused[1]}
