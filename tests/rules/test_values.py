"""Each rule's two sides have one type and one value, and before the derivative one gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from egcompile import ops
from egcompile.rules import RULES, Rule

from .cases import DTYPE_TEXTS, Case, case, examples, values, with_dtype

ALL = list(examples())
NAMES = [f"{rule.name}-{i}" for i, (rule, _) in enumerate(ALL)]
EARLY = [(r, e) for r, e in ALL if r.runs_in("recognition")]


def _close(left: torch.Tensor, right: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)


Sides = tuple[list[torch.Tensor], list[torch.Tensor]]


def _evaluated(found: Case, inputs: Mapping[str, torch.Tensor]) -> Sides:
    known = {found.inputs[name]: value for name, value in inputs.items()}
    return ops.evaluate_nodes(found.lefts, known), ops.evaluate_nodes(found.rights, known)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_an_example_on_which_it_holds(name: str) -> None:
    rule = RULES[name]
    assert rule.doc and rule.examples
    assert all(case(rule, example) is not None for example in rule.examples)


@pytest.mark.parametrize(("rule", "example"), ALL, ids=NAMES)
def test_both_sides_have_one_type(rule: Rule, example: Mapping[str, Any]) -> None:
    found = case(rule, example)
    assert found is not None
    assert [left.type for left in found.lefts] == [right.type for right in found.rights]


@pytest.mark.parametrize("draw", ["plain", "ties", "special"])
@pytest.mark.parametrize(("rule", "example"), ALL, ids=NAMES)
def test_both_sides_have_one_value(rule: Rule, example: Mapping[str, Any], draw: str) -> None:
    exact = rule.exactness == "exact"
    variants = [example, *(with_dtype(example, dtype) for dtype in DTYPE_TEXTS)]
    checked = 0
    for variant in variants:
        found = case(rule, variant)
        if found is None or not (exact or found.narrowest in (torch.float32, torch.float64)):
            continue
        inputs = {name: values(node, draw) for name, node in found.inputs.items()}
        tolerance = 0.0 if exact else 16 * torch.finfo(found.narrowest).eps
        for left, right in zip(*_evaluated(found, inputs), strict=True):
            _close(left, right, tolerance)
        checked += 1
    assert checked


@pytest.mark.parametrize("draw", ["plain", "ties"])
@pytest.mark.parametrize(("rule", "example"), EARLY, ids=[f"{r.name}-{i}" for i, (r, _) in enumerate(EARLY)])
def test_both_sides_have_one_gradient(rule: Rule, example: Mapping[str, Any], draw: str) -> None:
    """In fp64 where the rule holds there, for then only a true difference is one."""
    found = case(rule, with_dtype(example, "f64")) or case(rule, example)
    assert found is not None
    inputs = {name: values(node, draw) for name, node in found.inputs.items()}
    leaves = [x.requires_grad_() for x in inputs.values() if x.is_floating_point()]
    tolerance = 32 * torch.finfo(found.narrowest).eps
    for left, right in zip(*_evaluated(found, inputs), strict=True):
        if not left.requires_grad:
            assert not leaves
            continue
        ct = torch.randn(left.shape, dtype=torch.float64).to(left.dtype)
        gradients = (torch.autograd.grad(side, leaves, ct, allow_unused=True) for side in (left, right))
        for a, b in zip(*gradients, strict=True):
            _close(torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b, tolerance)
