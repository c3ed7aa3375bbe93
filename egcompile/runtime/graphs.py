"""CUDA graphs of a plan's forward and backward: a step's launches become two replays.

A graph reads and writes fixed memory. An input that lies where it lay when the graph was captured (a
parameter) is read in place; others are copied to memory of the graph's own. What a caller gets is copied out
again, so that nothing it holds ever changes; what only the backward reads stays. Where a replay would
overwrite values that a pending backward still needs, the launches run one by one instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from egcompile.config import logger

Results = tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class _Captured:
    """`inputs` are as the graph reads them; `own` are positions of those in its own memory, `addresses` where
    the others must lie. Of `results` the first are copied out."""

    graph: torch.cuda.CUDAGraph
    stream: int
    inputs: list[Tensor]
    own: tuple[int, ...]
    addresses: dict[int, int]
    results: Results


class Graphed:
    """`run`, captured once its inputs' addresses have repeated, and then replayed.

    pool      of memory, shared by a plan's forward and backward
    outputs   how many of the results, the first ones, the caller gets; the rest is kept for the backward
    expected  where the inputs must lie that another graph left behind; None while there is none
    """

    def __init__(
        self,
        run: Callable[[Sequence[Tensor]], Results],
        pool: Any,
        outputs: int | None = None,
        expected: Callable[[], Mapping[int, int] | None] = dict,
    ) -> None:
        self.run, self.pool, self.outputs, self.expected = run, pool, outputs, expected
        self.addresses: list[int] = []
        self.moving: set[int] = set()
        self.captured: _Captured | None = None
        self.refused = False
        self.kept: weakref.ref[Tensor] | None = None

    def __call__(self, inputs: Sequence[Tensor]) -> Results:
        expected = self.expected()
        if self.refused or expected is None or self.pending() or torch.cuda.is_current_stream_capturing():
            return self.run(inputs)
        addresses = [x.data_ptr() for x in inputs]
        stream = torch.cuda.current_stream().cuda_stream
        captured = self.captured
        if any(addresses[i] != address for i, address in expected.items()):
            return self.run(inputs)
        if not self.addresses or (captured is not None and captured.stream != stream):
            self.addresses = addresses  # the first call loads kernels, and shows what stays in place
            return self.run(inputs)
        before = dict(enumerate(self.addresses)) if captured is None else captured.addresses
        moved = {i for i, address in before.items() if addresses[i] != address}
        if captured is None or moved:
            self.moving |= moved - expected.keys()
            self.captured = None  # its memory first
            captured = self.captured = self.capture(inputs, stream)
            if captured is None:
                return self.run(inputs)
        else:
            for i in captured.own:
                captured.inputs[i].copy_(inputs[i])
        captured.graph.replay()
        return self.hand_out(captured.results)

    def pending(self) -> bool:
        """Whether a backward still reads what the last replay left for it."""
        return self.kept is not None and self.kept() is not None

    def capture(self, inputs: Sequence[Tensor], stream: int) -> _Captured | None:
        """The graph; None, for good, where something in the plan cannot be captured."""
        if any(x.device.type != "cuda" for x in inputs):
            self.refuse("an input is not on the GPU")
            return None
        own = tuple(i for i in range(len(inputs)) if i in self.moving)
        static = [x.clone() if i in self.moving else x.detach() for i, x in enumerate(inputs)]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                results = self.run(static)
        except RuntimeError as error:
            self.refuse(str(error).partition("\n")[0])
            return None
        addresses = {i: x.data_ptr() for i, x in enumerate(inputs) if i not in self.moving}
        logger("kernels").debug("captured a graph; %d of %d inputs are copied", len(own), len(inputs))
        kept = [x if i in self.moving else x.new_empty(0) for i, x in enumerate(static)]
        return _Captured(graph, stream, kept, own, addresses, results)

    def refuse(self, reason: str) -> None:
        self.refused = True
        logger("kernels").warning("no CUDA graph, launches run one by one: %s", reason)

    def hand_out(self, results: Results) -> Results:
        """Results as new tensors: copies for the caller, and for the backward the graph's own memory."""
        count = len(results) if self.outputs is None else self.outputs
        copied = [x for x in results[:count] if x is not None]
        copies = [torch.empty_like(x) for x in copied]
        for dtype in {x.dtype for x in copied}:
            same = [(a, b) for a, b in zip(copies, copied, strict=True) if b.dtype == dtype]
            torch._foreach_copy_([a for a, _ in same], [b for _, b in same])
        fresh = iter(copies)
        kept = tuple(None if x is None else x.detach() for x in results[count:])
        held = next((x for x in kept if x is not None), None)
        self.kept = None if held is None else weakref.ref(held)
        return *(None if x is None else next(fresh) for x in results[:count]), *kept


def graphed(
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[[list[Tensor]], Results] | None,
    outputs: int,
    left: Mapping[int, int],
) -> tuple[Callable[..., Any], Callable[[list[Tensor]], Results] | None]:
    """A plan's forward and backward, replayed from CUDA graphs from their third call at the latest.

    `left` has the backward's values that are results of the forward no caller gets: value -> result.
    """
    pool = torch.cuda.graph_pool_handle()
    first = Graphed(lambda inputs: forward(*inputs), pool, outputs)

    def ahead(*inputs: Tensor) -> Results:
        return first(inputs)

    if backward is None:
        return ahead, None

    def lie() -> dict[int, int] | None:
        if first.captured is None:
            return None
        results = first.captured.results
        return {i: x.data_ptr() for i, j in left.items() if (x := results[j]) is not None}

    second = Graphed(lambda values: backward(list(values)), pool, expected=lie)

    def back(values: list[Tensor]) -> Results:
        inputs = list(values)
        values.clear()
        return second(inputs)

    return ahead, back
