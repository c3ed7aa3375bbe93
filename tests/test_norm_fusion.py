"""What goes through memory around a norm, in plans for a GPU: each pass that must be, and no other.

A norm over more than a row reads its input twice, for statistics and to apply them; what comes after it is
part of the second pass. Its backward reads cotangent and input twice, for two sums and to apply them; the
activation's gradient is part of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import egcompile
from egcompile.schedule.kernel import Buffer, Call, Launch, Program

CHANNELS = 64


def image() -> Tensor:
    x = torch.empty(8, CHANNELS, 32, 32, dtype=torch.bfloat16)
    return x.to(memory_format=torch.channels_last).requires_grad_()


def rows() -> Tensor:
    return torch.empty(8, 512, CHANNELS, dtype=torch.bfloat16, requires_grad=True)


class Block(nn.Module):
    """`after(norm(before(x)), *more)`."""

    def __init__(
        self, norm: nn.Module, after: Callable[..., object], before: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.before, self.norm, self.after = before or nn.Identity(), norm, after

    def forward(self, x: Tensor, *more: Tensor) -> object:
        return self.after(self.norm(self.before(x)), *more)


class AddNorm(nn.Module):
    """`norm(x + r), x + r`."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return self.norm(h), h


@dataclass(frozen=True)
class Case:
    """`forward` and `backward` are how often a value of `x`'s size is read or written by kernels."""

    make: Callable[[], nn.Module]
    inputs: tuple[Callable[[], Tensor], ...]
    forward: int
    backward: int


def batch_norm() -> nn.Module:
    return nn.BatchNorm2d(CHANNELS)


def group_norm() -> nn.Module:
    return nn.GroupNorm(8, CHANNELS)


def convolution(bias: bool) -> nn.Module:
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=bias)


def leaky(x: Tensor) -> Tensor:
    return F.leaky_relu(x, 0.2)


def add_relu(x: Tensor, r: Tensor) -> Tensor:
    return F.relu(x + r)


def silu_add(x: Tensor, r: Tensor) -> Tensor:
    return F.silu(x) + r


ONE, TWO = (image,), (image, image)
CASES = {
    "batch norm, relu": Case(lambda: Block(batch_norm(), F.relu), ONE, 3, 5),
    # the sum's gradient is an output of its own, and then what the second pass reads
    "batch norm, add, relu": Case(lambda: Block(batch_norm(), add_relu), TWO, 4, 7),
    "group norm, silu": Case(lambda: Block(group_norm(), F.silu), ONE, 3, 5),
    "group norm, silu, add": Case(lambda: Block(group_norm(), silu_add), TWO, 4, 5),
    "instance norm, leaky relu": Case(lambda: Block(nn.InstanceNorm2d(CHANNELS), leaky), ONE, 3, 5),
    "convolution, batch norm, relu": Case(lambda: Block(batch_norm(), F.relu, convolution(False)), ONE, 3, 5),
    "biased convolution, group norm, silu": Case(
        lambda: Block(group_norm(), F.silu, convolution(True)), ONE, 3, 5
    ),
    "biased convolution, batch norm, silu": Case(
        lambda: Block(batch_norm(), F.silu, convolution(True)), ONE, 3, 5
    ),
    "add, layer norm": Case(lambda: AddNorm(nn.LayerNorm(CHANNELS)), (rows, rows), 4, 4),
    "add, rms norm": Case(lambda: AddNorm(nn.RMSNorm(CHANNELS)), (rows, rows), 4, 4),
}


def distinct_bytes(buffer: Buffer) -> int:
    sizes = zip(buffer.type.shape, buffer.strides, strict=True)
    return math.prod(n for n, stride in sizes if stride) * buffer.type.dtype.itemsize


def passes(program: Program, x: Tensor) -> int:
    """How often kernels read or write as much as `x`; what is far smaller is not counted."""
    total = 0
    for step in program.steps:
        if isinstance(step, Launch):
            buffers = [program.buffers[name] for name in (*step.inputs, *step.outputs)]
            total += sum(round(distinct_bytes(b) / x.nbytes) for b in buffers)
    return total


@pytest.mark.parametrize("name", CASES)
def test_each_pass_must_be(name: str) -> None:
    case = CASES[name]
    inputs = tuple(make() for make in case.inputs)
    model = case.make().to(torch.bfloat16)
    if inputs[0].dim() == 4:
        model = model.to(memory_format=torch.channels_last)
    plan = egcompile.optimize(egcompile.trace(model, inputs), target="cuda:90")
    schedule = plan.compiled().schedule
    assert schedule.backward is not None
    assert passes(schedule.forward, inputs[0]) == case.forward
    assert passes(schedule.backward, inputs[0]) == case.backward
    for program in (schedule.forward, schedule.backward):
        called = [step.op for step in program.steps if isinstance(step, Call)]
        assert all(op.startswith("convolution") for op in called)
