"""Torch's private parts that the runtime uses, for torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""`torch.cuda.current_device`, where CUDA is initialized already, without its checks."""

current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)
"""The driver's handle of a device's current stream."""

empty_cuda: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = _empty_strided_cuda
"""`torch.empty_strided` on the current CUDA device, without parsing keywords; a shape is no torch.Size."""


def memory_of(x: torch.Tensor) -> int:
    """The memory in which a tensor lies, for `users`; a number that is good as long as the tensor lives."""
    memory: int = x.untyped_storage()._cdata
    return memory


def users(memory: int) -> int:
    """How many tensors lie in a memory: views, detached ones and saved ones count too."""
    count: int = torch._C._storage_Use_Count(memory)
    return count
