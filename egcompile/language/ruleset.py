"""Which rules a graph can use, an e-graph that has them and the graph, and running it to rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from egcompile.ir.node import Node
from egcompile.ir.types import ValueType
from egcompile.language.encode import ops_of
from egcompile.language.render import left_ops, right_ops
from egcompile.language.session import Contents, Session
from egcompile.language.types import infer_types
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
    ops = ops_of(nodes).union(*(right_ops(r) for r in rules))
    session = Session(sorted(ops, key=lambda op: op.name), rules)
    session.load(nodes)
    return session


@dataclass(frozen=True)
class Rest:
    """What an e-graph held when its rules stopped. `stopped` is "saturated", or the limit that was met."""

    contents: Contents
    types: dict[int, ValueType]
    iterations: int
    stopped: str


def run_to_rest(session: Session, limit: Callable[[int], str]) -> Rest:
    """Runs the rules until nothing is new, or `limit` of the iterations so far names a limit that is met.

    Raises TypeMismatch where a rule made values of different types equal.
    """
    iterations, stopped = 0, ""
    found: tuple[Contents, dict[int, ValueType]] | None = None  # unless the e-graph has changed since
    while not stopped:
        if stopped := limit(iterations):
            break
        iterations += 1
        if session.run():
            found = None
            continue
        stopped = "saturated"
        if found is None:  # at rest, but rules may wait for the types of what rules have built
            contents = session.read()
            types, witnesses = infer_types(contents.classes, session.blame)
            found = contents, types
            if session.add_types(contents, types, witnesses):
                stopped = ""
    if found is None:
        contents = session.read()
        found = contents, infer_types(contents.classes, session.blame)[0]
    return Rest(*found, iterations, stopped)
