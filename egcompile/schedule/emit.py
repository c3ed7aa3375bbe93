"""From a plan to straight lines: launches, calls, views, and where each value is dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from egcompile.extract.extraction import Extraction, KernelPlan
from egcompile.ir.buffer import Buffer
from egcompile.ir.node import Node
from egcompile.ops.opdef import Kind
from egcompile.partition import Partition, base, partition
from egcompile.schedule.beside import beside
from egcompile.schedule.bodies import Kernels
from egcompile.schedule.kernel import Call, Free, Launch, Program, Schedule, Step, View
from egcompile.schedule.onwards import onwards
from egcompile.schedule.order import in_time, order
from egcompile.schedule.together import Group, together
from egcompile.target import Target

_ATEN = (Kind.CONTRACTION, Kind.EXTERN)


def schedule(extraction: Extraction, target: Target, parts: Partition | None = None) -> Schedule:
    """The forward's and the backward's steps, on any target alike; without `parts`, of the fastest partition.

    As many launches and calls are emitted as extraction and partition planned, but for kernels that share a
    launch with others, which is asserted. The unfused plan, there to compare with, keeps these apart.
    """
    parts = parts or partition(extraction, target)
    joint = extraction.joint
    emitter = _Emitter(extraction)
    names = emitter.names
    extra = [n for n in parts.saved if n not in joint.primals and n not in joint.outputs]
    forward = emitter.program("forward", joint.primals, [*joint.outputs, *extra], parts.forward)
    cotangents = [ct for ct in joint.cotangents if ct is not None]
    backward = None
    if any(g is not None for g in joint.gradients):
        inputs = [*parts.saved, *cotangents]
        backward = emitter.program("backward", inputs, joint.gradients, parts.backward, parts.recomputed)
    steps = [*forward.steps, *(backward.steps if backward else ())]
    emitted = sum(isinstance(step, (Launch, Call)) for step in steps)
    planned = len(extraction.kernels) + len(parts.recomputed) - emitter.shared
    assert emitted == planned, f"planned {planned} launches and calls, emitted {emitted}"
    return Schedule(forward, backward, tuple(names[n] for n in parts.saved), emitter.shared)


class _Emitter:
    """Emits programs of one plan; they share kernels and the names of values.

    shared   kernels so far that run in another's launch
    """

    def __init__(self, extraction: Extraction) -> None:
        self.extraction = extraction
        self.kernels = Kernels(extraction.views)
        self.rank = {node: i for i, node in enumerate(extraction.joint.graph.nodes)}
        self.names = _names(extraction)
        self.shared = 0

    def program(
        self,
        name: str,
        inputs: Sequence[Node],
        outputs: Sequence[Node | None],
        kernels: Sequence[KernelPlan],
        again: Sequence[KernelPlan] = (),
    ) -> Program:
        """`again` are kernels that make values of the forward again, where the first kernel reads them."""
        returned = [node for node in outputs if node is not None]
        steps: list[Step] = []
        present: dict[Node, None] = dict.fromkeys(inputs)
        kept = [*map(self._base, returned), *self.extraction.joint.primals]  # the caller has the primals
        available = [*inputs, *(node for kernel in again for node in kernel.writes)]
        ordered = order(kernels, self._base, kept, available, lambda k: self.rank.get(k.root, 0))
        ordered = in_time(ordered, again, self._base, returned)
        groups = self._groups(ordered, kept)
        self.shared += len(ordered) - len(groups)
        for group in groups:
            step, reads = self._step(group)
            for node in reads:
                self._view(node, present, steps)
            steps.append(step)
            present.update(dict.fromkeys(node for plan in group for node in plan.writes))
        for node in returned:
            self._view(node, present, steps)
        buffers = {self.names[node]: self._buffer(node) for node in present}
        kept_names = {self.names[node] for node in (*returned, *(inputs if name == "forward" else ()))}
        return Program(
            name,
            tuple(self.names[node] for node in inputs),
            tuple(None if node is None else self.names[node] for node in outputs),
            tuple(_with_frees(steps, kept_names, [self.names[node] for node in inputs])),
            buffers,
        )

    def _groups(self, kernels: Sequence[KernelPlan], kept: Sequence[Node]) -> list[Group]:
        if self.extraction.stats.mode == "unfused":
            return [(kernel,) for kernel in kernels]
        longer = onwards(kernels, self._base, kept, self.extraction.buffers)
        return together(beside(longer, self._base, kept), self._base)

    def _base(self, node: Node) -> Node:
        return base(self.extraction, node)

    def _buffer(self, node: Node) -> Buffer:
        return self.extraction.buffers[node]

    def _view(self, node: Node, present: dict[Node, None], steps: list[Step]) -> None:
        if node not in present:
            present[node] = None
            steps.append(View(self.names[self._base(node)], self._buffer(node), self.names[node]))

    def _step(self, group: Group) -> tuple[Step, Sequence[Node]]:
        """What a group is run by, and the values that this reads."""
        plan, root = group[0], group[0].root
        if root.op.kind not in _ATEN:
            kernel, inputs, outputs = self.kernels.of(group, self.extraction.buffers)
            known = self.extraction.joint.graph.origins
            nodes = (n for plan in group for n in (plan.root, *plan.nodes, *plan.writes))
            origins = frozenset().union(*(known.get(n, ()) for n in nodes))
            names = tuple(self.names[n] for n in inputs), tuple(self.names[n] for n in outputs)
            return Launch(kernel, *names, origins), inputs
        attrs = tuple(zip(root.op.attr_names, root.attrs, strict=True))
        results: list[str | None] = [None] * (len(root.type) if isinstance(root.type, tuple) else 1)
        for node in plan.writes:
            results[node.attr("index") if node.op.kind is Kind.PROJECTION else 0] = self.names[node]
        call = Call(root.op.name, tuple(self.names[n] for n in root.inputs), attrs, tuple(results))
        return call, tuple(plan.reads)


def _names(extraction: Extraction) -> dict[Node, str]:
    """Inputs have their own names; other values are numbered by the op that they come from."""
    joint = extraction.joint
    names = {node: str(node.attr("name")) for node in joint.graph.inputs}
    taken = set(names.values())
    count: Counter[str] = Counter()
    for node in joint.graph.nodes:
        if node in names or isinstance(node.type, tuple):
            continue
        projected = node.op.kind is Kind.PROJECTION
        op = node.inputs[0].op if projected else node.op
        stem = f"{op.name}_{op.outputs[node.attr('index')]}" if projected else op.name
        while True:
            name = f"{stem}{count[stem]}"
            count[stem] += 1
            if name not in taken:
                break
        taken.add(name)
        names[node] = name
    return names


def _with_frees(steps: Sequence[Step], kept: set[str], inputs: Sequence[str]) -> list[Step]:
    """Drops each name after its last use, and inputs that are never used at the start."""
    last: dict[str, int] = dict.fromkeys(inputs, -1)
    for i, step in enumerate(steps):
        for name in _mentioned(step):
            last[name] = i
    dropped: dict[int, list[str]] = {}
    for name, i in last.items():
        if name not in kept:
            dropped.setdefault(i, []).append(name)
    result: list[Step] = [Free(tuple(dropped[-1]))] if -1 in dropped else []
    for i, step in enumerate(steps):
        result.append(step)
        if i in dropped:
            result.append(Free(tuple(dropped[i])))
    return result


def _mentioned(step: Step) -> list[str]:
    match step:
        case Launch() | Call():
            return [*step.inputs, *(name for name in step.outputs if name is not None)]
        case View():
            return [step.source, step.output]
    return []
