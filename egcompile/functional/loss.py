"""Softmax and cross-entropy."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from egcompile.functional.call import aten, call, checked, eager
from egcompile.ir.node import Node
from egcompile.ir.types import TensorType, accumulate_dtype

Tensor = torch.Tensor
Reduction = Literal["none", "mean", "sum"]

_REDUCTIONS = ("none", "mean", "sum")
"""In the order of ATen's numbers for them."""


@checked
def softmax(input: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> Tensor:
    """`exp(x) / sum(exp(x))` along `dim` of `input`, cast to `dtype` first if that is given.

    Computed in fp32 at least and rounded once. Raises IndexError for a `dim` that there is not.
    """
    if not -max(input.ndim, 1) <= dim < max(input.ndim, 1):
        raise IndexError(f"softmax along axis {dim} of {TensorType.of(input)}")
    if eager():
        return torch.softmax(input, dim, dtype=dtype)
    return call(_softmax, input, dim=dim, dtype=dtype or input.dtype)[0]


@checked
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`-log softmax(input[M, C, *])[target[M, *]]`, or of one row `[C]`; returned in fp32 at least.

    `target` holds classes, or a probability for each class, in `input`'s shape and dtype. `weight[C]` weighs
    classes; rows whose target is `ignore_index` count 0. The mean divides by the weights of the rows that
    count, and is NaN without any, as in PyTorch; `none` gives `[M, *]`. `label_smoothing` mixes that much of
    the uniform distribution into the target. Raises TypeMismatch, and ValueError for another reduction.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"reduction is {', '.join(_REDUCTIONS[:-1])} or {_REDUCTIONS[-1]}, not {reduction!r}"
        )
    if eager():
        wide = accumulate_dtype(input.dtype)
        target = target.to(wide) if target.is_floating_point() else target
        return F.cross_entropy(
            input.to(wide),
            target,
            None if weight is None else weight.to(wide),
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    return call(
        _cross_entropy,
        input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )[0]


def _softmax(input: Node, dim: int, dtype: torch.dtype) -> tuple[Node, ...]:
    return (aten(torch.ops.aten.softmax.int, TensorType(input.shape, dtype), input, dim, dtype),)


def _cross_entropy(
    input: Node,
    target: Node,
    weight: Node | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> tuple[Node, ...]:
    of_rows = input.shape[:1] + input.shape[2:] if len(input.shape) > 1 else ()
    out = TensorType(of_rows if reduction == "none" else (), accumulate_dtype(input.dtype))
    number = _REDUCTIONS.index(reduction)
    overload = torch.ops.aten.cross_entropy_loss.default
    return (aten(overload, out, input, target, weight, number, ignore_index, label_smoothing),)
