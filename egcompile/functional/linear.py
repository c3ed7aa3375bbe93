"""Linear layers with their activation, and gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

from egcompile import ops
from egcompile.functional.call import call, checked, eager
from egcompile.ir.node import Node

Tensor = torch.Tensor
Activation = Literal["none", "relu", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh"]


@checked
def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "none"
) -> Tensor:
    """`activation(x[*, K] @ weight[N, K].T + bias[N]) -> [*, N]`; `weight` as `torch.nn.Linear` has it.

    `gelu` is the exact one, `gelu_tanh` the approximation. Raises TypeMismatch, and ValueError for another
    activation.
    """
    if activation not in ("none", *ops.ACTIVATIONS):
        raise ValueError(f"no activation {activation!r}; there are none, {', '.join(ops.ACTIVATIONS)}")
    if eager():
        return _ACTIVATIONS[activation](F.linear(x, weight, bias))
    return call(_linear_act, x, weight, bias, activation=activation)[0]


@checked
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, elementwise."""
    if eager():
        return F.silu(gate) * up
    return call(_swiglu, gate, up)[0]


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def _linear_act(x: Node, weight: Node, bias: Node | None, activation: str) -> tuple[Node, ...]:
    rows = x if len(x.shape) > 1 else ops.reshape(x, shape=(1, *x.shape))
    y = ops.matmul(rows, ops.transpose(weight))
    if bias is not None:
        y = ops.add(y, ops.broadcast_to(bias, y.shape))
    if activation != "none":
        y = ops.ACTIVATIONS[activation].forward(y)
    return (ops.reshape_to(y, (*x.shape[:-1], y.shape[-1])),)


def _swiglu(gate: Node, up: Node) -> tuple[Node, ...]:
    return (ops.mul(ops.silu(gate), up),)
