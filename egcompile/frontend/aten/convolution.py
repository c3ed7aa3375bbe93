"""Rows for convolutions, pooling and upsampling. A bias is an addition, which fuses with what comes after."""

from __future__ import annotations

import math
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


def _pairs(*values: Sequence[int]) -> list[tuple[int, ...]]:
    return [_each(v, 2) for v in values]


def _max_pool2d(
    out: Sequence[TensorType],
    x: Node,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[Node, ...]:
    """ATen lets no gradient through the indices, which are integers; no stride is that of the kernel."""
    window = _pairs(kernel, stride or kernel, padding, dilation)
    planes = reshape(x, (math.prod(x.shape[:-3]), *x.shape[-3:]))
    results = ops.max_pool2d(planes, *window, ceil_mode=ceil_mode)
    return tuple(reshape(y, t.shape) for y, t in zip(results, out, strict=True))


def _blocks(x: Node, sizes: Sequence[int]) -> Node:
    """`[*, H, W]` in `sizes` blocks a side: mean of each."""
    *leading, height, width = x.shape
    rank, (rows, columns) = len(leading), sizes
    if height % rows or width % columns or not x.dtype.is_floating_point:
        raise UnsupportedOp(f"pooling of {x.tensor} to {list(sizes)}, whose windows are no equal blocks")
    split = reshape(x, (*leading, rows, height // rows, columns, width // columns))
    dims = [d for d in (rank + 1, rank + 3) if split.shape[d] > 1]
    return reshape(ops.mean(split, dims=tuple(dims)) if dims else split, (*leading, *sizes))


def _avg_pool2d(
    out: TensorType,
    x: Node,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Node:
    size, step, edge = _pairs(kernel, stride or kernel, padding)
    blocks = tuple(n * k for n, k in zip(out.shape[-2:], size, strict=True)) == x.shape[-2:]
    if size != step or any(edge) or divisor_override is not None or not blocks:
        raise UnsupportedOp("avg_pool2d over windows that are no equal blocks")
    return _blocks(x, out.shape[-2:])


def _adaptive_avg_pool2d(out: TensorType, x: Node, size: Sequence[int]) -> Node:
    return _blocks(x, out.shape[-2:])


def _upsample_nearest2d(out: TensorType, x: Node, *_: Any) -> Node:
    """Each element `k x k` times, for `k` whose reciprocal ATen's index arithmetic holds well enough."""
    *leading, height, width = x.shape
    times = [a // b for a, b in zip(out.shape[-2:], (height, width), strict=True)]
    whole = (*leading, height * times[0], width * times[1]) == out.shape
    if not whole or not {*times} <= {1, 2, 3, 4, 8, 16}:
        raise UnsupportedOp(f"upsample_nearest2d of {x.tensor} to {out}")
    split = reshape(x, (*leading, height, 1, width, 1))
    return reshape(broadcast(split, (*leading, height, times[0], width, times[1])), out.shape)


def _upsample_scaled(
    out: TensorType, x: Node, size: Sequence[int] | None, scales: Sequence[float] | None
) -> Node:
    if scales is not None and any(float(s) != int(s) for s in scales):
        raise UnsupportedOp(f"upsample_nearest2d by {list(scales)}")
    return _upsample_nearest2d(out, x)


CONVOLUTION: dict[Any, Any] = {
    aten.convolution.default: _convolution,
    aten.max_pool2d_with_indices.default: _max_pool2d,
    aten.avg_pool2d.default: _avg_pool2d,
    aten.adaptive_avg_pool2d.default: _adaptive_avg_pool2d,  # decomposed, it reads strides
    aten._adaptive_avg_pool2d.default: _adaptive_avg_pool2d,
    aten.upsample_nearest2d.vec: _upsample_scaled,
}
