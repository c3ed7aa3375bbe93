"""The 0/1 program: which e-node a class is computed by, in which kernels, and what goes through memory.

    M[c]      class c is in memory           X[n]     e-node n is picked         V[n]   as a view
    E[K,n]    e-node n is computed inside kernel K; of a root: K is launched
    R[K,c]    kernel K reads class c from memory
    G[K,c]    all of class c is computed in K just once, on the way to K's root: it can be an output

Every constraint is a clause "if this, then one of these", or "at most one of these":

    E[K,n] -> R[K,k] or E[K,m] for some m of operand k that can be computed with n
    R[K,k] -> M[k]          M[c] -> X[n] of a kernel of its own, V[n], or some G[K,c]
    V[n]   -> M[operand]    E[K,n], V[n] -> X[n]         X[n] -> X[m] for some m of each operand
    one X[n] a class        one row space a kernel

so no constant in it is larger than 1. Costs: a launch a root, bytes a read and a written class, work an
E[K,n]: recomputing and rereading are paid in each kernel that does it.
"""

from __future__ import annotations

from collections import defaultdict

from egcompile.extract.candidates import Candidate, Edge
from egcompile.extract.choices import Choices
from egcompile.extract.cost import EACH_NODE, REPEATED, Costs
from egcompile.extract.facts import Facts
from egcompile.extract.fusible import OWNERS, Role
from egcompile.extract.program import Program, Variables


class Builder:
    """Makes the program of an e-graph's candidates.

    writers   class -> (kernel, variable by which that kernel writes it)
    sources   class -> variables by which it is in memory otherwise: a kernel of its own, or a view
    """

    def __init__(self, table: Choices, known: Facts, kernels: list[Candidate], costs: Costs) -> None:
        self.table, self.known, self.kernels, self.costs = table, known, kernels, costs
        self.program = Program()
        self.at = Variables()
        self.writers: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.sources: dict[int, list[int]] = {}

    def build(self) -> tuple[Program, Variables]:
        self._picks()
        for index in range(len(self.kernels)):
            self._kernel(index)
        self._memory()
        for root in dict.fromkeys(self.table.roots):
            self.program.implies(None, self.at.memory[root])
        return self.program, self.at

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
                if not (found := self.picked(k)):
                    continue
                program.implies(variable, *found)
                if k in at.memory and not self.known.inline[n, position]:
                    program.implies(variable, at.memory[k])

    def picked(self, c: int) -> list[int]:
        """The picks that compute a class; none for an input or a constant."""
        return [self.at.picked[n] for n in self.table.nodes[c] if n in self.at.picked]

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
            self.writers[kernel.root].extend((index, at.computed[index, n]) for n in kernel.nodes)
        for c in kernel.storable:
            self.writers[c].append((index, self._covered(index, c)))

    def _evaluations(self, kernel: Candidate, c: int, n: int) -> float:
        if self.table.role(n) in (Role.ROW_REDUCTION, Role.REDUCTION):
            return self.table.tensor(self.table.operands[n][0]).numel
        own = self.table.tensor(c).numel
        return own + REPEATED * (kernel.evaluations[c] - own)

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
            sources = self.sources[c] = []
            for n in nodes:
                role = table.role(n)
                if role in OWNERS or role is Role.PROJECTION:
                    sources.append(at.picked[n])
                elif n in at.viewed:
                    sources.append(at.viewed[n])
                    program.implies(at.viewed[n], at.memory[table.operands[n][0]])
                    program.implies(at.viewed[n], at.picked[n])
            writers = self.writers.get(c, ())
            for index, _ in writers:
                if (index, c) in at.read:  # a kernel does not read what it writes itself
                    others = (v for i, v in writers if i != index)
                    program.implies(at.read[index, c], *sources, *others)
            if writers:
                at.written[c] = program.variable(self.costs.write(table.types[c]))
                program.implies(at.written[c], *(v for _, v in writers))
                if loops := [at.picked[n] for n in table.loops(c) if n in at.picked]:
                    program.implies(at.written[c], *loops)
                program.implies(at.memory[c], *sources, at.written[c])
            else:
                program.implies(at.memory[c], *sources)
