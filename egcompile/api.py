"""The package's functions: `compile`, `trace`, `optimize`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from egcompile.backend import backend
from egcompile.config import disabled
from egcompile.frontend import Traced, trace
from egcompile.ir.graph import Graph
from egcompile.pipeline import mode_of
from egcompile.plan import Plan
from egcompile.target import Target

Model = TypeVar("Model", bound=Callable[..., Any])


def compile(
    model: Model | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    disable: bool = False,
) -> Any:
    """`torch.compile` with egcompile behind it: the model as it was, its forward and backward compiled.

    Parameters stay the model's own. Compilation happens at the first call, for each shape. `mode` and
    `options` are those of `egcompile.backend.backend`; the rest is torch.compile's. Without a model it is a
    decorator.
    """
    if model is None:
        return functools.partial(
            compile, fullgraph=fullgraph, dynamic=dynamic, mode=mode, options=options, disable=disable
        )
    if disable or disabled():
        return model
    chosen = functools.partial(backend, mode=mode, options=options)
    return torch.compile(model, fullgraph=fullgraph, dynamic=dynamic, backend=chosen)


def optimize(
    graph: Graph | Traced,
    target: str | None = None,
    mode: str = "exact",
    *,
    needed: Sequence[bool] | None = None,
) -> Plan:
    """A plan of `graph` for `target`: "cpu", "cuda:90", ...; by default this machine's device.

    `needed` says which inputs get gradients: those that required them when traced, or else all floating
    ones. `mode` is exact, greedy or unfused. No GPU is needed to look at a plan for one. Raises ValueError
    for an unknown target or mode, and, once the plan is looked at or called, the errors of the pipeline.
    """
    chosen = mode_of(mode)
    if target is None:
        found = Target.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    else:
        found = Target.parse(target)
    if isinstance(graph, Graph):
        return Plan(graph, found, chosen, needed)
    needed = graph.requires_grad if needed is None else needed
    changed = [index for index, _ in graph.mutated]
    return Plan(graph.graph, found, chosen, needed, graph.strides, changed)


__all__ = ["compile", "optimize", "trace"]
