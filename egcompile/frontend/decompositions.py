"""Composite ATen ops that are taken apart otherwise than ATen does, into what the importer keeps whole."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """A group norm with a group a channel, `x[N, C, *]` as it lies. ATen has it `[1, N C, *]`, a batch norm.

    The running statistics move towards the mean of the samples'; by running statistics it is a batch norm.
    """
    if not use_input_stats:
        return torch.batch_norm(
            x, weight, bias, running_mean, running_var, False, momentum, eps, cudnn_enabled
        )
    samples, channels, *sizes = x.shape
    wide = x.dtype
    if running_mean is not None or any(v is not None and v.dtype != x.dtype for v in (weight, bias)):
        wide = torch.promote_types(x.dtype, torch.float32)
    scales = [None if v is None else v.to(wide) for v in (weight, bias)]
    count = math.prod(sizes)
    y, mean, rstd = aten.native_group_norm(x.to(wide), *scales, samples, channels, count, channels, eps)
    if running_mean is not None and running_var is not None:
        variance = (rstd.square().reciprocal() - eps).clamp_min(0) * (count / max(count - 1, 1))
        for running, value in ((running_mean, mean), (running_var, variance)):
            new = value.detach().mean(0) * momentum + running.to(wide) * (1 - momentum)
            running.copy_(new)
    return y.to(x.dtype)


def _slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Of complex numbers, whose derivative ATen does not have, as of pairs of real ones."""
    if not x.is_complex():
        return NotImplemented
    parts = [torch.view_as_real(value.resolve_conj()) for value in (x, source)]
    return torch.view_as_complex(aten.slice_scatter(*parts, dim % x.ndim, start, end, step))


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Of complex numbers: the functional form has no derivative in ATen."""
    return source.to(x.dtype).expand_as(x).clone() if x.is_complex() else NotImplemented


def _embedding_bag(*args: Any) -> Any:
    """The form that has a derivative. ATen chooses by whether the weight requires a gradient in the trace."""
    return aten._embedding_bag.default(*args)


DECOMPOSITIONS: dict[Any, Any] = {
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten.copy.default: _copy,
    aten.instance_norm.default: _instance_norm,
    aten.slice_scatter.default: _slice_scatter,
}
