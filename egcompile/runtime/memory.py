"""Memory for a plan's values."""

from __future__ import annotations

from collections.abc import Callable

import torch

from egcompile.runtime._torch import empty_cuda

Strides = tuple[int, ...]


def empty_beside(
    x: torch.Tensor, shape: tuple[int, ...], strides: Strides, dtype: torch.dtype
) -> torch.Tensor:
    """Memory where `x` lies, which is the current device if it is a GPU."""
    if x.is_cuda:
        return empty_cuda(shape, strides, dtype)
    return torch.empty_strided(shape, strides, dtype=dtype, device=x.device)


def empty_on(device: torch.device) -> Callable[[tuple[int, ...], Strides, torch.dtype], torch.Tensor]:
    """`empty(shape, strides, dtype)` on `device`, which is the current one if it is a GPU."""
    if device.type == "cuda":
        return empty_cuda

    def empty(shape: tuple[int, ...], strides: Strides, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return empty
