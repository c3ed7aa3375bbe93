"""Torch's private parts that the runtime uses, for torch 2.11 to 2.13."""

from __future__ import annotations

import torch
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]


def current_device() -> int:
    """`torch.cuda.current_device`, where CUDA is initialized already, without its checks."""
    return torch._C._cuda_getDevice()


def empty_cuda(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """`torch.empty_strided` on the current CUDA device, without parsing keywords."""
    return _empty_strided_cuda(tuple(shape), tuple(strides), dtype)  # it takes no torch.Size


def memory_of(x: torch.Tensor) -> int:
    """The memory in which a tensor lies, for `users`; a number that is good as long as the tensor lives."""
    memory: int = x.untyped_storage()._cdata
    return memory


def users(memory: int) -> int:
    """How many tensors lie in a memory: views, detached ones and saved ones count too."""
    count: int = torch._C._storage_Use_Count(memory)
    return count
