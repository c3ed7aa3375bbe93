"""Norms of channels: GroupNorm and BatchNorm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from egcompile.errors import TypeMismatch
from egcompile.functional.call import aten, call, checked, eager
from egcompile.ir.node import Node
from egcompile.ir.types import TensorType, accumulate_dtype

Tensor = torch.Tensor


@checked
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * weight[C] + bias[C]` of `input[N, C, *]`, statistics in fp32 at least
    over each sample's `num_groups` groups of channels.

    With as many groups as channels it is InstanceNorm. Raises TypeMismatch.
    """
    _check("group_norm", input, weight=weight, bias=bias)
    if num_groups < 1 or input.shape[1] % num_groups:
        raise TypeMismatch(f"group_norm of {TensorType.of(input)} in {num_groups} groups")
    if eager():
        return F.group_norm(input, num_groups, weight, bias, eps)
    return call(_group_norm, input, weight, bias, groups=num_groups, eps=eps)[0]


@checked
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * weight[C] + bias[C]` of `input[N, C, *]`, statistics in fp32 at least.

    In training they are the batch's, and the running ones, if given, move towards them in place by
    `momentum`; otherwise they are the running ones. In training `num_batches_tracked`, if given, counts one
    more batch. With a `momentum` of None, which needs it, the running statistics are the average over all
    batches, as in `torch.nn.BatchNorm2d`. Raises TypeMismatch, and ValueError for what is missing.
    """
    tracked = running_mean is not None and running_var is not None
    _check("batch_norm", input, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    if not tracked and (running_mean is not None or running_var is not None or not training):
        raise ValueError("batch_norm needs both running statistics, or neither and training=True")
    if training and input.numel() == input.shape[1]:
        raise ValueError(f"batch_norm in training of one value a channel: {TensorType.of(input)}")
    if training and tracked and momentum is None and num_batches_tracked is None:
        raise ValueError("batch_norm with momentum=None needs num_batches_tracked")
    if training and num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    if eager():
        if momentum is None:
            momentum = (
                1.0 / float(num_batches_tracked) if training and num_batches_tracked is not None else 0.0
            )
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not tracked:
        return call(_by_batch, input, weight, bias, eps=eps)[0]
    assert running_mean is not None and running_var is not None
    running = running_mean.detach(), running_var.detach()
    if not training:
        return call(_by_running, input, *running, weight, bias, eps=eps)[0]
    share = None
    if momentum is None:
        assert num_batches_tracked is not None
        share = num_batches_tracked.double().reciprocal()
    y, *updated = call(_training, input, *running, weight, bias, share, momentum=momentum, eps=eps)
    with torch.no_grad():
        for statistic, value in zip(running, updated, strict=True):
            statistic.copy_(value)
    return y


def _check(name: str, input: Tensor, **of_channels: Tensor | None) -> None:
    if input.ndim < 2:
        raise TypeMismatch(f"{name} of {TensorType.of(input)}; it has no channels")
    for operand, value in of_channels.items():
        if value is not None and value.shape != input.shape[1:2]:
            raise TypeMismatch(f"{name} of {TensorType.of(input)} with {operand} {TensorType.of(value)}")


# ---- the graphs ----
def _group_norm(
    input: Node, weight: Node | None, bias: Node | None, groups: int, eps: float
) -> tuple[Node, ...]:
    overload = torch.ops.aten.group_norm.default
    return (aten(overload, input.tensor, input, groups, weight, bias, eps, False),)


def _outputs(input: Node, *more: Node) -> Any:
    """The types of an ATen batch norm's results: `y`, two statistics of the batch, and `more`."""
    statistic = TensorType(input.shape[1:2], accumulate_dtype(input.dtype))
    return input.tensor, statistic, statistic, *(node.tensor for node in more)


def _by_batch(input: Node, weight: Node | None, bias: Node | None, eps: float) -> tuple[Node, ...]:
    overload = torch.ops.aten._native_batch_norm_legit.no_stats
    return aten(overload, _outputs(input), input, weight, bias, True, 0.0, eps)[:1]


def _by_running(
    input: Node,
    running_mean: Node,
    running_var: Node,
    weight: Node | None,
    bias: Node | None,
    eps: float,
) -> tuple[Node, ...]:
    overload = torch.ops.aten._native_batch_norm_legit_no_training.default
    return aten(overload, _outputs(input), input, weight, bias, running_mean, running_var, 0.0, eps)[:1]


def _training(
    input: Node,
    running_mean: Node,
    running_var: Node,
    weight: Node | None,
    bias: Node | None,
    share: Node | None,
    momentum: float | None,
    eps: float,
) -> tuple[Node, ...]:
    """`y`, and the running statistics moved by `momentum`, or else by `share[]`."""
    out = _outputs(input, running_mean, running_var)
    rate = share if momentum is None else momentum
    arguments = input, weight, bias, running_mean, running_var, True, rate, eps
    y, _, _, *updated = aten(torch.ops.aten._native_batch_norm_legit_functional.default, out, *arguments)
    return y, *updated
