"""How long planning takes and what it finds: `python -m benchmarks.compile_time`; needs no GPU."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.environment import versions
from egcompile.derive import derive
from egcompile.extract import extract
from egcompile.frontend import trace
from egcompile.partition import partition
from egcompile.saturate import saturate
from egcompile.schedule import schedule
from egcompile.target import Target
from examples.llama import SIZES, Llama

STAGES = ("derive", "saturate", "extract", "partition", "schedule")


def measure(layers: int, target: Target, memory_budget: float = 1.0) -> dict[str, object]:
    """CPU seconds by stage for a Llama's training graph, from its traced forward; and what was found."""
    config = replace(SIZES["small"], layers=layers)
    model = Llama(config).to(torch.bfloat16)
    tokens = torch.zeros(4, config.context, dtype=torch.int64)
    traced = trace(model, (tokens, tokens))
    start, marks = time.perf_counter(), [time.process_time()]
    derived = derive(traced.graph, traced.requires_grad)
    marks.append(time.process_time())
    egraph, report = saturate(derived)
    marks.append(time.process_time())
    extraction = extract(egraph, target)
    marks.append(time.process_time())
    parts = partition(extraction, target, memory_budget)
    marks.append(time.process_time())
    schedule(extraction, target, parts)
    marks.append(time.process_time())
    wall = time.perf_counter() - start
    seconds = {stage: b - a for stage, a, b in zip(STAGES, marks, marks[1:])}
    live = extraction.stats.live
    print(f"{layers} layers, {len(derived.graph.nodes)} nodes, {target.name}")
    print(report)
    print(extraction.stats)
    print(f"{live / layers:.1f} classes a layer with two or more live choices")
    print(", ".join(f"{stage} {spent:.2f} s" for stage, spent in seconds.items()))
    print(f"{sum(seconds.values()):.2f} s of CPU in all, {wall:.2f} s by the clock")
    return {
        "layers": layers,
        "cpu_seconds": seconds,
        "wall_seconds": wall,
        "live_choices": live,
        "report": str(extraction.stats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--target", default="cuda:90")
    parser.add_argument("--memory-budget", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options.layers, Target.parse(options.target), options.memory_budget)
    if options.json:
        options.json.write_text(json.dumps({**versions(), **result}, indent=1))


if __name__ == "__main__":
    main()
