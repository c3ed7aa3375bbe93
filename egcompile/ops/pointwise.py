"""Pointwise ops. Operands have one shape and one dtype; `expand` and `cast` make them so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from egcompile.errors import TypeMismatch
from egcompile.ir.types import TensorType
from egcompile.ops.opdef import Kind, OpDef, Sample, register, same_type


def _pointwise(
    name: str,
    operands: str,
    evaluate: Callable[..., Any],
    scalar: str,
    *,
    low: float = -2.0,
    high: float = 2.0,
    type_rule: Callable[..., TensorType] = same_type,
    nondifferentiable: str = "",
    dtype: str = "f64",
) -> OpDef:
    names = tuple(operands.split())
    return register(
        OpDef(
            name,
            Kind.POINTWISE,
            names,
            type_rule=type_rule,
            evaluate=evaluate,
            scalar=scalar,
            samples=(Sample((f"{dtype}[3,4]",) * len(names), low=low, high=high),),
            nondifferentiable=frozenset(nondifferentiable.split()),
        )
    )


def _boolean(*types: TensorType) -> TensorType:
    return TensorType(same_type(*types).shape, torch.bool)


# ---- arithmetic; `scalar` is in the accumulation dtype ----
add = _pointwise("add", "a b", torch.add, "{0} + {1}")
sub = _pointwise("sub", "a b", torch.sub, "{0} - {1}")
mul = _pointwise("mul", "a b", torch.mul, "{0} * {1}")
div = _pointwise("div", "a b", torch.div, "{0} / {1}", low=0.5)
neg = _pointwise("neg", "x", torch.neg, "-{0}")
pow = _pointwise("pow", "a b", torch.pow, "libdevice.pow({0}, {1})", low=0.5)
reciprocal = _pointwise("reciprocal", "x", torch.reciprocal, "1.0 / {0}", low=0.5)
sqrt = _pointwise("sqrt", "x", torch.sqrt, "tl.sqrt_rn({0})", low=0.5)
rsqrt = _pointwise("rsqrt", "x", torch.rsqrt, "tl.rsqrt({0})", low=0.5)
exp = _pointwise("exp", "x", torch.exp, "tl.exp({0})")
log = _pointwise("log", "x", torch.log, "tl.log({0})", low=0.5)
log1p = _pointwise("log1p", "x", torch.log1p, "libdevice.log1p({0})", low=-0.5)
expm1 = _pointwise("expm1", "x", torch.expm1, "libdevice.expm1({0})")
sin = _pointwise("sin", "x", torch.sin, "tl.sin({0})")
cos = _pointwise("cos", "x", torch.cos, "tl.cos({0})")
erf = _pointwise("erf", "x", torch.erf, "tl.erf({0})")
abs = _pointwise("abs", "x", torch.abs, "tl.abs({0})", low=0.5)
maximum = _pointwise(
    "maximum", "a b", torch.maximum, "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"
)
minimum = _pointwise(
    "minimum", "a b", torch.minimum, "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"
)

# ---- comparison and choice ----
eq = _pointwise("eq", "a b", torch.eq, "{0} == {1}", type_rule=_boolean, nondifferentiable="a b")
ne = _pointwise("ne", "a b", torch.ne, "{0} != {1}", type_rule=_boolean, nondifferentiable="a b")
lt = _pointwise("lt", "a b", torch.lt, "{0} < {1}", type_rule=_boolean, nondifferentiable="a b")
le = _pointwise("le", "a b", torch.le, "{0} <= {1}", type_rule=_boolean, nondifferentiable="a b")
gt = _pointwise("gt", "a b", torch.gt, "{0} > {1}", type_rule=_boolean, nondifferentiable="a b")
ge = _pointwise("ge", "a b", torch.ge, "{0} >= {1}", type_rule=_boolean, nondifferentiable="a b")
logical_and = _pointwise(
    "logical_and", "a b", torch.logical_and, "{0} & {1}", dtype="bool", nondifferentiable="a b"
)
logical_or = _pointwise(
    "logical_or", "a b", torch.logical_or, "{0} | {1}", dtype="bool", nondifferentiable="a b"
)
logical_not = _pointwise(
    "logical_not", "x", torch.logical_not, "{0} == 0", dtype="bool", nondifferentiable="x"
)


def _where_type(condition: TensorType, a: TensorType, b: TensorType) -> TensorType:
    if condition != TensorType(a.shape, torch.bool):
        raise TypeMismatch(f"where wants a condition bool{list(a.shape)}, got {condition}")
    return same_type(a, b)


where = register(
    OpDef(
        "where",
        Kind.POINTWISE,
        ("condition", "a", "b"),
        type_rule=_where_type,
        evaluate=torch.where,
        scalar="tl.where({0}, {1}, {2})",
        samples=(Sample(("bool[3,4]", "f64[3,4]", "f64[3,4]")),),
        nondifferentiable=frozenset({"condition"}),
    )
)

cast = register(
    OpDef(
        "cast",
        Kind.POINTWISE,
        ("x",),
        {"dtype": "dtype"},
        type_rule=lambda x, dtype: TensorType(x.shape, dtype),
        evaluate=lambda x, dtype: x.to(dtype),
        scalar="{0}",  # the renderer rounds to the node's dtype
        samples=(Sample(("f64[3,4]",), {"dtype": torch.float32}),),
    )
)
"""A change of dtype. It is always applied, inside fused kernels too."""

stop_gradient = _pointwise("stop_gradient", "x", torch.detach, "{0}", nondifferentiable="x")
"""`detach`: the same value, and no gradient. It is erased after the backward is derived."""
