"""A plan: a graph compiled for a target, callable on tensors, open to inspection."""

from __future__ import annotations

import difflib
import functools
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from egcompile.config import logger
from egcompile.derive import derive
from egcompile.differentiable import dependent
from egcompile.draws import with_draws_as_inputs, with_draws_as_outputs
from egcompile.errors import TypeMismatch
from egcompile.explain import explain
from egcompile.ir.graph import Graph
from egcompile.ir.joint import Joint
from egcompile.ir.node import Node, topological
from egcompile.ir.types import TensorType, is_differentiable
from egcompile.ir.verify import verify
from egcompile.pipeline import Compiled, Mode, compile_graph, launches
from egcompile.runtime.aten import has_strides, laid_out, overlaps
from egcompile.runtime.bridge import Executable, Gradients, Mask, Vjp, run
from egcompile.runtime.graphs import graphed
from egcompile.runtime.loader import load
from egcompile.schedule.kernel import Buffer, Launch, contiguous_strides
from egcompile.target import Target
from egcompile.tune import tuner_for

Tensor = torch.Tensor


@dataclass(frozen=True)
class PlanKernel:
    """A kernel of a plan: its source, empty on a CPU, which runs ATen; the model's places that it is the
    work of; and how often it is launched.
    """

    name: str
    source: str
    origin: tuple[str, ...]
    launches: int


class Plan:
    """A graph compiled for `target`. Call it on tensors in the order of the graph's inputs.

    It runs under autograd, to any order. A plan is compiled once for each set of inputs that want gradients
    and each set of outputs that get cotangents, when first met; `needed` says which of them `source`,
    `kernels` and the other views show.
    """

    def __init__(
        self,
        graph: Graph,
        target: Target,
        mode: Mode = "exact",
        needed: Sequence[bool] | None = None,
        strides: Sequence[tuple[int, ...]] | None = None,
        volatile: Sequence[int] = (),
        memory_budget: float = 1.0,
        graphs: bool = False,
        tune: bool = False,
    ) -> None:
        """`needed` has a flag an input (all floating ones if None), `strides` how each lies in memory.

        `volatile` are positions of inputs that the caller changes in place after a call, `memory_budget` is
        how much the forward may save: from 0, its inputs alone, to 1, all that makes the plan faster.
        `graphs` has a GPU's launches replayed from CUDA graphs, `tune` has tiles timed on the GPU at hand.
        """
        self.graph = verify(graph)
        self._whole = with_draws_as_outputs(graph)
        self._draws = len(self._whole.outputs) - len(graph.outputs)
        self.target = target
        self.mode = mode
        self.memory_budget = memory_budget
        self.graphs = graphs and target.kind == "cuda"
        self.tune = tune and target.kind == "cuda"
        types = [node.tensor for node in graph.inputs]
        self.needed: Mask = tuple(needed or (is_differentiable(t.dtype) for t in types))
        strides = strides or [contiguous_strides(t.shape) for t in types]
        self.inputs = tuple(Buffer(t, s) for t, s in zip(types, strides, strict=True))
        self._volatile = frozenset(volatile)
        self._names = [str(node.attr("name")) for node in graph.inputs]
        self._foreseen: dict[Mask, Mask] = {}
        self._compiled: dict[tuple[Mask, Mask], Compiled] = {}
        self._executables: dict[Mask, Executable] = {}
        self._vjps: dict[tuple[Mask, Mask], VjpPlan] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        inputs = ", ".join(f"{name}: {b.type}" for name, b in zip(self._names, self.inputs, strict=True))
        return f"<plan for {self.target.name} of {len(self.graph.nodes)} nodes ({inputs})>"

    # ---- running ----
    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The outputs: one tensor, or a tuple of several.

        Raises TypeMismatch for other shapes, dtypes or devices, and for what is no dense tensor. An input
        that lies otherwise in memory than the plan expects is copied; where the plan expects elements that
        share memory, as an expanded tensor's do, that is a TypeMismatch too.
        """
        outputs = self.run(self.accept(inputs))
        return outputs[0] if len(outputs) == 1 else outputs

    def run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs, from inputs known to be as `accept` makes them."""
        if torch.is_grad_enabled():
            needed = tuple([x.requires_grad for x in inputs])
        else:
            needed = (False,) * len(inputs)
        executable = self._executables.get(needed) or self._executable(needed)
        return run(executable, inputs)

    def accept(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs as the plan expects them; raises TypeMismatch where they cannot be."""
        if len(inputs) != len(self.inputs):
            raise TypeMismatch(f"the plan takes {len(self.inputs)} inputs, {self._names}, got {len(inputs)}")
        device = next((x.device for x in inputs if isinstance(x, Tensor)), None)
        accepted = []
        for x, buffer, name in zip(inputs, self.inputs, self._names, strict=True):
            if not isinstance(x, Tensor) or x.layout != torch.strided:
                found = f"a tensor of layout {x.layout}" if isinstance(x, Tensor) else repr(x)
                raise TypeMismatch(f"{name}: the plan takes {buffer.type}, got {found}")
            if x.shape != buffer.type.shape or x.dtype != buffer.type.dtype or x.device != device:
                found = f"{TensorType.of(x)} on {x.device}"
                raise TypeMismatch(f"{name}: the plan takes {buffer.type} on {device}, got {found}")
            accepted.append(x if x.stride() == buffer.strides else _laid_out(x, buffer, name))
        if device is not None and device.type != self.target.kind and not _interpreted(device):
            raise TypeMismatch(f"{self._names[0]} is on {device}; the plan is for {self.target.name}")
        return accepted

    # ---- compiling ----
    def compiled(self, needed: Mask | None = None, cotangents: Mask | None = None) -> Compiled:
        """What was decided for these gradients and cotangents; those that the plan shows if None."""
        needed = self.needed if needed is None else needed
        key = needed, self._foresee(needed) if cotangents is None else cotangents
        with self._lock:
            if key not in self._compiled:
                strides = {n: b.strides for n, b in zip(self._names, self.inputs) if not b.is_contiguous}
                wanted = (*key[1], *(False,) * self._draws)
                choose = tuner_for(self.target) if self.tune else None
                self._compiled[key] = compile_graph(
                    self._whole, self.target, self.mode, needed, wanted, strides, self.memory_budget, choose
                )
            return self._compiled[key]

    def vjp(self, cotangents: Mask, needed: Mask) -> Vjp:
        """The gradients of the inputs `needed`, given cotangents of the outputs `cotangents`.

        Its plan reads inputs, cotangents and what was drawn at random, and no saved value, so that it can be
        differentiated again. It is derived when first asked for. Raises NoGradientRule.
        """
        with self._lock:
            if (cotangents, needed) not in self._vjps:
                graph = with_draws_as_inputs(self.graph, needed)
                wants = (*needed, *(False,) * self._draws)
                self._vjps[cotangents, needed] = VjpPlan(
                    self, derive(graph, wants, cotangents, keep_stops=True)
                )
            return self._vjps[cotangents, needed]

    def _foresee(self, needed: Mask) -> Mask:
        """Which outputs will get cotangents: the losses, if there are any, or all that depend on `needed`.

        A model that returns its logits beside its loss has no cotangent for them, and one of zeros would
        cost as much as the loss. If the guess is wrong, the gradients come by `vjp`, and the next call uses
        a plan that is right.
        """
        if needed not in self._foreseen:
            flows = _differentiable(self.graph, needed)
            losses = tuple(
                flow and y.tensor.numel == 1 for flow, y in zip(flows, self.graph.outputs, strict=True)
            )
            self._foreseen[needed] = losses if any(losses) else flows
        return self._foreseen[needed]

    def _mispredicted(self, needed: Mask, cotangents: Mask) -> None:
        with self._lock:
            if self._foreseen[needed] != cotangents:
                names = [n for n, present in zip(self.graph.output_names, cotangents, strict=True) if present]
                logger("kernels").debug("recompiling: the outputs with cotangents are %s", ", ".join(names))
                self._foreseen[needed] = cotangents
                self._executables.pop(needed, None)

    def _executable(self, needed: Mask) -> Executable:
        with self._lock:
            self._executables[needed] = self._load(self.compiled(needed), needed)
            return self._executables[needed]

    def _load(self, compiled: Compiled, needed: Mask) -> Executable:
        module = load(compiled.source)
        forward, backward = compiled.schedule.forward, compiled.schedule.backward
        outputs = tuple(node.tensor for node in self.graph.outputs)
        if backward is None:
            return Executable(self._replayed(module.forward, None, {})[0], None, outputs)
        position: dict[str | None, int] = {}
        for i, name in enumerate((*forward.inputs, *forward.outputs)):
            position.setdefault(name, i)
        saved = compiled.schedule.saved
        lies = iter([backward.buffers[name] for name in backward.inputs[len(saved) :]])
        flows = _differentiable(self.graph, needed)
        taken = [position[name] for name in saved]
        first = len(forward.inputs)
        drawn = range(first + len(outputs), first + len(outputs) + self._draws)
        kept = {i: i for i in self._kept(compiled.derived, flows)}
        kept |= {first + i: p for i, p in enumerate(drawn)}
        places = {p: i for i, p in enumerate(dict.fromkeys((*taken, *kept.values())))}
        left = {i: p - first for i, p in enumerate(taken) if p >= first + len(outputs)}
        run, run_back = self._replayed(module.forward, module.backward, left)
        return Executable(
            run,
            run_back,
            outputs,
            saved=tuple(places),
            taken=len(taken),
            kept={i: places[p] for i, p in kept.items()},
            copied=tuple(self._volatile.intersection(places)),
            constant=tuple(i for i, flow in enumerate(flows) if not flow),
            cotangents=tuple(
                None if ct is None else next(lies) for ct in compiled.derived.cotangents[: len(outputs)]
            ),
            vjp=self.vjp,
            mispredicted=functools.partial(self._mispredicted, needed),
        )

    def _replayed(self, forward: Any, backward: Any, left: Mapping[int, int]) -> tuple[Any, Any]:
        """The plan's callables, from CUDA graphs if it is to use them; `left` as in `graphed`."""
        if not self.graphs:
            return forward, backward
        return graphed(forward, backward, len(self.graph.outputs), left)

    def _kept(self, derived: Joint, flows: Mask) -> tuple[int, ...]:
        """The inputs that a vjp may read: for these gradients, and for the outputs without a cotangent here
        that may have one (a running statistic's update never has).
        """
        roots = [g for g in derived.gradients if g is not None]
        outputs = zip(self.graph.outputs, derived.cotangents, flows, strict=False)
        roots += [y for y, ct, flow in outputs if ct is None and flow]
        return _reached(roots, derived.primals)

    # ---- looking ----
    @property
    def joint(self) -> Joint:
        """The forward and backward in one graph, as optimized."""
        return self.compiled().extraction.joint

    @property
    def forward(self) -> Graph:
        """The outputs from the inputs, as optimized."""
        return Graph(
            self.joint.primals, self.joint.outputs, self._whole.output_names, self.joint.graph.origins
        )

    @property
    def backward(self) -> Graph:
        """The gradients from the inputs and cotangents, as optimized; what is saved shows in `source`."""
        pairs = [
            (f"d_{n}", g) for n, g in zip(self._names, self.joint.gradients, strict=True) if g is not None
        ]
        names, gradients = tuple(n for n, _ in pairs), tuple(g for _, g in pairs)
        return Graph(self.joint.graph.inputs, gradients, names, self.joint.graph.origins)

    @property
    def source(self) -> str:
        """Runnable Python: the kernels, then `forward` and `backward` as straight lines."""
        return self.compiled().source

    @property
    def kernels(self) -> tuple[PlanKernel, ...]:
        compiled = self.compiled()
        texts = {text.name: text.text for text in compiled.texts}
        return tuple(
            PlanKernel(kernel.name, texts.get(kernel.name, ""), tuple(sorted(_places(runs))), len(runs))
            for kernel, runs in launches(compiled.schedule).items()
        )

    def diff(self) -> str:
        """The joint graph before and after optimization, as a unified diff of their texts."""
        compiled = self.compiled()
        before, after = str(compiled.derived.graph), str(compiled.extraction.joint.graph)
        lines = difflib.unified_diff(
            before.splitlines(), after.splitlines(), "derived", "optimized", lineterm=""
        )
        return "\n".join(lines)

    def explain(self) -> str:
        """What was recognized, which rules fired, what was fused and what was not, and what it costs."""
        return explain(self.compiled())


class VjpPlan:
    """A plan's gradients as a function of its inputs and cotangents: a `Plan` of the derived backward."""

    def __init__(self, of: Plan, derived: Joint) -> None:
        self._gradients = derived.gradients
        outputs = tuple(g for g in derived.gradients if g is not None)
        self._read = _reached(outputs, derived.primals)
        cotangents = [ct for ct in derived.cotangents if ct is not None]
        inputs = (*(derived.primals[i] for i in self._read), *cotangents)
        lie = [b.strides for b in of.inputs]
        strides = [
            lie[i] if i < len(lie) else contiguous_strides(derived.primals[i].shape) for i in self._read
        ] + [contiguous_strides(ct.shape) for ct in cotangents]
        names = tuple(
            f"d_{p.attr('name')}" for p, g in zip(derived.primals, derived.gradients) if g is not None
        )
        graph = Graph(inputs, outputs, names, derived.graph.origins)
        budget, tune = of.memory_budget, of.tune
        self.plan = Plan(graph, of.target, of.mode, strides=strides, memory_budget=budget, tune=tune)

    def __call__(self, inputs: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]) -> Gradients:
        """One gradient an input of the first plan, None where none flows; inputs not read may be None."""
        values = [*(inputs[i] for i in self._read), *(ct for ct in cotangents if ct is not None)]
        results = iter(self.plan.run(self.plan.accept([v for v in values if v is not None])))
        return tuple(None if g is None else next(results) for g in self._gradients)


def _laid_out(x: Tensor, buffer: Buffer, name: str) -> Tensor:
    """An input as its buffer lies; raises TypeMismatch where a copy cannot lie so."""
    if not has_strides(x, buffer.strides) and overlaps(buffer.type.shape, buffer.strides):
        raise TypeMismatch(
            f"{name}: the plan takes {buffer.type} with the strides {buffer.strides}, whose elements share "
            f"memory; got the strides {x.stride()}: make the plan for a contiguous {name}"
        )
    return laid_out(x, buffer.strides)


def _differentiable(graph: Graph, needed: Sequence[bool]) -> Mask:
    """Which outputs have a gradient with respect to an input in `needed`."""
    sources = [node for node, need in zip(graph.inputs, needed, strict=True) if need]
    found = dependent(graph.nodes, sources)
    return tuple(node in found for node in graph.outputs)


def _reached(roots: Iterable[Node], inputs: Sequence[Node]) -> tuple[int, ...]:
    nodes = set(topological(roots))
    return tuple(i for i, node in enumerate(inputs) if node in nodes)


def _places(runs: Sequence[Launch]) -> frozenset[str]:
    return frozenset().union(*(run.origins for run in runs))


def _interpreted(device: torch.device) -> bool:
    """Whether a GPU's kernels run on this device all the same, in Triton's interpreter."""
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
