"""A softmax in fp32 around values of 16 bits, as attention is written out: softmax and casts are one loop.

The named op is a kernel by itself; its parts can be computed inside the cast, forward and backward, and the
probabilities are computed again rather than saved, where that is cheaper.
"""

from __future__ import annotations

from egcompile.ops import amax, cast, div, exp, mul, shape, softmax, softmax_backward, sub, sum
from egcompile.rules.attributes import last_axis
from egcompile.rules.patterns import across, is_wide
from egcompile.rules.rule import DType, Equations, Int, Tensor, rule


@rule("fusion/softmax_cast", {"x": "f32[2,3,5]", "dim": 2, "d": "bf16"})
def _(x: Tensor, dim: Int, d: DType) -> Equations:
    "y = softmax(x), cast(y)  ==>  e / sum(e), cast(e / sum(e)) with e = exp(x - amax(x))"
    dims = last_axis(shape(x))
    e = exp(sub(x, across(amax(x, dims), x)))
    y, written = softmax(x, dim), div(e, across(sum(e, dims), x))
    return {cast(y, d): cast(written, d), y: written}, [is_wide(x), (dims, (dim,))]


@rule("fusion/softmax_backward_cast", {"y": "f32[2,3,5]", "ct": "f32[2,3,5]", "dim": 2, "d": "bf16"})
def _(y: Tensor, ct: Tensor, dim: Int, d: DType) -> Equations:
    "cast(softmax_backward(y, ct))  ==>  cast(y (ct - sum(y ct)))"
    dims = last_axis(shape(y))
    written = mul(y, sub(ct, across(sum(mul(y, ct), dims), y)))
    return {cast(softmax_backward(y, ct, dim), d): cast(written, d)}, [is_wide(y), (dims, (dim,))]
