"""A slice of PyTorch's own op database: every op is right, or refused by name."""

from __future__ import annotations

import pytest

from benchmarks import op_database
from benchmarks.op_database import Outcome

SLICE = 36
"""Every so many ops; all of them are `python -m benchmarks.op_database`."""


@pytest.mark.slow
def test_a_slice_of_pytorchs_samples() -> None:
    pytest.importorskip("expecttest")
    names = [info.formatted_name for info in op_database.infos()][::SLICE]
    outcomes = list(op_database.check_all(names, samples=1, jobs=2))
    assert sorted(outcome.op for outcome in outcomes) == sorted(names)
    assert not [outcome for outcome in outcomes if outcome.kind == "wrong"]
    assert {outcome.kind for outcome in outcomes} >= {"native", "opaque"}


def test_the_worst_sample_decides() -> None:
    outcome = Outcome("x")
    for kind in ("opaque", "wrong", "refused"):
        outcome.note(kind, f"it was {kind}")
    assert outcome.kind == "wrong"
    assert len(outcome.notes) == 3
