"""A skip connection's sum in the norm that reads it, forward and backward."""

from __future__ import annotations

from egcompile.ops import add, add_rms_norm, rms_norm, rms_norm_backward, rms_norm_backward_add
from egcompile.rules.rule import Bool, Equations, Float, Tensor, rule

_FORWARD = {
    "x": "bf16[2,3,8]",
    "r": "bf16[2,3,8]",
    "w": "bf16[8]",
    "eps": 1e-5,
    "cast_first": True,
}


@rule("fusion/add_rms_norm", _FORWARD)
def _(x: Tensor, r: Tensor, w: Tensor, eps: Float, cast_first: Bool) -> Equations:
    "h = x + r, rms_norm(h, w)[0]  ==>  add_rms_norm(x, r, w)[0], [1]"
    h = add(x, r)
    fused = add_rms_norm(x, r, w, eps, cast_first)
    return {h: fused[0], rms_norm(h, w, eps, cast_first)[0]: fused[1]}


@rule("fusion/add_rms_norm_rstd", _FORWARD)
def _(x: Tensor, r: Tensor, w: Tensor, eps: Float, cast_first: Bool) -> Equations:
    "rms_norm(x + r, w)[1]  ==>  add_rms_norm(x, r, w)[2], saved for the backward"
    fused = add_rms_norm(x, r, w, eps, cast_first)
    return {rms_norm(add(x, r), w, eps, cast_first)[1]: fused[2]}


_BACKWARD = {
    "x": "bf16[2,3,8]",
    "w": "bf16[8]",
    "rstd": "f32[2,3,1]",
    "ct": "bf16[2,3,8]",
    "skip": "bf16[2,3,8]",
    "cast_first": False,
}

for _side in ("", "_left"):

    @rule(f"fusion/rms_norm_backward_add{_side}", _BACKWARD)
    def _(x: Tensor, w: Tensor, rstd: Tensor, ct: Tensor, skip: Tensor, cast_first: Bool) -> Equations:
        "rms_norm_backward(...)[0] + skip  ==>  rms_norm_backward_add(..., skip)[0]"
        dx = rms_norm_backward(x, w, rstd, ct, cast_first)[0]
        fused = rms_norm_backward_add(x, w, rstd, ct, skip, cast_first)
        return {(add(skip, dx) if _side else add(dx, skip)): fused[0]}

    @rule(f"fusion/rms_norm_backward_add_dw{_side}", _BACKWARD)
    def _(x: Tensor, w: Tensor, rstd: Tensor, ct: Tensor, skip: Tensor, cast_first: Bool) -> Equations:
        "rms_norm_backward(...)[0] + skip, [1]  ==>  rms_norm_backward_add(..., skip)[0], [1]"
        dx, dw = rms_norm_backward(x, w, rstd, ct, cast_first)
        fused = rms_norm_backward_add(x, w, rstd, ct, skip, cast_first)
        return {(add(skip, dx) if _side else add(dx, skip)): fused[0], dw: fused[1]}
