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
from egcompile.pipeline import budget_of, mode_of
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
    memory_budget: float | None = None,
    disable: bool = False,
) -> Any:
    """`torch.compile` with egcompile behind it: the model as it was, its forward and backward compiled.

    Parameters stay the model's own. Compilation happens at the first call, for each shape. `mode` and
    `options` are those of `egcompile.backend.backend`, and `memory_budget` is the option of that name; the
    rest is torch.compile's. Without a model it is a decorator. Raises ValueError for a budget that is none.
    """
    if memory_budget is not None:
        options = {**(options or {}), "memory_budget": budget_of(memory_budget)}
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
    memory_budget: float = 1.0,
) -> Plan:
    """A plan of `graph` for `target`: "cpu", "cuda:90", ...; by default this machine's device.

    `needed` says which inputs get gradients: those that required them when traced, or else all floating
    ones. `mode` is exact, greedy or unfused. `memory_budget` is how much the forward may save for the
    backward, as in `torch._functorch.config.activation_memory_budget`: 1 gives the fastest plan, 0 saves
    inputs alone and makes all again that may be, 0.5 saves half of what lies between. No GPU is needed to
    look at a plan for one. Raises ValueError for an unknown target, mode or budget, and, once the plan is
    looked at or called, the errors of the pipeline.
    """
    chosen, budget = mode_of(mode), budget_of(memory_budget)
    if target is None:
        found = Target.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    else:
        found = Target.parse(target)
    if isinstance(graph, Graph):
        return Plan(graph, found, chosen, needed, memory_budget=budget)
    needed = graph.requires_grad if needed is None else needed
    changed = [index for index, _ in graph.mutated]
    return Plan(graph.graph, found, chosen, needed, graph.strides, changed, budget)


__all__ = ["compile", "optimize", "trace"]
