"""Independent items in one launch: a range of programs for each, and one function for those alike.

Here of two items that take two programs each, and one of another kind:

    program = tl.program_id(0)
    if program < 4:
        item_0 = program // 2
        x0_0_ptr = x0_ptr
        x0_0_ptr = tl.where(item_0 == 1, x2_ptr, x0_0_ptr)
        _foreach_mul_0_item(program % 2, x0_0_ptr, ...)
    if (program >= 4) & (program < 5):
        _foreach_mul_0_item_2(program - 4, x4_ptr, ...)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from egcompile.codegen.pointwise import parameters
from egcompile.codegen.source import JitFunction
from egcompile.ir.graph import Graph
from egcompile.ir.node import Node, topological
from egcompile.ops.core import input as input_op
from egcompile.ops.opdef import Kind
from egcompile.schedule.kernel import Buffer, Kernel


def items(kernel: Kernel) -> list[Kernel]:
    """The parts of a body that have nothing in common but constants, as kernels over their own inputs.

    Outputs of one part that differ in size are parts too: a pointwise function has one.
    """
    part: dict[Node, int] = {}
    sizes: list[tuple[int, int]] = []
    for i, output in enumerate(kernel.body.outputs):
        found = [n for n in topological([output]) if n.op.kind is not Kind.LEAF or n in kernel.body.inputs]
        joined = {part[n] for n in found if n in part} or {i}
        first = min(joined)
        part |= {n: first for n, p in part.items() if p in joined} | dict.fromkeys(found, first)
        sizes.append((i, output.tensor.numel))
    groups: dict[tuple[int, int], list[int]] = {}
    for i, numel in sizes:
        groups.setdefault((part.get(kernel.body.outputs[i], i), numel), []).append(i)
    return [_item(kernel, outputs) for outputs in groups.values()]


def _item(kernel: Kernel, outputs: Sequence[int]) -> Kernel:
    roots = tuple(kernel.body.outputs[i] for i in outputs)
    buffers = dict(zip(kernel.body.inputs, kernel.inputs))
    inputs = tuple(n for n in topological(roots) if n in buffers)
    body = Graph(inputs, roots, tuple(kernel.body.output_names[i] for i in outputs))
    return Kernel(
        kernel.name, body, tuple(buffers[n] for n in inputs), tuple(kernel.outputs[i] for i in outputs)
    )


@dataclass(frozen=True)
class Family:
    """Items that do the same work on the same layouts, and the function that does it for one.

    tensors   the arguments of each item, as the function's tensors
    """

    function: JitFunction
    tensors: tuple[tuple[str, ...], ...]

    @property
    def programs(self) -> int:
        """Programs of one item."""
        return self.function.programs

    @functools.cached_property
    def parameters(self) -> list[str]:
        """The arguments of all items that the function reads or writes."""
        used = [t in self.function.parameters for t in self.function.tensors]
        return [name for tensors in self.tensors for name, own in zip(tensors, used, strict=True) if own]


@dataclass(frozen=True)
class Foreach:
    """One launch of several families."""

    name: str
    families: tuple[Family, ...]

    @property
    def programs(self) -> int:
        return sum(f.programs * len(f.tensors) for f in self.families)

    @functools.cached_property
    def parameters(self) -> list[str]:
        return list(dict.fromkeys(name for family in self.families for name in family.parameters))

    def text(self) -> str:
        head = f"@triton.jit\ndef {self.name}({', '.join(f'{name}_ptr' for name in self.parameters)}):"
        lines, start = ["program = tl.program_id(0)"], 0
        for i, family in enumerate(self.families):
            stop = start + family.programs * len(family.tensors)
            inside = f"(program >= {start}) & (program < {stop})" if start else f"program < {stop}"
            lines.append(f"if {inside}:")
            lines.extend(f"    {line}" for line in self._call(i, family, start))
            start = stop
        functions = [family.function.text() for family in self.families]
        return "\n\n\n".join([*functions, "\n".join([head, *(f"    {line}" for line in lines)])])

    def _call(self, number: int, family: Family, start: int) -> Iterator[str]:
        place = f"program - {start}" if start else "program"
        chosen = list(family.tensors[0])
        if len(family.tensors) > 1:
            item, place = place, "0"
            if family.programs > 1:
                counted = f"({item})" if start else item
                item, place = f"{counted} // {family.programs}", f"{counted} % {family.programs}"
            yield f"item_{number} = {item}"
            for j, parameter in enumerate(family.function.tensors):
                if parameter not in family.function.parameters:
                    continue
                name = f"{parameter}_{number}"
                yield f"{name}_ptr = {chosen[j]}_ptr"
                for k, others in enumerate(family.tensors[1:], 1):
                    yield f"{name}_ptr = tl.where(item_{number} == {k}, {others[j]}_ptr, {name}_ptr)"
                chosen[j] = name
        pointers = dict(zip(family.function.tensors, chosen))
        passed = [f"{pointers[p]}_ptr" for p in family.function.parameters]
        constants = [f"{name}={value}" for name, value in family.function.constants.items()]
        yield f"{family.function.name}({', '.join([place, *passed, *constants])})"

    def launch(self) -> str:
        warps = max(f.function.config.num_warps for f in self.families)
        passed = [*self.parameters, f"num_warps={warps}"]
        return f"{self.name}[({self.programs},)]({', '.join(passed)})"


def foreach(name: str, parts: Sequence[Kernel], render: Callable[[Kernel], JitFunction]) -> Foreach:
    """The launch of `parts`, each of which is pointwise work with outputs of one size, by what `render`
    makes of one of each family.
    """
    known: dict[object, list[tuple[str, ...]]] = {}
    kernels: dict[object, Kernel] = {}
    for kernel in parts:
        tensors = parameters(kernel)
        key, alike = _canonical(kernel)
        kernels.setdefault(key, alike)
        known.setdefault(key, []).append(tensors)
    families = [Family(render(alike), tuple(known[key])) for key, alike in kernels.items()]
    return Foreach(name, tuple(families))


def _canonical(kernel: Kernel) -> tuple[object, Kernel]:
    """The kernel with its arguments named by position, and what is equal for kernels that are then alike."""
    new: dict[Node, Node] = {
        node: input_op(name=f"x{i}", shape=node.shape, dtype=node.dtype)
        for i, node in enumerate(kernel.body.inputs)
    }
    for node in topological(kernel.body.outputs):
        if node not in new:
            new[node] = Node.make(node.op, tuple(new[i] for i in node.inputs), node.attrs)
    inputs = tuple(new[i] for i in kernel.body.inputs)
    body = Graph(inputs, tuple(new[o] for o in kernel.body.outputs))
    alike = Kernel(kernel.name, body, kernel.inputs, kernel.outputs)
    buffers: tuple[tuple[Buffer, ...], ...] = (kernel.inputs, kernel.outputs)
    return (inputs, body.outputs, *buffers), alike
