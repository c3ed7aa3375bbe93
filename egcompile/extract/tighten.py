"""Clauses that every plan satisfies anyway, but fractions of plans do not: they bring the relaxation near.

Without them a relaxation computes a class by halves, in two kernels, with half of its operands each; or has
half of each of two choices, where both need the same operand, and that one by half too.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from egcompile.extract.candidates import Edge
from egcompile.extract.dominators import bits, needs, node_computed, node_stored
from egcompile.extract.formulate import Builder
from egcompile.extract.fusible import Role

MOST_READERS = 6
"""Kernels that may write and read a class up to which each pair of them gets a clause."""

MANY_KERNELS = 12
"""Kernels that may compute an e-node, on average, from which on a graph is dense."""


def tighten(made: Builder) -> None:
    """Adds the clauses to a built program."""
    _dominators(made)
    _somewhere(made)
    for index in range(len(made.kernels)):
        _read_anyway(made, index)
    for c, writers in made.writers.items():
        _one_has_written(made, c, writers)
    _one_kernel_for_all(made)


def _dominators(made: Builder) -> None:
    """What every plan computes and has in memory; of the rest, what several e-nodes of a class need."""
    table, at, program = made.table, made.at, made.program
    found = needs(table, made.known)
    stored = computed = 0
    for root in table.roots:
        stored |= found.stored[root]
        computed |= found.computed[root]
    for c in range(len(table.nodes)):
        if stored >> c & 1:
            program.implies(None, at.memory[c])
        if computed >> c & 1 and (picks := made.picked(c)):
            program.implies(None, *picks)
    for nodes in table.nodes:
        if len(nodes) > 1:
            both = [(n, node_computed(table, found, n) & ~computed) for n in nodes]
            _shared(made, both, made.picked)
            both = [(n, node_stored(table, made.known, found, n) & ~stored) for n in nodes]
            _shared(made, both, lambda k: [at.memory[k]])


def _shared(made: Builder, needed: Sequence[tuple[int, int]], options: Callable[[int], list[int]]) -> None:
    """For (e-node, bit set of what it needs) of one class: what two of them need, either one needs."""
    once = twice = 0
    for _, mask in needed:
        twice |= once & mask
        once |= mask
    for k in bits(twice):
        if then := options(k):
            made.program.implies([made.at.picked[n] for n, mask in needed if mask >> k & 1], *then)


def _somewhere(made: Builder) -> None:
    """What is picked is computed in a kernel or is a view; so is each operand, or that is in memory.

    Only along chains of row reductions, or where any kernel may compute much of the graph: there the
    relaxation is far off without. Elsewhere these clauses cost the solver more than they save.
    """
    at = made.at
    inside: dict[int, list[int]] = defaultdict(list)
    operands: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, kernel in enumerate(made.kernels):
        for nodes in kernel.members.values():
            for n in nodes:
                inside[n].append(at.computed[index, n])
        for edge in kernel.edges:
            operands[edge.node, edge.operand].extend(at.computed[index, m] for m in edge.inline)
    dense = sum(map(len, inside.values())) > MANY_KERNELS * len(inside)
    for n, variable in at.picked.items():
        if n not in inside or not (dense or made.known.carried[n]):
            continue
        viewed = [at.viewed[n]] if n in at.viewed else []
        made.program.implies(variable, *inside[n], *viewed)
        for k in dict.fromkeys(made.table.operands[n]):
            if made.picked(k):
                memory = [at.memory[k]] if k in at.memory else []
                made.program.implies(variable, *memory, *operands[n, k])


def _read_anyway(made: Builder, index: int) -> None:
    """What a kernel reads by whichever e-nodes it computes a class."""
    kernel, at = made.kernels[index], made.at
    if all(len(nodes) < 2 for nodes in kernel.members.values()):
        return
    edges: dict[int, list[Edge]] = defaultdict(list)
    for edge in kernel.edges:
        edges[edge.node].append(edge)
    reads: dict[int, int] = {}
    for c in sorted({kernel.root, *kernel.members}):
        needed = []
        for n in kernel.members.get(c, kernel.nodes):
            mask = 0
            for edge in edges[n]:
                if not edge.inline:
                    mask |= 1 << edge.operand
                elif not edge.readable:
                    mask |= reads.get(edge.operand, 0)
            needed.append((n, mask))
        reads[c] = functools.reduce(operator.and_, (mask for _, mask in needed))
        if len(needed) > 1 or c == kernel.root:
            for k in bits(functools.reduce(operator.or_, (mask for _, mask in needed))):
                given = [at.computed[index, n] for n, mask in needed if mask >> k & 1]
                made.program.implies(given, at.read[index, k])


def _one_has_written(made: Builder, c: int, writers: Sequence[tuple[int, int]]) -> None:
    """Of two kernels that both read a class, neither wrote it."""
    read = made.at.read
    reading = [i for i in dict.fromkeys(i for i, _ in writers) if (i, c) in read]
    if len(reading) <= MOST_READERS:
        for i, j in itertools.combinations(reading, 2):
            others = (v for k, v in writers if k not in (i, j))
            made.program.implies((read[i, c], read[j, c]), made.at.memory[c], *made.sources[c], *others)


def _one_kernel_for_all(made: Builder) -> None:
    """A kernel whose every output another one gives too is not run beside that one, nor reads of it."""
    table = made.table
    outputs: dict[int, set[int]] = defaultdict(set)  # tuple class -> classes of its outputs
    givers: dict[int, list[int]] = defaultdict(list)  # class -> tuple classes that it is an output of
    for n, site in enumerate(table.sites):
        if site.role is Role.PROJECTION:
            outputs[table.operands[n][0]].add(table.owner[n])
            givers[table.owner[n]].append(table.operands[n][0])
    for less, given in outputs.items():
        for more in {m for c in given for m in givers[c]} - {less}:
            apart = not any(made.known.depends[more] >> c & 1 for c in given)
            if apart and given <= outputs[more] and (given < outputs[more] or less < more):
                made.program.at_most(1, (*made.picked(less), *made.picked(more)))
                _reads_of_others(made, less, more, outputs[more])


def _reads_of_others(made: Builder, less: int, more: int, given: Iterable[int]) -> None:
    at = made.at
    kernels = [i for i, kernel in enumerate(made.kernels) if kernel.root == less]
    for c in given:
        theirs = {at.picked[n] for n in made.table.nodes[c] if more in made.table.operands[n]}
        others = [v for v in made.sources[c] if v not in theirs]
        others += [at.written[c]] if c in at.written else []
        for i in kernels:
            if (i, c) in at.read:
                made.program.implies(at.read[i, c], *others)
