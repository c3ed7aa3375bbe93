"""Which rules a graph can use, and an e-graph that has them and the graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from egcompile.ir.node import Node
from egcompile.language.render import left_ops, right_ops
from egcompile.language.session import Session
from egcompile.ops.opdef import OpDef
from egcompile.rules.rule import Exactness, Phase, Rule


def usable(
    rules: Iterable[Rule], phase: Phase, exactness: Collection[Exactness], ops: Iterable[OpDef]
) -> list[Rule]:
    """The rules of a phase whose left sides are made of `ops`, or of what usable rules build from them."""
    present = set(ops)
    waiting = [r for r in rules if r.runs_in(phase) and r.exactness in exactness]
    found: list[Rule] = []
    while ready := [r for r in waiting if left_ops(r) <= present]:
        found += ready
        waiting = [r for r in waiting if r not in ready]
        present.update(*(right_ops(r) for r in ready))
    order = {rule: i for i, rule in enumerate(rules)}
    return sorted(found, key=order.__getitem__)


def session_with(nodes: Sequence[Node], rules: Sequence[Rule]) -> Session:
    """An e-graph with `nodes`, their types, and `rules`."""
    ops = {node.op for node in nodes}.union(*(right_ops(r) for r in rules))
    session = Session(sorted(ops, key=lambda op: op.name), rules)
    session.load(nodes)
    return session
