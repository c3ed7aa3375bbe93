"""The 0/1 program: which e-node a class is computed by, in which kernels, and what goes through memory.

    M[c]      class c is in memory           X[n]     e-node n is picked         V[n]   as a view
    E[K,n]    e-node n is computed inside kernel K; of a root: K is launched
    R[K,c]    kernel K reads class c from memory
    G[K,c]    all of class c is computed in K just once, on the way to K's root: it can be an output

Every constraint is a clause "if this, then one of these", or "at most one of these":

    E[K,n] -> R[K,k] or E[K,m] for some m of operand k that can be computed with n
    R[K,k] -> M[k]          M[c] -> X[n] of a kernel of its own, V[n], or some G[K,c]
    V[n]   -> M[operand]    E[K,n], V[n] -> X[n]
    X[n]   -> X[m] for some m of each operand; M[operand] where nobody can compute it inside
    one X[n] a class        one row space a kernel

so no constant in it is larger than 1. What is said of X[n] follows for whole numbers from the rest; it keeps
the relaxation from computing a class by halves in several kernels, each with half of its operands.

Costs: a launch a root, bytes a read and a written class, work an E[K,n]: recomputing and rereading are paid
in each kernel that does it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from egcompile.extract.candidates import Candidate, Edge
from egcompile.extract.choices import Choices
from egcompile.extract.cost import EACH_NODE, Costs
from egcompile.extract.dominators import bits, needs, node_computed, node_stored
from egcompile.extract.facts import Facts
from egcompile.extract.fusible import LOOPS, OWNERS, Role


@dataclass(slots=True)
class Program:
    """Minimize `cost` (none below 0) over 0/1 variables.

    clauses   (conditions, options): if one of the former, then some of the latter. No conditions: always.
              Several conditions exclude each other
    limits    (variables, most): at most so many of them
    """

    cost: list[float] = field(default_factory=list)
    clauses: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    limits: list[tuple[tuple[int, ...], int]] = field(default_factory=list)

    def variable(self, cost: float = 0.0) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def implies(self, condition: int | Sequence[int] | None, *options: int) -> None:
        """None always holds."""
        if condition is None:
            condition = ()
        conditions = (condition,) if isinstance(condition, int) else tuple(condition)
        self.clauses.append((conditions, tuple(dict.fromkeys(options))))

    def at_most(self, most: int, variables: Iterable[int]) -> None:
        self.limits.append((tuple(dict.fromkeys(variables)), most))

    def holds(self, values: Sequence[int]) -> bool:
        """Whether values satisfy every clause and limit."""
        return all(
            any(values[v] for v in options) or (bool(conditions) and not any(values[v] for v in conditions))
            for conditions, options in self.clauses
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
        self.writers: dict[int, list[tuple[int, int]]] = defaultdict(list)  # class -> (kernel, variable)

    def build(self) -> tuple[Program, Variables]:
        self._picks()
        for index in range(len(self.kernels)):
            self._kernel(index)
        self._memory()
        self._somewhere()
        for root in dict.fromkeys(self.table.roots):
            self.program.implies(None, self.at.memory[root])
        self._dominators()
        return self.program, self.at

    def _dominators(self) -> None:
        """What every plan computes and has in memory; of the rest, what several e-nodes of a class need.

        These follow from the other clauses for whole numbers, but not in the relaxation.
        """
        table, at = self.table, self.at
        found = needs(table, self.known)
        stored = computed = 0
        for root in table.roots:
            stored |= found.stored[root]
            computed |= found.computed[root]
        for c in range(len(table.nodes)):
            if stored >> c & 1:
                self.program.implies(None, at.memory[c])
            if computed >> c & 1 and (picks := self._picked(c)):
                self.program.implies(None, *picks)
        for nodes in table.nodes:
            if len(nodes) > 1:
                self._shared([(n, node_computed(table, found, n) & ~computed) for n in nodes], self._picked)
                self._shared(
                    [(n, node_stored(table, self.known, found, n) & ~stored) for n in nodes],
                    lambda k: [at.memory[k]],
                )

    def _shared(self, needed: list[tuple[int, int]], options: Callable[[int], list[int]]) -> None:
        once = twice = 0
        for _, mask in needed:
            twice |= once & mask
            once |= mask
        for k in bits(twice):
            if then := options(k):
                self.program.implies([self.at.picked[n] for n, mask in needed if mask >> k & 1], *then)

    def _picks(self) -> None:
        table, at, program = self.table, self.at, self.program
        for c, nodes in enumerate(table.nodes):
            if self.known.memory[c]:
                inputs = any(table.role(n) is Role.INPUT for n in nodes)
                at.memory[c] = program.variable()
                if inputs:
                    program.implies(None, at.memory[c])
            for n in nodes:
                role = table.role(n)
                if role in OWNERS:
                    at.picked[n] = program.variable(self._owned(n))
                elif role is Role.PROJECTION:
                    at.picked[n] = program.variable(EACH_NODE + self.costs.write(table.types[c]))
                elif role not in (Role.INPUT, Role.CONSTANT):
                    at.picked[n] = program.variable()
                if self.known.viewable[n] and self.known.memory[table.operands[n][0]]:
                    at.viewed[n] = program.variable(EACH_NODE)
            if len(nodes) > 1:
                program.at_most(1, (at.picked[n] for n in nodes))
        for n, variable in at.picked.items():
            for position, k in enumerate(table.operands[n]):
                if not (found := self._picked(k)):
                    continue
                program.implies(variable, *found)
                if k in at.memory and not self.known.inline[n, position]:
                    program.implies(variable, at.memory[k])

    def _picked(self, c: int) -> list[int]:
        """The picks that compute a class; none for an input or a constant."""
        return [self.at.picked[n] for n in self.table.nodes[c] if n in self.at.picked]

    def _owned(self, n: int) -> float:
        """A kernel of its own: launch and work, and the write where it has one output."""
        type = self.table.types[self.table.owner[n]]
        write = 0.0 if isinstance(type, tuple) else self.costs.write(type)
        return self.costs.kernel(self.table.sites[n]) + write

    def _somewhere(self) -> None:
        """What is picked is computed in some kernel or is a view, and so is each operand of it."""
        at = self.at
        made: dict[int, list[int]] = defaultdict(list)
        within: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, kernel in enumerate(self.kernels):
            for nodes in kernel.members.values():
                for n in nodes:
                    made[n].append(at.computed[index, n])
            for edge in kernel.edges:
                within[edge.node, edge.operand].extend(at.computed[index, m] for m in edge.inline)
        for n, variable in at.picked.items():
            if self.table.role(n) not in LOOPS:
                continue
            viewed = [at.viewed[n]] if n in at.viewed else []
            self.program.implies(variable, *made[n], *viewed)
            for k in dict.fromkeys(self.table.operands[n]):
                if self._picked(k):
                    memory = [at.memory[k]] if k in at.memory else []
                    self.program.implies(variable, *memory, *within[n, k])

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
        self._read_anyway(index)
        if len(kernel.spaces) > 1:
            spaces = [program.variable() for _ in kernel.spaces]
            program.at_most(1, spaces)
            for space, reductions in zip(spaces, kernel.spaces.values()):
                for n in reductions:
                    at.space[index, n] = space
                    program.implies(at.computed[index, n], space)
        if not kernel.owner:
            self.writers[kernel.root].extend((index, at.computed[index, n]) for n in kernel.nodes)
        for c in kernel.storable:
            self.writers[c].append((index, self._covered(index, c)))

    def _read_anyway(self, index: int) -> None:
        """What a kernel reads by whichever e-nodes it computes a class: tightens the relaxation again."""
        kernel, at = self.kernels[index], self.at
        classes = {self.table.owner[n] for n in kernel.nodes} | kernel.members.keys()
        if all(len(kernel.members.get(c, ())) < 2 for c in classes):
            return
        edges: dict[int, list[Edge]] = defaultdict(list)
        for edge in kernel.edges:
            edges[edge.node].append(edge)
        reads: dict[int, int] = {}
        for c in sorted(classes):
            nodes = kernel.members.get(c, kernel.nodes)
            needed = []
            for n in nodes:
                mask = 0
                for edge in edges[n]:
                    if not edge.inline:
                        mask |= 1 << edge.operand
                    elif not edge.readable:
                        mask |= reads.get(edge.operand, 0)
                needed.append((n, mask))
            reads[c] = functools.reduce(operator.and_, (mask for _, mask in needed))
            if len(nodes) > 1 or c == kernel.root:
                for k in bits(functools.reduce(operator.or_, (mask for _, mask in needed))):
                    given = [at.computed[index, n] for n, mask in needed if mask >> k & 1]
                    self.program.implies(given, at.read[index, k])

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
        program.implies(variable, *(self._through(index, edge) for edge in kernel.covering[c]))
        if any(self.table.enodes[e.node].op.name == "expand" for e in kernel.covering[c]):
            rows = [at.computed[index, n] for nodes in kernel.spaces.values() for n in nodes]
            program.implies(variable, *rows)
        return variable

    def _through(self, index: int, edge: Edge) -> int:
        """A reader is computed whole in K, by that e-node, with that operand inside."""
        kernel, at = self.kernels[index], self.at
        reader = self.table.owner[edge.node]
        whole = at.computed[index, edge.node] if reader == kernel.root else self._covered(index, reader)
        alternatives = (*kernel.members.get(reader, ()), *kernel.members[edge.operand])
        if len(alternatives) <= 2:
            return whole
        variable = self.program.variable()
        self.program.implies(variable, whole)
        self.program.implies(variable, at.computed[index, edge.node])
        self.program.implies(variable, *(at.computed[index, m] for m in edge.inline))
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
                    program.implies(at.viewed[n], at.picked[n])
            writers = self.writers.get(c, ())
            self._own_writes(c, sources, writers)
            if writers:
                at.written[c] = program.variable(self.costs.write(table.types[c]))
                program.implies(at.written[c], *(v for _, v in writers))
                if loops := [at.picked[n] for n in table.loops(c) if n in at.picked]:
                    program.implies(at.written[c], *loops)
                sources.append(at.written[c])
            program.implies(at.memory[c], *sources)

    def _own_writes(self, c: int, sources: list[int], writers: Sequence[tuple[int, int]]) -> None:
        """A kernel does not read what it writes itself; of two readers, only one can have written."""
        reading = [i for i in dict.fromkeys(i for i, _ in writers) if (i, c) in self.at.read]
        for i in reading:
            others = (v for j, v in writers if j != i)
            self.program.implies(self.at.read[i, c], *sources, *others)
        for i, j in itertools.combinations(reading, 2):
            others = (v for k, v in writers if k not in (i, j))
            readers = (self.at.read[i, c], self.at.read[j, c])
            self.program.implies(readers, self.at.memory[c], *sources, *others)
