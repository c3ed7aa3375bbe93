"""LayerNorm over the last axis, by definition. Statistics are in fp32 at least, and ATen's rounding: once."""

from __future__ import annotations

from egcompile.ir.node import Node
from egcompile.ir.types import accumulate_dtype
from egcompile.ops.build import broadcast_to, cast_to, constant, sum_rows
from egcompile.ops.opdef import Kind, OpDef, Sample, register
from egcompile.ops.pointwise import add, mul, rsqrt, sub
from egcompile.ops.reduction import mean


def _layer_norm(x: Node, weight: Node, bias: Node, eps: float) -> tuple[Node, Node, Node]:
    wide = cast_to(x, accumulate_dtype(x.dtype))
    last = (len(x.shape) - 1,)
    center = mean(wide, dims=last)
    deviation = sub(wide, broadcast_to(center, x.shape))
    variance = mean(mul(deviation, deviation), dims=last)
    rstd = rsqrt(add(variance, constant(eps, variance)))
    x_hat = mul(deviation, broadcast_to(rstd, x.shape))
    scaled = mul(x_hat, broadcast_to(cast_to(weight, wide.dtype), x.shape))
    y = add(scaled, broadcast_to(cast_to(bias, wide.dtype), x.shape))
    return cast_to(y, x.dtype), center, rstd


def _layer_norm_backward(
    x: Node, weight: Node, mean_: Node, rstd: Node, ct: Node
) -> tuple[Node, Node, Node, Node]:
    """With x_hat = (x - mean) rstd, g = ct w: dx = rstd (g - mean(g) - x_hat mean(g x_hat)).

    dw and db are the sums over rows of ct x_hat and ct; dsum is that of dx.
    """
    last = len(x.shape) - 1
    rows = broadcast_to(rstd, x.shape)
    x_hat = mul(sub(cast_to(x, rstd.dtype), broadcast_to(mean_, x.shape)), rows)
    wide_ct = cast_to(ct, rstd.dtype)
    g = mul(wide_ct, broadcast_to(cast_to(weight, rstd.dtype), x.shape))
    along = broadcast_to(mean(mul(g, x_hat), dims=(last,)), x.shape)
    centered = sub(g, broadcast_to(mean(g, dims=(last,)), x.shape))
    dx = cast_to(mul(rows, sub(centered, mul(x_hat, along))), x.dtype)
    dw, db = sum_rows(mul(wide_ct, x_hat)), sum_rows(wide_ct)
    return dx, cast_to(dw, weight.dtype), cast_to(db, weight.dtype), sum_rows(dx)


def _add_layer_norm(x: Node, r: Node, weight: Node, bias: Node, eps: float) -> tuple[Node, Node, Node, Node]:
    h = add(x, r)
    return (h, *_layer_norm(h, weight, bias, eps))


def _layer_norm_backward_add(
    x: Node, weight: Node, mean_: Node, rstd: Node, ct: Node, skip: Node
) -> tuple[Node, Node, Node, Node]:
    dx, dw, db, _ = _layer_norm_backward(x, weight, mean_, rstd, ct)
    total = add(dx, skip)
    return total, dw, db, sum_rows(total)


_X, _N, _COLUMN = "f64[2,3,8]", "f64[8]", "f64[2,3,1]"
_EPS = {"eps": 1e-5}

layer_norm = register(
    OpDef(
        "layer_norm",
        Kind.COMPOSITE,
        ("x", "weight", "bias"),
        {"eps": "float"},
        outputs=("y", "mean", "rstd"),
        definition=_layer_norm,
        samples=(Sample((_X, _N, _N), _EPS),),
    )
)
"""`(x[*, N] - mean) rstd weight[N] + bias[N]`, and `mean[*, 1]` and `rstd[*, 1]` in fp32."""

layer_norm_backward = register(
    OpDef(
        "layer_norm_backward",
        Kind.COMPOSITE,
        ("x", "weight", "mean", "rstd", "ct"),
        outputs=("dx", "dw", "db", "dsum"),
        definition=_layer_norm_backward,
        samples=(Sample((_X, _N, _COLUMN, _COLUMN, _X)),),
    )
)
"""`dsum[N]` is the sum of `dx` over its rows: the gradient of a bias that was added to `x`."""

add_layer_norm = register(
    OpDef(
        "add_layer_norm",
        Kind.COMPOSITE,
        ("x", "residual", "weight", "bias"),
        {"eps": "float"},
        outputs=("h", "y", "mean", "rstd"),
        definition=_add_layer_norm,
        samples=(Sample((_X, _X, _N, _N), _EPS),),
    )
)

layer_norm_backward_add = register(
    OpDef(
        "layer_norm_backward_add",
        Kind.COMPOSITE,
        ("x", "weight", "mean", "rstd", "ct", "skip"),
        outputs=("dx", "dw", "db", "dsum"),
        definition=_layer_norm_backward_add,
        samples=(Sample((_X, _N, _COLUMN, _COLUMN, _X, _X)),),
    )
)
"""`layer_norm_backward` with the skip connection's cotangent added to `dx` in the same kernel."""
