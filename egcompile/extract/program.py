"""The 0/1 program: which e-node a class is computed by, in which kernels, and what goes through memory.

    M[c]      class c is in memory           X[n]     e-node n is picked         V[n]   as a view
    E[K,n]    e-node n is computed inside kernel K; of a root: K is launched
    R[K,c]    kernel K reads class c from memory
    G[K,c]    all of class c is computed in K just once, on the way to K's root: it can be an output

Every constraint is a clause "if this, then one of these", or "at most one of these":

    E[K,n] -> R[K,k] or E[K,m] for some m of operand k that can be computed with n
    R[K,k] -> M[k]          M[c] -> X[n] of a kernel of its own, V[n], or some G[K,c]
    V[n]   -> M[operand]    a projection X[n] -> X of a named kernel
    one e-node a class      one row space a kernel

so no constant in it is larger than 1, and its relaxation is close to the plan. Costs: a launch a root,
bytes a read and a written class, work an E[K,n]: recomputing and rereading are paid in each kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from egcompile.extract.candidates import Candidate, Edge
from egcompile.extract.choices import Choices
from egcompile.extract.cost import EACH_NODE, Costs
from egcompile.extract.facts import Facts
from egcompile.extract.fusible import OWNERS, Role


@dataclass(slots=True)
class Program:
    """Minimize `cost` (none below 0) over 0/1 variables.

    clauses   (condition, options): if the one, then some of the others; condition -1 always holds
    limits    (variables, most): at most so many of them
    """

    cost: list[float] = field(default_factory=list)
    clauses: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    limits: list[tuple[tuple[int, ...], int]] = field(default_factory=list)

    def variable(self, cost: float = 0.0) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def implies(self, condition: int, *options: int) -> None:
        self.clauses.append((condition, tuple(dict.fromkeys(options))))

    def at_most(self, most: int, variables: Iterable[int]) -> None:
        self.limits.append((tuple(dict.fromkeys(variables)), most))

    def holds(self, values: Sequence[int]) -> bool:
        """Whether values satisfy every clause and limit."""
        return all(
            any(values[v] for v in options) or (condition >= 0 and not values[condition])
            for condition, options in self.clauses
        ) and all(sum(values[v] for v in variables) <= most for variables, most in self.limits)


@dataclass(slots=True)
class Variables:
    """Which variable stands for what; kernels by their index among the candidates."""

    memory: dict[int, int] = field(default_factory=dict)
    picked: dict[int, int] = field(default_factory=dict)
    viewed: dict[int, int] = field(default_factory=dict)
    computed: dict[tuple[int, int], int] = field(default_factory=dict)
    read: dict[tuple[int, int], int] = field(default_factory=dict)
    covered: dict[tuple[int, int], int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    space: dict[tuple[int, int], int] = field(default_factory=dict)


class Builder:
    """Makes the program of an e-graph's candidates."""

    def __init__(self, table: Choices, known: Facts, kernels: list[Candidate], costs: Costs) -> None:
        self.table, self.known, self.kernels, self.costs = table, known, kernels, costs
        self.program = Program()
        self.at = Variables()
        self.writers: dict[int, list[int]] = defaultdict(list)

    def build(self) -> tuple[Program, Variables]:
        self._picks()
        for index in range(len(self.kernels)):
            self._kernel(index)
        self._memory()
        for root in dict.fromkeys(self.table.roots):
            self.program.implies(-1, self.at.memory[root])
        return self.program, self.at

    def _picks(self) -> None:
        table, at, program = self.table, self.at, self.program
        for c, nodes in enumerate(table.nodes):
            if self.known.memory[c]:
                inputs = any(table.role(n) is Role.INPUT for n in nodes)
                at.memory[c] = program.variable()
                if inputs:
                    program.implies(-1, at.memory[c])
            for n in nodes:
                role = table.role(n)
                if role in OWNERS:
                    at.picked[n] = program.variable(self._owned(n))
                elif role is Role.PROJECTION:
                    at.picked[n] = program.variable(EACH_NODE + self.costs.write(table.types[c]))
                elif len(nodes) > 1 and role is not Role.INPUT:
                    at.picked[n] = program.variable()
                if self.known.viewable[n] and self.known.memory[table.operands[n][0]]:
                    at.viewed[n] = program.variable(EACH_NODE)
            if len(nodes) > 1:
                program.at_most(1, (at.picked[n] for n in nodes if n in at.picked))

    def _owned(self, n: int) -> float:
        """A kernel of its own: launch and work, and the write where it has one output."""
        type = self.table.types[self.table.owner[n]]
        write = 0.0 if isinstance(type, tuple) else self.costs.write(type)
        return self.costs.kernel(self.table.sites[n]) + write

    def _kernel(self, index: int) -> None:
        kernel, table, at, program = self.kernels[index], self.table, self.at, self.program
        for c, nodes in kernel.members.items():
            launch = self.costs.launch if c == kernel.root else 0.0
            for n in nodes:
                work = self.costs.work(table.sites[n], self._evaluations(kernel, c, n))
                at.computed[index, n] = program.variable(launch + work)
                if n in at.picked:
                    program.implies(at.computed[index, n], at.picked[n])
        for n in kernel.nodes if kernel.owner else ():
            at.computed[index, n] = at.picked[n]
        for edge in kernel.edges:
            options = [at.computed[index, m] for m in edge.inline]
            if edge.readable:
                options.append(self._read(index, edge))
            program.implies(at.computed[index, edge.node], *options)
        if len(kernel.spaces) > 1:
            spaces = [program.variable() for _ in kernel.spaces]
            program.at_most(1, spaces)
            for space, reductions in zip(spaces, kernel.spaces.values()):
                for n in reductions:
                    at.space[index, n] = space
                    program.implies(at.computed[index, n], space)
        if not kernel.owner:
            self.writers[kernel.root].extend(at.computed[index, n] for n in kernel.nodes)
        for c in kernel.storable:
            self.writers[c].append(self._covered(index, c))

    def _evaluations(self, kernel: Candidate, c: int, n: int) -> int:
        if self.table.role(n) in (Role.ROW_REDUCTION, Role.REDUCTION):
            return self.table.tensor(self.table.operands[n][0]).numel
        return kernel.evaluations[c]

    def _read(self, index: int, edge: Edge) -> int:
        key = index, edge.operand
        cost = self.costs.read(self.table.sites[edge.node], edge.position, self.known.buffer(edge.operand))
        if key not in self.at.read:
            self.at.read[key] = self.program.variable(cost)
            self.program.implies(self.at.read[key], self.at.memory[edge.operand])
        return self.at.read[key]

    def _covered(self, index: int, c: int) -> int:
        """G[K,c]: computed in K, and so is a reader through which it is computed whole, up to the root."""
        key, kernel, at, program = (index, c), self.kernels[index], self.at, self.program
        if key in at.covered:
            return at.covered[key]
        at.covered[key] = variable = program.variable()
        program.implies(variable, *(at.computed[index, m] for m in kernel.members[c]))
        through = []
        for edge in kernel.covering[c]:
            reader = self.table.owner[edge.node]
            direct = reader == kernel.root
            through.append(at.computed[index, edge.node] if direct else self._covered(index, reader))
        program.implies(variable, *through)
        if any(self.table.enodes[e.node].op.name == "expand" for e in kernel.covering[c]):
            rows = [at.computed[index, n] for nodes in kernel.spaces.values() for n in nodes]
            program.implies(variable, *rows)
        return variable

    def _memory(self) -> None:
        table, at, program = self.table, self.at, self.program
        for c, nodes in enumerate(table.nodes):
            if c not in at.memory or any(table.role(n) is Role.INPUT for n in nodes):
                continue
            sources = []
            for n in nodes:
                role = table.role(n)
                if role in OWNERS or role is Role.PROJECTION:
                    sources.append(at.picked[n])
                elif n in at.viewed:
                    sources.append(at.viewed[n])
                    program.implies(at.viewed[n], at.memory[table.operands[n][0]])
                    if n in at.picked:
                        program.implies(at.viewed[n], at.picked[n])
                if role is Role.PROJECTION:
                    tuples = table.nodes[table.operands[n][0]]
                    program.implies(at.picked[n], *(at.picked[m] for m in tuples))
            if writers := self.writers.get(c):
                at.written[c] = program.variable(self.costs.write(table.types[c]))
                program.implies(at.written[c], *writers)
                sources.append(at.written[c])
            program.implies(at.memory[c], *sources)


