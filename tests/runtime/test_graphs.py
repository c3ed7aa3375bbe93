"""Plans replayed from CUDA graphs: the same numbers as launch by launch, whatever the caller holds on to."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import egcompile

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
