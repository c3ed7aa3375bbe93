"""The gradient product of a linear layer, with the derivative of what came before it as its epilogue."""

from __future__ import annotations

from egcompile.ops import (
    ACTIVATIONS,
    linear_act_backward,
    linear_swiglu_backward,
    matmul,
    swiglu_backward,
)
from egcompile.rules.patterns import column_sum, sums_rows
from egcompile.rules.rule import Equations, Ints, Tensor, rule

_ACT = {"ct": "bf16[2,3,4]", "w": "bf16[4,5]", "saved": "bf16[2,3,5]"}

for _act, _row in ACTIVATIONS.items():

    @rule(f"fusion/linear_{_act}_backward", _ACT)
    def _(ct: Tensor, w: Tensor, saved: Tensor) -> Equations:
        "act_backward(ct w, saved)  ==>  linear_act_backward(ct, w, saved)[0]"
        dpre = _row.backward(matmul(ct, w), saved)
        return {dpre: linear_act_backward(ct, w, saved, _act)[0]}

    @rule(
        f"fusion/linear_{_act}_backward_dbias",
        {**_ACT, "dims": (0, 1)},
        {"ct": "bf16[1,3,4]", "w": "bf16[4,5]", "saved": "bf16[1,3,5]", "dims": (1,)},
    )
    def _(ct: Tensor, w: Tensor, saved: Tensor, dims: Ints) -> Equations:
        "dpre = act_backward(ct w, saved), its sum over rows  ==>  linear_act_backward(ct, w, saved)[0], [1]"
        dpre = _row.backward(matmul(ct, w), saved)
        fused = linear_act_backward(ct, w, saved, _act)
        return {dpre: fused[0], column_sum(dpre, dims): fused[1]}, [sums_rows(dpre, dims)]


@rule(
    "fusion/linear_swiglu_backward",
    {"ct": "bf16[2,3,4]", "w": "bf16[4,5]", "gate": "bf16[2,3,5]", "up": "bf16[2,3,5]"},
)
def _(ct: Tensor, w: Tensor, gate: Tensor, up: Tensor) -> Equations:
    "swiglu_backward(gate, up, ct w)[0], [1]  ==>  linear_swiglu_backward(ct, w, gate, up)[0], [1]"
    dgate, dup = swiglu_backward(gate, up, matmul(ct, w))
    fused = linear_swiglu_backward(ct, w, gate, up)
    return {dgate: fused[0], dup: fused[1]}
