"""Saturation: the joint rules run over a joint graph until nothing is new, or a limit is met."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from egcompile.errors import SaturationLimit
from egcompile.ir.joint import Joint
from egcompile.ir.node import Node
from egcompile.ir.types import ValueType
from egcompile.language.egraph import EClass, EGraph
from egcompile.language.ruleset import run_to_rest, session_with, usable
from egcompile.language.session import Contents
from egcompile.ops.opdef import Kind
from egcompile.rules import RULES
from egcompile.rules.rule import Exactness, Rule


@dataclass(frozen=True)
class Limits:
    """Where saturation stops if it has not come to rest before."""

    iterations: int = 40
    nodes: int = 200_000
    seconds: float = 60.0


@dataclass(frozen=True)
class Report:
    """What saturation did. `rules` has the matches and seconds of each rule that matched.

    `stopped` is "saturated", or which limit was met.
    """

    rules: Mapping[str, tuple[int, float]]
    iterations: int
    nodes: int
    classes: int
    seconds: float
    stopped: str

    def __str__(self) -> str:
        lines = [
            f"{self.stopped} after {self.iterations} iterations, {self.seconds:.2f} s: "
            f"{self.nodes} e-nodes in {self.classes} classes"
        ]
        width = max(map(len, self.rules), default=0)
        for name, (matches, seconds) in sorted(self.rules.items(), key=lambda item: -item[1][0]):
            lines.append(f"  {name:<{width}}  {matches:>7} matches  {1e3 * seconds:>8.1f} ms")
        return "\n".join(lines)


def saturate(
    joint: Joint,
    *,
    exactness: Collection[Exactness] = ("exact", "reassociating"),
    limits: Limits = Limits(),
    rules: Mapping[str, Rule] = RULES,
) -> tuple[EGraph, Report]:
    """The joint graph and everything that the rules make equal to its parts.

    Warns with SaturationLimit where a limit is met: what was found until then is valid. Raises TypeMismatch
    where a rule made values of different types equal.
    """
    start = time.perf_counter()
    nodes = joint.graph.nodes
    session = session_with(nodes, usable(rules.values(), "joint", exactness, {node.op for node in nodes}))
    rest = run_to_rest(
        session, lambda iterations: _limit(limits, iterations, session.size(), time.perf_counter() - start)
    )
    contents, stopped = rest.contents, rest.stopped
    class_of = {node: contents.class_of[session.encoder.number[node]] for node in nodes}
    egraph = _egraph(joint, contents, rest.types, class_of)
    fired = {name: (count, session.seconds[name]) for name, count in session.matches.items() if count}
    size = sum(map(len, contents.classes.values()))
    seconds = time.perf_counter() - start
    report = Report(fired, rest.iterations, size, len(egraph.classes), seconds, stopped)
    if stopped != "saturated":
        warnings.warn(
            f"rewriting stopped at its {stopped} of {size} e-nodes; the plan is valid, and may miss rewrites",
            SaturationLimit,
            stacklevel=2,
        )
    return egraph, report


def _limit(limits: Limits, iterations: int, nodes: int, seconds: float) -> str:
    if iterations >= limits.iterations:
        return f"limit of {limits.iterations} iterations"
    if nodes >= limits.nodes:
        return f"limit of {limits.nodes} e-nodes"
    if seconds >= limits.seconds:
        return f"limit of {limits.seconds:g} seconds"
    return ""


def _egraph(
    joint: Joint, contents: Contents, types: Mapping[int, ValueType], class_of: dict[Node, int]
) -> EGraph:
    """The contents with their types, and the places in the model that asked for each class."""
    origins: dict[int, frozenset[str]] = defaultdict(frozenset)
    for node, origin in joint.graph.origins.items():
        if node in class_of:
            origins[class_of[node]] |= origin
    for c, enodes in contents.classes.items():
        for enode in enodes:
            if enode.op.kind is Kind.PROJECTION:
                origins[enode.operands[0]] |= origins[c]
    classes = {
        c: EClass(c, types[c], list(enodes), origins[c]) for c, enodes in sorted(contents.classes.items())
    }
    return EGraph(classes, joint, class_of)
