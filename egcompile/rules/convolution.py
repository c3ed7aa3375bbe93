"""The derivatives of convolutions and of pooling.

A convolution is linear in both operands, and three ops give each other's derivatives. In the weight the
transposed one has the same gradient, with the operands' roles exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from egcompile.ops import (
    TensorType,
    convolution,
    convolution_transpose,
    convolution_weight_grad,
    max_pool2d,
    max_pool2d_backward,
    max_pool2d_pick,
)
from egcompile.ops.convolution import Sizes, transposed_padding
from egcompile.ops.term import Pattern
from egcompile.rules.rule import vjp

Types = tuple[TensorType, ...]
Attrs = Mapping[str, Any]


def _window(attrs: Attrs) -> tuple[Sizes, Sizes, Sizes]:
    return attrs["stride"], attrs["padding"], attrs["dilation"]


def _kernel(types: Types, attrs: Attrs, index: int) -> Sizes:
    return types[1].shape[2:]


def _extra(types: Types, attrs: Attrs, index: int) -> Sizes:
    """The transposed convolution's `output_padding` for the gradient of a convolution's `x`."""
    y = convolution.infer(types, tuple(attrs[name] for name in convolution.attr_names))
    assert isinstance(y, TensorType)
    return transposed_padding(types[0].shape[2:], y.shape[2:], types[1].shape[2:], *_window(attrs))


def _extra_of_weight_grad(types: Types, attrs: Attrs, index: int) -> Sizes:
    x, ct = types
    return transposed_padding(x.shape[2:], ct.shape[2:], attrs["kernel"], *_window(attrs))


def _convolution(
    x: Pattern, w: Pattern, s: Any, p: Any, d: Any, groups: Any, ct: Pattern, kernel: Any, extra: Any
) -> tuple[Pattern, Pattern]:
    dx = convolution_transpose(ct, w, s, p, d, groups, extra)
    return dx, convolution_weight_grad(x, ct, kernel, s, p, d, groups)


def _transpose(
    x: Pattern, w: Pattern, s: Any, p: Any, d: Any, groups: Any, extra: Any, ct: Pattern, kernel: Any
) -> tuple[Pattern, Pattern]:
    dx = convolution(ct, w, s, p, d, groups)
    return dx, convolution_weight_grad(ct, x, kernel, s, p, d, groups)


def _weight_grad(
    x: Pattern, y: Pattern, kernel: Any, s: Any, p: Any, d: Any, groups: Any, ct: Pattern, extra: Any
) -> tuple[Pattern, Pattern]:
    dx = convolution_transpose(y, ct, s, p, d, groups, extra)
    return dx, convolution(x, ct, s, p, d, groups)


vjp(convolution, _convolution, derived={"kernel": ("ints", _kernel), "extra": ("ints", _extra)})
vjp(convolution_transpose, _transpose, derived={"kernel": ("ints", _kernel)})
vjp(convolution_weight_grad, _weight_grad, derived={"extra": ("ints", _extra_of_weight_grad)})


# ---- max pooling: linear, once the largest elements are known ----
def _pool(x: Pattern, kernel: Any, s: Any, p: Any, d: Any, ceil_mode: Any, ys: Any, ct: Pattern) -> Pattern:
    return max_pool2d_backward(x, ys[1], ct, kernel, s, p, d, ceil_mode)


vjp(max_pool2d, _pool)
vjp(
    max_pool2d_backward,
    lambda x, i, y, kernel, s, p, d, ceil, ct: (
        None,
        None,
        max_pool2d_pick(ct, i, kernel, s, p, d, ceil),
    ),
)
vjp(
    max_pool2d_pick,
    lambda x, i, kernel, s, p, d, ceil, ct: (max_pool2d_backward(x, i, ct, kernel, s, p, d, ceil), None),
)
