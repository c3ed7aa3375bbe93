"""The torch.compile backend: what Dynamo captures becomes a plan for each set of sizes that it meets."""

from __future__ import annotations

import importlib.metadata
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Parameter

from egcompile._torch import register_backend
from egcompile.config import disabled, logger
from egcompile.errors import TraceError
from egcompile.frontend.aliases import Argument, Shared
from egcompile.frontend.dynamo import Capture, Imported, Number
from egcompile.frontend.importer import Constant
from egcompile.ir.types import TensorType
from egcompile.pipeline import MODES as PLANNED
from egcompile.pipeline import Mode, budget_of, mode_of
from egcompile.plan import Plan
from egcompile.runtime.aten import laid_out
from egcompile.target import Target

GRAPHED = ("reduce-overhead", "max-autotune")
TUNED = ("max-autotune", "max-autotune-no-cudagraphs")
"""Modes, by torch.compile's names, whose plans are replayed from CUDA graphs, and whose tiles are timed."""

MODES = ("default", *dict.fromkeys((*GRAPHED, *TUNED)), *PLANNED)

PLANS = 64
"""Plans that a captured graph with open sizes keeps; the least recently used goes first."""


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="egcompile", mode=..., options={...})`.

    `mode` "default" proves the cheapest plan; "reduce-overhead" also replays it from CUDA graphs on a GPU,
    "max-autotune-no-cudagraphs" times tiles of its kernels there, and "max-autotune" does both; "greedy" and
    "unfused" are other ways to choose a plan, to compare with. `options` may hold `target`, by
    default the device of the inputs; `memory_budget`, how much the forward may save, from 0 to 1, its
    default (`egcompile.optimize`); and `opaque`: False has ATen ops that no rule knows raise
    UnsupportedOp, instead of being run and differentiated by PyTorch. Raises ValueError for other modes or
    options, and the errors of the frontend and the pipeline.
    """
    if disabled():
        return gm.forward
    options = options or {}
    if unknown := set(options) - {"target", "opaque", "memory_budget"}:
        raise ValueError(f"no option {', '.join(unknown)}; there are target, opaque and memory_budget")
    budget = budget_of(options.get("memory_budget", 1.0))
    if mode is not None and mode not in MODES:
        raise ValueError(f"no mode {mode!r}; there are {', '.join(MODES)}")
    graphs, tune = mode in GRAPHED, mode in TUNED
    chosen = mode_of("exact" if graphs or tune or mode in (None, "default") else str(mode))
    capture = Capture.of(gm)
    opaque = options.get("opaque", True)
    compiler = _Compiler(capture, chosen, options.get("target"), opaque, budget, graphs, tune)
    if not capture.numbers and not any(map(_is_symbolic, example_inputs)):
        return compiler.specialize(example_inputs)
    return _Specializing(compiler)


def register() -> None:
    """Makes "egcompile" a backend's name where the package is not installed, which declares it by itself."""
    declared = importlib.metadata.entry_points(group="torch_dynamo_backends", name="egcompile")
    if not declared:
        register_backend(backend, name="egcompile")


@dataclass(frozen=True, eq=False)
class _Compiler:
    capture: Capture
    mode: Mode
    target: str | None
    opaque: bool
    memory_budget: float
    graphs: bool
    tune: bool

    def specialize(self, args: Sequence[Any]) -> _Call:
        """A callable for arguments of these sizes and numbers; raises as `Capture.specialize` does."""
        imported = self.capture.specialize(args, opaque=self.opaque)
        device = imported.device
        imported = replace(imported, constants=tuple(x.to(device) for x in imported.constants))
        tensors = [*(args[i] for i in imported.input_indices), *imported.constants]
        plan = Plan(
            imported.graph,
            Target.parse(self.target) if self.target else Target.of(device),
            self.mode,
            needed=imported.requires_grad,
            strides=[x.stride() for x in tensors],
            volatile=[imported.input_indices.index(i) for i, _ in imported.mutated],
            memory_budget=self.memory_budget,
            graphs=self.graphs,
            tune=self.tune,
        )
        return _Call(imported, plan)


class _Call:
    """Runs a plan with the captured graph's calling convention."""

    def __init__(self, imported: Imported, plan: Plan) -> None:
        self.imported = imported
        self.plan = plan

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self.imported.enables and not torch.is_grad_enabled():
            with torch.enable_grad():
                return self(*args)
        imported = self.imported
        inputs = [args[i] for i in imported.input_indices]
        inputs = [x if x.device == imported.device else x.to(imported.device) for x in inputs]
        if imported.mutated:
            _refuse_overlap(args, [index for index, _ in imported.mutated])
        values = self.plan.run([*inputs, *imported.constants])
        changed = [(args[index], values[position]) for index, position in imported.mutated]
        for dtype in dict.fromkeys(x.dtype for x, _ in changed):  # a launch for many, where they are alike
            pairs = [pair for pair in changed if pair[0].dtype == dtype]
            torch._foreach_copy_([x for x, _ in pairs], [y for _, y in pairs])
        results: list[Any] = []
        bases: dict[int, Tensor] = {}
        for output in imported.outputs:
            match output:
                case int():
                    results.append(values[output])
                case Number(position):
                    results.append(values[position].cpu())
                case Shared(position, strides, window):
                    if position not in bases:
                        bases[position] = laid_out(values[position], strides)
                    results.append(window.of(bases[position]) if window else bases[position])
                case Argument():
                    results.append(output.of(args))
                case Constant():
                    results.append(output.value)
        return results


class _Specializing:
    """One plan for each set of sizes and numbers met in a graph whose sizes Dynamo keeps open."""

    def __init__(self, compiler: _Compiler) -> None:
        self.compiler = compiler
        self.calls: OrderedDict[tuple[Any, ...], _Call] = OrderedDict()
        self.numbers: frozenset[int] = frozenset()  # arguments whose values plans are made for
        self.lock = threading.RLock()

    def __call__(self, *args: Any) -> Sequence[Any]:
        with self.lock:
            call = self.call(args)
        return call(*args)

    def call(self, args: Sequence[Any]) -> _Call:
        """The callable for arguments like these, compiled if they are the first."""
        key = self.key(args)
        call = self.calls.get(key)
        if call is None:
            if self.calls:
                logger("kernels").debug("recompiling: %s", _difference(next(reversed(self.calls)), key))
            if len(self.calls) == PLANS:
                self.calls.popitem(last=False)
            call = self.compiler.specialize(args)
            self.numbers |= set(call.imported.numbers)
            key = self.key(args)
            self.calls[key] = call
        self.calls.move_to_end(key)
        return call

    def key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        # as text, in which 0.0 and -0.0 differ, and NaN is NaN
        return tuple([repr(x.item()) if i in self.numbers else _key(x) for i, x in enumerate(args)])


def _refuse_overlap(args: Sequence[Any], mutated: Sequence[int]) -> None:
    """Raises TraceError where a change in place would be seen through a second argument."""
    tensors = [(i, x) for i, x in enumerate(args) if type(x) is not Parameter and isinstance(x, Tensor)]
    memory = [x.untyped_storage().data_ptr() for _, x in tensors]
    if len(set(memory)) == len(memory):  # as at nearly every call
        return
    owners: dict[int, int] = {}
    for (i, x), where in zip(tensors, memory, strict=True):
        if not isinstance(x, Parameter) and x.numel():
            first = owners.setdefault(where, i)
            if first != i and (i in mutated or first in mutated):
                raise TraceError(
                    f"arguments {first} and {i} share memory and one is changed in place; clone it"
                )


def _key(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype
    return argument


def _difference(old: tuple[Any, ...], new: tuple[Any, ...]) -> str:
    """What a recompilation is for: the first arguments that differ from those of the last."""
    changed = [(i, a, b) for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    return ", ".join(f"argument {i} is {_text(b)}, was {_text(a)}" for i, a, b in changed[:3])


def _text(key: Any) -> str:
    if isinstance(key, tuple):
        shape, strides, dtype = key
        return f"{TensorType(tuple(shape), dtype)} with strides {tuple(strides)}"
    return str(key)


def _is_symbolic(argument: Any) -> bool:
    if isinstance(argument, Tensor):
        return not all(isinstance(n, int) for n in (*argument.shape, *argument.stride()))
    return not isinstance(argument, (int, float, bool, str, type(None)))
