"""Plans replayed from CUDA graphs: the same numbers as launch by launch, whatever the caller holds on to."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import egcompile
from egcompile.runtime.graphs import Graphed, Results

pytestmark = pytest.mark.gpu


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def _pair() -> tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    plain = Model().cuda()
    replayed = copy.deepcopy(plain)
    egcompile_mode = egcompile.compile(replayed, mode="reduce-overhead")
    return plain, replayed, egcompile.compile(plain), egcompile_mode


def _x(seed: int) -> Tensor:
    return torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(seed)).cuda()


def _same(plain: nn.Module, replayed: nn.Module) -> None:
    for (name, p), q in zip(plain.named_parameters(), replayed.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0, msg=name)
    for (name, p), q in zip(plain.named_buffers(), replayed.buffers(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=0, msg=name)


def test_training_is_the_same_to_the_bit() -> None:
    plain, replayed, a, b = _pair()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, replayed)]
    for step in range(8):
        losses = [f(_x(step)).square().mean() for f in (a, b)]
        assert losses[0].item() == losses[1].item()
        for loss in losses:
            loss.backward()
        _same(plain, replayed)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_gradients_accumulate() -> None:
    plain, replayed, a, b = _pair()
    for step in range(8):
        for f in (a, b):
            f(_x(step)).square().mean().backward()
        _same(plain, replayed)


def test_two_forwards_before_their_backwards() -> None:
    plain, replayed, a, b = _pair()
    for step in range(8):
        for f in (a, b):
            first, second = f(_x(2 * step)), f(_x(2 * step + 1))
            (first.square().mean() + second.square().mean() / 3).backward()
        _same(plain, replayed)


def test_what_a_caller_holds_stays() -> None:
    _, _, a, b = _pair()
    held = [(a(_x(step)), b(_x(step))) for step in range(8)]
    for expected, got in held:
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_graph_that_is_retained() -> None:
    plain, replayed, a, b = _pair()
    for step in range(6):
        for f in (a, b):
            loss = f(_x(step)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        _same(plain, replayed)


def test_a_parameter_that_moves() -> None:
    plain, replayed, a, b = _pair()
    for step in range(9):
        if step % 4 == 3:
            for model in (plain, replayed):
                model.head.weight.data = model.head.weight.detach() * 1.5
        for model, f in ((plain, a), (replayed, b)):
            model.zero_grad()
            f(_x(step)).square().mean().backward()
        _same(plain, replayed)


def test_evaluation_and_training_in_turn() -> None:
    plain, replayed, a, b = _pair()
    for step in range(6):
        for model, f in ((plain, a), (replayed, b)):
            model.zero_grad()
            f(_x(step)).square().mean().backward()
        _same(plain, replayed)
        with torch.no_grad():
            torch.testing.assert_close(b(_x(99)), a(_x(99)), rtol=0, atol=0)


def test_dropout_draws_anew_at_each_replay() -> None:
    torch.manual_seed(0)
    model = egcompile.compile(
        nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda(), mode="reduce-overhead"
    )
    x = torch.randn(32, 64, device="cuda")
    masks = []
    for _ in range(6):
        y = model(x)
        y.sum().backward()
        masks.append(y == 0)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(masks))
    assert all(0.4 < m.float().mean().item() < 0.6 for m in masks)


def test_a_capture_that_fails_leaves_the_callers_stream() -> None:
    def reads_back(values: list[Tensor]) -> Results:
        return (values[0] * values[0].sum().item(),)

    graphed = Graphed(reads_back, torch.cuda.graph_pool_handle(), threading.RLock())
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(4):
                (y,) = graphed([torch.ones(3, device="cuda")])
                assert y is not None and y.tolist() == [3, 3, 3]
                assert torch.cuda.current_stream() == stream
    assert graphed.refused


def test_inputs_that_lie_anyhow() -> None:
    layouts: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(4, 8),
        lambda x: x.flatten().as_strided((4, 6), (2, 1)),
    )
    for layout in layouts:
        function = egcompile.compile(lambda x: (x * 2, x.t().exp().sum(0)), mode="reduce-overhead")
        for step in range(6):
            x = layout(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).cuda())
            for got, expected in zip(function(x), (x * 2, x.t().exp().sum(0)), strict=True):
                torch.testing.assert_close(got, expected)


def test_saved_values_that_a_hook_holds() -> None:
    """A hook copies what is large, as one that offloads does, and holds what is small."""

    def pack(x: Tensor) -> Tensor:
        return x.clone() if x.numel() > 400 else x.detach()

    plain, replayed, a, b = _pair()
    for step in range(6):
        for f in (a, b):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                first, second = f(_x(2 * step)), f(_x(2 * step + 1))
            (first.square().mean() + second.square().mean() / 3).backward()
        _same(plain, replayed)
