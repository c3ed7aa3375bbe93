"""A skip connection's sum in the LayerNorm that reads it, forward and backward."""

from __future__ import annotations

from egcompile.ops import add, add_layer_norm, layer_norm, layer_norm_backward, layer_norm_backward_add
from egcompile.rules.patterns import column_sum, sums_rows
from egcompile.rules.rule import Equations, Float, Ints, Tensor, rule

_X, _COLUMN = "bf16[2,3,8]", "f32[2,3,1]"
_FORWARD = {"x": _X, "r": _X, "w": "bf16[8]", "b": "bf16[8]", "eps": 1e-5}


@rule("fusion/add_layer_norm", _FORWARD)
def _(x: Tensor, r: Tensor, w: Tensor, b: Tensor, eps: Float) -> Equations:
    "h = x + r, layer_norm(h, w, b)[0]  ==>  add_layer_norm(x, r, w, b)[0], [1]"
    h = add(x, r)
    fused = add_layer_norm(x, r, w, b, eps)
    return {h: fused[0], layer_norm(h, w, b, eps)[0]: fused[1]}


for _saved, _index in (("mean", 1), ("rstd", 2)):

    @rule(f"fusion/add_layer_norm_{_saved}", _FORWARD)
    def _(x: Tensor, r: Tensor, w: Tensor, b: Tensor, eps: Float) -> Equations:
        "layer_norm(x + r, w, b)[i]  ==>  add_layer_norm(x, r, w, b)[i + 1], saved for the backward"
        fused = add_layer_norm(x, r, w, b, eps)
        return {layer_norm(add(x, r), w, b, eps)[_index]: fused[_index + 1]}


_BACKWARD = {"x": _X, "w": "bf16[8]", "mean": _COLUMN, "rstd": _COLUMN, "ct": _X, "skip": _X}

for _side in ("", "_left"):

    @rule(f"fusion/layer_norm_backward_add{_side}", _BACKWARD)
    def _(x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, ct: Tensor, skip: Tensor) -> Equations:
        "layer_norm_backward(...)[0] + skip  ==>  layer_norm_backward_add(..., skip)[0]"
        dx = layer_norm_backward(x, w, mean, rstd, ct)[0]
        fused = layer_norm_backward_add(x, w, mean, rstd, ct, skip)
        return {(add(skip, dx) if _side else add(dx, skip)): fused[0]}

    for _gradient, _index in (("dw", 1), ("db", 2)):

        @rule(f"fusion/layer_norm_backward_add_{_gradient}{_side}", _BACKWARD)
        def _(x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, ct: Tensor, skip: Tensor) -> Equations:
            "layer_norm_backward(...)[0] + skip, [i]  ==>  layer_norm_backward_add(..., skip)[0], [i]"
            apart = layer_norm_backward(x, w, mean, rstd, ct)
            fused = layer_norm_backward_add(x, w, mean, rstd, ct, skip)
            dx = apart[0]
            left = add(skip, dx) if _side else add(dx, skip)
            return {left: fused[0], apart[_index]: fused[_index]}


# ---- the gradient of a bias before the norm is the sum of the norm's own dx ----

_BEFORE = {**_BACKWARD, "dims": (0, 1)}


@rule("fusion/layer_norm_backward_dsum", {k: v for k, v in _BEFORE.items() if k != "skip"})
def _(x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, ct: Tensor, dims: Ints) -> Equations:
    "sum(layer_norm_backward(...)[0]) over rows  ==>  [3]"
    apart = layer_norm_backward(x, w, mean, rstd, ct)
    return {column_sum(apart[0], dims): apart[3]}, [sums_rows(apart[0], dims)]


@rule("fusion/layer_norm_backward_add_dsum", _BEFORE)
def _(x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, ct: Tensor, skip: Tensor, dims: Ints) -> Equations:
    "sum(layer_norm_backward_add(...)[0]) over rows  ==>  [3]"
    fused = layer_norm_backward_add(x, w, mean, rstd, ct, skip)
    return {column_sum(fused[0], dims): fused[3]}, [sums_rows(fused[0], dims)]
