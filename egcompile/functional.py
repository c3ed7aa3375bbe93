"""The fused operations themselves, as ordinary functions of tensors, differentiable to any order.

Each call is a small graph that goes through the whole pipeline once for each set of shapes, dtypes and
memory layouts, and through generated kernels from then on. On a CPU it runs as ATen calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F

from egcompile import ops
from egcompile.config import disabled
from egcompile.errors import TypeMismatch
from egcompile.ir.graph import Graph
from egcompile.ir.node import Node
from egcompile.ir.types import accumulate_dtype
from egcompile.plan import Plan
from egcompile.target import Target

Tensor = torch.Tensor

Activation = Literal["none", "relu", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh"]


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, cast_first: bool = False
) -> Tensor:
    """`x[*, N] / sqrt(mean(x^2) + eps) * weight[N]`, statistics in fp32 at least.

    `cast_first` rounds the normalized row to `x`'s dtype before it is multiplied, as Hugging Face's Llama
    does; otherwise the product is rounded, as `torch.nn.functional.rms_norm` does. Raises TypeMismatch.
    """
    if _eager():
        return _rms_norm_eager(x, weight, eps, cast_first)
    return _call(_rms_norm, x, weight, eps=eps, cast_first=cast_first)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, cast_first: bool = False
) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual, weight, eps), x + residual)`: the normalized rows, then the sum [*, N].

    In a residual block the first goes into the next branch and the second is carried on.
    """
    if _eager():
        return _rms_norm_eager(x + residual, weight, eps, cast_first), x + residual
    y, total = _call(_add_rms_norm, x, residual, weight, eps=eps, cast_first=cast_first)
    return y, total


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "none"
) -> Tensor:
    """`activation(x[*, K] @ weight[N, K].T + bias[N]) -> [*, N]`; `weight` as `torch.nn.Linear` has it.

    `gelu` is the exact one, `gelu_tanh` the approximation. Raises TypeMismatch, and ValueError for another
    activation.
    """
    if activation not in ("none", *ops.ACTIVATIONS):
        raise ValueError(f"no activation {activation!r}; there are none, {', '.join(ops.ACTIVATIONS)}")
    if _eager():
        return _ACTIVATIONS[activation](F.linear(x, weight, bias))
    return _call(_linear_act, x, weight, bias, activation=activation)[0]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, elementwise."""
    if _eager():
        return F.silu(gate) * up
    return _call(_swiglu, gate, up)[0]


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """`exp(x) / sum(exp(x))` along `dim`, computed in fp32 at least and rounded once."""
    if _eager():
        return torch.softmax(x, dim)
    return _call(_softmax, x, dim=dim % x.ndim)[0]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    reduction: Literal["none", "mean", "sum"] = "mean",
) -> Tensor:
    """`-log softmax(logits[M, V])[target[M]]`, 0 in rows whose target is `ignore_index`; in fp32 at least.

    `mean` is over the rows that are not ignored; without any it is NaN, as in PyTorch. `none` gives [M].
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction is none, mean or sum, not {reduction!r}")
    if _eager():
        wide = logits.to(accumulate_dtype(logits.dtype))
        return F.cross_entropy(wide, target, ignore_index=ignore_index, reduction=reduction)
    return _call(_cross_entropy, logits, target, ignore_index=ignore_index, reduction=reduction)[0]


# ---- through PyTorch ----
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def _eager() -> bool:
    """Whether to say it in PyTorch: if disabled, or for a compiler that traces and fuses as it sees fit."""
    return torch.compiler.is_compiling() or disabled()


def _rms_norm_eager(x: Tensor, weight: Tensor | None, eps: float, cast_first: bool) -> Tensor:
    if not cast_first:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.to(accumulate_dtype(x.dtype))
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else weight * y


# ---- the graphs ----
def _rms_norm(x: Node, weight: Node | None, eps: float, cast_first: bool) -> tuple[Node, ...]:
    weight = ops.full(value=1.0, shape=x.shape[-1:], dtype=x.dtype) if weight is None else weight
    return (ops.rms_norm(x, weight, eps=eps, cast_first=cast_first)[0],)


def _add_rms_norm(
    x: Node, residual: Node, weight: Node | None, eps: float, cast_first: bool
) -> tuple[Node, ...]:
    total = ops.add(x, residual)
    return (*_rms_norm(total, weight, eps, cast_first), total)


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


def _softmax(x: Node, dim: int) -> tuple[Node, ...]:
    return (ops.softmax(x, dim=dim),)


def _cross_entropy(logits: Node, target: Node, ignore_index: int, reduction: str) -> tuple[Node, ...]:
    rows, _ = ops.cross_entropy(logits, target, ignore_index=ignore_index)
    if reduction == "none":
        return (rows,)
    loss = ops.sum(rows, dims=(0,))
    if reduction == "mean":
        kept = ops.ne(target, ops.constant(ignore_index, target))
        loss = ops.div(loss, ops.sum(ops.cast(kept, dtype=rows.dtype), dims=(0,)))
    return (ops.reshape(loss, shape=()),)


# ---- running them ----
def _call(
    build: Callable[..., tuple[Node, ...]], *operands: Tensor | None, **attrs: Any
) -> tuple[Tensor, ...]:
    """`build` on tensors, by its plan for their types and strides."""
    inputs = [x for x in operands if x is not None]
    signature = tuple(None if x is None else (x.shape, x.dtype, x.stride()) for x in operands)
    if any(x.device != inputs[0].device for x in inputs):
        raise TypeMismatch(f"operands on {', '.join(str(x.device) for x in inputs)}; move them to one device")
    return _plan(build, signature, tuple(attrs.items()), inputs[0].device).run(inputs)


_Signature = tuple[tuple[torch.Size, torch.dtype, tuple[int, ...]] | None, ...]
_Attrs = tuple[tuple[str, Any], ...]


def _graph(build: Callable[..., tuple[Node, ...]], signature: _Signature, attrs: _Attrs) -> Graph:
    names = list(build.__annotations__)
    operands = [
        None if s is None else ops.input(name=name, shape=tuple(s[0]), dtype=s[1])
        for name, s in zip(names, signature, strict=False)
    ]
    outputs = build(*operands, **dict(attrs))
    return Graph(tuple(x for x in operands if x is not None), outputs)


@functools.lru_cache(maxsize=1024)
def _plan(
    build: Callable[..., tuple[Node, ...]], signature: _Signature, attrs: _Attrs, device: torch.device
) -> Plan:
    graph = _graph(build, signature, attrs)
    return Plan(graph, Target.of(device), strides=[s[2] for s in signature if s is not None])


__all__ = ["add_rms_norm", "cross_entropy", "linear_act", "rms_norm", "softmax", "swiglu"]
