"""What a replay may overwrite and what it must not, where replays are played by the launches themselves."""

from __future__ import annotations

import copy
import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import egcompile
from egcompile.plan import Plan
from egcompile.runtime import graphs
from egcompile.runtime.graphs import Graphed, Results, Run, Shared, graphed
from tests.runtime.scenarios import LAYOUTS, SCENARIOS, Pair, inputs_of

Replays = list[int]


def _at_address(x: Tensor) -> Tensor:
    """The tensor's memory, which this does not keep alive."""
    if not x.numel():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    flat = x.as_strided((1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)),), (1,))
    memory = (ctypes.c_char * flat.nbytes).from_address(x.data_ptr())
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, x.stride())


def _record(run: Run, reads: list[Tensor], pool: Any) -> tuple[Callable[[], None], Results]:
    """As a CUDA graph does, a replay reads the memory of `reads` and writes that of the first results."""
    results = run(list(reads))
    reads = [_at_address(x) for x in reads]
    pool.append(0)

    def replay() -> None:
        pool[-1] += 1
        for kept, new in zip(results, run(list(reads)), strict=True):
            if kept is not None and new is not None:
                flat = graphs._memory(kept)
                flat.copy_(graphs._memory(new))

    return replay, results


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replays]:
    """Plans run on a CPU as they would from CUDA graphs; replays of each capture, in order."""
    count: Replays = []
    monkeypatch.setattr(graphs, "_record", _record)
    monkeypatch.setattr(graphs, "_stream", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: count)

    def replayed(self: Plan, forward: Any, backward: Any, left: Any) -> Any:
        return (
            graphed(forward, backward, len(self.graph.outputs), left) if self.graphs else (forward, backward)
        )

    def wanted(self: Plan, *args: Any, graphs: bool = False, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.graphs = graphs

    init = Plan.__init__
    monkeypatch.setattr(Plan, "__init__", wanted)
    monkeypatch.setattr(Plan, "_replayed", replayed)
    yield count
    torch.compiler.reset()


def _x(seed: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SCENARIOS)
def test_as_launch_by_launch(name: str, replays: Replays) -> None:
    SCENARIOS[name](Pair("cpu"))
    # where results are held with all that their backwards need, none may be replayed
    assert (sum(replays) >= 4) == (name != "what_a_caller_holds")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_that_lie_anyhow(layout: str, replays: Replays) -> None:
    inputs_of(layout, "cpu")
    assert sum(replays) >= 4


def test_a_retained_graph_and_one_that_is_differentiated_again(replays: Replays) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
    replayed = copy.deepcopy(plain)
    a, b = egcompile.compile(plain), egcompile.compile(replayed, mode="reduce-overhead")
    for step in range(5):
        for model, f in ((plain, a), (replayed, b)):
            loss = f(_x(step)).square().mean()
            loss.backward(retain_graph=True)
            f(_x(90 + step))
            (g,) = torch.autograd.grad(loss, [next(model.parameters())], create_graph=True)
            g.square().sum().backward()
        for p, q in zip(plain.parameters(), replayed.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)
    assert sum(replays) >= 4


def test_results_lie_as_without_graphs(replays: Replays) -> None:
    def views(x: Tensor) -> tuple[Tensor, ...]:
        y = x.exp()
        return y[:, ::2], y.sum(1, keepdim=True).expand(4, 8), (x * 2).t(), y.new_zeros(3, 1).expand(3, 5)

    plain, replayed = egcompile.compile(views), egcompile.compile(views, mode="reduce-overhead")
    for step in range(6):
        for got, expected in zip(replayed(_x(step)), plain(_x(step)), strict=True):
            assert got.stride() == expected.stride() and not got._is_view()
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert sum(replays) >= 4


def test_inference_mode_and_no_grad_in_turn(replays: Replays) -> None:
    pair = Pair("cpu")
    for model in pair.models:
        model.eval()
    for step in range(4):
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                expected, got = (f(pair.x(step)) for f in pair.calls)
                torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_what_cannot_be_captured_runs_launch_by_launch(
    replays: Replays, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(run: Run, reads: list[Tensor], pool: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "_record", fails)
    SCENARIOS["gradients_accumulate"](Pair("cpu"))


def test_a_list_of_values_is_emptied_as_by_the_run_itself(replays: Replays) -> None:
    left: list[int] = []

    def run(values: list[Tensor]) -> Results:
        total = values.pop() + values.pop()
        left.append(len(values))
        return (total,)

    one, two = torch.ones(3), torch.ones(3)
    forward = Graphed(run, Shared())
    for _ in range(4):
        values = [one, two]
        (total,) = forward(values)
        assert values == [] and total is not None and total.tolist() == [2, 2, 2]


def test_a_new_graph_of_the_forward_is_one_of_the_backward_too(replays: Replays) -> None:
    """Its backward's temporaries may lie where the new forward leaves values."""
    captures: list[str] = []

    def forward(inputs: list[Tensor]) -> Results:
        captures.append("forward")
        return inputs[0] * 2, inputs[0] + 1

    def backward(inputs: list[Tensor]) -> Results:
        captures.append("backward")
        return (inputs[0] * inputs[1],)

    shared = Shared()
    first = Graphed(forward, shared, 1)
    second = Graphed(backward, shared, before=(first, {0: 1}))
    ct = torch.ones(3)
    x = torch.ones(3)
    for step in range(8):
        x = x if step < 4 else torch.full((3,), float(step))
        y, kept = first([x])
        assert y is not None and kept is not None
        old = second.captured
        (g,) = second([kept, ct])
        del kept
        assert g is not None and g.tolist() == (x + 1).tolist()
        if step == 4:
            assert old is not None and second.captured is not old
    assert second.captured is not None and first.captured is not None
    assert second.captured.before == first.captured.number


def _two(shared: Shared) -> tuple[Graphed, Graphed]:
    first = Graphed(lambda inputs: (inputs[0] * 2, inputs[0] + 1), shared, 1)
    return first, Graphed(lambda inputs: (inputs[0] * inputs[1],), shared, before=(first, {0: 1}))


def test_gradients_are_lent_while_the_caller_lets_go_of_them(replays: Replays) -> None:
    first, second = _two(shared := Shared())
    places = set()
    for step in range(6):
        _, kept = first([torch.full((3,), float(step))])
        (g,) = second([kept, torch.ones(3)])
        del kept
        assert g is not None and g.tolist() == [step + 1] * 3
        if step > 2:
            assert second.captured is not None and second.captured.results[0] is not None
            places.add((g.data_ptr(), second.captured.results[0].data_ptr()))
        del g
    assert len(places) == 1 and len(set(*places)) == 1 and shared.lends


def test_a_gradient_that_is_kept_stays_as_it_is(replays: Replays) -> None:
    """Nothing is replayed over it: its own graph is not, nor the forward, whose temporaries lie there."""
    first, second = _two(shared := Shared())
    held: list[Tensor] = []
    for step in range(8):
        before = first.captured
        _, kept = first([torch.full((3,), float(step))])
        assert (first.captured is before) == (step not in (1, 4))
        (g,) = second([kept, torch.ones(3)])
        assert g is not None and g.tolist() == [step + 1] * 3
        assert shared.lends == (step < 4)
        if step == 3:
            held.append(g)
        del g, kept
    assert held[0].tolist() == [4] * 3 and sum(replays) >= 8


def test_a_second_backward_of_one_forward_is_no_reason_to_capture(replays: Replays) -> None:
    """What the first lent is still there: the graphs go, and with them the forward's, whose values it has."""
    first, second = _two(shared := Shared())
    for step in range(4):
        _, kept = first([torch.full((3,), float(step))])
        (g,) = second([kept, torch.ones(3)])
        if step < 3:
            del g, kept
    captures = len(replays)
    (again,) = second([kept, torch.ones(3)])
    assert g is not None and again is not None and g.tolist() == again.tolist() == [4] * 3
    assert not shared.lends and first.captured is second.captured is None and len(replays) == captures


def test_graphs_go_when_the_plan_does(replays: Replays) -> None:
    """Their memory is the GPU's: it cannot wait for a collection of cycles."""
    first, second = _two(Shared())
    gone = [weakref.ref(first), weakref.ref(second)]
    gc.disable()
    try:
        del first, second
        assert [x() for x in gone] == [None, None]
    finally:
        gc.enable()


def test_memory_that_the_caller_freed_is_not_written(replays: Replays) -> None:
    """As what shards tensors does, by resizing storages."""
    first, second = _two(shared := Shared())
    for step in range(6):
        _, kept = first([torch.full((3,), float(step))])
        (g,) = second([kept, torch.ones(3)])
        assert g is not None and g.tolist() == [step + 1] * 3
        if step == 3:
            g.untyped_storage().resize_(0)
        del g, kept
        assert shared.lends == (step < 4)


def test_threads_take_turns(replays: Replays) -> None:
    """None has its inputs overwritten by another before its results are copied out."""

    def slow(inputs: list[Tensor]) -> Results:
        total = inputs[0].clone()
        for _ in range(20):
            total = total + inputs[0] - inputs[0]
        return (total,)

    f = Graphed(slow, Shared())
    for step in range(3):
        f([torch.full((64,), float(step))])
    wrong: list[float] = []

    def work(own: float) -> None:
        for _ in range(100):
            (y,) = f([torch.full((64,), own)])
            if y is None or not bool((y == own).all()):
                wrong.append(own)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
