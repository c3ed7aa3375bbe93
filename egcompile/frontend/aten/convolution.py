"""The row for convolutions. The bias is an addition of its own, which fuses with what comes after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from egcompile import ops
from egcompile.errors import UnsupportedOp
from egcompile.frontend.build import broadcast, reshape
from egcompile.ir import Node, TensorType

aten = torch.ops.aten


def _each(values: Sequence[int], spatial: int) -> tuple[int, ...]:
    """One number an axis; a single one stands for all."""
    return tuple(values) * spatial if len(values) == 1 else tuple(values)


def _convolution(
    out: TensorType,
    x: Node,
    weight: Node,
    bias: Node | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Node:
    spatial = len(weight.shape) - 2
    window = [_each(values, spatial) for values in (stride, padding, dilation)]
    x = reshape(x, (1, *x.shape)) if len(x.shape) < len(weight.shape) else x
    if transposed:
        extra = _each(output_padding, spatial)
        if any(e >= s for e, s in zip(extra, window[0], strict=True)):
            raise UnsupportedOp("a transposed convolution whose output_padding is not less than its stride")
        y = ops.convolution_transpose(x, weight, *window, groups, extra)
    else:
        y = ops.convolution(x, weight, *window, groups)
    if bias is not None:
        y = ops.add(y, broadcast(reshape(bias, (1, *bias.shape, *(1,) * spatial)), y.shape))
    return reshape(y, out.shape)


CONVOLUTION: dict[Any, Any] = {aten.convolution.default: _convolution}
