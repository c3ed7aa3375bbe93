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
    """`launches` has what a launch needs beside its arguments: by device, and by which are not aligned."""

    def __init__(self, function: JITFunction[Any]) -> None:
        self.function = function
        self.grid: tuple[int, ...] = ()
        self.launches: dict[int | tuple[int, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grid = grid
        return self.launch

    def launch(self, *arguments: Tensor | Any, **constants: Any) -> None:
        """Tensors go as pointers, of which the launcher need not ask the driver whose memory they are; a
        tensor descriptor goes as it is."""
        passed = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
        device = current_device()
        unaligned = [i for i, x in enumerate(passed) if isinstance(x, int) and x % ALIGNMENT]
        key = (device, *unaligned) if unaligned else device
        if key not in self.launches:
            kernel = self.function[self.grid](*arguments, **constants)
            values = tuple(constants[name] for name in self.function.arg_names[len(arguments) :])
            fixed = (kernel.function, kernel.packed_metadata, None, None, None)
            self.launches[key] = kernel.run, (*(*self.grid, 1, 1)[:3], fixed, values)
            return
        run, (x, y, z, fixed, values) = self.launches[key]
        stream = triton.runtime.driver.active.get_current_stream(device)
        run(x, y, z, stream, *fixed, *passed, *values)


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
