"""Small helpers for writing definitions and importers: implicit PyTorch habits made explicit nodes."""

from __future__ import annotations

import torch

from egcompile.ir.node import Node
from egcompile.ops.core import full
from egcompile.ops.movement import expand, reshape
from egcompile.ops.pointwise import cast
from egcompile.ops.reduction import sum


def constant(value: float, like: Node) -> Node:
    """`value` in the shape and dtype of `like`."""
    return full(value=value, shape=like.shape, dtype=like.dtype)


def cast_to(x: Node, dtype: torch.dtype) -> Node:
    """`x` as `dtype`; `x` itself if it is that already."""
    return x if x.dtype == dtype else cast(x, dtype=dtype)


def reshape_to(x: Node, shape: tuple[int, ...]) -> Node:
    return x if x.shape == shape else reshape(x, shape=shape)


def broadcast_to(x: Node, shape: tuple[int, ...]) -> Node:
    """`x` broadcast to `shape` by PyTorch's rule, leading axes added; raises TypeMismatch."""
    x = reshape_to(x, (1,) * (len(shape) - len(x.shape)) + x.shape)
    return x if x.shape == shape else expand(x, shape=shape)


def sum_rows(x: Node) -> Node:
    """`x[*, N] -> [N]`: the sum over all axes but the last."""
    leading = tuple(range(len(x.shape) - 1))
    return reshape_to(sum(x, dims=leading) if leading else x, x.shape[-1:])
