"""PyTorch's own samples of every differentiable op, compiled against eager in fp64 on a CPU.

    python -m benchmarks.op_database                       all of them: about an hour
    python -m benchmarks.op_database --seconds 240         as many as fit, always in the same order
    python -m benchmarks.op_database --only cumsum -v

An op is *native* if rules know all that its samples trace to, *opaque* if ATen runs and differentiates some
of it, *refused* if a sample raises one of egcompile's own errors, and *wrong* if a value or a gradient
differs from eager's, or anything else is raised. Needs `expecttest`, as PyTorch's tests do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import multiprocessing.connection
import signal
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import egcompile
from benchmarks.environment import versions
from egcompile.errors import EgcompileError

RESULTS = Path(__file__).parent / "results"
KINDS = ("native", "opaque", "refused", "wrong")
SAMPLES = 2
"""Samples of each op: the first, and others at equal distance."""

PATIENCE = 60
"""Seconds for one sample, beyond which it counts as wrong."""

TOLERANCE = 1e-9
INEXACT = {"nn_functional_hardsigmoid": 1e-7}
"""Ops that ATen itself has with less: its hardsigmoid's derivative is 1/6 in fp32, whatever the dtype."""


@dataclass
class Outcome:
    """What became of an op. `notes` has a line for each sample that was not simply right."""

    op: str
    kind: str = "native"
    samples: int = 0
    seconds: float = 0.0
    opaque: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, kind: str, text: str) -> None:
        self.kind = max(self.kind, kind, key=KINDS.index)
        if text and text not in self.notes:
            self.notes.append(text)


def infos() -> list[Any]:
    """The differentiable ops, in an order that is the same everywhere and mixes their kinds."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = [info for info in op_db if torch.float64 in info.dtypes and info.supports_autograd]
    return sorted(found, key=lambda info: zlib.crc32(info.formatted_name.encode()))


def check_all(
    names: Sequence[str], samples: int = SAMPLES, seconds: float = math.inf, jobs: int = 1
) -> Iterator[Outcome]:
    """Outcomes as they come, from processes beside this one; no op is started after `seconds`.

    A process that ends, since an op brought it down, is one wrong outcome and replaced.
    """
    start, waiting = time.perf_counter(), list(reversed(names))
    running: dict[Any, str] = {}

    def give(worker: Any) -> None:
        if waiting and time.perf_counter() - start < seconds:
            running[worker] = waiting.pop()
            worker.send((running[worker], samples))
        else:
            worker.close()

    for _ in range(min(jobs, len(names))):
        give(_worker())
    while running:
        for worker in multiprocessing.connection.wait(list(running)):
            name = running.pop(worker)
            try:
                outcome = worker.recv()
            except EOFError:
                worker, outcome = _worker(), Outcome(name, "wrong", notes=["its process ended"])
            give(worker)
            yield outcome


def _worker() -> Any:
    """A connection to a new process that takes (name, samples) and answers with outcomes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=_work, args=(theirs,), daemon=True).start()
    theirs.close()
    return ours


def _work(pipe: Any) -> None:
    by_name = {info.formatted_name: info for info in infos()}
    with contextlib.suppress(EOFError):
        while True:
            name, samples = pipe.recv()
            pipe.send(check(by_name[name], samples))


def check(info: Any, count: int = SAMPLES) -> Outcome:
    """Runs samples of an op; never raises for what the op or egcompile does."""
    outcome, start = Outcome(info.formatted_name), time.perf_counter()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(info.sample_inputs("cpu", torch.float64, requires_grad=True))
        for sample in samples[:: max(1, -(-len(samples) // count))]:
            outcome.samples += 1
            try:
                with _patience():
                    _check_sample(info, sample, outcome)
            except EgcompileError as error:
                outcome.note("refused", _line(error))
            except Exception as error:
                outcome.note("wrong", _line(error))
    outcome.seconds = round(time.perf_counter() - start, 2)
    return outcome


def _check_sample(info: Any, sample: Any, outcome: Outcome) -> None:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def function(*tensors: Tensor) -> list[Tensor]:
        values = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(values, spec)
        result = sample.output_process_fn_grad(info.op(first, *args, **kwargs))
        return [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]

    try:
        expected, again = (_gradients(function, leaves, places, seed) for seed in (1, 2))
    except Exception as error:
        outcome.notes.append(f"eager: {_line(error)}")
        return
    inputs = _fresh(leaves, places)
    traced = egcompile.trace(function, tuple(inputs))
    plan = egcompile.optimize(traced, "cpu")

    def compiled(*tensors: Tensor) -> list[Tensor]:
        return traced.restore(plan.run(plan.accept(traced.inputs(tensors))))

    for node in traced.graph.nodes:
        if node.op.derivative is not None:
            outcome.note("opaque", "")
            if node.op.name not in outcome.opaque:
                outcome.opaque.append(node.op.name)
    found = _gradients(compiled, leaves, places, 1)
    chance = any(node.op.random for node in traced.graph.nodes)
    chance |= any(not _same(a, b) for a, b in zip(expected, again, strict=True))
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if mine is None or theirs is None:
            given = mine if mine is not None else theirs
            if given is not None and bool((given != 0).any()):
                outcome.note("wrong", f"result {i} is {'missing' if mine is None else 'not None'}")
        elif chance:  # it draws otherwise than eager; its shape is all there is to compare
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                outcome.note("wrong", f"result {i} is of another type")
        elif not _same(mine, theirs, INEXACT.get(outcome.op, TOLERANCE)):
            outcome.note("wrong", f"result {i} of {len(found)} differs: {_difference(mine, theirs)}")


def _fresh(leaves: Sequence[Any], places: Sequence[int]) -> list[Tensor]:
    return [leaves[i].detach().clone().requires_grad_(leaves[i].requires_grad) for i in places]


def _gradients(
    function: Callable[..., list[Tensor]], leaves: Sequence[Any], places: Sequence[int], seed: int
) -> list[Tensor | None]:
    """The outputs, then the gradient of each input that wants one."""
    inputs = _fresh(leaves, places)
    torch.manual_seed(seed)
    outputs = function(*inputs)
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (y, torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype))
        for y in outputs
        if y.requires_grad
    ]
    wanting = [x for x in inputs if x.requires_grad]
    gradients: tuple[Tensor | None, ...] = (None,) * len(wanting)
    if pairs and wanting:
        roots, cotangents = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(roots, wanting, cotangents, allow_unused=True)
    return [*(y.detach() for y in outputs), *gradients]


def _same(a: Tensor | None, b: Tensor | None, tolerance: float = TOLERANCE) -> bool:
    if a is None or b is None:
        return a is b
    try:
        torch.testing.assert_close(a, b, equal_nan=True, rtol=tolerance, atol=tolerance)
    except AssertionError:
        return False
    return True


def _difference(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)} for {b.dtype} {tuple(b.shape)}"
    return f"by {(a.double() - b.double()).abs().max().item():.3g}"


def _line(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:300]}"


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def summary(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(outcome.kind for outcome in outcomes)
    return f"{len(outcomes)} ops: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no op after that time")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="ops whose name holds this")
    parser.add_argument("--part", default="0/1", help="every n-th op from the k-th on, as k/n")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("-v", "--verbose", action="store_true", help="a line an op")
    parser.add_argument("--output", type=Path, default=RESULTS / "op_database.json")
    options = parser.parse_args()
    first, step = map(int, options.part.split("/"))
    chosen = [i.formatted_name for i in infos()[first::step] if options.only in i.formatted_name]
    outcomes: list[Outcome] = []
    for last in check_all(chosen, options.samples, options.seconds, options.jobs):
        outcomes.append(last)
        if options.verbose or last.kind == "wrong":
            print(f"{last.kind:8} {last.op:50} {', '.join(last.opaque)} {'; '.join(last.notes)}", flush=True)
    print(summary(outcomes))
    if not options.only:
        options.output.parent.mkdir(exist_ok=True)
        result = {"versions": versions(), "ops": [asdict(o) for o in sorted(outcomes, key=lambda o: o.op)]}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
