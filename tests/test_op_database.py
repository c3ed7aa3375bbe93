"""A slice of PyTorch's own op database: every op is right, or refused by name."""

from __future__ import annotations

import pytest

from benchmarks import op_database, report
from benchmarks.op_database import Outcome

SLICE = 12
"""Every so many ops; all of them are `python -m benchmarks.op_database`."""


@pytest.mark.slow
def test_a_slice_of_pytorchs_samples() -> None:
    pytest.importorskip("expecttest")
    names = [info.formatted_name for info in op_database.infos()][::SLICE]
    outcomes = list(op_database.check_all(names, samples=1, twice=True, jobs=2))
    assert sorted(outcome.op for outcome in outcomes) == sorted(names)
    assert not [outcome for outcome in outcomes if outcome.kind == "wrong"]
    assert {outcome.kind for outcome in outcomes} >= {"native", "opaque"}
    assert all(
        outcome.reason in op_database.REASONS.values() for outcome in outcomes if outcome.kind == "refused"
    )


def test_the_worst_sample_decides() -> None:
    outcome = Outcome("x")
    for kind in ("opaque", "wrong", "refused"):
        outcome.note(kind, f"it was {kind}")
    assert outcome.kind == "wrong"
    assert len(outcome.notes) == 3


def test_refusals_are_grouped_by_reason() -> None:
    outcomes = [
        Outcome(name, "refused", notes=[note])
        for name, note in (
            ("b", "UnsupportedOp: x has the layout torch.sparse_coo; tensors must be dense"),
            ("a", "UnsupportedOp: y has the layout torch.sparse_csr; tensors must be dense"),
            ("c", "TraceError: the shape of what z gives depends on data"),
            ("d", "something new"),
        )
    ]
    assert op_database.refusals([*outcomes, Outcome("e")]) == {
        "sparse tensors": ["a", "b"],
        "what depends on data": ["c"],
        "something new": ["d"],
    }


def test_the_page_names_what_is_not_compiled() -> None:
    outcomes = [
        Outcome("a"),
        Outcome("b", "refused", notes=["UnsupportedOp: it has the layout torch.sparse_coo"]),
        Outcome("c", "eager"),
    ]
    table = report.op_database([op_database.result(outcomes, samples=2, twice=True)])
    assert "| native | 1 |" in table
    assert "| refused | 1 | sparse tensors: `b` |" in table
    assert "| eager | 1 | Dynamo leaves it to eager: `c` |" in table
    assert "| all | 3 | value, gradients and their gradients; samples an op, at most: 2 |" in table


def test_no_op_was_wrong_when_all_were_run() -> None:
    (result,) = [r for r in report.load() if r["kind"] == "op_database"]
    assert result["counts"]["wrong"] == 0
    assert sum(result["counts"].values()) == len(result["ops"]) > 500
    assert set(result["refused"]) <= set(op_database.REASONS.values())
