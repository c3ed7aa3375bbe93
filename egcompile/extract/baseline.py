"""Plans that need no solver: every op a kernel, and what a greedy choice would give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from egcompile.extract.candidates import Candidate, Edge, Kernels
from egcompile.extract.choices import Choices
from egcompile.extract.cost import Costs
from egcompile.extract.facts import Facts
from egcompile.extract.fusible import LOOPS, OWNERS, Role
from egcompile.extract.plan import Plan, PlannedKernel
from egcompile.extract.program import Program, Variables


def unfused(table: Choices, known: Facts) -> Plan:
    """Each op as the joint graph has it, in a kernel of its own; views and constants stay free."""
    return _original(table, known, lambda n: known.viewable[n])


def plain(table: Choices, known: Facts) -> Plan:
    """The same with each movement a copy, which no strides stand in the way of."""
    return _original(table, known, lambda n: False)


def _original(table: Choices, known: Facts, viewed: Callable[[int], bool]) -> Plan:
    pick = [n if n is not None else nodes[0] for n, nodes in zip(table.original, table.nodes)]
    kernels = Kernels(table, known)

    def alone(n: int) -> PlannedKernel:
        kernel = PlannedKernel(table.owner[n], n)
        if table.role(n) in LOOPS:
            kernel.computed[kernel.root] = n
        for position, k in enumerate(table.operands[n]):
            if (m := kernels.constant(n, position, n)) is not None:
                kernel.computed[k] = m
                kernel.inlined.add((n, position))
            else:
                kernel.reads[k] = None
        return kernel

    return _assemble(table, pick, viewed, alone)


def greedy(table: Choices, known: Facts, candidates: Sequence[Candidate], costs: Costs) -> Plan:
    """The cheapest e-node a class, seen alone; then what only one kernel reads is computed inside it."""
    pick = _cheapest(table, known, costs)
    around = {n: kernel for kernel in candidates for n in kernel.nodes}
    edges = {n: _by_node(kernel) for n, kernel in around.items()}

    def viewed(n: int) -> bool:
        return known.viewable[n] and known.memory[table.operands[n][0]]

    home = _homes(table, pick, edges, viewed)

    def fused(n: int) -> PlannedKernel:
        kernel = around[n]
        planned = PlannedKernel(kernel.root, n)
        stack = [n]
        while stack:
            m = stack.pop()
            if table.owner[m] != kernel.root or not kernel.owner:
                planned.computed[table.owner[m]] = m
            for position, constant in kernel.constants.get(m, ()):
                planned.computed[table.owner[constant]] = constant
                planned.inlined.add((m, position))
            for edge in edges[n].get(m, ()):
                if edge.readable and home.get(edge.operand) != n:
                    planned.reads[edge.operand] = None
                else:
                    stack.append(pick[edge.operand])
                    planned.inlined.add((m, edge.position))
        return planned

    return _assemble(table, pick, viewed, fused)


def _homes(
    table: Choices,
    pick: Sequence[int],
    edges: Mapping[int, Mapping[int, Sequence[Edge]]],
    viewed: Callable[[int], bool],
) -> dict[int, int]:
    """Class -> the e-node whose kernel is the only one that reads it, and can compute it inside."""

    known: dict[tuple[int, int], bool] = {}

    def fits(root: int, edge: Edge) -> bool:
        """Whether the picked e-node can be computed there, and what it cannot read is picked so too."""
        picked = pick[edge.operand]
        if (root, picked) not in known:
            inner = edges[root].get(picked, ())
            known[root, picked] = all(e.readable or fits(root, e) for e in inner)
        return picked in edge.inline and known[root, picked]

    home: dict[int, int] = {}
    readers = _readers(table, pick)
    for c in sorted(readers, reverse=True):
        kernels: set[int | None] = {None} if c in table.roots else set()
        for m in readers[c]:
            reader = table.owner[m]
            if reader in home:
                kernels.add(home[reader])
            else:
                kernels.add(None if table.role(m) is Role.MOVEMENT and viewed(m) else m)
        (root, *others) = kernels
        if others or root is None or root not in edges:
            continue
        entering = [e for m in readers[c] for e in edges[root].get(m, ()) if e.operand == c]
        if entering and all(fits(root, e) for e in entering):
            home[c] = root
    return home


def _by_node(kernel: Candidate) -> dict[int, list[Edge]]:
    found: dict[int, list[Edge]] = {}
    for edge in kernel.edges:
        found.setdefault(edge.node, []).append(edge)
    return found


def _assemble(
    table: Choices,
    pick: Sequence[int],
    viewed: Callable[[int], bool],
    kernel: Callable[[int], PlannedKernel],
) -> Plan:
    """The kernels that the roots need, when each class is made as picked."""
    plan = Plan()
    made: dict[int, PlannedKernel] = {}
    stack = list(dict.fromkeys(table.roots))
    seen = set(stack)
    while stack:
        c = stack.pop()
        n = pick[c]
        needed: list[int] = []
        if table.role(n) is Role.INPUT:
            continue
        if table.role(n) is Role.MOVEMENT and viewed(n):
            plan.viewed[c] = n
            needed = list(table.operands[n])
        else:
            around = pick[table.operands[n][0]] if table.role(n) is Role.PROJECTION else n
            if around not in made:
                made[around] = kernel(around)
                plan.kernels.append(made[around])
                needed = list(made[around].reads)
            plan.written[c] = made[around]
            made[around].writes[c] = None
        for k in needed:
            if k not in seen:
                seen.add(k)
                stack.append(k)
    return plan


def _cheapest(table: Choices, known: Facts, costs: Costs) -> list[int]:
    """Bottom-up: an e-node's own kernel, and its operands' costs, each divided among its readers.

    Undivided, costs would grow with the number of paths, and all choices would tie.
    """
    pick: list[int] = []
    score: list[float] = []
    for c, nodes in enumerate(table.nodes):
        best, chosen = math.inf, table.original[c]
        for n in nodes:
            if any(k >= c for k in table.operands[n]):
                continue
            own = _alone(table, known, costs, n)
            own += sum(score[k] / len(table.consumers[k]) for k in dict.fromkeys(table.operands[n]))
            if own < best:
                best, chosen = own, n
        pick.append(nodes[0] if chosen is None else chosen)
        score.append(0.0 if math.isinf(best) else best)
    return pick


def _alone(table: Choices, known: Facts, costs: Costs, n: int) -> float:
    site, c = table.sites[n], table.owner[n]
    if site.role in (Role.INPUT, Role.CONSTANT) or known.viewable[n]:
        return 0.0
    if site.role is Role.PROJECTION:
        return costs.write(site.type)
    operands = enumerate(table.operands[n])
    reads = sum(costs.read(site, p, known.buffer(k)) for p, k in operands if not _constant(table, k))
    write = 0.0 if isinstance(site.type, tuple) else costs.write(site.type)
    if site.role in OWNERS:
        return costs.kernel(site) + reads + write
    return costs.launch + costs.work(site, table.tensor(c).numel) + reads + write


def _constant(table: Choices, c: int) -> bool:
    return any(table.role(n) is Role.CONSTANT for n in table.nodes[c])


def _readers(table: Choices, pick: Sequence[int]) -> dict[int, list[int]]:
    """The picked e-nodes that read each class that the roots need."""
    readers: dict[int, list[int]] = {c: [] for c in table.roots}
    stack = list(readers)
    while stack:
        n = pick[stack.pop()]
        for k in dict.fromkeys(table.operands[n]):
            if k not in readers:
                readers[k] = []
                stack.append(k)
            readers[k].append(n)
    return readers


def as_values(
    plan: Plan, table: Choices, kernels: Sequence[Candidate], program: Program, at: Variables
) -> list[int] | None:
    """A plan as values of the program's variables; None if it is outside of what the program can say."""
    values = [0] * len(program.cost)
    index = {n: i for i, kernel in enumerate(kernels) for n in kernel.nodes}
    picks = plan.picks(table)
    for n in picks.values():
        if n in at.picked:
            values[at.picked[n]] = 1
    for c, v in at.memory.items():
        inputs = any(table.role(n) is Role.INPUT for n in table.nodes[c])
        values[v] = int(inputs or c in plan.written or c in plan.viewed)
    for c, planned in plan.written.items():
        if c in planned.computed:
            values[at.written[c]] = 1
    for n in plan.viewed.values():
        if n not in at.viewed:
            return None
        values[at.viewed[n]] = 1
    for planned in plan.kernels:
        i = index.get(planned.node)
        if i is None:
            return None
        for n in planned.computed.values():
            if table.role(n) is Role.CONSTANT and (i, n) not in at.computed:
                continue
            if (i, n) not in at.computed:
                return None
            values[at.computed[i, n]] = 1
            if (i, n) in at.space:
                values[at.space[i, n]] = 1
        for k in planned.reads:
            if (i, k) not in at.read:
                return None
            values[at.read[i, k]] = 1
    return values if program.holds(values) else None
