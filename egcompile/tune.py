"""Tiles by measurement: a few sources of a kernel are timed on the GPU at hand, and the fastest is taken.

Which it was is kept on disk, for this GPU, for these versions of torch and Triton, and for the text that the
heuristics make of the kernel, so that whatever is compiled again is not timed again.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from egcompile.codegen import Config, KernelSource, generate
from egcompile.codegen.neighbours import neighbours
from egcompile.config import cache_dir, logger
from egcompile.errors import CacheCorrupt
from egcompile.runtime.loader import write
from egcompile.schedule.kernel import Kernel
from egcompile.schedule.together import SMALL
from egcompile.target import Target

Timer = Callable[[Kernel, Sequence[KernelSource], Target], list[float]]

GAIN = 0.98
"""Of the heuristics' time: what takes longer is no faster, as far as can be measured."""

_ONE_AT_A_TIME = threading.Lock()


def tuner_for(target: Target) -> Tuner | None:
    """What times tiles for `target` on the GPU here; None, with a logged reason, if there is no such GPU."""
    if not torch.cuda.is_available():
        reason = "there is no GPU here"
    elif torch.cuda.is_current_stream_capturing():
        reason = "a CUDA graph is being captured"
    elif (here := Target.of(torch.device("cuda"))) != target:
        reason = f"the GPU here is {here.name}"
    else:
        from egcompile.runtime.timing import machine, microseconds  # Triton, which is for GPUs alone

        return Tuner(target, machine(), microseconds)
    logger("kernels").warning("tiles for %s are the heuristics': %s", target.name, reason)
    return None


@dataclass(frozen=True)
class Tuner:
    """Chooses a kernel's `Config` by `time`, which gives microseconds of some of its sources on `machine`."""

    target: Target
    machine: str
    time: Timer

    def __call__(self, kernel: Kernel) -> Config | None:
        """The fastest tiles; None for the heuristics', also where none are to be chosen or timed."""
        nbytes = sum(b.distinct_bytes for b in (*kernel.inputs, *kernel.outputs))
        if nbytes <= SMALL:  # as long as its launch, whatever its tiles are
            return None
        kernel = replace(kernel, name="kernel")
        first = generate(kernel, self.target)
        if first.config is None:
            return None
        with _ONE_AT_A_TIME:
            path = cache_dir() / f"tiles_{self.key(kernel, first)}.json"
            config = _read(path) or self.measure(kernel, path)
        return None if config == first.config else config

    def key(self, kernel: Kernel, source: KernelSource) -> str:
        """A hash of all that a time depends on. The text does not tell the types of what it reads."""
        buffers = [f"{b.type} {b.strides} {b.offset % 16}" for b in (*kernel.inputs, *kernel.outputs)]
        text = "\n".join([self.machine, self.target.name, *buffers, source.text])
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def measure(self, kernel: Kernel, path: Path) -> Config | None:
        """The fastest of the neighbours' tiles, written to `path`; None where memory for that is short."""
        sources = neighbours(kernel, self.target)
        try:
            times = self.time(kernel, sources, self.target)
        except torch.OutOfMemoryError:
            logger("kernels").warning("not tuned, for want of memory: %s", _title(kernel))
            return None
        best = min(range(len(times)), key=times.__getitem__)
        best = best if times[best] < GAIN * times[0] else 0
        chosen = sources[best].config
        assert chosen is not None
        said = "tuned %s: %s, %.1f us; by the heuristics %.1f us"
        logger("kernels").debug(said, _title(kernel), chosen, times[best], times[0])
        found: dict[str, object] = {
            "machine": self.machine,
            "kernel": _title(kernel),
            "config": asdict(chosen),
        }
        found["times"] = [
            {**asdict(s.config), "microseconds": round(t, 3)}
            for s, t in zip(sources, times, strict=True)
            if s.config is not None and math.isfinite(t)
        ]
        _keep(path, json.dumps(found, indent=1) + "\n")
        return chosen


def _title(kernel: Kernel) -> str:
    """What a kernel writes from what it reads, by type."""
    reads, writes = (", ".join(str(b.type) for b in side) for side in (kernel.inputs, kernel.outputs))
    return f"{reads} -> {writes}"


def _read(path: Path) -> Config | None:
    """What was chosen before; None, with a CacheCorrupt warning where a file is no such, if nothing was."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))["config"]
        config = Config(**values)
        if all(type(v) is int and v >= 0 for v in values.values()):
            return config
    except OSError:  # there is none, or no such directory
        return None
    except (ValueError, KeyError, TypeError):
        pass
    warnings.warn(CacheCorrupt(f"{path} has no tiles; they are chosen anew"), stacklevel=2)
    return None


def _keep(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, text)
    except OSError as error:
        warnings.warn(f"chosen tiles are not kept, for EGCOMPILE_CACHE_DIR: {error}", stacklevel=2)
