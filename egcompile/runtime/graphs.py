"""CUDA graphs of a plan's forward and backward: a step's launches become two replays.

A graph reads and writes fixed memory. An input that lies where it lay when the graph was captured (a
parameter) is read in place; others are copied to memory of the graph's own. What a caller gets of the forward
is copied out again, so that nothing it holds ever changes; what only the backward reads stays. Where a replay
would overwrite values that a pending backward still needs, the launches run one by one instead.

Gradients are lent: a caller gets them where the graph wrote them, as most loops let go of them (`zero_grad`)
before the next forward. The first time that one does not, both graphs are captured anew, in other memory, and
from then on gradients are copied out too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from egcompile.config import logger
from egcompile.runtime._torch import memory_of, users
from egcompile.runtime.aten import laid_out, overlaps, unviewed
from egcompile.runtime.memory import empty_on

T = TypeVar("T")
Results = tuple[Tensor | None, ...]
Run = Callable[[list[Tensor]], Results]
"""A plan's forward or backward, which may empty its list, as the backward does to free memory early."""


_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class _Captured:
    """A graph, and where it reads and writes.

    number     that no other graph has
    before     that of the graph whose results it reads
    stream     on which it is replayed, which orders the uses of its memory
    own        memory of its own for inputs that are copied, by position
    addresses  where the other inputs must lie
    results    in the graph's memory
    lie        their addresses
    copied     those that are copied out for the caller, by position
    left       memory of the results that stay for the backward, and how many tensors of the graph lie there
    lent       the same of results that the caller gets in place
    """

    replay: Callable[[], None]
    number: int
    before: int | None
    stream: int
    own: Mapping[int, Tensor]
    addresses: Mapping[int, int]
    results: Results
    lie: tuple[int | None, ...]
    copied: Mapping[int, _Copied]
    left: Mapping[int, int]
    lent: Mapping[int, int]

    def pending(self) -> bool:
        """Whether others than the graph still have what the last replay left, or aliases of it."""
        return any(users(memory) > own for memory, own in self.left.items())

    def borrowed(self) -> bool:
        """Whether the caller still has what it was lent, or aliases of it; or has freed the memory itself."""
        if not self.lent:
            return False
        kept = any(users(memory) > own for memory, own in self.lent.items())
        return kept or any(x is not None and x.data_ptr() != at for x, at in zip(self.results, self.lie))


class _Copied:
    """A result that a caller gets in memory of its own, laid out alike."""

    def __init__(self, result: Tensor) -> None:
        self.shape, self.strides = result.shape, result.stride()
        self.memory = _memory(result)
        self.empty = functools.partial(
            empty_on(result.device), tuple(self.memory.shape), self.memory.stride(), result.dtype
        )

    def seen(self, copy: Tensor) -> Tensor:
        """The result in a copy of its memory."""
        return copy if copy.shape == self.shape else unviewed(copy.as_strided(self.shape, self.strides))


class Shared:
    """What a plan's forward and backward have in common.

    pool      of memory: one graph's temporaries lie where the other's do, or its results
    lock      threads take turns, so that none overwrites what another has not yet copied out
    lends     whether gradients are handed out in place
    graphs    those of the two; they own this, and not it them: a plan's GPU memory goes when the plan does
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.lock = threading.RLock()
        self.lends = True
        self.graphs: weakref.WeakSet[Graphed] = weakref.WeakSet()

    def reclaim(self) -> None:
        """Leaves to the caller what it was lent and still has, for good: nothing is replayed there again."""
        if any(g.captured is not None and g.captured.borrowed() for g in self.graphs):
            logger("kernels").debug("gradients are kept beyond the next call: they are copied from now on")
            self.lends = False
            self.pool = torch.cuda.graph_pool_handle()
            for graphed in self.graphs:
                graphed.captured = None


class Graphed:
    """`run`, captured once its inputs' addresses have repeated, and then replayed.

    outputs   how many of the results, the first ones, the caller gets; the rest is kept for the backward
    before    the graph before this one, and inputs that are results which it left behind: input -> result.
              What comes after another is a backward, whose results are lent
    """

    def __init__(
        self,
        run: Run,
        shared: Shared,
        outputs: int | None = None,
        before: tuple[Graphed, Mapping[int, int]] | None = None,
    ) -> None:
        self.run, self.shared, self.outputs, self.before = run, shared, outputs, before
        shared.graphs.add(self)
        self.seen: list[int] = []
        self.moving: set[int] = set()
        self.captured: _Captured | None = None
        self.refused = False

    def __call__(self, inputs: list[Tensor]) -> Results:
        with self.shared.lock:
            captured = self.ready(inputs)
            if captured is not None:
                captured.replay()
                inputs.clear()
                return _handed_out(captured)
        return self.run(inputs)

    def ready(self, inputs: list[Tensor]) -> _Captured | None:
        """The graph, with these inputs where it reads them; None where the launches are to run one by one."""
        if self.refused or torch.cuda.is_current_stream_capturing():
            return None
        self.shared.reclaim()  # before any graph is asked for: it may be gone then
        before, expected = self.expected()
        addresses = [x.data_ptr() for x in inputs]
        if expected is None or any(addresses[i] != address for i, address in expected.items()):
            return None
        captured = self.captured
        if captured is not None and captured.pending():
            return None
        stream = _stream()
        if not self.seen or (captured is not None and captured.stream != stream):
            self.seen = addresses  # the first call loads kernels, and shows what stays in place
            return None
        known = dict(enumerate(self.seen)) if captured is None else captured.addresses
        moved = {i for i, address in known.items() if addresses[i] != address}
        if captured is not None and captured.before is before and not moved:
            for i, own in captured.own.items():
                _memory(own).copy_(_memory(inputs[i]))
            return captured
        self.moving |= moved - expected.keys()
        self.captured = None  # its memory first
        self.captured = self.capture(inputs, stream, before)
        return self.captured

    def expected(self) -> tuple[int | None, Mapping[int, int] | None]:
        """The graph before, and where the inputs must lie that it left behind; None while there is none."""
        if self.before is None:
            return None, {}
        graphed, left = self.before
        if (captured := graphed.captured) is None:
            return None, None
        lie = captured.lie
        return captured.number, {i: address for i, j in left.items() if (address := lie[j]) is not None}

    def capture(self, inputs: list[Tensor], stream: int, before: int | None) -> _Captured | None:
        """The graph; None, for good, where something in the plan cannot be captured."""
        # memory that outlives the call must not be inference mode's, which nothing outside may write
        with torch.inference_mode(False), torch.no_grad():
            own = {i: _twin(inputs[i]) for i in sorted(self.moving)}
            reads = [own[i] if i in own else x.detach() for i, x in enumerate(inputs)]
            try:
                replay, results = _record(self.run, reads, self.shared.pool)
            except RuntimeError as error:
                self.refused = True
                reason = str(error).partition("\n")[0]
                logger("kernels").warning("no CUDA graph, launches run one by one: %s", reason)
                return None
        logger("kernels").debug("captured a graph; %d of %d inputs are copied", len(own), len(inputs))
        count = len(results) if self.outputs is None else self.outputs
        lent = self.lendable(results, reads)
        return _Captured(
            replay,
            next(_numbers),
            before,
            stream,
            own,
            {i: x.data_ptr() for i, x in enumerate(inputs) if i not in own},
            results,
            tuple(None if x is None else x.data_ptr() for x in results),
            {
                i: _Copied(x)
                for i, x in enumerate(results[:count])
                if x is not None and memory_of(x) not in lent
            },
            _users(memory_of(x) for x in results[count:] if x is not None),
            _users(lent),
        )

    def lendable(self, results: Results, reads: Sequence[Tensor]) -> set[int]:
        """Memory of results that the caller gets in place: in each lies one of them, and no input."""
        if self.before is None or not self.shared.lends:
            return set()
        counts = Counter(memory_of(x) for x in results if x is not None)
        return {memory for memory, count in counts.items() if count == 1} - set(map(memory_of, reads))


def _users(memories: Iterable[int]) -> dict[int, int]:
    return {memory: users(memory) for memory in memories}


def _handed_out(captured: _Captured) -> Results:
    """Results as new tensors: copies for the caller; the graph's own memory where it is lent, or left."""
    copies = {i: x.empty() for i, x in captured.copied.items()}
    for dtype in dict.fromkeys(x.dtype for x in copies.values()):
        of = [i for i, x in copies.items() if x.dtype == dtype]
        torch._foreach_copy_([copies[i] for i in of], [captured.copied[i].memory for i in of])

    def handed(i: int, x: Tensor) -> Tensor:
        return captured.copied[i].seen(copies[i]) if i in copies else x.detach()

    return tuple(None if x is None else handed(i, x) for i, x in enumerate(captured.results))


def graphed(
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Run | None,
    outputs: int,
    left: Mapping[int, int],
) -> tuple[Callable[..., Any], Run | None]:
    """A plan's forward and backward, replayed from CUDA graphs from their third call at the latest.

    `left` has the backward's values that are results of the forward no caller gets: value -> result.
    """
    shared = Shared()
    first = Graphed(lambda inputs: forward(*inputs), shared, outputs)
    second = None if backward is None else Graphed(backward, shared, before=(first, left))
    return (lambda *inputs: first(list(inputs))), second


def _record(run: Run, reads: list[Tensor], pool: Any) -> tuple[Callable[[], None], Results]:
    """A replay of `run` on these inputs, and its results; raises RuntimeError for what cannot be captured."""
    for x in reads:
        if x.device.type != "cuda":
            raise RuntimeError(f"an input is on {x.device}")
    side = _side_stream(torch.cuda.current_device())
    try:
        graph, results = _graph_of(lambda: run(list(reads)), pool, side)
    except BaseException:
        # torch's generators stay as if the capture went on, and each draw raises, until one has ended
        with contextlib.suppress(RuntimeError):
            _graph_of(lambda: torch.zeros(1, device=side.device), None, side)
        raise
    return graph.replay, results


def _graph_of(work: Callable[[], T], pool: Any, side: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of `work`, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    capture = torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local")
    with torch.cuda.stream(side), capture:  # that stays on its stream where the end of a capture raises
        returned = work()
    return graph, returned


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """The stream of a device on which graphs are captured; torch's own is on the device that came first."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _stream() -> int:
    stream: int = torch.cuda.current_stream().cuda_stream
    return stream


def _twin(x: Tensor) -> Tensor:
    """A copy of `x` in memory that is laid out alike, as launches read it by fixed strides."""
    memory = _memory(x)
    return laid_out(memory, memory.stride(), copy=True).as_strided(x.shape, x.stride())


def _memory(x: Tensor) -> Tensor:
    """`x`, or where elements share memory, which no copy may write so, all that it spans as a vector."""
    if not overlaps(x.shape, x.stride()):
        return x
    return x.as_strided((1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())),), (1,))
