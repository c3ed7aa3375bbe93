"""Max pooling over planes `x[N, C, H, W]`, run by ATen. Its gradient needs the indices that it gives."""

from __future__ import annotations

import torch

from egcompile.errors import TypeMismatch
from egcompile.ir.node import Attr
from egcompile.ir.types import TensorType
from egcompile.ops.opdef import Kind, OpDef, Sample, register

Sizes = tuple[int, ...]

_WINDOW = {"kernel": "ints", "stride": "ints", "padding": "ints", "dilation": "ints", "ceil_mode": "bool"}


def _places(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """How many windows start within an axis or its left padding, as `at::native::pooling_output_shape`."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (room + (stride - 1 if ceil_mode else 0)) // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + padding else count


def _pooled(
    x: TensorType, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool
) -> Sizes:
    if x.rank != 4 or any(len(v) != 2 for v in (kernel, stride, padding, dilation)):
        raise TypeMismatch(f"max_pool2d of {x} with a window {list(kernel)}")
    axes = zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    sizes = tuple(_places(*axis, ceil_mode) for axis in axes)
    if min(sizes) < 1:
        raise TypeMismatch(f"max_pool2d of {x} would have the spatial axes {list(sizes)}")
    return (*x.shape[:2], *sizes)


def _pool_type(
    x: TensorType, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool
) -> tuple[TensorType, TensorType]:
    shape = _pooled(x, kernel, stride, padding, dilation, ceil_mode)
    return TensorType(shape, x.dtype), TensorType(shape, torch.int64)


def _backward_type(
    x: TensorType,
    indices: TensorType,
    ct: TensorType,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
) -> TensorType:
    if _pool_type(x, kernel, stride, padding, dilation, ceil_mode) != (ct, indices):
        raise TypeMismatch(f"max_pool2d_backward of {x}, {indices} and {ct}")
    return x


def _pick_type(
    x: TensorType,
    indices: TensorType,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
) -> TensorType:
    y, wanted = _pool_type(x, kernel, stride, padding, dilation, ceil_mode)
    if indices != wanted:
        raise TypeMismatch(f"max_pool2d_pick of {x} at {indices}")
    return y


def _pool(
    x: torch.Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    y, indices = torch.ops.aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil_mode)
    return y, indices


def _backward(
    x: torch.Tensor,
    indices: torch.Tensor,
    ct: torch.Tensor,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
) -> torch.Tensor:
    gradient: torch.Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
        ct, x, kernel, stride, padding, dilation, ceil_mode, indices
    )
    return gradient


def _pick(x: torch.Tensor, indices: torch.Tensor, **_: Attr) -> torch.Tensor:
    return x.flatten(2).gather(2, indices.flatten(2)).view(indices.shape)


_X, _Y, _I = "f64[2,3,5,6]", "f64[2,3,3,3]", "i64[2,3,3,3]"
_SAMPLE: dict[str, Attr] = {
    "kernel": (3, 3),
    "stride": (2, 2),
    "padding": (1, 1),
    "dilation": (1, 1),
    "ceil_mode": False,
}

max_pool2d = register(
    OpDef(
        "max_pool2d",
        Kind.EXTERN,
        ("x",),
        _WINDOW,
        outputs=("y", "indices"),
        type_rule=_pool_type,
        evaluate=_pool,
        samples=(Sample((_X,), _SAMPLE), Sample((_X,), _SAMPLE | {"kernel": (2, 3), "ceil_mode": True})),
    )
)
"""Each window's largest element, and where in its plane that is."""

max_pool2d_backward = register(
    OpDef(
        "max_pool2d_backward",
        Kind.EXTERN,
        ("x", "indices", "ct"),
        _WINDOW,
        type_rule=_backward_type,
        evaluate=_backward,
        samples=(Sample((_X, _I, _Y), _SAMPLE, low=0.0, high=2.0),),
        nondifferentiable=frozenset({"x", "indices"}),
    )
)
"""Each cotangent added where its window's largest element was. Of `x` ATen takes only the sizes."""

max_pool2d_pick = register(
    OpDef(
        "max_pool2d_pick",
        Kind.EXTERN,
        ("x", "indices"),
        _WINDOW,
        type_rule=_pick_type,
        evaluate=_pick,
        samples=(Sample((_X, _I), _SAMPLE, low=0.0, high=2.0),),
        nondifferentiable=frozenset({"indices"}),
    )
)
"""The elements of `x` at the indices of a pooling: the transpose of `max_pool2d_backward`."""
