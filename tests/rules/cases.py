"""Every rule on each of its examples: both sides as nodes, and inputs to evaluate them on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from egcompile.errors import TypeMismatch
from egcompile.ir import Node, topological
from egcompile.ops.instantiate import attribute, bind, instantiate
from egcompile.ops.term import Var
from egcompile.rules import RULES, Rule

DTYPE_TEXTS = ("f64", "f32", "bf16")


@dataclass(frozen=True, eq=False)
class Case:
    """A rule filled in: `lefts[i]` is to equal `rights[i]`; `inputs` stand for its tensor variables."""

    rule: Rule
    inputs: dict[str, Node]
    lefts: list[Node]
    rights: list[Node]

    @property
    def narrowest(self) -> torch.dtype:
        """The floating dtype of the least precision anywhere in the case."""
        types = [n.type for n in topological([*self.lefts, *self.rights])]
        tensors = [t for type in types for t in (type if isinstance(type, tuple) else (type,))]
        floating = [t.dtype for t in tensors if t.dtype.is_floating_point]
        return max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def case(rule: Rule, example: Mapping[str, Any]) -> Case | None:
    """`rule` on `example`, or None where its conditions do not hold there."""
    binding = bind(rule.variables, example)
    try:
        lefts = [instantiate(left, binding) for left, _ in rule.equations]
        if any(attribute(a, binding) != attribute(b, binding) for a, b in rule.where):
            return None
    except (TypeMismatch, ValueError):
        return None
    rights = [instantiate(right, binding) for _, right in rule.equations]
    inputs = {name: binding[name] for name, v in rule.variables.items() if isinstance(v, Var)}
    return Case(rule, inputs, lefts, rights)


def with_dtype(example: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The example with every floating tensor of `dtype`."""
    return {
        name: re.sub(r"^(bf|f)\d+(?=\[)", dtype, value) if isinstance(value, str) else value
        for name, value in example.items()
    }


def examples() -> Iterator[tuple[Rule, Mapping[str, Any]]]:
    return ((rule, example) for rule in RULES.values() for example in rule.examples)


def values(node: Node, draw: str) -> torch.Tensor:
    """An input: `plain` normal numbers, `ties` small whole ones, `special` with NaN and infinities in it."""
    shape, dtype = node.shape, node.dtype
    if not dtype.is_floating_point:
        return torch.randint(0, 2 if dtype == torch.bool else 4, shape).to(dtype)
    x = torch.randn(shape, dtype=torch.float64)
    if draw == "ties":
        x = torch.randint(-1, 2, shape).double()
    if draw == "special":
        special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0], dtype=torch.float64)
        chosen = torch.rand(shape) < 0.2
        x = torch.where(chosen, special[torch.randint(0, len(special), shape)], x)
    return x.to(dtype)
