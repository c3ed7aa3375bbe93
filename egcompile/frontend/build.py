"""PyTorch's implicit habits made explicit nodes: broadcasting, promotion, scalars, negative axes.

Constants fold: a movement or cast of `full` is a `full`, and an `iota` that only gains or loses axes of
size 1, or is expanded, is an `iota`. What does not fold is as `egcompile.ops.build` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from egcompile import ops
from egcompile.errors import UnsupportedOp
from egcompile.ir import Node, TensorType
from egcompile.ops.build import broadcast_to, cast_to, reshape_to

Scalar = bool | int | float
Operand = Node | Scalar

_COMMUTATIVE = frozenset(
    {
        ops.add,
        ops.mul,
        ops.maximum,
        ops.minimum,
        ops.eq,
        ops.ne,
        ops.logical_and,
        ops.logical_or,
    }
)


_INTEGERS = {
    dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
}


def is_full(x: Node) -> bool:
    return x.op is ops.full


def cast(x: Node, dtype: torch.dtype) -> Node:
    if is_full(x) and x.dtype != dtype:
        value = torch.tensor(x.attr("value"), dtype=x.dtype, device="cpu").to(dtype).item()
        return ops.full(value=value, shape=x.shape, dtype=dtype)
    return cast_to(x, dtype)


def reshape(x: Node, shape: Sequence[int]) -> Node:
    shape = tuple(shape)
    if x.shape == shape:
        return x
    if is_full(x):
        return ops.full(value=x.attr("value"), shape=shape, dtype=x.dtype)
    if x.op is ops.iota and (axis := _same_axis(x, shape)) is not None:
        return ops.iota(shape=shape, axis=axis, dtype=x.dtype)
    if x.op is ops.reshape:
        return reshape(x.inputs[0], shape)
    return reshape_to(x, shape)


def _same_axis(x: Node, shape: tuple[int, ...]) -> int | None:
    """Where an iota's own axis stands in `shape`, if that has the same sizes other than 1."""
    axis = x.attr("axis")
    if [n for n in x.shape if n != 1] != [n for n in shape if n != 1] or x.shape[axis] == 1:
        return None
    before = sum(n != 1 for n in x.shape[:axis])
    return [i for i, n in enumerate(shape) if n != 1][before]


def broadcast(x: Node, shape: Sequence[int]) -> Node:
    """`x` broadcast to `shape` by PyTorch's rule, leading axes added; raises TypeMismatch."""
    shape = tuple(shape)
    if is_full(x):
        return ops.full(value=x.attr("value"), shape=shape, dtype=x.dtype)
    x = reshape(x, (1,) * (len(shape) - len(x.shape)) + x.shape)
    if x.op is ops.iota and x.shape[x.attr("axis")] == shape[x.attr("axis")]:
        return ops.iota(shape=shape, axis=x.attr("axis"), dtype=x.dtype)
    return broadcast_to(x, shape)


def operand(x: Operand, like: TensorType) -> Node:
    """A tensor or a number as an operand of exactly the type `like`; an integer wraps around as in ATen.

    Raises UnsupportedOp for an integer that the float of a `full` does not hold, such as 2^53 + 1.
    """
    if isinstance(x, Node):
        return broadcast(cast(x, like.dtype), like.shape)
    if not like.dtype.is_floating_point and float(x) != x:
        raise UnsupportedOp(f"the constant {x}, as {like.dtype}")
    if like.dtype in _INTEGERS and float(x).is_integer():
        least, most = _INTEGERS[like.dtype]
        x = (int(x) - least) % (most - least + 1) + least
    return ops.full(value=x, shape=like.shape, dtype=like.dtype)


def pointwise(op: ops.OpDef, *operands: Node) -> Node:
    """`op(*operands)`; a commutative op has its constant, or else its broadcast operand, second.

    Recognition rules then need one form only: `mul(x, expand(w))`, `add(x, full(eps))`.
    """
    if op in _COMMUTATIVE and _spread(operands[0]) > _spread(operands[1]):
        operands = operands[::-1]
    return op(*operands)


def _spread(x: Node) -> int:
    return 2 if is_full(x) else int(x.op is ops.expand)


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that all of `shapes` broadcast to; raises RuntimeError if there is none."""
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def permute(x: Node, perm: Sequence[int]) -> Node:
    """Axes in the order `perm`; a swap of the last two is a `transpose`."""
    rank = len(x.shape)
    perm = tuple(axis(p, rank) for p in perm)
    if perm == tuple(range(rank)):
        return x
    if is_full(x):
        shape = tuple(x.shape[p] for p in perm)
        return ops.full(value=x.attr("value"), shape=shape, dtype=x.dtype)
    if perm == (*range(rank - 2), rank - 1, rank - 2):
        return ops.transpose(x)
    return ops.permute(x, perm=perm)


def slice_axis(x: Node, dim: int, start: int | None, stop: int | None, step: int = 1) -> Node:
    """`x[..., start:stop:step, ...]` on axis `dim`, by Python's rule for bounds."""
    dim = axis(dim, len(x.shape))
    size = x.shape[dim]
    start, stop, step = slice(start, stop, step).indices(size)
    stop = max(start, stop)
    if (start, stop, step) == (0, size, 1):
        return x
    if is_full(x):
        shape = (*x.shape[:dim], len(range(start, stop, step)), *x.shape[dim + 1 :])
        return ops.full(value=x.attr("value"), shape=shape, dtype=x.dtype)
    return ops.slice_(x, axis=dim, start=start, stop=stop, step=step)


def axis(dim: int, rank: int) -> int:
    return dim + max(rank, 1) if dim < 0 else dim


def axes(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Sorted non-negative axes; none given means all of them."""
    if dims is None or (not isinstance(dims, int) and not dims):
        return tuple(range(rank))
    some = [dims] if isinstance(dims, int) else dims
    return tuple(sorted(axis(d, rank) for d in some)) if rank else ()


def result_dtype(*operands: Operand) -> torch.dtype:
    """The dtype that PyTorch promotes the operands to; 0-d tensors and numbers are weak."""
    samples = [
        torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Node) else x for x in operands
    ]
    dtype = torch.result_type(samples[0], samples[0])
    return torch.result_type(samples[0], samples[1]) if len(samples) == 2 else dtype
