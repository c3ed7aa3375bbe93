"""PyTorch's own samples of every differentiable op, compiled against eager in fp64 on a CPU.

    python -m benchmarks.op_database                       all of them: about ten minutes
    python -m benchmarks.op_database --twice               and their second derivatives: twice that
    python -m benchmarks.op_database --seconds 240         as many as fit, always in the same order
    python -m benchmarks.op_database --only cumsum -v

Each sample goes through torch.compile, values, gradients and arguments changed in place are compared, and an
op is what its worst sample is: *native* if rules know all that it traces to, *opaque* if ATen runs and
differentiates some of it, *eager* if Dynamo, the tracer, breaks the graph at it so that nothing is left to
compile, *refused* if one of egcompile's own errors is raised, and *wrong* if anything differs from eager, or
anything else is raised. Needs `expecttest`, as PyTorch's tests do.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import math
import multiprocessing
import multiprocessing.connection
import signal
import time
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils import _pytree as pytree

from benchmarks.environment import versions
from egcompile.backend import backend
from egcompile.errors import EgcompileError
from egcompile.ir import Graph

RESULTS = Path(__file__).parent / "results"
KINDS = ("native", "opaque", "eager", "refused", "wrong")
SAMPLES = 2
"""Samples of each op: the first, and others at equal distance."""

PATIENCE = 60
"""Seconds for one sample, beyond which it counts as wrong."""

TOLERANCE = 1e-9
INEXACT = {"nn_functional_hardsigmoid": 1e-7}
"""Ops that ATen itself has with less: its hardsigmoid's derivative is 1/6 in fp32, whatever the dtype."""

REASONS = {
    "dtype torch.complex32": "complex numbers of half precision",
    "the layout torch.sparse": "sparse tensors",
    "depends on data": "what depends on data",
    "depends on the data": "what depends on data",
    "has no derivative": "a derivative that cannot be traced",
    "has no second derivative": "second derivatives through a random draw",
}
"""What a refusal comes to, by what its message holds."""


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

    @property
    def reason(self) -> str:
        """What it was refused for: one of `REASONS`, or else what the error says."""
        notes = " ".join(self.notes)
        return next((reason for text, reason in REASONS.items() if text in notes), notes)


def infos() -> list[Any]:
    """The differentiable ops, in an order that is the same everywhere and mixes their kinds."""
    from torch.testing._internal import common_methods_invocations
    from torch.testing._internal.common_methods_invocations import op_db

    # Random ops are wrapped to set a seed, where Dynamo would break the graph; `_results` sets one itself.
    common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    found = [info for info in op_db if torch.float64 in info.dtypes and info.supports_autograd]
    return sorted(found, key=lambda info: zlib.crc32(info.formatted_name.encode()))


def check_all(
    names: Sequence[str],
    samples: int = SAMPLES,
    twice: bool = False,
    seconds: float = math.inf,
    jobs: int = 1,
) -> Iterator[Outcome]:
    """Outcomes as they come, from processes beside this one; no op is started after `seconds`.

    A process that ends, since an op brought it down, is one wrong outcome and replaced.
    """
    start, waiting = time.perf_counter(), list(reversed(names))
    running: dict[Any, str] = {}

    def give(worker: Any) -> None:
        if waiting and time.perf_counter() - start < seconds:
            running[worker] = waiting.pop()
            worker.send((running[worker], samples, twice))
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
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # Dynamo tells of every graph it breaks
    by_name = {info.formatted_name: info for info in infos()}
    with contextlib.suppress(EOFError):
        while True:
            name, samples, twice = pipe.recv()
            pipe.send(check(by_name[name], samples, twice))


def check(info: Any, count: int = SAMPLES, twice: bool = False) -> Outcome:
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
                    _check_sample(info, sample, twice and info.supports_gradgrad, outcome)
            except Exception as error:
                cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
                outcome.note("refused" if isinstance(cause, EgcompileError) else "wrong", _line(cause))
    outcome.seconds = round(time.perf_counter() - start, 2)
    return outcome


def _check_sample(info: Any, sample: Any, twice: bool, outcome: Outcome) -> None:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def whole(op: Callable[..., Any]) -> Callable[..., list[Tensor]]:
        def function(*tensors: Tensor) -> list[Tensor]:
            values = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                values[place] = tensor
            first, args, kwargs = pytree.tree_unflatten(values, spec)
            result = sample.output_process_fn_grad(op(first, *args, **kwargs))
            return [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]

        return function

    try:
        expected, again = (_results(whole(info.op), leaves, places, twice, seed) for seed in (1, 2))
    except Exception as error:
        outcome.notes.append(f"eager: {_line(error)}")
        return
    compiled, graphs = _compiled(info.op)
    found = _results(whole(compiled), leaves, places, twice, 1)
    if not graphs:
        outcome.note("eager", "")
    nodes = [node for graph in graphs for node in graph.nodes]
    for node in nodes:
        if node.op.derivative is not None:
            outcome.note("opaque", "")
            if node.op.name not in outcome.opaque:
                outcome.opaque.append(node.op.name)
    chance = any(node.op.random for node in nodes)
    chance |= any(not _same(a, b) for a, b in zip(expected, again, strict=True))
    wanting = [i for i in places if leaves[i].requires_grad]
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if theirs is None and twice and i >= len(expected) - len(wanting):
            continue  # PyTorch does not differentiate this gradient again
        if mine is None or theirs is None:
            given = mine if mine is not None else theirs
            if given is not None and bool((given != 0).any()):
                outcome.note("wrong", f"result {i} is {'missing' if mine is None else 'not None'}")
        elif chance:  # it draws otherwise than eager; its shape is all there is to compare
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                outcome.note("wrong", f"result {i} is of another type")
        elif not _same(mine, theirs, INEXACT.get(outcome.op, TOLERANCE)):
            outcome.note("wrong", f"result {i} of {len(found)} differs: {_difference(mine, theirs)}")


def _compiled(op: Callable[..., Any]) -> tuple[Callable[..., Any], list[Graph]]:
    """`egcompile.compile(op)`, and a list of the graphs that it compiles as it runs."""
    graphs: list[Graph] = []

    def recording(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        call: Any = backend(gm, inputs)
        graphs.append(call.plan.graph)
        return call

    torch._dynamo.reset()
    return torch.compile(lambda *a, **k: op(*a, **k), backend=recording, dynamic=False), graphs


def _fresh(leaves: Sequence[Any], places: Sequence[int]) -> list[Tensor]:
    return [leaves[i].detach().clone().requires_grad_(leaves[i].requires_grad) for i in places]


def _results(
    function: Callable[..., list[Tensor]],
    leaves: Sequence[Any],
    places: Sequence[int],
    twice: bool,
    seed: int,
) -> list[Tensor | None]:
    """The outputs, the inputs as they are after the call, the gradients of those that want one, and if
    asked the gradients of these."""
    inputs = _fresh(leaves, places)
    torch.manual_seed(seed)
    outputs = function(*inputs)
    results: list[Tensor | None] = [y.detach().clone() for y in outputs]
    results += [x.detach().clone() for x in inputs]
    wanting = [x for x in inputs if x.requires_grad]
    roots: Sequence[Tensor | None] = outputs
    for order in range(1 + twice):
        roots = _gradients(roots, wanting, create_graph=order < twice)
        results += [None if g is None else g.detach() for g in roots]
    return results


def _gradients(
    outputs: Sequence[Tensor | None], inputs: Sequence[Tensor], create_graph: bool
) -> Sequence[Tensor | None]:
    """Of a random weighting of the outputs, always the same."""
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (y, torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype))
        for y in outputs
        if y is not None and y.requires_grad
    ]
    if not pairs or not inputs:
        return [None] * len(inputs)
    roots, cotangents = zip(*pairs, strict=True)
    return torch.autograd.grad(roots, inputs, cotangents, allow_unused=True, create_graph=create_graph)


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
    lines = [f"{len(outcomes)} ops: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)]
    for reason, names in refusals(outcomes).items():
        lines.append(f"refused for {reason}: {', '.join(names)}")
    return "\n".join(lines)


def refusals(outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """The ops that are refused, by reason, the most frequent first."""
    found: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.kind == "refused":
            found[outcome.reason].append(outcome.op)
    return {reason: sorted(names) for reason, names in sorted(found.items(), key=lambda f: -len(f[1]))}


def result(outcomes: Sequence[Outcome], samples: int, twice: bool) -> dict[str, Any]:
    """What `benchmarks.report` makes its table of."""
    outcomes = sorted(outcomes, key=lambda outcome: outcome.op)
    about = {"kind": "op_database", "model": "op_database", "size": "full", "dtype": "f64", "device": "cpu"}
    return {
        **about,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "samples": samples,
        "orders": 1 + twice,
        "counts": {kind: sum(outcome.kind == kind for outcome in outcomes) for kind in KINDS},
        "refused": refusals(outcomes),
        "ops": [asdict(outcome) for outcome in outcomes],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no op after that time")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="ops whose name holds this; writes no result")
    parser.add_argument("--part", default="0/1", help="every n-th op from the k-th on, as k/n")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--twice", action="store_true", help="second derivatives too")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line an op")
    parser.add_argument("--output", type=Path, default=RESULTS / "op_database.json")
    options = parser.parse_args()
    first, step = map(int, options.part.split("/"))
    chosen = [i.formatted_name for i in infos()[first::step] if options.only in i.formatted_name]
    outcomes: list[Outcome] = []
    for last in check_all(chosen, options.samples, options.twice, options.seconds, options.jobs):
        outcomes.append(last)
        if options.verbose or last.kind == "wrong":
            print(f"{last.kind:8} {last.op:50} {', '.join(last.opaque)} {'; '.join(last.notes)}", flush=True)
    print(
        f"{options.samples} samples of each op, at most; of {'two orders' if options.twice else 'one order'}"
    )
    print(summary(outcomes))
    if not options.only:
        options.output.parent.mkdir(exist_ok=True)
        found = [result(outcomes, options.samples, options.twice)]
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
