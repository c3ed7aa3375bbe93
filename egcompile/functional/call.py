"""Small graphs run on tensors: one plan for each set of shapes, dtypes and memory layouts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import torch

from egcompile import ops
from egcompile.config import disabled
from egcompile.errors import TypeMismatch
from egcompile.frontend.aten import TABLE
from egcompile.ir.graph import Graph
from egcompile.ir.node import Node
from egcompile.plan import Plan
from egcompile.target import Target

P = ParamSpec("P")
R = TypeVar("R")
Tensor = torch.Tensor
Build = Callable[..., tuple[Node, ...]]
"""From operands, as nodes or None, and attributes by name to the graph's outputs."""


def eager() -> bool:
    """Whether to say it in PyTorch: if disabled, or for a compiler that traces and fuses as it sees fit."""
    return torch.compiler.is_compiling() or disabled()


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which raises TypeMismatch where a parameter that is annotated a tensor gets none."""
    parameters = inspect.signature(function).parameters
    names = tuple(parameters)
    may_be_none = {
        name: "None" in p.annotation for name, p in parameters.items() if p.annotation.startswith("Tensor")
    }

    @functools.wraps(function)
    def with_tensors(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, x in (*zip(names, args, strict=False), *kwargs.items()):
            if name in may_be_none and not isinstance(x, Tensor) and not (x is None and may_be_none[name]):
                raise TypeMismatch(f"{function.__name__}: {name} is {x!r}, and must be a tensor")
        return function(*args, **kwargs)

    return with_tensors


def call(build: Build, *operands: Tensor | None, **attrs: Hashable) -> tuple[Tensor, ...]:
    """`build` on tensors, by its plan for their types and strides.

    `build`'s first parameters are the operands; attributes are hashable. Raises TypeMismatch.
    """
    inputs = [x for x in operands if x is not None]
    signature = tuple(None if x is None else (x.shape, x.dtype, x.stride()) for x in operands)
    if any(x.device != inputs[0].device for x in inputs):
        raise TypeMismatch(f"operands on {', '.join(str(x.device) for x in inputs)}; move them to one device")
    return _plan(build, signature, tuple(attrs.items()), inputs[0].device).run(inputs)


def aten(overload: Any, out: Any, *arguments: Any) -> Any:
    """What a compiled model's call of an ATen op is, as nodes: the importer's own row."""
    return TABLE[overload](out, *arguments)


_Signature = tuple[tuple[torch.Size, torch.dtype, tuple[int, ...]] | None, ...]
_Attrs = tuple[tuple[str, Any], ...]


def _graph(build: Build, signature: _Signature, attrs: _Attrs) -> Graph:
    names = list(build.__annotations__)
    operands = [
        None if s is None else ops.input(name=name, shape=tuple(s[0]), dtype=s[1])
        for name, s in zip(names, signature, strict=False)
    ]
    outputs = build(*operands, **dict(attrs))
    return Graph(tuple(x for x in operands if x is not None), outputs)


@functools.lru_cache(maxsize=1024)
def _plan(build: Build, signature: _Signature, attrs: _Attrs, device: torch.device) -> Plan:
    graph = _graph(build, signature, attrs)
    return Plan(graph, Target.of(device), strides=[s[2] for s in signature if s is not None])
