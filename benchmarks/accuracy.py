"""Judges results instead of speed: gradients against fp64 truth, and losses after training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speed import failure
from benchmarks.variants import DTYPES, Batches, Training, gradients, make_model
from benchmarks.zoo import Case

CHECK_STEPS = (0, 50)
FLOOR = 1 / 32
"""An error below this part of the dtype's epsilon, relative to the gradient's size, counts as none."""


def rmse(a: Tensor, b: Tensor) -> float:
    return (a - b).square().mean().sqrt().item()


def gradient_ratios(
    truth: dict[str, Tensor], eager: dict[str, Tensor], other: dict[str, Tensor], eps: float
) -> dict[str, float]:
    """Per parameter: `other`'s RMSE against the truth, over eager's or the floor, whichever is larger.

    A parameter that lacks a gradient where the truth has one, or has a NaN, gives infinity.
    """
    ratios = {}
    for name, exact in truth.items():
        floor = FLOOR * eps * exact.square().mean().sqrt().item()
        if name not in other:
            ratios[name] = math.inf
            continue
        error = rmse(other[name], exact)
        allowed = max(rmse(eager[name], exact), floor)
        ratios[name] = error / allowed if allowed else (0.0 if error == 0 else math.inf)
        if math.isnan(error):
            ratios[name] = math.inf
    return ratios


def check(case: Case, variants: list[str], device: torch.device, dtype: str) -> dict[str, Any]:
    """Gradient errors of each variant over eager's, at the start and after 50 steps of eager training."""
    batches = Batches(case, device, DTYPES[dtype], distinct=max(CHECK_STEPS) + 1)
    training = Training("eager", make_model(case, device, DTYPES[dtype]), case.learning_rate)
    rows: list[dict[str, Any]] = []
    for step in range(max(CHECK_STEPS) + 1):
        if step in CHECK_STEPS:
            compared = [v for v in variants if v != "eager"]
            eps = torch.finfo(DTYPES[dtype]).eps
            rows += _check_at(step, training.model, batches(step), compared, eps)
        training.step(batches(step))
    return {"rows": rows}


def _check_at(
    step: int, model: nn.Module, batch: tuple[Any, ...], variants: list[str], eps: float
) -> list[dict[str, Any]]:
    wide = tuple(t.double() if t.is_floating_point() else t for t in batch)
    truth = gradients("eager", copy.deepcopy(model).double(), wide)
    eager = gradients("eager", model, batch)
    size = {name: exact.square().mean().sqrt().item() for name, exact in truth.items()}
    typical = fmean(rmse(eager[name], truth[name]) / size[name] for name in truth if size[name])
    rows = []
    for variant in variants:
        row: dict[str, Any] = {"variant": variant, "step": step, "eager_relative_rmse": typical}
        try:
            ratios = gradient_ratios(truth, eager, gradients(variant, model, batch), eps)
            worst = max(ratios, key=ratios.__getitem__)
            row |= {"max_ratio": ratios[worst], "parameter": worst, "mean_ratio": fmean(ratios.values())}
        except Exception:
            row["error"] = failure(variant)
        rows.append(row)
    return rows


def check_table(result: dict[str, Any]) -> str:
    head = f"{'variant':30}{'step':>6}{'max ratio':>11}{'mean ratio':>12}"
    lines = ["gradient RMSE against fp64, over eager's", f"{head}  parameter of the largest"]
    for row in result["rows"]:
        if "error" in row:
            lines.append(f"{row['variant']:30}{row['step']:>6}  failed: {row['error'][:100]}")
            continue
        numbers = f"{row['step']:>6}{row['max_ratio']:>11.2f}{row['mean_ratio']:>12.2f}"
        lines.append(f"{row['variant']:30}{numbers}  {row['parameter']}")
    if result["rows"]:
        lines.append(f"eager's own relative RMSE, mean: {result['rows'][0]['eager_relative_rmse']:.2e}")
    return "\n".join(lines)


# ---- the loss after training ----
def final_loss(
    case: Case, variant: str, device: torch.device, dtype: str, seed: int, steps: int, tail: int
) -> float:
    """The mean of the last `tail` of `steps` losses."""
    batches = Batches(case, device, DTYPES[dtype], distinct=steps)
    training = Training(variant, make_model(case, device, DTYPES[dtype], seed), case.learning_rate)
    losses = [training.step(batches(i)).clone() for i in range(steps)]
    return torch.stack(losses[-tail:]).double().mean().item()


def losses(
    case: Case,
    variants: list[str],
    device: torch.device,
    dtype: str,
    steps: int = 300,
    tail: int = 50,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """How far each variant's loss ends from eager's, and eager's own distance from fp32 for three seeds.

    fp32 products may use TF32 (its fraction has three more bits than bf16's), or the run would take hours.
    """
    torch.set_float32_matmul_precision("high")

    def run(variant: str, kind: str, seed: int) -> float:
        value = final_loss(case, variant, device, kind, seed, steps, tail)
        report(f"{variant:24} {kind} seed {seed}: {value:.5f}")
        return value

    result: dict[str, Any] = {"steps": steps, "tail": tail, "rows": []}
    low = [run("eager", dtype, seed) for seed in range(3)]
    for variant in (v for v in variants if v != "eager"):
        row: dict[str, Any] = {"variant": variant, "eager": low[0]}
        try:
            row["loss"] = run(variant, dtype, 0)
            row["difference"] = row["loss"] - low[0]
        except Exception:
            row["error"] = failure(variant)
        result["rows"].append(row)
    fp32 = [run("eager", "fp32", seed) for seed in range(3)]
    result["eager"], result["eager_fp32"] = low, fp32
    result["spread"] = [a - b for a, b in zip(low, fp32, strict=True)]
    return result


def losses_table(result: dict[str, Any]) -> str:
    spread = ", ".join(f"{d:+.5f}" for d in result["spread"])
    lines = [f"mean loss of the last {result['tail']} of {result['steps']} steps"]
    for row in result["rows"]:
        if "error" in row:
            lines.append(f"{row['variant']:24} failed: {row['error'][:100]}")
        else:
            numbers = f"{row['loss']:.5f}, eager {row['eager']:.5f}, difference {row['difference']:+.5f}"
            lines.append(f"{row['variant']:24} {numbers}")
    return "\n".join([*lines, f"eager's distance from fp32, three seeds: {spread}"])
