"""Norms of channels, `x[N, C, *]`, by definition: over a batch, or over groups of channels of one sample.

Statistics are in fp32 at least, in two passes. The named norms are what is differentiated; each is also its
moments and then pointwise work, which fuses with what comes after. A backward needs two sums a channel.
"""

from __future__ import annotations

import torch

from egcompile.ir.node import Node
from egcompile.ir.types import accumulate_dtype
from egcompile.ops.build import broadcast_to, cast_to, constant, reshape_to
from egcompile.ops.opdef import Kind, OpDef, Sample, register
from egcompile.ops.pointwise import add, mul, rsqrt, sub
from egcompile.ops.reduction import mean, sum


def _wide(x: Node) -> Node:
    return cast_to(x, accumulate_dtype(x.dtype))


def _channel(vector: Node, like: Node) -> Node:
    """`vector[C]` (or `[N, C]`, a value a sample) over the rest of `like[N, C, *]`."""
    leading = vector.shape if len(vector.shape) == 2 else (1, *vector.shape)
    return broadcast_to(reshape_to(vector, (*leading, *(1,) * (len(like.shape) - 2))), like.shape)


def _of_groups(column: Node, channels: int) -> Node:
    """`column[N, G] -> [N, C]`: each channel has its group's value."""
    samples, groups = column.shape
    wide = broadcast_to(reshape_to(column, (samples, groups, 1)), (samples, groups, channels // groups))
    return reshape_to(wide, (samples, channels))


def _moments(x: Node, dims: tuple[int, ...]) -> tuple[Node, Node]:
    center = mean(x, dims=dims)
    deviation = sub(x, broadcast_to(center, x.shape))
    return center, mean(mul(deviation, deviation), dims=dims)


def _across(x: Node) -> tuple[int, ...]:
    return (0, *range(2, len(x.shape)))


def _batch_moments(x: Node, eps: float) -> tuple[Node, Node, Node]:
    center, variance = (reshape_to(each, x.shape[1:2]) for each in _moments(_wide(x), _across(x)))
    return center, variance, _rstd(variance, eps)


def _group_moments(x: Node, groups: int, eps: float) -> tuple[Node, Node]:
    samples, channels, *sizes = x.shape
    grouped = reshape_to(_wide(x), (samples, groups, channels // groups, *sizes))
    center, variance = _moments(grouped, tuple(range(2, len(grouped.shape))))
    return reshape_to(center, (samples, groups)), reshape_to(_rstd(variance, eps), (samples, groups))


def _rstd(variance: Node, eps: float) -> Node:
    return rsqrt(add(variance, constant(eps, variance)))


def _normalized(x: Node, center: Node, rstd: Node, weight: Node, bias: Node) -> Node:
    x_hat = mul(sub(_wide(x), _channel(center, x)), _channel(rstd, x))
    scaled = mul(x_hat, _channel(_wide(weight), x))
    return cast_to(add(scaled, _channel(_wide(bias), x)), x.dtype)


def _batch_norm(x: Node, weight: Node, bias: Node, eps: float) -> tuple[Node, Node, Node]:
    center, variance, rstd = _batch_moments(x, eps)
    return _normalized(x, center, rstd, weight, bias), center, variance


def _group_norm(x: Node, weight: Node, bias: Node, groups: int, eps: float) -> tuple[Node, Node, Node]:
    center, rstd = _group_moments(x, groups, eps)
    each = [_of_groups(column, x.shape[1]) for column in (center, rstd)]
    return _normalized(x, each[0], each[1], weight, bias), center, rstd


def _batch_norm_sums(
    x: Node, center: Node, rstd: Node, ct: Node, dtype: torch.dtype
) -> tuple[Node, Node, Node, Node]:
    ct, dims, channels = _wide(ct), _across(x), x.shape[1:2]
    x_hat = mul(sub(_wide(x), _channel(center, x)), _channel(rstd, x))
    total, along = (reshape_to(sum(each, dims=dims), channels) for each in (ct, mul(ct, x_hat)))
    return total, along, cast_to(along, dtype), cast_to(total, dtype)


def _group_norm_sums(x: Node, center: Node, rstd: Node, ct: Node, groups: int) -> tuple[Node, Node]:
    ct, channels = _wide(ct), x.shape[:2]
    each = [_channel(_of_groups(column, x.shape[1]), x) for column in (center, rstd)]
    x_hat = mul(sub(_wide(x), each[0]), each[1])
    dims = tuple(range(2, len(x.shape)))
    if not dims:
        return ct, mul(ct, x_hat)
    return reshape_to(sum(ct, dims=dims), channels), reshape_to(sum(mul(ct, x_hat), dims=dims), channels)


def _group_norm_terms(
    total: Node, along: Node, weight: Node, groups: int, count: float
) -> tuple[Node, Node, Node, Node]:
    samples, channels = total.shape
    wide = broadcast_to(reshape_to(_wide(weight), (1, channels)), total.shape)

    def share(sums: Node) -> Node:
        grouped = reshape_to(mul(wide, sums), (samples, groups, channels // groups))
        column = reshape_to(sum(grouped, dims=(2,)), (samples, groups))
        return mul(column, constant(1.0 / max(count, 1), column))  # of no elements, nothing

    dw, db = (reshape_to(sum(sums, dims=(0,)), (channels,)) for sums in (along, total))
    return cast_to(dw, weight.dtype), cast_to(db, weight.dtype), share(total), share(along)


_X, _C, _NC, _NG = "f64[3,4,2,5]", "f64[4]", "f64[3,4]", "f64[3,2]"

batch_moments = register(
    OpDef(
        "batch_moments",
        Kind.COMPOSITE,
        ("x",),
        {"eps": "float"},
        outputs=("mean", "var", "rstd"),
        definition=_batch_moments,
        samples=(Sample((_X,), {"eps": 1e-5}), Sample(("f64[6,4]",), {"eps": 1e-5})),
    )
)
"""`x[N, C, *]` -> each channel's mean, (biased) variance and `rsqrt(var + eps)`, `[C]`, in fp32."""

group_moments = register(
    OpDef(
        "group_moments",
        Kind.COMPOSITE,
        ("x",),
        {"groups": "int", "eps": "float"},
        outputs=("mean", "rstd"),
        definition=_group_moments,
        samples=(Sample((_X,), {"groups": 2, "eps": 1e-5}),),
    )
)
"""`x[N, C, *]` -> mean and `rstd[N, G]`, one over the root of variance and eps, of each sample's groups of
channels, in fp32."""

batch_norm = register(
    OpDef(
        "batch_norm",
        Kind.COMPOSITE,
        ("x", "weight", "bias"),
        {"eps": "float"},
        outputs=("y", "mean", "var"),
        definition=_batch_norm,
        samples=(Sample((_X, _C, _C), {"eps": 1e-5}), Sample(("f64[6,4]", _C, _C), {"eps": 1e-5})),
    )
)
"""`(x[N, C, *] - mean) rsqrt(var + eps) weight[C] + bias[C]`, and the batch's `mean[C]` and `var[C]`."""

group_norm = register(
    OpDef(
        "group_norm",
        Kind.COMPOSITE,
        ("x", "weight", "bias"),
        {"groups": "int", "eps": "float"},
        outputs=("y", "mean", "rstd"),
        definition=_group_norm,
        samples=(Sample((_X, _C, _C), {"groups": 2, "eps": 1e-5}),),
    )
)
"""`(x[N, C, *] - mean) rstd weight[C] + bias[C]`, with the groups' `mean[N, G]` and `rstd[N, G]`."""

batch_norm_sums = register(
    OpDef(
        "batch_norm_sums",
        Kind.COMPOSITE,
        ("x", "mean", "rstd", "ct"),
        {"dtype": "dtype"},
        outputs=("total", "along", "dw", "db"),
        definition=_batch_norm_sums,
        samples=(
            Sample((_X, _C, _C, _X), {"dtype": torch.float64}),
            Sample(("f64[6,4]", _C, _C, "f64[6,4]"), {"dtype": torch.float64}),
        ),
    )
)
"""The sums of `ct` and of `ct x_hat` over each channel, `[C]`, and both as gradients of bias and weight."""

group_norm_sums = register(
    OpDef(
        "group_norm_sums",
        Kind.COMPOSITE,
        ("x", "mean", "rstd", "ct"),
        {"groups": "int"},
        outputs=("total", "along"),
        definition=_group_norm_sums,
        samples=(Sample((_X, _NG, _NG, _X), {"groups": 2}),),
    )
)
"""The sums of `ct` and of `ct x_hat` over each sample's channels, `[N, C]`."""

group_norm_terms = register(
    OpDef(
        "group_norm_terms",
        Kind.COMPOSITE,
        ("total", "along", "weight"),
        {"groups": "int", "count": "float"},
        outputs=("dw", "db", "mean_ct", "mean_along"),
        definition=_group_norm_terms,
        samples=(Sample((_NC, _NC, _C), {"groups": 2, "count": 20.0}),),
    )
)
"""From `group_norm_sums`: the gradients of weight and bias, and the means of `g` and `g x_hat` over the
`count` elements of a group, `[N, G]`, for `g = ct weight`."""
