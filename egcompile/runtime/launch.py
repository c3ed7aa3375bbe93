"""Launches without Triton's dispatch, which takes longer than many a kernel.

A plan's launches have fixed grids, shapes and constants; what Triton would still specialize on is the
device and which pointers are multiples of 16 bytes. The rest is prepared at the first launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor
from triton.runtime.jit import JITFunction

from egcompile.runtime._torch import current_device, current_stream
from egcompile.runtime._triton import Launch, hooked, prepared

ALIGNMENT = 16
"""Bytes of the widest access. Triton compiles for pointers that are multiples of it, and for others."""

OPTIONS = {"enable_fp_fusion": True}
"""Of all kernels: a product and a sum are one instruction. Triton 3.10 no longer does so unless asked."""


def direct(function: Any) -> Any:
    """A jit function with the same `function[grid](...)`, for one call site; in the interpreter, itself."""
    return _Direct(function) if isinstance(function, JITFunction) else function


class _Direct:
    """`launches` has what is prepared: by device, and by which pointers are not aligned.

    tensors   whether all arguments are known to be tensors, none a tensor descriptor
    """

    def __init__(self, function: JITFunction[Any]) -> None:
        self.function = function
        self.grid: tuple[int, ...] = ()
        self.tensors = False
        self.launches: dict[int | tuple[int, ...], Launch] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grid = grid
        return self.launch

    def launch(self, *arguments: Tensor | Any, **constants: Any) -> None:
        """Tensors go as pointers, of which the launcher need not ask the driver whose memory they are; a
        tensor descriptor goes as it is."""
        if self.tensors:
            passed = pointers = list(map(Tensor.data_ptr, arguments))
        else:
            passed = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
            pointers = [x for x in passed if isinstance(x, int)]
        device = current_device()
        key: int | tuple[int, ...] = device
        bits = 0
        for pointer in pointers:
            bits |= pointer
        if bits % ALIGNMENT:
            key = (device, *(i for i, x in enumerate(pointers) if x % ALIGNMENT))
        launch = self.launches.get(key)
        if launch is None:
            self.launches[key] = self.first(arguments, constants)
        elif hooked():
            self.function[self.grid](*arguments, **constants, **OPTIONS)
        else:
            launch(current_stream(device), passed)

    def first(self, arguments: Sequence[Any], constants: Mapping[str, Any]) -> Launch:
        """A launch by Triton's dispatch; how to do without it the next time."""
        kernel = self.function[self.grid](*arguments, **constants, **OPTIONS)
        self.tensors = all(isinstance(x, Tensor) for x in arguments)
        values = tuple(constants[name] for name in self.function.arg_names[len(arguments) :])
        return prepared(kernel, self.grid, len(arguments), values)


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
        return functools.partial(self.function.warmup, grid=grid, **OPTIONS)
