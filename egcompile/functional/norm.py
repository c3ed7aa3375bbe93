"""Norms of rows: RMSNorm and LayerNorm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from egcompile import ops
from egcompile.errors import TypeMismatch
from egcompile.functional.call import aten, call, checked, eager
from egcompile.ir.node import Node
from egcompile.ir.types import TensorType, accumulate_dtype

Tensor = torch.Tensor


@checked
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, cast_first: bool = False
) -> Tensor:
    """`x[*, N] / sqrt(mean(x^2) + eps) * weight[N]`, statistics in fp32 at least.

    `cast_first` rounds the normalized row to `x`'s dtype before it is multiplied, as Hugging Face's Llama
    does; otherwise the product is rounded, as `torch.nn.functional.rms_norm` does. Raises TypeMismatch.
    """
    if eager():
        return _rms_norm_eager(x, weight, eps, cast_first)
    return call(_rms_norm, x, weight, eps=eps, cast_first=cast_first)[0]


@checked
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, cast_first: bool = False
) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual, weight, eps), x + residual)`: the normalized rows, then the sum [*, N].

    In a residual block the first goes into the next branch and the second is carried on.
    """
    if eager():
        return _rms_norm_eager(x + residual, weight, eps, cast_first), x + residual
    y, total = call(_add_rms_norm, x, residual, weight, eps=eps, cast_first=cast_first)
    return y, total


@checked
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last axes of `input`, statistics in fp32 at
    least.

    `normalized_shape` says which axes those are; it is the shape of `weight` and `bias`. Raises TypeMismatch.
    """
    shape = tuple(normalized_shape)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and tuple(value.shape) != shape:
            raise TypeMismatch(f"layer_norm over {list(shape)} with {name} {TensorType.of(value)}")
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        raise TypeMismatch(f"layer_norm over {list(shape)} of {TensorType.of(input)}")
    if eager():
        return F.layer_norm(input, shape, weight, bias, eps)
    return call(_layer_norm, input, weight, bias, shape=shape, eps=eps)[0]


def _rms_norm_eager(x: Tensor, weight: Tensor | None, eps: float, cast_first: bool) -> Tensor:
    if not cast_first:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.to(accumulate_dtype(x.dtype))
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else weight * y


def _rms_norm(x: Node, weight: Node | None, eps: float, cast_first: bool) -> tuple[Node, ...]:
    weight = ops.full(value=1.0, shape=x.shape[-1:], dtype=x.dtype) if weight is None else weight
    return (ops.rms_norm(x, weight, eps=eps, cast_first=cast_first)[0],)


def _add_rms_norm(
    x: Node, residual: Node, weight: Node | None, eps: float, cast_first: bool
) -> tuple[Node, ...]:
    total = ops.add(x, residual)
    return (*_rms_norm(total, weight, eps, cast_first), total)


def _layer_norm(
    input: Node, weight: Node | None, bias: Node | None, shape: tuple[int, ...], eps: float
) -> tuple[Node, ...]:
    return (aten(torch.ops.aten.layer_norm.default, input.tensor, input, shape, weight, bias, eps, False),)
