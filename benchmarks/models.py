"""Whole training steps: speed, memory, gradients and losses, of egcompile beside others.

    python -m benchmarks.models llama gpt2 --device cuda --json results.json
    python -m benchmarks.models llama --modes eager,torch.compile,torch.compile:max-autotune,egcompile
    python -m benchmarks.models llama --check       gradients against fp64 truth
    python -m benchmarks.models llama --loss        losses after 300 steps, against eager's own spread
    python -m benchmarks.models llama --coverage    what the plan computes in generated kernels; needs no GPU

A model's full size is a GPU's; a CPU runs a small one, to try the harness. A variant or a model that fails
is reported, and the others go on. The tables in the documentation are made of the JSON by benchmarks.report.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import accuracy, coverage, speed
from benchmarks.environment import command, versions
from benchmarks.variants import DTYPES
from benchmarks.zoo import CASES, Case

DEFAULT_MODES = "eager,torch.compile,egcompile"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command(__doc__)
    parser.add_argument("models", nargs="+", choices=[*CASES, "all"], metavar="MODEL", help=", ".join(CASES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=("full", "small"), help="default: full on a GPU, small on a CPU")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--modes", default=DEFAULT_MODES, help=f"variants (default {DEFAULT_MODES})")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=60.0, help="timing then ends at round 5")
    parser.add_argument("--steps", type=int, default=300, help="of --loss")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--loss", action="store_true")
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("--speed", action="store_true", help="the default; name it to have it beside others")
    parser.add_argument("--target", default="cuda:90", help="of --coverage")
    parser.add_argument("--json", type=Path, help="where results are added, each as soon as it is there")
    options = parser.parse_args(arguments)
    gpu = options.device.startswith("cuda")
    options.size = options.size or ("full" if gpu else "small")
    options.dtype = options.dtype or ("bf16" if gpu else "fp32")
    options.models = list(CASES) if "all" in options.models else options.models
    options.modes = options.modes.split(",")
    if options.rounds < 5:
        parser.error("--rounds must be at least 5: fewer give no percentiles")
    return options


def run(kind: str, case: Case, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """One result and its table."""
    device = torch.device(options.device)
    match kind:
        case "speed":
            result = speed.measure(
                case, options.modes, device, options.dtype, options.rounds, options.seconds
            )
            return result, speed.table(result)
        case "check":
            result = accuracy.check(case, options.modes, device, options.dtype)
            return result, accuracy.check_table(result)
        case "loss":
            result = accuracy.losses(case, options.modes, device, options.dtype, options.steps)
            return result, accuracy.losses_table(result)
        case "coverage":
            result = coverage.measure(case, options.target, options.dtype)
            return result, coverage.table(result)
    raise ValueError(kind)


def append(path: Path, result: dict[str, Any]) -> None:
    """Adds a result to the list in a JSON file; written whole each time, so that a stop loses nothing."""
    known = json.loads(path.read_text()) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*known, result], indent=1) + "\n")


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    kinds = [k for k in ("speed", "check", "loss", "coverage") if getattr(options, k)] or ["speed"]
    tables = []
    for model in options.models:
        for kind in kinds:
            title = f"{model} {options.size}, {options.dtype}, {options.device}: {kind}"
            print(f"== {title}", flush=True)
            about = {"kind": kind, "model": model, "size": options.size, "dtype": options.dtype}
            about |= {"device": options.device, "versions": versions()}
            about["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            try:
                case = CASES[model][options.size]()
                result, text = run(kind, case, options)
                about["tokens"] = case.tokens
            except Exception:
                error = speed.failure(f"{model} {kind}")
                result, text = {"error": error}, f"failed: {error}"
            if options.json:
                append(options.json, about | result)
            print(text, flush=True)
            tables.append(f"{title}\n{text}")
            _free()
    print("\n" + "\n\n".join(tables))


def _free() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
