"""The stages in a row: from a forward graph to everything that was decided about it, source included."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, get_args

from egcompile.codegen import Config, KernelSource, generate
from egcompile.config import checking, logger
from egcompile.derive import derive
from egcompile.extract import Extraction, extract
from egcompile.extract.extraction import Mode
from egcompile.extract.layout import cotangent_strides
from egcompile.ir.graph import Graph
from egcompile.ir.joint import Joint
from egcompile.ir.verify import verify_joint
from egcompile.partition import Partition, partition
from egcompile.runtime.source import render
from egcompile.saturate import Report, saturate
from egcompile.schedule import Schedule, schedule
from egcompile.schedule.kernel import Call, Kernel, Launch
from egcompile.target import Target

__all__ = ["MODES", "Compiled", "Mode", "budget_of", "compile_graph", "launches", "mode_of"]

MODES: tuple[Mode, ...] = get_args(Mode)
"""How a plan is extracted: proven cheapest, or, to compare with, the two that others use."""


def mode_of(name: str) -> Mode:
    """The mode of that name; raises ValueError."""
    for mode in MODES:
        if mode == name:
            return mode
    raise ValueError(f"no mode {name!r}; there are {', '.join(MODES)}")


def budget_of(value: float) -> float:
    """A memory budget; raises ValueError where it is none."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"memory_budget is from 0 (the fewest bytes) to 1 (the fastest plan), not {value}")
    return float(value)


Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Compiled:
    """What each stage decided.

    derived   the joint graph before rewriting
    texts     the generated kernels, none for a CPU
    seconds   by stage
    """

    target: Target
    derived: Joint
    report: Report
    extraction: Extraction
    partition: Partition
    schedule: Schedule
    texts: tuple[KernelSource, ...]
    source: str
    seconds: dict[str, float]


def compile_graph(
    graph: Graph,
    target: Target,
    mode: Mode,
    needed: Sequence[bool],
    cotangents: Sequence[bool],
    strides: Mapping[str, tuple[int, ...]],
    memory_budget: float = 1.0,
    choose: Callable[[Kernel], Config | None] | None = None,
) -> Compiled:
    """Compiles `graph` for gradients of the inputs `needed`, from cotangents of the outputs `cotangents`.

    `strides` has those of the inputs that are not row-major, by name; `memory_budget` is `partition`'s;
    `choose` gives kernels other tiles than the heuristics do. Raises NoGradientRule and ExtractionError.
    """
    seconds: dict[str, float] = {}

    def timed(stage: str, run: Callable[[], Result]) -> Result:
        start = time.perf_counter()
        result = run()
        seconds[stage] = time.perf_counter() - start
        logger("passes").debug("%s: %.3f s", stage, seconds[stage])
        return result

    derived = timed("derive", lambda: derive(graph, needed, cotangents))
    _check(derived, "derive")
    strides = {**strides, **cotangent_strides(derived, strides)}
    egraph, report = timed("saturate", lambda: saturate(derived))
    extraction = timed("extract", lambda: extract(egraph, target, mode=mode, strides=strides))
    _check(extraction.joint, "extract")
    parts = timed("partition", lambda: partition(extraction, target, memory_budget))
    scheduled = timed("schedule", lambda: schedule(extraction, target, parts))
    texts: tuple[KernelSource, ...] = ()
    if target.kind != "cpu":
        configs: dict[Kernel, Config | None] = dict.fromkeys(launches(scheduled))
        if choose is not None:
            configs = timed("tune", lambda: {k: choose(k) for k in configs})
        texts = timed("codegen", lambda: tuple(generate(k, target, c) for k, c in configs.items()))
    source = timed("render", lambda: render(scheduled, texts, target))
    logger("rules").debug("%s", report)
    logger("kernels").debug("%s; %s", _summary(scheduled), extraction.stats)
    logger("graphs").debug("before:\n%s\nafter:\n%s", derived.graph, extraction.joint.graph)
    logger("source").debug("%s", source)
    return Compiled(target, derived, report, extraction, parts, scheduled, texts, source, seconds)


def _summary(scheduled: Schedule) -> str:
    """How often each kernel is launched and each op called."""
    runs = Counter({kernel.name: len(runs) for kernel, runs in launches(scheduled).items()})
    for program in (scheduled.forward, scheduled.backward):
        runs.update(step.op for step in (program.steps if program else ()) if isinstance(step, Call))
    return ", ".join(f"{count} x {name}" for name, count in runs.items())


def _check(joint: Joint, stage: str) -> None:
    if checking():
        verify_joint(joint, stage)


def launches(schedule: Schedule) -> dict[Kernel, list[Launch]]:
    """The launches of each kernel, in order."""
    found: dict[Kernel, list[Launch]] = {}
    for program in (schedule.forward, schedule.backward):
        for step in program.steps if program else ():
            if isinstance(step, Launch):
                found.setdefault(step.kernel, []).append(step)
    return found
