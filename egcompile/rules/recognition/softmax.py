"""Softmax and its logarithm written out, and the upcasts around them and cross-entropy."""

from __future__ import annotations

from collections.abc import Callable

from egcompile.ops import (
    add,
    amax,
    cast,
    cross_entropy,
    div,
    dtype,
    exp,
    log,
    log_softmax,
    mul,
    reciprocal,
    softmax,
    stop_gradient,
    sub,
    sum,
)
from egcompile.ops.term import Pattern
from egcompile.rules.attributes import accumulate
from egcompile.rules.patterns import across, is_wide
from egcompile.rules.rule import Equations, Int, Ints, Tensor, rule

_WRITTEN = ({"x": "f64[3,5]", "dims": (1,)}, {"x": "f32[2,3,5]", "dims": (1,)})


@rule("recognition/softmax", *_WRITTEN, phase="recognition")
def _(x: Tensor, dims: Ints) -> Equations:
    "e / sum(e) with e = exp(x - amax(x))  ==>  softmax(x).  The gradients through amax cancel."
    e = exp(sub(x, across(amax(x, dims), x)))
    return {div(e, across(sum(e, dims), x)): softmax(x, dims[0])}, [is_wide(x), (dims, (dims[0],))]


@rule("recognition/softmax_mul", *_WRITTEN, exactness="reassociating", phase="recognition")
def _(x: Tensor, dims: Ints) -> Equations:
    "e * (1 / sum(e)) with e = exp(x - amax(x))  ==>  softmax(x)"
    e = exp(sub(x, across(amax(x, dims), x)))
    scale = across(reciprocal(sum(e, dims)), x)
    return {mul(e, scale): softmax(x, dims[0])}, [is_wide(x), (dims, (dims[0],))]


_TOPS: dict[str, Callable[[Pattern], Pattern]] = {
    "": lambda top: top,
    "_detached": stop_gradient,
}
"""Not that of `torch.logsumexp`: less it, a row with an inf is NaN there alone, a log_softmax all over."""

for suffix, guard in _TOPS.items():

    @rule(f"recognition/log_softmax{suffix}", *_WRITTEN, exactness="reassociating", phase="recognition")
    def _(x: Tensor, dims: Ints) -> Equations:
        "x - (top + log(sum(exp(x - top)))) with top = amax(x)  ==>  log_softmax(x)"
        top = guard(amax(x, dims))
        lse = add(top, log(sum(exp(sub(x, across(top, x))), dims)))
        return {sub(x, across(lse, x)): log_softmax(x, dims[0])}, [is_wide(x), (dims, (dims[0],))]


@rule("recognition/log_softmax_shifted", *_WRITTEN, phase="recognition")
def _(x: Tensor, dims: Ints) -> Equations:
    "s - log(sum(exp(s))) with s = x - amax(x)  ==>  log_softmax(x)"
    s = sub(x, across(amax(x, dims), x))
    left = sub(s, across(log(sum(exp(s), dims)), x))
    return {left: log_softmax(x, dims[0])}, [is_wide(x), (dims, (dims[0],))]


# There is none for softmax: its gradient is made of its result, and where a probability near 1 was rounded,
# nothing true is left of `ct - sum(ct y)`.


@rule("recognition/log_softmax_upcast", {"x": "bf16[3,5]", "dim": 1}, phase="recognition")
def _(x: Tensor, dim: Int) -> Equations:
    "cast(log_softmax(cast(x, wide)), dtype(x))  ==>  log_softmax(x): it widens x and rounds once itself"
    return {cast(log_softmax(cast(x, accumulate(dtype(x))), dim), dtype(x)): log_softmax(x, dim)}


@rule(
    "recognition/cross_entropy_upcast",
    {"x": "bf16[4,5]", "target": "i64[4]", "ignore": 1},
    phase="recognition",
)
def _(x: Tensor, target: Tensor, ignore: Int) -> Equations:
    "cross_entropy(cast(x, wide), target)  ==>  cross_entropy(x, target): it widens the logits itself"
    wide = cast(x, accumulate(dtype(x)))
    return {cross_entropy(wide, target, ignore)[0]: cross_entropy(x, target, ignore)[0]}
