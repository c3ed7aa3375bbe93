"""What a plan's source calls: `op.<name>` for every op of the registry, and where results have to lie."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from egcompile.ops.evaluate import call
from egcompile.ops.opdef import REGISTRY
from egcompile.runtime.attention import attention, attention_backward


def _full(value: float, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


def _iota(shape: tuple[int, ...], axis: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    view = [1] * len(shape)
    view[axis] = shape[axis]
    return torch.arange(shape[axis], dtype=dtype, device=device).view(view).expand(shape)


def _contract_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.ndim > 2:
        a, b = a.flatten(0, -2), b.flatten(0, -2)
    return torch.mm(a.t(), b)


CALLS: dict[str, Callable[..., Any]] = {
    "full": _full,
    "iota": _iota,
    "contract_rows": _contract_rows,
    "sdpa": attention,
    "sdpa_backward": attention_backward,
}
"""Ops for which the reference meaning is not the best call: leaves, which need a device, and attention."""


class Ops:
    """`op.add(a, b)`: an op of the registry, run by ATen on the device of its operands."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") or name not in REGISTRY:
            raise AttributeError(f"no op {name!r} is registered")
        function = CALLS.get(name) or REGISTRY[name].evaluate or functools.partial(_by_definition, name)
        setattr(self, name, function)
        return function


def _by_definition(name: str, *operands: torch.Tensor, **attrs: Any) -> Any:
    if operands[0].device.type == "cpu":
        return call(REGISTRY[name], operands, attrs)
    with operands[0].device:  # the definition's constants are made on it
        return call(REGISTRY[name], operands, attrs)


op = Ops()


def laid_out(value: torch.Tensor, strides: tuple[int, ...], *, copy: bool = False) -> torch.Tensor:
    """`value` in memory with `strides` (those of axes longer than 1 matter), copied if they differ.

    `copy` copies in any case: a plan's values are its own memory, never an alias of an operand.
    """
    if has_strides(value, strides) and not copy:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def has_strides(value: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether `value` lies in memory with these strides; those of axes of one element do not matter."""
    own = value.stride()
    return own == strides or all(n <= 1 or a == b for n, a, b in zip(value.shape, own, strides))


def overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements may share memory: where an axis does not step over all that the finer ones reach."""
    reach = 0
    for stride, n in sorted((s, n) for n, s in zip(shape, strides) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (n - 1)
    return False


def unviewed(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that is no view: what autograd lets a caller change in place."""
    return view.data  # the only alias that is none to autograd
