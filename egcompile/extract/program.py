"""A 0/1 program of clauses, and what its variables stand for in an e-graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Program:
    """Minimize `cost` (none below 0) over 0/1 variables.

    clauses   (conditions, options): if one of the former, then some of the latter; no conditions: always.
              In the relaxation several conditions add up: there are as many options as conditions
    limits    (variables, most): at most so many of them
    """

    cost: list[float] = field(default_factory=list)
    clauses: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    limits: list[tuple[tuple[int, ...], int]] = field(default_factory=list)

    def variable(self, cost: float = 0.0) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def implies(self, condition: int | Sequence[int] | None, *options: int) -> None:
        """None always holds."""
        if condition is None:
            condition = ()
        conditions = (condition,) if isinstance(condition, int) else tuple(condition)
        self.clauses.append((conditions, tuple(dict.fromkeys(options))))

    def at_most(self, most: int, variables: Iterable[int]) -> None:
        self.limits.append((tuple(dict.fromkeys(variables)), most))

    def holds(self, values: Sequence[int]) -> bool:
        """Whether values satisfy every clause and limit."""
        return all(
            any(values[v] for v in options) or (bool(conditions) and not any(values[v] for v in conditions))
            for conditions, options in self.clauses
        ) and all(sum(values[v] for v in variables) <= most for variables, most in self.limits)


@dataclass(slots=True)
class Variables:
    """Which variable stands for what; kernels by their index among the candidates."""

    memory: dict[int, int] = field(default_factory=dict)
    picked: dict[int, int] = field(default_factory=dict)
    viewed: dict[int, int] = field(default_factory=dict)
    computed: dict[tuple[int, int], int] = field(default_factory=dict)
    read: dict[tuple[int, int], int] = field(default_factory=dict)
    covered: dict[tuple[int, int], int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    space: dict[tuple[int, int], int] = field(default_factory=dict)
