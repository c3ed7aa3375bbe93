"""Where the solver has no plan in time, or a plan cannot run, the next simpler one is taken, and told."""

from __future__ import annotations

import pytest
import torch

import egcompile
from egcompile.errors import ExtractionError, NoSolution
from egcompile.extract import Extraction, extract
from egcompile.extract.plan import Plan, cycles
from egcompile.ops import evaluate
from egcompile.schedule import schedule
from egcompile.target import Target
from tests.extract.builder import egraph
from tests.extract.random_graphs import RandomCosts, random_joint
from tests.schedule.interpret import run_schedule

TARGET = Target.parse("cuda:90")
MODES = ["exact", "greedy", "unfused"]
ORDER = ["exact", "greedy", "unfused", "plain"]


def _run(seed: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> Extraction:
    """Extracts a random graph and asserts that the plan computes it."""
    monkeypatch.setattr("egcompile.extract.extraction.Costs", lambda target: RandomCosts(target, seed))
    made, equal = random_joint(seed, steps=30)
    inputs = [torch.randn(n.shape, dtype=n.dtype) for n in made.graph.inputs]
    found = extract(egraph(made, equal), TARGET, mode=mode)  # type: ignore[arg-type]
    count = len(made.primals)
    outputs, gradients = run_schedule(
        schedule(found, TARGET), len(made.outputs), inputs[:count], inputs[count:]
    )
    results = [*outputs, *(g for g in gradients if g is not None)]
    for a, b in zip(results, evaluate(made.graph, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return found


def _no_time(*arguments: object) -> None:
    raise NoSolution("HiGHS found no plan in 0.0 s")


@pytest.mark.parametrize("seed", range(8))
def test_without_a_solution_the_greedy_plan_is_taken(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egcompile.extract.extraction.solve", _no_time)
    stats = _run(seed, "exact", monkeypatch).stats
    assert (stats.mode, stats.gap) == ("exact", 1.0)
    assert stats.taken in ("greedy", "unfused")
    assert f"{stats.taken} (there is no exact plan)" in str(stats)
    if stats.taken == "greedy":
        assert stats.cost == stats.greedy_cost


@pytest.mark.parametrize("broken", range(4))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_that_goes_in_circles_is_not_taken(
    seed: int, mode: str, broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first `broken` plans are said to go in circles, which is checked of each."""
    seen: list[Plan] = []

    def circles(plan: Plan, table: object) -> object:
        if not any(plan is other for other in seen):
            seen.append(plan)
        first = next(i for i, other in enumerate(seen) if other is plan)
        return [[("read", 0, 0)]] if first < broken else cycles(plan, table)  # type: ignore[arg-type]

    monkeypatch.setattr("egcompile.extract.extraction.solve", _no_time)
    monkeypatch.setattr("egcompile.extract.extraction.cycles", circles)
    candidates = ORDER[max(ORDER.index(mode), 1) :]
    if broken >= len(candidates):
        with pytest.raises(ExtractionError, match="no plan can run, of"):
            _run(seed, mode, monkeypatch)
        return
    taken = _run(seed, mode, monkeypatch).stats.taken
    assert taken in candidates[broken:]


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_without_views_computes_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egcompile.extract.extraction.unfused", lambda table, known: _broken())
    monkeypatch.setattr("egcompile.extract.extraction.cost", lambda *arguments: 0.0)
    monkeypatch.setattr("egcompile.extract.extraction.cycles", lambda plan, table: plan is BROKEN)
    found = _run(seed, "unfused", monkeypatch)
    assert found.stats.taken == "plain"
    assert not found.views


BROKEN = Plan()


def _broken() -> Plan:
    return BROKEN


def test_explain_says_which_plan_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egcompile.extract.extraction.solve", _no_time)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.LayerNorm(4))
    plan = egcompile.optimize(egcompile.trace(model, (torch.randn(3, 4),)))
    assert "greedy (there is no exact plan)" in plan.explain()
