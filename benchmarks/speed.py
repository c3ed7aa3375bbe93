"""Times training steps: all variants alive in one process, their rounds interleaved."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.variants import DTYPES, Batches, Training, make_model
from benchmarks.zoo import Case

WARMUP_STEPS = 10
MEMORY_STEPS = 3


@dataclass
class Measurement:
    """One variant's results: `samples` are milliseconds a step, one a round; `losses` the warm-up's."""

    variant: str
    samples: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    compile_s: float | None = None
    peak_gb: float | None = None
    error: str = ""

    def percentile(self, q: float) -> float:
        """Linear between the two nearest samples; NaN without any."""
        if not self.samples:
            return float("nan")
        ordered = sorted(self.samples)
        at = q * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (at - low) * (ordered[high] - ordered[low])

    def record(self, reference: Measurement | None, tokens: int) -> dict[str, Any]:
        """As JSON; the loss difference is the largest of the warm-up steps against `reference`."""
        if self.error:
            return {"variant": self.variant, "error": self.error}
        row: dict[str, Any] = {"variant": self.variant, "ms": self.percentile(0.5)}
        row |= {"p20": self.percentile(0.2), "p80": self.percentile(0.8), "rounds": len(self.samples)}
        row |= {"tokens_per_s": tokens / row["ms"] * 1e3, "peak_gb": self.peak_gb}
        row |= {"compile_s": self.compile_s, "losses": self.losses}
        if reference is not None and not reference.error:
            row["speedup"] = reference.percentile(0.5) / row["ms"]
            apart = [abs(a - b) for a, b in zip(self.losses, reference.losses, strict=True)]
            row["loss_difference"] = max(apart)
        return row


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pool_bytes() -> int:
    """Bytes that CUDA graphs hold in pools of their own: a replay needs them all, whatever is live."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def _live_pool_bytes() -> int:
    segments = torch.cuda.memory_snapshot()
    return sum(s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


class Contestant:
    """A variant that has compiled and warmed up, ready to be timed."""

    def __init__(self, variant: str, case: Case, batches: Batches, device: torch.device, dtype: str) -> None:
        self.result = Measurement(variant)
        self.batches, self.device = batches, device
        cuda = device.type == "cuda"
        before = torch.cuda.memory_allocated(device) if cuda else 0
        pools = _pool_bytes() - _live_pool_bytes() if cuda else 0
        start = time.perf_counter()
        model = make_model(case, device, DTYPES[dtype])
        built = time.perf_counter() - start
        self.training = Training(variant, model, case.learning_rate)
        self.result.losses = [self._loss(i) for i in range(WARMUP_STEPS)]
        self._warm_seconds = time.perf_counter() - start - built
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
            self._run(MEMORY_STEPS)
            _synchronize(device)
            idle = _pool_bytes() - _live_pool_bytes() - pools
            peak = torch.cuda.max_memory_allocated(device) - before + max(0, idle)
            self.result.peak_gb = peak / 2**30
        self.steps_a_round = max(3, int(0.25 / max(self._seconds(3), 1e-4)))

    def _loss(self, step: int) -> float:
        return self.training.step(self.batches(step)).item()

    def _run(self, steps: int) -> None:
        for i in range(steps):
            self.training.step(self.batches(i))

    def _seconds(self, steps: int) -> float:
        """Seconds a step, by the device's clock where it has one."""
        _synchronize(self.device)
        if self.device.type != "cuda":
            start = time.perf_counter()
            self._run(steps)
            return (time.perf_counter() - start) / steps
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._run(steps)
        end.record()
        _synchronize(self.device)
        return begin.elapsed_time(end) / 1e3 / steps

    def time_round(self) -> None:
        self._run(1)  # the other variants have had the caches and the clocks
        self.result.samples.append(self._seconds(self.steps_a_round) * 1e3)

    def finish(self) -> Measurement:
        """Compilation is what the warm-up took beyond its steps at their quickest."""
        steady = WARMUP_STEPS * self.result.percentile(0.0) / 1e3
        self.result.compile_s = max(0.0, self._warm_seconds - steady)
        return self.result


def measure(
    case: Case,
    variants: list[str],
    device: torch.device,
    dtype: str,
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """Compiles the variants one by one, then times them in turn; one that fails says so and is left out.

    Stops after `rounds` rounds, or after 5 once `seconds` have passed in timing.
    """
    batches = Batches(case, device, DTYPES[dtype], distinct=4)
    batches.load()
    results: dict[str, Measurement] = {}
    contestants: list[Contestant] = []
    for variant in variants:
        try:
            contestants.append(Contestant(variant, case, batches, device, dtype))
            results[variant] = contestants[-1].result
        except Exception:
            results[variant] = Measurement(variant, error=failure(variant))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    start = time.perf_counter()
    for i in range(rounds):
        if i >= 5 and time.perf_counter() - start > seconds:
            break
        turn = i % max(1, len(contestants))
        for contestant in contestants[turn:] + contestants[:turn]:
            try:
                if not contestant.result.error:
                    contestant.time_round()
            except Exception:
                contestant.result.error = failure(contestant.result.variant)
    for contestant in contestants:
        if not contestant.result.error:
            contestant.finish()
    reference = results.get("eager")
    return {"variants": [results[v].record(reference, case.tokens) for v in variants]}


def failure(what: str) -> str:
    """The error being handled: printed whole, and its innermost cause returned as a line."""
    print(f"{what} failed:\n{traceback.format_exc()}", flush=True)
    error = sys.exc_info()[1]
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def table(result: dict[str, Any]) -> str:
    """The result as text, a line a variant."""
    head = f"{'variant':30}{'ms/step':>10}{'20%':>9}{'80%':>9}{'speedup':>9}{'peak GB':>9}"
    lines = [f"{head}{'compile s':>11}{'loss diff':>11}"]
    for row in result["variants"]:
        if "error" in row:
            lines.append(f"{row['variant']:30}failed: {row['error'][:120]}")
            continue
        peak = "-" if row["peak_gb"] is None else f"{row['peak_gb']:.2f}"
        speedup = f"{row['speedup']:.2f}x" if "speedup" in row else "-"
        apart = f"{row['loss_difference']:.1e}" if "loss_difference" in row else "-"
        numbers = f"{row['ms']:>10.2f}{row['p20']:>9.2f}{row['p80']:>9.2f}{speedup:>9}{peak:>9}"
        lines.append(f"{row['variant']:30}{numbers}{row['compile_s']:>11.1f}{apart:>11}")
    return "\n".join(lines)
