"""From values of the program's variables to a plan, and from what is wrong with a plan to a cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from egcompile.errors import ExtractionError
from egcompile.extract.candidates import Candidate, Edge
from egcompile.extract.choices import Choices
from egcompile.extract.facts import Facts
from egcompile.extract.fusible import Role
from egcompile.extract.plan import BrokenView, Plan, PlannedKernel, cycles
from egcompile.extract.program import Variables

Cut = tuple[int, ...]
"""Variables that cannot all be 1."""


class Decoder:
    """Reads plans out of solutions of one program."""

    def __init__(self, table: Choices, known: Facts, kernels: Sequence[Candidate], at: Variables) -> None:
        self.table, self.known, self.kernels, self.at = table, known, kernels, at
        self.edges: list[dict[int, list[Edge]]] = []
        self.constants: list[dict[int, list[tuple[int, int]]]] = []
        self.makers: dict[int, list[int]] = defaultdict(list)
        for i, kernel in enumerate(kernels):
            edges: dict[int, list[Edge]] = defaultdict(list)
            for edge in kernel.edges:
                edges[edge.node].append(edge)
            self.edges.append(edges)
            self.constants.append(kernel.constants)
            self.makers[kernel.root].append(i)
            for c in kernel.storable:
                self.makers[c].append(i)

    def decode(self, values: Sequence[int]) -> tuple[Plan, list[Cut]]:
        """What the roots need of a solution. With cuts, the plan goes round in circles and is none."""
        plan = Plan()
        made: dict[int, PlannedKernel] = {}
        cuts: list[Cut] = []
        stack = list(dict.fromkeys(self.table.roots))
        seen = set(stack)
        while stack:
            c = stack.pop()
            needed: list[int] = []
            if any(self.table.role(n) is Role.INPUT for n in self.table.nodes[c]):
                continue
            maker = self._maker(c, values)
            if maker < 0:
                plan.viewed[c] = -1 - maker
                needed.append(self.table.operands[-1 - maker][0])
            else:
                if maker not in made:
                    made[maker] = self._kernel(maker, values, cuts)
                    plan.kernels.append(made[maker])
                    needed.extend(made[maker].reads)
                plan.written[c] = made[maker]
                made[maker].writes[c] = None
            for k in needed:
                if k not in seen:
                    seen.add(k)
                    stack.append(k)
        self.index = {id(kernel): i for i, kernel in made.items()}
        for ring in cycles(plan, self.table):
            cuts.append(tuple(dict.fromkeys(self._literal(plan, step) for step in ring)))
        return plan, cuts

    def _maker(self, c: int, values: Sequence[int]) -> int:
        """The kernel (its index) that writes a class, or -1 - (the e-node of the view that it is)."""
        table, at = self.table, self.at
        for n in table.nodes[c]:
            if table.role(n) is Role.PROJECTION and values[at.picked[n]]:
                for i in self.makers[table.operands[n][0]]:
                    if values[at.picked[self.kernels[i].nodes[0]]]:
                        return i
        for i in self.makers[c]:
            kernel = self.kernels[i]
            if kernel.root != c and values[at.covered[i, c]]:
                return i
            if kernel.root == c and kernel.owner and values[at.picked[kernel.nodes[0]]]:
                return i
        for n in table.nodes[c]:
            if n in at.viewed and values[at.viewed[n]]:
                return -1 - n
        for i in self.makers[c]:
            kernel = self.kernels[i]
            if kernel.root == c and any(values[at.computed[i, n]] for n in kernel.nodes):
                return i
        raise ExtractionError(f"the solution has nothing that puts class {c} in memory")

    def _kernel(self, i: int, values: Sequence[int], cuts: list[Cut]) -> PlannedKernel:
        kernel, table, at = self.kernels[i], self.table, self.at
        root = next(n for n in kernel.nodes if values[at.computed[i, n]])
        planned = PlannedKernel(kernel.root, root)
        order: dict[int, int] = {}
        state: dict[int, int] = {}  # e-node -> 1 while its operands are visited, 2 after
        path: list[int] = []
        stack: list[tuple[int, bool]] = [(root, False)]
        while stack:
            n, expanded = stack.pop()
            if expanded:
                state[n] = 2
                path.pop()
                order[table.owner[n]] = n
                continue
            if state.get(n):
                if state[n] == 1:
                    ring = path[path.index(n) :]
                    cuts.append(tuple(at.computed[i, m] for m in ring))
                continue
            state[n] = 1
            path.append(n)
            stack.append((n, True))
            inline = []
            for edge in self.edges[i].get(n, ()):
                m = next((m for m in edge.inline if values[at.computed[i, m]]), None)
                if m is None:
                    planned.reads[edge.operand] = None
                else:
                    inline.append(m)
                    planned.inlined.add((n, edge.position))
            for position, constant in self.constants[i].get(n, ()):
                order[table.owner[constant]] = constant
                planned.inlined.add((n, position))
            stack.extend((m, False) for m in reversed(inline))
        planned.computed = order
        if kernel.owner:
            del planned.computed[kernel.root]
        return planned

    def _literal(self, plan: Plan, step: tuple[str, int, int]) -> int:
        kind, a, b = step
        at = self.at
        if kind == "view":
            return at.viewed[b]
        i = self.index[id(plan.kernels[a])]
        if kind == "read":
            return at.read[i, b]
        return self._written(i, plan.kernels[a], b)

    def _written(self, i: int, planned: PlannedKernel, c: int) -> int:
        kernel = self.kernels[i]
        if c in planned.computed:
            return self.at.covered[i, c] if c != kernel.root else self.at.computed[i, planned.node]
        return self.at.picked[planned.node]

    def view_cut(self, plan: Plan, broken: BrokenView) -> Cut:
        """That view, of an operand that came about in that way."""
        view = self.at.viewed[plan.viewed[broken.c]]
        if broken.operand in plan.viewed:
            return view, self.at.viewed[plan.viewed[broken.operand]]
        planned = plan.written[broken.operand]
        return view, self._written(self.index[id(planned)], planned, broken.operand)
