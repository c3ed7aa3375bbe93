"""Training as callers do it, of a model launch by launch beside its twin replayed from CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import egcompile


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class Pair:
    """Two equal models on a device, of which `replayed` is compiled in mode "reduce-overhead"."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.models = Model().to(device), Model().to(device)
        self.models[1].load_state_dict(copy.deepcopy(self.models[0].state_dict()))
        self.calls = (
            egcompile.compile(self.models[0]),
            egcompile.compile(self.models[1], mode="reduce-overhead"),
        )

    def x(self, seed: int) -> Tensor:
        return torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def loss(self, call: Callable[[Tensor], Tensor], seed: int) -> Tensor:
        return call(self.x(seed)).square().mean()

    def same(self) -> None:
        """Gradients and buffers are equal to the bit."""
        plain, replayed = self.models
        for (name, p), q in zip(plain.named_parameters(), replayed.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0, msg=name)
        for (name, p), q in zip(plain.named_buffers(), replayed.buffers(), strict=True):
            torch.testing.assert_close(q, p, rtol=0, atol=0, msg=name)


def training(pair: Pair) -> None:
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in pair.models]
    for step in range(8):
        losses = [pair.loss(f, step) for f in pair.calls]
        assert losses[0].item() == losses[1].item()
        for loss in losses:
            loss.backward()
        pair.same()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def gradients_accumulate(pair: Pair) -> None:
    for step in range(8):
        for f in pair.calls:
            pair.loss(f, step).backward()
        pair.same()


def gradients_live_beyond_the_next_forward(pair: Pair) -> None:
    """As where zero_grad comes between forward and backward."""
    for step in range(8):
        losses = [pair.loss(f, step) for f in pair.calls]
        if step:
            pair.same()  # the last step's
        for model, loss in zip(pair.models, losses, strict=True):
            model.zero_grad()
            loss.backward()


def gradients_are_kept(pair: Pair) -> None:
    kept: list[list[list[Tensor]]] = [[], []]
    for step in range(8):
        for model, f, grads in zip(pair.models, pair.calls, kept, strict=True):
            pair.loss(f, step).backward()
            grads.append([p.grad for p in model.parameters() if p.grad is not None])
            model.zero_grad()
            del grads[:-3]
        for expected, got in zip(*kept, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


def gradients_change_in_place(pair: Pair) -> None:
    for step in range(8):
        for model, f in zip(pair.models, pair.calls, strict=True):
            if step % 4 == 3:
                model.zero_grad(set_to_none=False)
            else:
                model.zero_grad()
            pair.loss(f, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        pair.same()


def two_forwards_before_their_backwards(pair: Pair) -> None:
    for step in range(8):
        for f in pair.calls:
            (pair.loss(f, 2 * step) + pair.loss(f, 2 * step + 1) / 3).backward()
        pair.same()


def what_a_caller_holds(pair: Pair) -> None:
    held = [[f(pair.x(step)) for f in pair.calls] for step in range(8)]
    for expected, got in held:
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def a_retained_graph(pair: Pair) -> None:
    for step in range(6):
        for f in pair.calls:
            loss = pair.loss(f, step)
            loss.backward(retain_graph=True)
            loss.backward()
        pair.same()


def a_parameter_that_moves(pair: Pair) -> None:
    for step in range(9):
        for model, f in zip(pair.models, pair.calls, strict=True):
            if step % 4 == 3:
                model.head.weight.data = model.head.weight.detach() * 1.5
            model.zero_grad()
            pair.loss(f, step).backward()
        pair.same()


def evaluation_in_turn(pair: Pair) -> None:
    for step in range(6):
        for model, f in zip(pair.models, pair.calls, strict=True):
            model.zero_grad()
            pair.loss(f, step).backward()
        pair.same()
        with torch.no_grad():
            expected, got = (f(pair.x(99)) for f in pair.calls)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def hooks_that_hold_saved_values(pair: Pair) -> None:
    """A hook copies what is large, as one that offloads does, and holds an alias of what is small."""

    def pack(x: Tensor) -> Tensor:
        return x.clone() if x.numel() > 400 else x.detach()

    for step in range(6):
        for f in pair.calls:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                first, second = pair.loss(f, 2 * step), pair.loss(f, 2 * step + 1)
            second.backward()
            first.backward()
        pair.same()


SCENARIOS: dict[str, Callable[[Pair], None]] = {
    f.__name__: f
    for f in (
        training,
        gradients_accumulate,
        gradients_live_beyond_the_next_forward,
        gradients_are_kept,
        gradients_change_in_place,
        two_forwards_before_their_backwards,
        what_a_caller_holds,
        a_retained_graph,
        a_parameter_that_moves,
        evaluation_in_turn,
        hooks_that_hold_saved_values,
    )
}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": lambda x: x[:, ::2],
    "columns": lambda x: x[:, 2:6],
    "expanded": lambda x: x[:1].expand(4, 8),
    "windows": lambda x: x.flatten().as_strided((4, 6), (2, 1)),
    "transposed": lambda x: x.t(),
}


def inputs_of(layout: str, device: str) -> None:
    """Inputs that lie in memory in that way, at six addresses."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2).sum(1), x.t().exp()

    compiled = egcompile.compile(function, mode="reduce-overhead")
    for step in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(device)
        x = LAYOUTS[layout](x)
        for got, expected in zip(compiled(x), function(x), strict=True):
            torch.testing.assert_close(got, expected)
