"""From a kernel to its source: lower the body, divide it into nests, render each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from egcompile.codegen.foreach import Family, Foreach, foreach, items
from egcompile.codegen.gemm import render_contraction
from egcompile.codegen.gemm_config import GemmConfig
from egcompile.codegen.heuristics import Config
from egcompile.codegen.launches import Step, shared
from egcompile.codegen.loops import render_nest
from egcompile.codegen.moments import shifted
from egcompile.codegen.nest import Nest, choose_nest, holds_rows, twice
from egcompile.codegen.pointwise import pointwise_function
from egcompile.codegen.scalar import HELPERS
from egcompile.codegen.source import Allocation, JitFunction, KernelSource, Launched, assemble
from egcompile.codegen.strewn import in_two
from egcompile.codegen.text import identifier
from egcompile.errors import CompileError
from egcompile.ir.graph import Graph
from egcompile.ir.node import Node, topological
from egcompile.ir.types import TensorType, accumulate_dtype
from egcompile.ops.build import constant, reshape_to
from egcompile.ops.core import input as input_op
from egcompile.ops.lower import lower
from egcompile.ops.opdef import REGISTRY, Kind
from egcompile.ops.pointwise import div
from egcompile.schedule.kernel import Buffer, Kernel
from egcompile.target import Target


def generate(kernel: Kernel, target: Target, config: Config | GemmConfig | None = None) -> KernelSource:
    """Triton source of `kernel`; `config` overrides the heuristics of its first nest, or of its contraction.

    Raises CompileError where the body holds an op that no generated kernel can hold, and TypeError for a
    `config` that is of the other kind.
    """
    body = lower(kernel.body)
    lowered = Kernel(kernel.name, body, kernel.inputs, kernel.outputs)
    if any(node.op.kind is Kind.CONTRACTION for node in body.nodes):
        if isinstance(config, Config):
            raise TypeError(f"{kernel.name} holds a contraction, which takes a GemmConfig")
        return render_contraction(lowered, target, config)
    if isinstance(config, GemmConfig):
        raise TypeError(f"{kernel.name} holds no contraction; it takes a Config")
    division = _Division(lowered, target, config)
    division.divide(lowered)
    return division.source()


class _Division:
    """The steps of one launcher, in order, and the temporaries between them."""

    def __init__(self, kernel: Kernel, target: Target, config: Config | None) -> None:
        self.name, self.target, self.config = kernel.name, target, config
        self.inputs = [node.attr("name") for node in kernel.body.inputs]
        self.arguments = [*self.inputs, *kernel.body.output_names]
        self.buffers = dict(zip(self.arguments, (*kernel.inputs, *kernel.outputs), strict=True))
        self.steps: list[Step] = []
        self.functions: set[str] = set()

    def source(self) -> KernelSource:
        """The launcher of all steps, small ones together."""
        nbytes = {name: buffer.distinct_bytes for name, buffer in self.buffers.items()}
        lines: list[Launched | Allocation] = []
        made = set(self.arguments)
        config = None
        for group in shared(self.steps, self.inputs, nbytes):
            launched: JitFunction | Foreach = group[0].function
            if len(group) > 1:
                families = [family for step in group for family in step.families()]
                launched = Foreach(launched.name, tuple(families))
            elif group[0] is self.steps[0] and isinstance(launched, JitFunction):
                config = launched.config
            names = [name for name in self.buffers if name in launched.parameters and name not in made]
            made.update(names)
            lines += [*(Allocation(name, self.buffers[name]) for name in names), launched]
        return assemble(self.name, self.arguments, lines, config)

    def divide(self, kernel: Kernel, role: str = "") -> None:
        """Appends the nests that compute the kernel's outputs."""
        kernel = _restrict(kernel, [i for i, b in enumerate(kernel.outputs) if b.type.numel])
        if not any(node.op.kind is Kind.REDUCTION for node in kernel.body.nodes):
            if len(parts := items(kernel)) > 1:
                self.foreach(parts, role)
                return
            for numel in dict.fromkeys(b.type.numel for b in kernel.outputs):
                same = [i for i, b in enumerate(kernel.outputs) if b.type.numel == numel]
                part = _restrict(kernel, same)
                config = self.take_config()
                render = functools.partial(pointwise_function, kernel=part, target=self.target, config=config)
                self.step(role, render)
            return
        if moments := shifted(kernel, lambda mean: holds_rows(mean, kernel, self.target, self.config)):
            kernel = _replace(kernel, moments)
        if halves := in_two(kernel):
            kernel = _replace(kernel, halves)
        nest, left, anchor = choose_nest(kernel, self.target, self.config)
        if nest is None:
            self.store_first(kernel, anchor, role)
            return
        self.take_config()
        self.render(nest, role)
        if left:
            self.divide(_restrict(kernel, left), role)

    def step(self, role: str, render: Callable[..., JitFunction]) -> None:
        """Appends the nest that `render` makes a function of, given its name and, for an item, `program`."""

        def families() -> tuple[Family, ...]:
            function = render(self.function_name("item"), program="part")
            return (Family(function, (function.tensors,)),)

        self.steps.append(Step(render(self.function_name(role)), families))

    def foreach(self, parts: Sequence[Kernel], role: str) -> None:
        """Appends independent pointwise work."""

        def render(kernel: Kernel) -> JitFunction:
            return pointwise_function(self.function_name("item"), kernel, self.target, config, program="part")

        config = self.take_config()
        launched = foreach(self.function_name(role), parts, render)
        self.steps.append(Step(launched, lambda: launched.families))

    def take_config(self) -> Config | None:
        """The caller's overrides, which are for the first nest."""
        config, self.config = self.config, None
        return config

    def function_name(self, role: str) -> str:
        name = base = f"_{self.name}_{role}" if role else f"_{self.name}"
        count = 1
        while name in self.functions or name in HELPERS:
            count += 1
            name = f"{base}_{count}"
        self.functions.add(name)
        return name

    def temporary(self, hint: str, shape: tuple[int, ...], node: Node) -> tuple[str, Buffer]:
        """Memory for a value as the kernel holds it: unrounded."""
        name = base = identifier(hint)
        count = 1
        while name in self.buffers:
            count += 1
            name = f"{base}_{count}"
        self.buffers[name] = Buffer.contiguous(TensorType(shape, accumulate_dtype(node.dtype)))
        return name, self.buffers[name]

    def store_first(self, kernel: Kernel, anchor: Node, role: str) -> None:
        """Computes the anchor, or what it waits for, and reductions like that, into memory; then the rest."""
        anchor = next(n for n in topological((anchor,)) if n.op.kind is Kind.REDUCTION)
        like = [
            n
            for n in kernel.body.nodes
            if n.op.kind is Kind.REDUCTION
            and n.attr("dims") == anchor.attr("dims")
            and n.inputs[0].shape == anchor.inputs[0].shape
            and not any(m.op.kind is Kind.REDUCTION for m in topological(n.inputs))
        ]
        if kernel.body.outputs == tuple(like):
            raise CompileError(f"no nest of {self.name} computes {anchor}")
        made = {n: self.temporary(n.op.name, n.shape, n) for n in like}
        names = tuple(name for name, _ in made.values())
        buffers = tuple(buffer for _, buffer in made.values())
        body = Graph(kernel.body.inputs, tuple(like), names)
        self.divide(Kernel(kernel.name, body, kernel.inputs, buffers), "reduce")
        leaves = {n: input_op(name=name, shape=n.shape, dtype=n.dtype) for n, (name, _) in made.items()}
        self.divide(_with_leaves(kernel, leaves, leaves, buffers), role)

    def render(self, nest: Nest, role: str) -> None:
        stored: dict[Node, tuple[str, Buffer]] = {}
        if nest.parts == 1 and all(w.index for w in nest.after):
            self.step(role, functools.partial(render_nest, nest=nest, temporaries=stored))
            return
        for p in nest.partials:
            stored[p.node] = self.temporary(f"{p.node.op.name}_partials", (nest.parts, *p.node.shape), p.node)
        self.step(role, functools.partial(render_nest, nest=nest, temporaries=stored))
        leaves, sums = {}, {}
        again = {n: twice(n) for n in nest.kernel.body.nodes}
        for p in nest.partials:
            partial, buffer = stored[p.node]
            leaves[p.node] = input_op(name=partial, shape=buffer.type.shape, dtype=p.node.dtype)
            for node in (p.node, *(n for n, first in again.items() if first is p.node)):
                sums[node] = _of_partials(node, p.node, leaves[p.node])
        outputs = [nest.kernel.body.output_names.index(w.name) for w in nest.after]
        kernel = _restrict(nest.kernel, outputs)
        self.divide(_with_leaves(kernel, sums, leaves, [b for _, b in stored.values()]), "finalize")


def _of_partials(node: Node, first: Node, leaf: Node) -> Node:
    """The reduction `first`, or `node` which reduces it again, from partial results along a leading axis."""
    dims = (0,) if node is first else (0, *(d + 1 for d in node.attr("dims")))
    if leaf.shape[0] == 1:
        leaf, dims = reshape_to(leaf, first.shape), tuple(d - 1 for d in dims[1:])
    reduction = REGISTRY["sum" if node.op.name == "mean" else node.op.name]
    total = reshape_to(reduction(leaf, dims=dims) if dims else leaf, node.shape)
    if node.op.name != "mean":
        return total
    return div(total, constant(first.inputs[0].tensor.numel // node.tensor.numel, total))


def _restrict(kernel: Kernel, outputs: Sequence[int]) -> Kernel:
    """The kernel of some of its outputs."""
    if list(outputs) == list(range(len(kernel.outputs))):
        return kernel
    body = Graph(
        kernel.body.inputs,
        tuple(kernel.body.outputs[i] for i in outputs),
        tuple(kernel.body.output_names[i] for i in outputs),
    )
    return Kernel(kernel.name, body, kernel.inputs, tuple(kernel.outputs[i] for i in outputs))


def _replace(kernel: Kernel, values: Mapping[Node, Node]) -> Kernel:
    """The kernel with some nodes replaced, in each other's replacements too."""
    new: dict[Node, Node] = {}
    stack = list(kernel.body.outputs)
    while stack:
        node = stack[-1]
        before = (values[node],) if node in values else node.inputs
        if waiting := [n for n in before if n not in new]:
            stack.extend(waiting)
            continue
        stack.pop()
        if node in values:
            new[node] = new[values[node]]
        else:
            inputs = tuple(new[i] for i in node.inputs)
            new[node] = node if inputs == node.inputs else Node.make(node.op, inputs, node.attrs)
    body = Graph(kernel.body.inputs, tuple(new[o] for o in kernel.body.outputs), kernel.body.output_names)
    return Kernel(kernel.name, body, kernel.inputs, kernel.outputs)


def _with_leaves(
    kernel: Kernel, values: Mapping[Node, Node], leaves: Mapping[Node, Node], buffers: Sequence[Buffer]
) -> Kernel:
    """The kernel with some nodes replaced, and the inputs that the replacements read."""
    kernel = _replace(kernel, values)
    inputs = (*kernel.body.inputs, *leaves.values())
    body = Graph(inputs, kernel.body.outputs, kernel.body.output_names)
    return Kernel(kernel.name, body, (*kernel.inputs, *buffers), kernel.outputs)
