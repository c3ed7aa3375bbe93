"""One graph, one device: where a traced graph lies, and what would move a value away from there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from egcompile.errors import TraceError


def device_of(tensors: Iterable[Tensor]) -> torch.device | None:
    """The device of a graph's inputs, or of its results; None without any that says.

    As in PyTorch, numbers as 0-d tensors on a CPU may stand among them. Raises TraceError for two devices.
    """
    devices = list(dict.fromkeys(x.device for x in tensors if not is_number(x)))
    if len(devices) > 1:
        raise TraceError(
            f"one graph has tensors on {', '.join(map(str, devices))}; compile each part for itself"
        )
    return devices[0] if devices else None


def refuse_move(device: torch.device, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Raises TraceError where a call gives a tensor that lies elsewhere than the graph.

    Arithmetic on numbers stays where the numbers are. `operands` are those that depend on an input: a
    constant is made where the graph is, wherever the model makes it.
    """
    numbers_only = all(map(is_number, operands))
    for x in results:
        if x.device != device and not (numbers_only and is_number(x)):
            raise TraceError(
                f"a tensor moves to {x.device} in a graph on {device}, which has one device; "
                "move it outside of what is compiled"
            )


def is_number(x: Tensor) -> bool:
    """Whether PyTorch takes a tensor as it takes a Python number, on every device."""
    return x.ndim == 0 and x.device.type == "cpu"
