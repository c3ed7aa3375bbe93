"""What a replay may overwrite and what it must not, where replays are played by the launches themselves."""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import egcompile
from egcompile.plan import Plan
from egcompile.runtime import graphs
from egcompile.runtime.graphs import Graphed, Results, Run, graphed

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


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(F.gelu(self.norm(self.first(x))))
        return y


def _pair() -> tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    plain = Model()
    replayed = copy.deepcopy(plain)
    return plain, replayed, egcompile.compile(plain), egcompile.compile(replayed, mode="reduce-overhead")


def _x(seed: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def _same(plain: nn.Module, replayed: nn.Module) -> None:
    for (name, p), q in zip(plain.named_parameters(), replayed.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0, msg=name)


def test_training_with_an_optimizer_is_the_same(replays: Replays) -> None:
    plain, replayed, a, b = _pair()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, replayed)]
    for step in range(8):
        for f, optimizer in zip((a, b), optimizers, strict=True):
            optimizer.zero_grad()
            f(_x(step)).square().mean().backward()
        _same(plain, replayed)
        for optimizer in optimizers:
            optimizer.step()
    assert sum(replays) > 8


@pytest.mark.parametrize("keep", [0, 200], ids=["all", "small ones"])
def test_saved_values_that_hooks_hold(replays: Replays, keep: int) -> None:
    """A hook is given an alias of what is saved; one may copy what is large, and hold what is small."""

    def pack(x: Tensor) -> Tensor:
        return x.clone() if keep and x.numel() > keep else x

    plain, replayed, a, b = _pair()
    for step in range(6):
        for f in (a, b):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                first = f(_x(2 * step))
                second = f(_x(2 * step + 1))
            second.square().mean().backward()
            first.square().mean().backward()
        _same(plain, replayed)
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
        _same(plain, replayed)
    assert sum(replays) >= 4


def test_parameters_that_move_between_steps(replays: Replays) -> None:
    plain, replayed, a, b = _pair()
    for step in range(9):
        if step % 4 == 3:
            for model in (plain, replayed):
                model.head.weight.data = model.head.weight.detach() * 1.5
        for model, f in ((plain, a), (replayed, b)):
            model.zero_grad()
            f(_x(step)).square().mean().backward()
        _same(plain, replayed)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": lambda x: x[:, ::2],
    "columns": lambda x: x[:, 2:6],
    "expanded": lambda x: x[:1].expand(4, 8),
    "windows": lambda x: x.flatten().as_strided((4, 6), (2, 1)),
    "transposed": lambda x: x.t(),
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_inputs_that_lie_anyhow(replays: Replays, layout: str) -> None:
    function = egcompile.compile(lambda x: ((x * 2).sum(1), x.t().exp()), mode="reduce-overhead")
    for step in range(6):
        x = _LAYOUTS[layout](_x(step))
        for got, expected in zip(function(x), ((x * 2).sum(1), x.t().exp()), strict=True):
            torch.testing.assert_close(got, expected)
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
    _, _, a, b = _pair()
    for step in range(4):
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                torch.testing.assert_close(b(_x(2 * step)), a(_x(2 * step)), rtol=0, atol=0)


def test_what_cannot_be_captured_runs_launch_by_launch(
    replays: Replays, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(run: Run, reads: list[Tensor], pool: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "_record", fails)
    plain, replayed, a, b = _pair()
    for step in range(5):
        for f in (a, b):
            f(_x(step)).square().mean().backward()
        _same(plain, replayed)


def test_a_list_of_values_is_emptied_as_by_the_run_itself(replays: Replays) -> None:
    left: list[int] = []

    def run(values: list[Tensor]) -> Results:
        total = values.pop() + values.pop()
        left.append(len(values))
        return (total,)

    one, two = torch.ones(3), torch.ones(3)
    forward = Graphed(run, [], threading.RLock())
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

    lock = threading.RLock()
    first = Graphed(forward, [], lock, 1)
    second = Graphed(backward, [], lock, before=(first, {0: 1}))
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


def test_threads_take_turns(replays: Replays) -> None:
    """None has its inputs overwritten by another before its results are copied out."""

    def slow(inputs: list[Tensor]) -> Results:
        total = inputs[0].clone()
        for _ in range(20):
            total = total + inputs[0] - inputs[0]
        return (total,)

    f = Graphed(slow, [], threading.RLock())
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
