"""Convolutions, run by ATen: over any number of spatial axes, strided, dilated, grouped.

Three ops are closed under differentiation. The transposed convolution is the convolution's transpose in
`x`, so each is the other's gradient there; the third is the gradient of both with respect to the weight.
"""

from __future__ import annotations

import torch

from egcompile.errors import TypeMismatch
from egcompile.ir.node import Attr
from egcompile.ir.types import TensorType
from egcompile.ops.opdef import Kind, OpDef, Sample, register

Sizes = tuple[int, ...]

_WINDOW = {"stride": "ints", "padding": "ints", "dilation": "ints"}


def _convolved(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """How many places a kernel has along an axis; 0 or less where it does not fit."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _transposed(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """The smallest axis on which a kernel has `size` places."""
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1


def transposed_padding(sizes: Sizes, smaller: Sizes, kernel: Sizes, *window: Sizes) -> Sizes:
    """What a transposed convolution of spatial axes `smaller` has to add at their ends to give `sizes`."""
    given = zip(sizes, smaller, kernel, *window, strict=True)
    return tuple(n - _transposed(*rest) for n, *rest in given)


def _checked(name: str, x: TensorType, w: TensorType, groups: int, *window: Sizes) -> None:
    spatial = x.rank - 2
    if spatial < 1 or w.rank != x.rank or x.dtype != w.dtype or any(len(v) != spatial for v in window):
        raise TypeMismatch(f"{name} of {x} with {w} and {', '.join(map(str, map(list, window)))}")
    if groups < 1 or x.shape[1] % groups or w.shape[0] % groups:
        raise TypeMismatch(f"{name} of {x} with {w} in {groups} groups")


def _sized(name: str, x: TensorType, channels: int, sizes: Sizes) -> TensorType:
    if min(sizes) < 1:
        raise TypeMismatch(f"{name} of {x} would have the spatial axes {list(sizes)}")
    return TensorType((x.shape[0], channels, *sizes), x.dtype)


def _convolution_type(
    x: TensorType, w: TensorType, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> TensorType:
    _checked("convolution", x, w, groups, stride, padding, dilation)
    if w.shape[1] * groups != x.shape[1]:
        raise TypeMismatch(f"convolution of {x} with {w} in {groups} groups")
    axes = zip(x.shape[2:], w.shape[2:], stride, padding, dilation, strict=True)
    return _sized("convolution", x, w.shape[0], tuple(_convolved(*axis) for axis in axes))


def _transpose_type(
    x: TensorType,
    w: TensorType,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: int,
    output_padding: Sizes,
) -> TensorType:
    _checked("convolution_transpose", x, w, groups, stride, padding, dilation, output_padding)
    if w.shape[0] != x.shape[1]:
        raise TypeMismatch(f"convolution_transpose of {x} with {w} in {groups} groups")
    if not all(0 <= extra < step for extra, step in zip(output_padding, stride, strict=True)):
        raise TypeMismatch(f"output_padding {list(output_padding)} is not less than stride {list(stride)}")
    axes = zip(x.shape[2:], w.shape[2:], stride, padding, dilation, strict=True)
    sizes = tuple(_transposed(*axis) + e for axis, e in zip(axes, output_padding, strict=True))
    return _sized("convolution_transpose", x, w.shape[1] * groups, sizes)


def _weight_grad_type(
    x: TensorType,
    ct: TensorType,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: int,
) -> TensorType:
    weight = TensorType((ct.shape[1], x.shape[1] // max(groups, 1), *kernel), x.dtype)
    if _convolution_type(x, weight, stride, padding, dilation, groups) != ct:
        raise TypeMismatch(f"convolution_weight_grad of {x} and {ct} with a kernel {list(kernel)}")
    return weight


def _convolution(
    x: torch.Tensor, w: torch.Tensor, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> torch.Tensor:
    none = [0] * len(stride)
    return torch.convolution(x, w, None, stride, padding, dilation, False, none, groups)


def _convolution_transpose(
    x: torch.Tensor,
    w: torch.Tensor,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: int,
    output_padding: Sizes,
) -> torch.Tensor:
    return torch.convolution(x, w, None, stride, padding, dilation, True, output_padding, groups)


def _weight_grad(
    x: torch.Tensor,
    ct: torch.Tensor,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: int,
) -> torch.Tensor:
    """ATen wants a weight for its sizes alone: one element stands for all."""
    shape = (ct.shape[1], x.shape[1] // groups, *kernel)
    weight = x.new_empty_strided(shape, (0,) * len(shape))
    none = [0] * len(stride)
    _, gradient, _ = torch.ops.aten.convolution_backward.default(
        ct, x, weight, None, stride, padding, dilation, False, none, groups, (False, True, False)
    )
    return gradient


def _products(x: TensorType, w: TensorType) -> int:
    """Two operations for each element of the weight at each place; strides, which are not known, aside."""
    return 2 * x.numel // max(x.shape[1], 1) * w.numel


_PLANE, _TRAIN = ("f64[2,4,5,6]", "f64[6,2,3,2]"), ("f64[2,4,9]", "f64[6,4,3]")
_IN_GROUPS: dict[str, Attr] = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 2}
_ALONG: dict[str, Attr] = {"stride": (3,), "padding": (2,), "dilation": (1,), "groups": 1}

convolution = register(
    OpDef(
        "convolution",
        Kind.EXTERN,
        ("x", "w"),
        {**_WINDOW, "groups": "int"},
        type_rule=_convolution_type,
        evaluate=_convolution,
        flops=_products,
        samples=(Sample(_PLANE, _IN_GROUPS), Sample(_TRAIN, _ALONG)),
    )
)
"""`x[N, I, *]` with `w[O, I/groups, *kernel]` -> `[N, O, *]`, zeros around `x`."""

convolution_transpose = register(
    OpDef(
        "convolution_transpose",
        Kind.EXTERN,
        ("x", "w"),
        {**_WINDOW, "groups": "int", "output_padding": "ints"},
        type_rule=_transpose_type,
        evaluate=_convolution_transpose,
        flops=_products,
        samples=(
            Sample(("f64[2,6,3,4]", "f64[6,2,3,2]"), {**_IN_GROUPS, "output_padding": (0, 0)}),
            Sample(("f64[2,6,4]", "f64[6,4,3]"), {**_ALONG, "output_padding": (1,)}),
        ),
    )
)
"""`x[N, I, *]` with `w[I, O/groups, *kernel]` -> `[N, O, *]`: the transpose of `convolution` in its `x`.

`output_padding`, less than the stride, adds to the end of each axis what the convolution would not reach.
"""

convolution_weight_grad = register(
    OpDef(
        "convolution_weight_grad",
        Kind.EXTERN,
        ("x", "ct"),
        {"kernel": "ints", **_WINDOW, "groups": "int"},
        type_rule=_weight_grad_type,
        evaluate=_weight_grad,
        flops=lambda x, ct: 2 * x.shape[1] * ct.numel,
        samples=(
            Sample(("f64[2,4,5,6]", "f64[2,6,3,4]"), {"kernel": (3, 2), **_IN_GROUPS}),
            Sample(("f64[2,4,9]", "f64[2,6,4]"), {"kernel": (3,), **_ALONG}),
        ),
    )
)
"""`sum of ct[N, O, *] x[N, I, *]` over the places of a kernel -> `[O, I/groups, *kernel]`."""
