"""Any legal plan computes what the joint graph does: random graphs, equalities and costs, run by steps."""

import pytest
import torch

from egcompile.extract import extract
from egcompile.ops import evaluate
from egcompile.schedule import schedule
from egcompile.schedule.kernel import Call, Launch
from egcompile.target import Target
from tests.extract.builder import egraph
from tests.extract.random_graphs import RandomCosts, random_joint
from tests.schedule.interpret import run_schedule

TARGET = Target.parse("cuda:90")
SEEDS = range(40)


@pytest.mark.parametrize("mode", ["exact", "greedy", "unfused"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_plan_computes_the_same(seed: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egcompile.extract.extraction.Costs", lambda target: RandomCosts(target, seed))
    made, equal = random_joint(seed, steps=20 + seed)
    inputs = [torch.randn(n.shape, dtype=n.dtype) for n in made.graph.inputs]
    expected = evaluate(made.graph, inputs)
    found = extract(egraph(made, equal), TARGET, mode=mode)  # type: ignore[arg-type]
    planned = schedule(found, TARGET)
    count = len(made.primals)
    outputs, gradients = run_schedule(planned, len(made.outputs), inputs[:count], inputs[count:])
    results = [*outputs, *(g for g in gradients if g is not None)]
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    steps = [*planned.forward.steps, *(planned.backward.steps if planned.backward else ())]
    launched = sum(isinstance(s, (Launch, Call)) for s in steps)
    assert launched + planned.shared == found.stats.kernels


def test_random_plans_meet_every_kind_of_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above says little unless plans inline, recompute, store aside, view, and go in circles."""
    aside = viewed = again = cut = 0
    for seed in SEEDS:
        monkeypatch.setattr(
            "egcompile.extract.extraction.Costs", lambda target, seed=seed: RandomCosts(target, seed)
        )
        found = extract(egraph(*random_joint(seed, steps=20 + seed)), TARGET)
        assert found.stats.gap < 1e-9
        assert found.stats.cost <= found.stats.greedy_cost + 1e-6
        aside += sum(len(k.writes) > 1 and k.root.op.kind.value != "composite" for k in found.kernels)
        viewed += len(found.views)
        inside = [n for k in found.kernels for n in k.nodes if n.op.name != "full"]
        again += len(inside) - len(set(inside))
        cut += found.stats.cuts
    assert min(aside, viewed, again, cut) > 0, (aside, viewed, again, cut)
