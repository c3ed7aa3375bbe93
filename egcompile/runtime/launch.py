"""Launches without Triton's dispatch, which takes longer than many a kernel.

A plan's launches have fixed grids, shapes and constants; what Triton would still specialize on is the
device and which pointers are multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.runtime.jit import JITFunction

ALIGNMENT = 16
"""Bytes of the widest access. Triton compiles for pointers that are multiples of it, and for others."""


def direct(function: Any) -> Any:
    """A jit function with the same `function[grid](...)`, for one call site; in the interpreter, itself."""
    return _Direct(function) if isinstance(function, JITFunction) else function


class _Direct:
    def __init__(self, function: JITFunction[Any]) -> None:
        self.function = function
        self.launches: dict[tuple[int | bool, ...], tuple[Callable[..., None], list[Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            aligned = [not x.data_ptr() % ALIGNMENT for x in arguments if isinstance(x, torch.Tensor)]
            key = (torch.cuda.current_device(), *aligned)
            if key not in self.launches:
                kernel = self.function[grid](*arguments, **constants)
                rest = [constants[name] for name in self.function.arg_names[len(arguments) :]]
                self.launches[key] = kernel[(*grid, 1, 1)[:3]], rest
                return
            run, rest = self.launches[key]
            run(*arguments, *rest)

        return launch
