"""A plan over the tables: kernels, what each computes, reads and writes; its cost, cycles and layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from egcompile.extract.choices import Choices, strong_components
from egcompile.extract.cost import EACH_NODE, Costs
from egcompile.extract.facts import Facts, Layout
from egcompile.extract.fusible import LOOPS, Role
from egcompile.extract.layout import dense, results, view
from egcompile.ir.buffer import Buffer


@dataclass(slots=True)
class PlannedKernel:
    """One launch, or one call of ATen.

    root      the class it is made for; a tuple's for a named kernel of several outputs
    node      the e-node that it is made around
    computed  class -> e-node, of the loops and constants computed inside
    inlined   (e-node, operand position) computed inside; other operands are read
    reads     classes read from memory
    writes    classes written, projections where the root is a tuple
    """

    root: int
    node: int
    computed: dict[int, int] = field(default_factory=dict)
    inlined: set[tuple[int, int]] = field(default_factory=set)
    reads: dict[int, None] = field(default_factory=dict)
    writes: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """kernels, and for every class in memory: the kernel that writes it, or the view (e-node) that it is.

    A class in neither is an input.
    """

    kernels: list[PlannedKernel] = field(default_factory=list)
    written: dict[int, PlannedKernel] = field(default_factory=dict)
    viewed: dict[int, int] = field(default_factory=dict)

    def picks(self, table: Choices) -> dict[int, int]:
        """The one e-node that each class in the plan is computed by."""
        picked = dict(self.viewed)
        for kernel in self.kernels:
            picked.update(kernel.computed)
            picked[kernel.root] = kernel.node
            for c in kernel.writes:
                if c not in picked:
                    picked[c] = next(n for n in table.nodes[c] if kernel.root in table.operands[n])
        return picked


def cost(plan: Plan, table: Choices, known: Facts, costs: Costs) -> float:
    """Microseconds, as the 0/1 program counts them, but for elements computed more than once in a kernel."""
    total = EACH_NODE * len(plan.viewed)
    for kernel in plan.kernels:
        root = table.sites[kernel.node]
        if root.role not in LOOPS:
            total += costs.kernel(root)
        else:
            total += costs.launch
        for c, n in kernel.computed.items():
            site = table.sites[n]
            reduction = site.role in (Role.ROW_REDUCTION, Role.REDUCTION)
            total += costs.work(site, table.tensor(table.operands[n][0] if reduction else c).numel)
        for k in kernel.reads:
            n = next(n for n in (kernel.node, *kernel.computed.values()) if k in table.operands[n])
            total += costs.read(table.sites[n], table.operands[n].index(k), known.buffer(k))
        for c in kernel.writes:
            total += costs.write(table.types[c])
            if isinstance(table.types[kernel.root], tuple) and c not in kernel.computed:
                total += EACH_NODE
    return total


def cycles(plan: Plan, table: Choices) -> list[list[tuple[str, int, int]]]:
    """Rings of kernels that wait for each other, at most one through each kernel of several outputs.

    A ring is a list of ("write", kernel, class), ("read", kernel, class), ("view", class, e-node), kernels
    by index.
    """
    index = {id(kernel): -1 - i for i, kernel in enumerate(plan.kernels)}
    successors: dict[int, list[int]] = {c: [index[id(k)]] for c, k in plan.written.items()}
    successors |= {c: [table.operands[n][0]] for c, n in plan.viewed.items()}
    for i, kernel in enumerate(plan.kernels):
        successors[-1 - i] = list(kernel.reads)
    for operands in list(successors.values()):
        for c in operands:
            successors.setdefault(c, [])
    rings = []
    for component in strong_components(successors):
        if len(component) == 1 and component[0] not in successors[component[0]]:
            continue
        inside = set(component)
        starts = [v for v in component if v < 0 and len(plan.kernels[-1 - v].writes) > 1] or component[:1]
        for start in starts:
            path = _ring(start, successors, inside)
            if path is not None:
                rings.append([_step(plan, path[i], path[i + 1]) for i in range(len(path) - 1)])
    return rings


def _ring(start: int, successors: dict[int, list[int]], inside: set[int]) -> list[int] | None:
    """The shortest way from `start` back to it."""
    previous: dict[int, int] = {}
    frontier = [start]
    while frontier:
        following = []
        for v in frontier:
            for w in successors[v]:
                if w == start:
                    path = [start, v]
                    while path[-1] != start:
                        path.append(previous[path[-1]])
                    return path[::-1]
                if w in inside and w not in previous:
                    previous[w] = v
                    following.append(w)
        frontier = following
    return None


def _step(plan: Plan, a: int, b: int) -> tuple[str, int, int]:
    if a < 0:
        return "read", -1 - a, b
    if b < 0:
        return "write", -1 - b, a
    return "view", a, plan.viewed[a]


@dataclass(frozen=True)
class BrokenView:
    """A view that the strides do not allow, given how its operand came to lie in this plan."""

    c: int
    operand: int


def lay_out(plan: Plan, table: Choices, known: Facts) -> dict[int, Layout] | BrokenView:
    """How each class in memory lies; views share the offset's origin with the value that is written."""
    layouts: dict[int, Layout] = {}

    def need(c: int) -> list[int]:
        if c in plan.viewed:
            return [table.operands[plan.viewed[c]][0]]
        kernel = plan.written.get(c)
        if kernel is None or c in kernel.computed:
            return []
        return [k for k in table.operands[kernel.node] if k not in kernel.computed]

    for c in _ordered(plan, need):
        if c in plan.viewed:
            n = plan.viewed[c]
            source = layouts[table.operands[n][0]][0]
            seen = view(table.enodes[n].op, table.enodes[n].attrs, table.tensor(c), source)
            if seen is None or (c in known.outputs and not seen.is_contiguous):
                return BrokenView(c, table.operands[n][0])
            layouts[c] = (seen,)
        elif (kernel := plan.written.get(c)) is None or c in kernel.computed:
            layouts[c] = known.layouts[c] if kernel is None else (dense(known.buffer(c)),)
        else:
            layouts[c] = (_written(kernel, table, known, layouts, c),)
    return layouts


def _written(
    kernel: PlannedKernel, table: Choices, known: Facts, layouts: dict[int, Layout], c: int
) -> Buffer:
    type = table.types[kernel.root]
    operands = [layouts.get(k, known.layouts[k])[0] for k in table.operands[kernel.node]]
    outputs = results(table.enodes[kernel.node].op, type if isinstance(type, tuple) else (type,), operands)
    if not isinstance(type, tuple):
        return outputs[0]
    (index,) = next(table.enodes[n].attrs for n in table.nodes[c] if kernel.root in table.operands[n])
    assert isinstance(index, int)
    return outputs[index]


def _ordered(plan: Plan, need: Callable[[int], list[int]]) -> list[int]:
    """Classes in memory, those that a layout depends on first."""
    order: dict[int, None] = {}
    for c in [*plan.written, *plan.viewed]:
        stack = [(c, False)]
        while stack:
            v, expanded = stack.pop()
            if v in order:
                continue
            if expanded:
                order[v] = None
            else:
                stack.append((v, True))
                stack.extend((k, False) for k in need(v) if k not in order)
    return list(order)
