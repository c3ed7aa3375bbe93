"""The kernels that a plan may be made of: what each can compute inside itself, read, and write besides."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from egcompile.extract.choices import Choices
from egcompile.extract.facts import Facts, writes
from egcompile.extract.fusible import OWNERS, Role, Space, covers, fusible

RECOMPUTED = 3
"""Values with readers outside the kernel that may be computed inside it, one within another; those that only
move others are free.

Three are a convolution's bias, the norm that reads the sum, and the activation of that.
"""

LARGEST = 96
"""Classes that a kernel may compute; what lies beyond is read from memory, where it can be."""


@dataclass(frozen=True, slots=True)
class Edge:
    """An operand of an e-node inside a kernel: e-nodes that may compute it there, and whether to read it."""

    node: int
    position: int
    operand: int
    inline: tuple[int, ...]
    readable: bool


@dataclass(slots=True)
class Candidate:
    """A kernel around `root`.

    root        the class that it is made for: written by a loop kernel, a tuple for a named one
    nodes       the e-nodes that it may be made around: one for a named kernel, a contraction or a call
    owner       whether it is one of the latter, which no loop computes
    members     class -> e-nodes that may be computed inside, the root of a loop kernel among them
    edges       operands of all these, but for constants
    constants   e-node -> (operand position, constant): they are part of every kernel that asks for them
    covering    member -> edges through which all of it is computed just once, if the reader's value is
    storable    members that may be outputs besides the root
    spaces      rows of the row reductions among the members
    evaluations member -> elements that are computed of it, at most
    """

    root: int
    nodes: tuple[int, ...]
    owner: bool
    members: dict[int, list[int]] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    constants: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    covering: dict[int, list[Edge]] = field(default_factory=dict)
    storable: list[int] = field(default_factory=list)
    spaces: dict[Space, list[int]] = field(default_factory=dict)
    evaluations: dict[int, int] = field(default_factory=dict)


class Kernels:
    """Builds the candidates of an e-graph."""

    def __init__(self, table: Choices, known: Facts) -> None:
        self.table, self.known = table, known

    def all(self) -> Iterator[Candidate]:
        """One a class that a loop kernel may write, one a named kernel, contraction or call."""
        table, known = self.table, self.known
        for c, nodes in enumerate(table.nodes):
            if known.writable[c]:
                roots = [n for n in nodes if writes(table, known.viewable, known.evaluable, n)]
                if (found := self._grown(Candidate(c, tuple(roots), False))) is not None:
                    yield found
            for n in nodes:
                if table.role(n) in OWNERS and (found := self._grown(Candidate(c, (n,), True))) is not None:
                    yield found

    def _grown(self, kernel: Candidate) -> Candidate | None:
        if kernel.owner and self.table.role(kernel.nodes[0]) is Role.CALL:
            kernel.edges = [Edge(n, p, k, (), True) for n in kernel.nodes for p, k in self._operands(n)]
            return kernel if all(self.known.memory[e.operand] for e in kernel.edges) else None
        self._collect(kernel)
        if not self._connect(kernel):
            return None
        self._cover(kernel)
        for nodes in kernel.members.values():
            for n in nodes:
                if self.table.role(n) is Role.ROW_REDUCTION:
                    kernel.spaces.setdefault(self.table.sites[n].space, []).append(n)
        return kernel

    def _operands(self, n: int) -> list[tuple[int, int]]:
        return list(enumerate(self.table.operands[n]))

    def inline(self, n: int, position: int, root: int) -> tuple[int, ...]:
        """The e-nodes of an operand that can be computed with `n`, in a kernel around e-node `root`."""
        if self.table.role(root) not in (Role.GEMM, Role.CALL):
            return self.known.inline[n, position]
        sites, known = self.table.sites, self.known
        return tuple(
            m
            for m in self.table.nodes[self.table.operands[n][position]]
            if known.evaluable[m]
            and fusible(sites[m], sites[n], position, sites[root], known.carried[m]) is None
        )

    def constant(self, n: int, position: int, root: int) -> int | None:
        """The constant that an operand may be, which is then part of the kernel and not read."""
        for m in self.inline(n, position, root):
            if self.table.role(m) is Role.CONSTANT:
                return m
        return None

    def _collect(self, kernel: Candidate) -> None:
        """Classes that may be computed inside, readers before operands."""
        table, root = self.table, kernel.nodes[0]
        readers: dict[int, list[tuple[int, int]]] = {}
        heap: list[int] = []
        depth: dict[int, int] = {}

        def open(c: int, nodes: list[int]) -> None:
            for n in nodes:
                for position, k in self._operands(n):
                    if self.inline(n, position, root) and self.constant(n, position, root) is None:
                        if k not in readers:
                            heapq.heappush(heap, -k)
                        readers.setdefault(k, []).append((n, position))

        inside = set(kernel.nodes)
        if not kernel.owner:
            kernel.members[kernel.root] = list(kernel.nodes)
            kernel.evaluations[kernel.root] = table.tensor(kernel.root).numel
        depth[kernel.root] = 0
        open(kernel.root, list(kernel.nodes))
        done = {kernel.root}
        while heap:
            k = -heapq.heappop(heap)
            if k in done:
                continue
            done.add(k)
            moved = all(table.role(n) is Role.MOVEMENT for n in table.nodes[k])
            outside = not moved and any(m not in inside for m, _ in table.consumers[k])
            depth[k] = outside + min(depth[table.owner[n]] for n, _ in readers[k])
            too_far = depth[k] > RECOMPUTED or len(kernel.members) >= LARGEST
            if too_far and self.known.memory[k]:
                continue
            nodes = list(dict.fromkeys(m for n, p in readers[k] for m in self.inline(n, p, root)))
            kernel.members[k] = nodes
            kernel.evaluations[k] = self._evaluated(kernel, k, readers[k])
            inside.update(nodes)
            open(k, nodes)

    def _evaluated(self, kernel: Candidate, k: int, readers: list[tuple[int, int]]) -> int:
        table, own = self.table, self.table.tensor(k).numel
        if any(self.known.carried[m] for m in table.nodes[k]):
            return own  # on its rows, once
        counts = [own]
        for n, _ in readers:
            reduction = table.role(n) in (Role.ROW_REDUCTION, Role.REDUCTION)
            if not reduction and not (kernel.owner and n == kernel.nodes[0]):
                counts.append(kernel.evaluations[table.owner[n]])
        return max(counts)

    def _connect(self, kernel: Candidate) -> bool:
        """The edges among members, and to memory. Drops what lacks an operand; False if the root does."""
        usable: dict[int, list[Edge]] = {}
        dropped = True
        while dropped:
            dropped = False
            usable.clear()
            for c, nodes in sorted(kernel.members.items()):
                kept = [n for n in nodes if self._edges(kernel, n, usable)]
                dropped = dropped or len(kept) < len(nodes)
                kernel.members[c] = kept
        if kernel.owner:
            kernel.nodes = tuple(n for n in kernel.nodes if self._edges(kernel, n, usable))
        else:
            kernel.nodes = tuple(kernel.members[kernel.root])
        kernel.members = {c: nodes for c, nodes in kernel.members.items() if nodes}
        kernel.edges = [edge for edges in usable.values() for edge in edges]
        return bool(kernel.nodes)

    def _edges(self, kernel: Candidate, n: int, usable: dict[int, list[Edge]]) -> bool:
        known, root = self.known, kernel.nodes[0]
        edges = []
        kernel.constants[n] = []
        for position, k in self._operands(n):
            if (constant := self.constant(n, position, root)) is not None:
                kernel.constants[n].append((position, constant))
                continue
            members = kernel.members.get(k, ())
            inline = tuple(m for m in self.inline(n, position, root) if m in members)
            readable = known.memory[k] and not known.viewable[n]
            if not inline and not readable:
                return False
            edges.append(Edge(n, position, k, inline, readable))
        usable[n] = edges
        return True

    def _cover(self, kernel: Candidate) -> None:
        """Which members can be outputs besides: computed whole, in the same phase, read by nobody before."""
        table, known = self.table, self.known
        root = table.sites[kernel.nodes[0]]
        into: dict[int, list[Edge]] = {}
        read = 0
        for edge in kernel.edges:
            if edge.inline:
                into.setdefault(edge.operand, []).append(edge)
            else:
                read |= known.depends[edge.operand]
        covered = {kernel.root}
        for c in sorted(kernel.members, reverse=True):
            if c == kernel.root:
                continue
            rows = any(known.carried[m] for m in kernel.members[c])
            edges = []
            for edge in into.get(c, ()):
                site = table.sites[edge.node]
                whole = covers(site, edge.position, root) and table.owner[edge.node] in covered
                if whole and (site.op.name != "expand" or rows):
                    edges.append(edge)
            if any(table.enodes[e.node].op.name != "expand" for e in edges):
                edges = [e for e in edges if table.enodes[e.node].op.name != "expand"]
            if edges:
                covered.add(c)
                kernel.covering[c] = edges
        late = known.backward[kernel.root]
        kernel.storable = [
            c
            for c in kernel.covering
            if known.writable[c] and not (late and known.forward[c]) and not read >> c & 1
        ]
