"""The solver against enumeration, and what it does when the time is too short."""

import itertools
import random

import pytest

from egcompile.errors import ExtractionError
from egcompile.extract.program import Program
from egcompile.extract.solve import components, propagate, solve


def _random(seed: int) -> Program:
    pick = random.Random(seed)
    program = Program()
    variables = [program.variable(pick.choice([0.0, 1.0, pick.random() * 5])) for _ in range(9)]
    for _ in range(pick.randint(3, 12)):
        conditions = pick.sample(variables, 1)
        rest = [v for v in variables if v not in conditions]
        program.implies(conditions[0], *pick.sample(rest, pick.randint(1, 3)))
    program.implies(None, *pick.sample(variables, 2))
    program.implies(None, *pick.sample(variables, 3))
    program.at_most(1, pick.sample(variables, 3))
    pair = pick.sample(variables, 2)
    program.at_most(1, pair)
    program.implies(pair, pick.choice([v for v in variables if v not in pair]))
    return program


def _best(program: Program) -> float | None:
    plans = (v for v in itertools.product((0, 1), repeat=len(program.cost)) if program.holds(v))
    return min((sum(c for c, x in zip(program.cost, v) if x) for v in plans), default=None)


@pytest.mark.parametrize("seed", range(60))
def test_the_optimum_is_that_of_enumeration(seed: int) -> None:
    program = _random(seed)
    best = _best(program)
    if best is None:
        with pytest.raises(ExtractionError, match="no plan"):
            solve(program, None, 10.0)
        return
    solution = solve(program, None, 10.0)
    assert program.holds(solution.values)
    assert solution.objective == pytest.approx(best)
    assert solution.gap == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_a_seed_does_not_change_the_optimum(seed: int) -> None:
    program = _random(seed)
    plans = [v for v in itertools.product((0, 1), repeat=len(program.cost)) if program.holds(v)]
    if plans:
        worst = max(plans, key=lambda v: sum(c for c, x in zip(program.cost, v) if x))
        assert solve(program, worst, 10.0).objective == pytest.approx(_best(program))


def _cover(size: int, seed: int = 0) -> Program:
    """A set cover without structure: hard to prove, easy to satisfy."""
    pick = random.Random(seed)
    program = Program()
    variables = [program.variable(1.0 + pick.random()) for _ in range(size)]
    for _ in range(3 * size):
        program.implies(None, *pick.sample(variables, 3))
    return program


def test_when_time_is_short_the_seed_is_the_answer_and_the_gap_is_told() -> None:
    program = _cover(400)
    solution = solve(program, [1] * 400, 0.0)
    assert program.holds(solution.values)
    assert solution.objective <= sum(program.cost)
    assert solution.gap > 0.0


def test_when_time_is_short_and_there_is_no_seed_it_says_so() -> None:
    with pytest.raises(ExtractionError, match="found no plan in"):
        solve(_cover(2000), None, 0.0)


def test_equal_parts_are_solved_once() -> None:
    program = Program()
    for _ in range(20):
        a, b, c = (program.variable(cost) for cost in (2.0, 3.0, 4.0))
        program.implies(None, a, b)
        program.implies(None, b, c)
        program.implies(None, a, c)
    solution = solve(program, None, 10.0)
    assert (solution.parts, solution.solved) == (20, 1)
    assert solution.objective == pytest.approx(20 * 5.0)


def test_propagation_settles_what_has_no_choice() -> None:
    program = Program()
    a, b, c, d, unasked = (program.variable(1.0) for _ in range(5))
    program.implies(None, a)
    program.implies(a, b)
    program.at_most(1, (b, c))
    program.implies(None, c, d)
    program.implies(unasked, c)
    values, rows = propagate(program)
    assert values == [1, 1, 0, 1, 0]
    assert not rows
    assert components(5, rows) == []


def test_a_contradiction_has_no_plan() -> None:
    program = Program()
    a, b = program.variable(), program.variable()
    program.implies(None, a)
    program.implies(None, b)
    program.at_most(1, (a, b))
    with pytest.raises(ExtractionError, match="no plan"):
        solve(program, None, 1.0)
