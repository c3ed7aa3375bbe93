"""Rows for ATen's views, joins and constants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from egcompile import ops
from egcompile.errors import UnsupportedOp
from egcompile.frontend.build import Scalar, axis, broadcast, cast, operand, permute, reshape, slice_axis
from egcompile.ir import Node, TensorType

aten = torch.ops.aten


def _reshape(out: TensorType, x: Node, *_: Any) -> Node:
    return reshape(x, out.shape)


def _expand(out: TensorType, x: Node, *_: Any) -> Node:
    return broadcast(x, out.shape)


def _transpose(out: TensorType, x: Node, a: int, b: int) -> Node:
    rank = len(x.shape)
    perm = list(range(rank))
    if rank:
        a, b = axis(a, rank), axis(b, rank)
        perm[a], perm[b] = b, a
    return permute(x, perm)


def _t(out: TensorType, x: Node) -> Node:
    return permute(x, tuple(reversed(range(len(x.shape)))))


def _narrow(out: TensorType, x: Node, dim: int, start: int, length: int) -> Node:
    start = start + x.shape[dim] if start < 0 else start
    return slice_axis(x, dim, start, start + length)


def _slice(out: TensorType, x: Node, dim: int, start: int | None, end: int | None, step: int) -> Node:
    return slice_axis(x, dim, start, end, step)


def _select(out: TensorType, x: Node, dim: int, index: int) -> Node:
    index = index + x.shape[dim] if index < 0 else index
    return reshape(slice_axis(x, dim, index, index + 1), out.shape)


def _pieces(out: Sequence[TensorType], x: Node, dim: int) -> tuple[Node, ...]:
    """`x` cut along `dim` into pieces of the types `out`."""
    start = 0
    result = []
    for piece in out:
        size = piece.shape[axis(dim, len(x.shape))]
        result.append(slice_axis(x, dim, start, start + size))
        start += size
    return tuple(result)


def _split(out: Sequence[TensorType], x: Node, _: Any, dim: int) -> tuple[Node, ...]:
    return _pieces(out, x, dim)


def _unbind(out: Sequence[TensorType], x: Node, dim: int) -> tuple[Node, ...]:
    return tuple(_select(t, x, dim, i) for i, t in enumerate(out))


def _cat(out: TensorType, xs: Sequence[Node], dim: int) -> Node:
    """ATen lets empty 1-d tensors stand among the operands; they add nothing."""
    kept = [cast(x, out.dtype) for x in xs if x.shape != (0,) or len(out.shape) == 1]
    return kept[0] if len(kept) == 1 else ops.cat(*kept, axis=axis(dim, len(out.shape)))


def _slice_scatter(
    out: TensorType, x: Node, source: Node, dim: int, start: int | None, end: int | None, step: int
) -> Node:
    """`x` with `source` in place of `x[start:end]` on axis `dim`."""
    if step != 1:
        raise UnsupportedOp(f"assignment to a slice with step {step}")
    dim = axis(dim, len(x.shape))
    size = x.shape[dim]
    start, end, _ = slice(start, end).indices(size)
    end = max(start, end)
    parts = (slice_axis(x, dim, 0, start), source, slice_axis(x, dim, end, size))
    return _cat(out, [part for part in parts if part.shape[dim]] or [x], dim)


def _select_scatter(out: TensorType, x: Node, source: Node, dim: int, index: int) -> Node:
    dim = axis(dim, len(x.shape))
    index = index + x.shape[dim] if index < 0 else index
    row = reshape(source, (*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    return _slice_scatter(out, x, row, dim, index, index + 1, 1)


def _stack(out: TensorType, xs: Sequence[Node], dim: int) -> Node:
    dim = axis(dim, len(out.shape))
    shape = (*out.shape[:dim], 1, *out.shape[dim + 1 :])
    return _cat(out, [reshape(x, shape) for x in xs], dim)


def _constant_pad(out: TensorType, x: Node, pad: Sequence[int], value: Scalar) -> Node:
    """`pad` lists (before, after) from the last axis on; a negative number cuts."""
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = len(x.shape) - 1 - i
        x = slice_axis(x, dim, max(-before, 0), x.shape[dim] - max(-after, 0))
        sides = [_filled_like(x, dim, max(n, 0), value) for n in (before, after)]
        parts = [part for part in (sides[0], x, sides[1]) if part.shape[dim]]
        x = ops.cat(*parts, axis=dim) if len(parts) > 1 else x
    return x


def _filled_like(x: Node, dim: int, size: int, value: Scalar) -> Node:
    return ops.full(value=value, shape=(*x.shape[:dim], size, *x.shape[dim + 1 :]), dtype=x.dtype)


def _repeat(out: TensorType, x: Node, repeats: Sequence[int]) -> Node:
    """[n] repeated r times is [1, n] expanded to [r, n] and read as [r n]."""
    shape = (1,) * (len(repeats) - len(x.shape)) + x.shape
    apart = [size for n in shape for size in (1, n)]
    spread = [size for n, r in zip(shape, repeats, strict=True) for size in (r, n)]
    return reshape(broadcast(reshape(x, apart), spread), out.shape)


def _triangle(lower: bool) -> Any:
    def row(out: TensorType, x: Node, diagonal: int) -> Node:
        rows, columns = (
            ops.iota(shape=out.shape, axis=len(out.shape) - n, dtype=torch.int64) for n in (2, 1)
        )
        if diagonal:
            rows = ops.add(rows, operand(diagonal, rows.tensor))
        inside = ops.ge(rows, columns) if lower else ops.le(rows, columns)
        return ops.where(inside, x, operand(0, out))

    return row


def _full(out: TensorType, size: Any, value: Scalar, *_: Any) -> Node:
    return operand(value, out)


def _new_full(out: TensorType, x: Node, size: Any, value: Scalar, *_: Any) -> Node:
    return operand(value, out)


def _filled(value: Scalar) -> Any:
    return lambda out, *_: operand(value, out)


def _fill_tensor(out: TensorType, x: Node, value: Node) -> Node:
    return operand(value, out)


def _scalar_tensor(out: TensorType, value: Scalar, *_: Any) -> Node:
    return operand(value, out)


def _arange_end(out: TensorType, end: Scalar, *_: Any) -> Node:
    return _arange(out, 0, end)


def _arange_start(out: TensorType, start: Scalar, end: Scalar, *_: Any) -> Node:
    return _arange(out, start, end)


def _arange_step(out: TensorType, start: Scalar, end: Scalar, step: Scalar, *_: Any) -> Node:
    return _arange(out, start, end, step)


def _arange(out: TensorType, start: Scalar, end: Scalar, step: Scalar = 1) -> Node:
    if not math.isfinite(start) or not math.isfinite(end):
        raise UnsupportedOp(f"arange from {start} to {end}")
    x = ops.iota(shape=out.shape, axis=0, dtype=out.dtype)
    if step != 1:
        x = ops.mul(x, operand(step, out))
    return x if start == 0 else ops.add(x, operand(start, out))


MOVEMENT: dict[Any, Any] = {
    # ---- views ----
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.flatten.using_ints: _reshape,
    aten.unflatten.int: _reshape,
    aten.unsqueeze.default: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.expand.default: _expand,
    aten.broadcast_to.default: _expand,
    aten.permute.default: lambda out, x, dims: permute(x, dims),
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.select.int: _select,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.chunk.default: _split,
    aten.unbind.int: _unbind,
    # ---- joins and repeats ----
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.repeat.default: _repeat,
    aten.constant_pad_nd.default: _constant_pad,
    aten.tril.default: _triangle(lower=True),
    aten.triu.default: _triangle(lower=False),
    # ---- constants ----
    aten.full.default: _full,
    aten.full_like.default: _full,
    aten.new_full.default: _new_full,
    aten.zeros.default: _filled(0),
    aten.zeros_like.default: _filled(0),
    aten.new_zeros.default: _filled(0),
    aten.ones.default: _filled(1),
    aten.ones_like.default: _filled(1),
    aten.new_ones.default: _filled(1),
    aten.fill.Scalar: _full,
    aten.fill.Tensor: _fill_tensor,
    aten.scalar_tensor.default: _scalar_tensor,
    aten.arange.default: _arange_end,
    aten.arange.start: _arange_start,
    aten.arange.start_step: _arange_step,
}
