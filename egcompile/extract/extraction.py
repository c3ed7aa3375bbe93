"""Extraction: the cheapest joint plan in an e-graph, over all outputs and gradients at once."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from egcompile.config import logger
from egcompile.errors import ExtractionError, NoSolution
from egcompile.extract.baseline import as_values, greedy, plain, unfused
from egcompile.extract.candidates import Candidate, Kernels
from egcompile.extract.choices import Choices, choices
from egcompile.extract.cost import Costs
from egcompile.extract.decode import Decoder
from egcompile.extract.facts import Facts, Layout, facts
from egcompile.extract.formulate import Builder
from egcompile.extract.plan import BrokenView, Plan, cost, cycles, lay_out
from egcompile.extract.program import Program, Variables
from egcompile.extract.solve import Solution, solve
from egcompile.extract.tighten import tighten
from egcompile.ir.buffer import Buffer
from egcompile.ir.graph import Graph
from egcompile.ir.joint import Joint
from egcompile.ir.node import Node
from egcompile.language.egraph import EGraph
from egcompile.target import Target

Mode = Literal["exact", "greedy", "unfused"]

MOST_CUTS = 50
"""Rounds of cutting off plans that go round in circles before extraction gives up on them."""


@dataclass(frozen=True)
class KernelPlan:
    """One launch or call: made around `root`, computing `nodes` inside, operands first.

    inlined   (reader, operand position) computed inside, not read from memory
    reads     values that are in memory before
    writes    values that are after; projections of a root of several outputs among them. A part of a named
              kernel, made again, writes the one output of it that its root is equal to
    """

    root: Node
    nodes: tuple[Node, ...]
    inlined: frozenset[tuple[Node, int]]
    reads: tuple[Node, ...]
    writes: tuple[Node, ...]


@dataclass(frozen=True)
class Stats:
    """What extraction did. Costs are predicted microseconds.

    mode      what was asked for
    taken     the plan that it came to: `mode`, or after it in `greedy`, `unfused`, `plain` the first that can
              run, where the solver found none in time or a plan's views are not to be had
    gap       of the plan to the proven bound, relative; 0 when it is the optimum of the program, 1 where
              nothing is proven
    live      classes with two or more usable e-nodes
    cuts      constraints added because a solution went round in circles
    parts     independent parts of the program, and how many of them differ and were solved
    """

    mode: Mode
    taken: str
    seconds: float
    gap: float
    classes: int
    nodes: int
    live: int
    variables: int
    clauses: int
    parts: int
    solved: int
    cuts: int
    kernels: int
    cost: float
    unfused_kernels: int
    unfused_cost: float
    greedy_kernels: int
    greedy_cost: float

    def __str__(self) -> str:
        return (
            f"{self._plan()}: {self.kernels} kernels, {self.cost:.1f} us predicted, gap {self.gap:.1%}, "
            f"{self.seconds:.2f} s; unfused {self.unfused_kernels} kernels, {self.unfused_cost:.1f} us; "
            f"greedy {self.greedy_kernels} kernels, {self.greedy_cost:.1f} us; "
            f"{self.live} live choices in {self.classes} classes, {self.nodes} e-nodes; "
            f"{self.variables} variables, {self.parts} parts, {self.solved} solved, {self.cuts} cuts"
        )

    def _plan(self) -> str:
        return self.mode if self.taken == self.mode else f"{self.taken} (there is no {self.mode} plan)"


@dataclass(frozen=True, eq=False)
class Extraction:
    """A plan as a graph.

    joint     the joint graph, rebuilt from the picked e-nodes
    kernels   the launches and calls, in no particular order
    views     values that lie in another's memory -> that operand of theirs
    buffers   how each written value, view and input lies; views have their offset in the base
    settled   values that comparisons must find again, to the bit (`egcompile.extract.settled`)
    """

    joint: Joint
    kernels: tuple[KernelPlan, ...]
    views: Mapping[Node, Node]
    buffers: Mapping[Node, Buffer]
    settled: frozenset[Node]
    stats: Stats

    @property
    def written(self) -> frozenset[Node]:
        return frozenset(node for kernel in self.kernels for node in kernel.writes)

    @property
    def inlined(self) -> frozenset[tuple[Node, int]]:
        """(reader, operand position) pairs where some kernel computes the operand inside itself."""
        return frozenset(edge for kernel in self.kernels for edge in kernel.inlined)


def extract(
    egraph: EGraph,
    target: Target,
    *,
    mode: Mode = "exact",
    time_limit: float = 30.0,
    strides: Mapping[str, tuple[int, ...]] | None = None,
) -> Extraction:
    """The cheapest plan for all outputs of `egraph.joint` on `target`.

    mode        `exact` solves the 0/1 program; `greedy` and `unfused` are the plans it is compared with
    time_limit  seconds for the solver, after which the best plan found is taken and its gap reported; if
                there is none, the greedy plan, else the unfused one, else that without views (`Stats.taken`)
    strides     of inputs that do not lie row-major, by name

    Raises ExtractionError where an output cannot be computed.
    """
    with _collector_paused():
        return _extract(egraph, target, mode, time_limit, strides or {})


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """The tables are large and free of cycles: the garbage collector would walk all that there is in vain."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _extract(
    egraph: EGraph, target: Target, mode: Mode, time_limit: float, strides: Mapping[str, tuple[int, ...]]
) -> Extraction:
    start = time.perf_counter()
    table = choices(egraph)
    known = facts(table, dict(strides))
    costs = Costs(target)
    candidates = list(Kernels(table, known).all())
    apart = unfused(table, known)
    quick = greedy(table, known, candidates, costs)
    built = Builder(table, known, candidates, costs)
    program, at = built.build()
    tighten(built)
    plans: list[tuple[str, Callable[[], Plan]]] = [
        ("greedy", lambda: quick),
        ("unfused", lambda: apart),
        ("plain", lambda: plain(table, known)),
    ]
    solution, cuts = None, 0
    if mode == "exact":
        try:
            best, solution, cuts = _exact(table, known, candidates, program, at, quick, start + time_limit)
            plans.insert(0, ("exact", lambda: best))
        except NoSolution as failure:
            logger("passes").warning("%s; another plan is taken", failure)
    taken, plan, layouts = _first_that_runs(plans[mode == "unfused" :], table, known)
    stats = Stats(
        mode=mode,
        taken=taken,
        seconds=time.perf_counter() - start,
        gap=solution.gap if solution is not None else float(mode == "exact"),
        classes=len(table.nodes),
        nodes=len(table.enodes),
        live=table.live,
        variables=len(program.cost),
        clauses=len(program.clauses),
        parts=0 if solution is None else solution.parts,
        solved=0 if solution is None else solution.solved,
        cuts=cuts,
        kernels=len(plan.kernels),
        cost=cost(plan, table, known, costs),
        unfused_kernels=len(apart.kernels),
        unfused_cost=cost(apart, table, known, costs),
        greedy_kernels=len(quick.kernels),
        greedy_cost=cost(quick, table, known, costs),
    )
    return _extraction(egraph, table, plan, layouts, stats, strides)


def _first_that_runs(
    plans: Sequence[tuple[str, Callable[[], Plan]]], table: Choices, known: Facts
) -> tuple[str, Plan, dict[int, Layout]]:
    """The first plan without circles whose views strides allow, and how its values lie."""
    for name, make in plans:
        plan = make()
        if not cycles(plan, table):
            layouts = lay_out(plan, table, known)
            if not isinstance(layouts, BrokenView):
                return name, plan, layouts
    raise ExtractionError(f"no plan can run, of {', '.join(name for name, _ in plans)}")


def _exact(
    table: Choices,
    known: Facts,
    candidates: list[Candidate],
    program: Program,
    at: Variables,
    quick: Plan,
    deadline: float,
) -> tuple[Plan, Solution, int]:
    """Solves, and solves again with a cut for each circle found, until the solution is a plan.

    Raises NoSolution where there was no time for that.
    """
    decoder = Decoder(table, known, candidates, at)
    seed = as_values(quick, table, candidates, program, at) if not cycles(quick, table) else None
    cuts = 0
    for _ in range(MOST_CUTS):
        solution = solve(program, seed, deadline - time.perf_counter())
        plan, found = decoder.decode(solution.values)
        if not found:
            layouts = lay_out(plan, table, known)
            if not isinstance(layouts, BrokenView):
                return plan, solution, cuts
            found = [decoder.view_cut(plan, layouts)]
        for cut in found:
            program.at_most(len(cut) - 1, cut)
        cuts += len(found)
        if seed is not None and not program.holds(seed):
            seed = None
    raise NoSolution(f"extraction still goes round in circles after {cuts} cuts")


def _extraction(
    egraph: EGraph,
    table: Choices,
    plan: Plan,
    layouts: dict[int, Layout],
    stats: Stats,
    strides: Mapping[str, tuple[int, ...]],
) -> Extraction:
    picks = plan.picks(table)
    nodes = _rebuild(table, picks)
    joint, graph = egraph.joint, egraph.joint.graph
    classes = (egraph.classes[c] for c in table.ids)
    origins = {nodes[c]: found.origins for c, found in enumerate(classes) if c in nodes and found.origins}
    outputs = tuple(nodes[c] for c in table.roots)
    count = len(joint.outputs)
    gradients = iter(outputs[count:])
    rebuilt = Joint(
        Graph(graph.inputs, outputs, graph.output_names, origins),
        joint.primals,
        joint.cotangents,
        outputs[:count],
        tuple(None if g is None else next(gradients) for g in joint.gradients),
    )
    kernels = tuple(
        KernelPlan(
            nodes[kernel.root],
            tuple(nodes[c] for c in sorted(kernel.computed)),
            frozenset((nodes[table.owner[n]], position) for n, position in kernel.inlined),
            tuple(nodes[c] for c in kernel.reads),
            tuple(nodes[c] for c in kernel.writes),
        )
        for kernel in plan.kernels
    )
    buffers = {nodes[c]: layout[0] for c, layout in layouts.items() if c in nodes}
    for node in graph.inputs:
        given = strides.get(str(node.attr("name")))
        buffers[node] = Buffer.contiguous(node.tensor) if given is None else Buffer(node.tensor, given)
    views = {nodes[c]: nodes[table.operands[n][0]] for c, n in plan.viewed.items()}
    settled = {c for c, site in zip(table.owner, table.sites, strict=True) if site.settled}
    return Extraction(
        rebuilt, kernels, views, buffers, frozenset(nodes[c] for c in settled if c in nodes), stats
    )


def _rebuild(table: Choices, picks: Mapping[int, int]) -> dict[int, Node]:
    """A node for each class of the plan, of its picked e-node."""
    nodes: dict[int, Node] = {}

    def pick(c: int) -> int:
        return picks[c] if c in picks else table.nodes[c][0]

    for c in [*picks, *table.roots]:
        stack = [(c, False)]
        while stack:
            v, expanded = stack.pop()
            if v in nodes:
                continue
            n = pick(v)
            if expanded:
                enode = table.enodes[n]
                nodes[v] = Node.make(enode.op, tuple(nodes[k] for k in table.operands[n]), enode.attrs)
            else:
                stack.append((v, True))
                stack.extend((k, False) for k in table.operands[n] if k not in nodes)
    return nodes
