"""Row norms, by definition. Statistics are in fp32 at least."""

from __future__ import annotations

from egcompile.ir.node import Node
from egcompile.ir.types import accumulate_dtype
from egcompile.ops.build import broadcast_to, cast_to, constant, sum_rows
from egcompile.ops.opdef import Kind, OpDef, Sample, register
from egcompile.ops.pointwise import add, mul, rsqrt, sub
from egcompile.ops.reduction import mean


def _rms_norm(x: Node, weight: Node, eps: float, cast_first: bool) -> tuple[Node, Node]:
    wide = cast_to(x, accumulate_dtype(x.dtype))
    square = mean(mul(wide, wide), dims=(len(x.shape) - 1,))
    rstd = rsqrt(add(square, constant(eps, square)))
    return _scale(mul(wide, broadcast_to(rstd, x.shape)), x, weight, cast_first), rstd


def _scale(x_hat: Node, x: Node, weight: Node, cast_first: bool) -> Node:
    """Hugging Face casts the normalized row before it multiplies (`cast_first`), ATen after."""
    if cast_first:
        return mul(cast_to(x_hat, weight.dtype), broadcast_to(weight, x.shape))
    scale = broadcast_to(cast_to(weight, x_hat.dtype), x.shape)
    return cast_to(mul(x_hat, scale), x.dtype)


def _rms_norm_backward(x: Node, weight: Node, rstd: Node, ct: Node, cast_first: bool) -> tuple[Node, Node]:
    """With x_hat = x rstd, g = ct w: dx = rstd (g - x_hat mean(g x_hat)), dw = sum of ct x_hat over rows.

    `cast_first` rounds what the forward rounds: the weight scales x_hat in its own dtype.
    """
    last = len(x.shape) - 1
    rows = broadcast_to(rstd, x.shape)
    x_hat = mul(cast_to(x, rstd.dtype), rows)
    scaling = weight.dtype if cast_first else rstd.dtype
    g = cast_to(ct, scaling)
    scaled = cast_to(mul(g, broadcast_to(cast_to(weight, scaling), x.shape)), rstd.dtype)
    along = broadcast_to(mean(mul(scaled, x_hat), dims=(last,)), x.shape)
    dx = cast_to(mul(rows, sub(scaled, mul(x_hat, along))), x.dtype)
    dw = sum_rows(mul(g, cast_to(x_hat, scaling)))
    return dx, cast_to(dw, weight.dtype)


def _add_rms_norm(x: Node, r: Node, weight: Node, eps: float, cast_first: bool) -> tuple[Node, Node, Node]:
    h = add(x, r)
    return (h, *_rms_norm(h, weight, eps, cast_first))


def _rms_norm_backward_add(
    x: Node, weight: Node, rstd: Node, ct: Node, skip: Node, cast_first: bool
) -> tuple[Node, Node]:
    dx, dw = _rms_norm_backward(x, weight, rstd, ct, cast_first)
    return add(dx, skip), dw


_FLAGS = {"eps": "float", "cast_first": "bool"}
_SAMPLE = {"eps": 1e-5, "cast_first": False}
_BACKWARD = {"cast_first": False}

rms_norm = register(
    OpDef(
        "rms_norm",
        Kind.COMPOSITE,
        ("x", "weight"),
        _FLAGS,
        outputs=("y", "rstd"),
        definition=_rms_norm,
        samples=(Sample(("f64[2,3,8]", "f64[8]"), _SAMPLE),),
    )
)
"""`x[*, N] rsqrt(mean(x^2) + eps) weight[N]` and the reciprocal deviation `rstd[*, 1]` in fp32."""

rms_norm_backward = register(
    OpDef(
        "rms_norm_backward",
        Kind.COMPOSITE,
        ("x", "weight", "rstd", "ct"),
        {"cast_first": "bool"},
        outputs=("dx", "dw"),
        definition=_rms_norm_backward,
        samples=(Sample(("f64[2,3,8]", "f64[8]", "f64[2,3,1]", "f64[2,3,8]"), _BACKWARD),),
    )
)

add_rms_norm = register(
    OpDef(
        "add_rms_norm",
        Kind.COMPOSITE,
        ("x", "residual", "weight"),
        _FLAGS,
        outputs=("h", "y", "rstd"),
        definition=_add_rms_norm,
        samples=(Sample(("f64[2,3,8]", "f64[2,3,8]", "f64[8]"), _SAMPLE),),
    )
)

rms_norm_backward_add = register(
    OpDef(
        "rms_norm_backward_add",
        Kind.COMPOSITE,
        ("x", "weight", "rstd", "ct", "skip"),
        {"cast_first": "bool"},
        outputs=("dx", "dw"),
        definition=_rms_norm_backward_add,
        samples=(Sample(("f64[2,3,8]", "f64[8]", "f64[2,3,1]", "f64[2,3,8]", "f64[2,3,8]"), _BACKWARD),),
    )
)
"""`rms_norm_backward` with the skip connection's cotangent added to `dx` in the same kernel."""
