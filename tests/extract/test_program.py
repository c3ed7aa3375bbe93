"""The 0/1 program itself: tightening changes no optimum, decoded plans cost what it says, none is cheaper."""

from __future__ import annotations

import pytest

from egcompile.extract.candidates import Candidate, Kernels
from egcompile.extract.choices import Choices, choices
from egcompile.extract.cost import Costs
from egcompile.extract.decode import Decoder
from egcompile.extract.dominators import bits, needs
from egcompile.extract.facts import Facts, facts
from egcompile.extract.formulate import Builder
from egcompile.extract.plan import BrokenView, Plan, cost, lay_out
from egcompile.extract.solve import Solution, solve
from egcompile.extract.tighten import tighten
from egcompile.ops import add, exp, matmul, neg, relu, transpose
from egcompile.target import Target
from tests.extract.builder import egraph, forward, leaf
from tests.extract.random_graphs import RandomCosts, random_joint

TARGET = Target.parse("cuda:90")
Parts = tuple[Choices, Facts, list[Candidate]]


def _parts(seed: int) -> Parts:
    table = choices(egraph(*random_joint(seed, steps=18)))
    known = facts(table, {})
    return table, known, list(Kernels(table, known).all())


def _solved(parts: Parts, costs: Costs, tight: bool = True) -> tuple[Solution, Plan]:
    """Solves with cuts until the solution is a plan."""
    table, known, kernels = parts
    built = Builder(table, known, kernels, costs)
    program, at = built.build()
    if tight:
        tighten(built)
    decoder = Decoder(table, known, kernels, at)
    while True:
        solution = solve(program, None, 30.0)
        plan, cuts = decoder.decode(solution.values)
        laid = None if cuts else lay_out(plan, table, known)
        if isinstance(laid, BrokenView):
            cuts = [decoder.view_cut(plan, laid)]
        if not cuts:
            return solution, plan
        for cut in cuts:
            program.at_most(len(cut) - 1, cut)


@pytest.mark.parametrize("seed", range(20))
def test_tightening_changes_no_optimum(seed: int) -> None:
    parts = _parts(seed)
    for costs in (Costs(TARGET), RandomCosts(TARGET, seed)):
        loose, _ = _solved(parts, costs, tight=False)
        tight, _ = _solved(parts, costs)
        assert tight.objective == pytest.approx(loose.objective, abs=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_is_cheaper_than_the_optimum(seed: int) -> None:
    """Plans that are best under random costs are a sample of all plans there are."""
    parts = table, known, _ = _parts(seed)
    costs = Costs(TARGET)
    solution, plan = _solved(parts, costs)
    best = cost(plan, table, known, costs)
    assert best <= solution.objective + 1e-6
    for other in range(6):
        _, rival = _solved(parts, RandomCosts(TARGET, 100 * seed + other))
        assert cost(rival, table, known, costs) >= best - 1e-6


def test_what_every_way_to_compute_needs() -> None:
    a, b = leaf("a", 8, 8), leaf("b", 8, 8)
    h = add(a, b)
    y = matmul(h, b)
    other = transpose(matmul(transpose(b), transpose(h)))
    table = choices(egraph(forward(relu(y)), [(y, other)]))
    known = facts(table, {})
    found = needs(table, known)
    (root,) = table.roots
    names = {table.enodes[table.nodes[c][0]].op.name for c in bits(found.computed[root])}
    assert names == {"input", "add", "matmul", "relu"}
    stored = {table.enodes[table.nodes[c][0]].op.name for c in bits(found.stored[root])}
    assert stored == {"input", "add", "matmul", "relu"}, "h is read by a product, whichever it is"


def test_needs_round_a_cycle_are_those_of_its_way_in() -> None:
    x = leaf("x", 8, 8)
    y = exp(x)
    table = choices(egraph(forward(relu(transpose(y)), neg(y)), [(transpose(transpose(y)), y)]))
    found = needs(table, facts(table, {}))
    everything = (1 << len(table.nodes)) - 1
    assert all(found.computed[c] != everything for c in range(len(table.nodes)))
    assert list(bits(0b101001)) == [0, 3, 5]
