"""Launches without Triton's dispatch, which takes longer than many a kernel.

A plan's launches have fixed grids, shapes and constants; what Triton would still specialize on is the
device and which pointers are multiples of 16 bytes. The rest is prepared at the first launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from egcompile.runtime._torch import current_device

ALIGNMENT = 16
"""Bytes of the widest access. Triton compiles for pointers that are multiples of it, and for others."""


def direct(function: Any) -> Any:
    """A jit function with the same `function[grid](...)`, for one call site; in the interpreter, itself."""
    return _Direct(function) if isinstance(function, JITFunction) else function


class _Direct:
    """`launches` has what a launch needs beside pointers: by device, and by which are aligned if not all."""

    def __init__(self, function: JITFunction[Any]) -> None:
        self.function = function
        self.grid: tuple[int, ...] = ()
        self.launches: dict[int | tuple[int | bool, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grid = grid
        return self.launch

    def launch(self, *tensors: Tensor, **constants: Any) -> None:
        driver = triton.runtime.driver.active
        pointers = [x.data_ptr() for x in tensors]
        device = current_device()
        together = 0
        for pointer in pointers:
            together |= pointer
        key = device if not together % ALIGNMENT else (device, *(not p % ALIGNMENT for p in pointers))
        if key not in self.launches:
            kernel = self.function[self.grid](*tensors, **constants)
            values = tuple(constants[name] for name in self.function.arg_names[len(tensors) :])
            fixed = (kernel.function, kernel.packed_metadata, None, None, None)
            self.launches[key] = kernel.run, (*(*self.grid, 1, 1)[:3], fixed, values)
            return
        run, (x, y, z, fixed, values) = self.launches[key]
        # pointers as numbers: of a tensor the launcher would ask the driver whose memory it is
        run(x, y, z, driver.get_current_stream(device), *fixed, *pointers, *values)


@contextmanager
def ahead(module: ModuleType) -> Iterator[None]:
    """Within it, what the module would launch is compiled instead."""
    launched = {name: f for name, f in vars(module).items() if isinstance(f, _Direct)}
    vars(module).update({name: _Ahead(f.function) for name, f in launched.items()})
    try:
        yield
    finally:
        vars(module).update(launched)


class _Ahead:
    def __init__(self, function: JITFunction[Any]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self.function.warmup, grid=grid)
