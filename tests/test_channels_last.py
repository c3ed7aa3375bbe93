"""Images that lie channels_last stay so through whole plans for a GPU: no copy, no change of layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import egcompile
from egcompile.ir.node import topological
from egcompile.ops.opdef import Kind
from egcompile.schedule.kernel import Buffer, Launch, Program


class Stage(nn.Module):
    """Convolution, norm, activation, pooling, and pointwise work with a skip connection."""

    def __init__(self, dims: int, norm: nn.Module, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        convolution = (nn.Conv2d, nn.Conv3d)[dims - 2]
        self.first, self.second = (convolution(8, 8, 3, padding=1) for _ in range(2))
        self.norm, self.pool = norm, pool

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.silu(self.norm(self.first(x))))
        return torch.tanh(self.second(x)) * 0.5 + x


def norms(dims: int) -> dict[str, Callable[[], nn.Module]]:
    return {
        "batch": lambda: (nn.BatchNorm2d, nn.BatchNorm3d)[dims - 2](8),
        "instance": lambda: (nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 2](8, affine=True),
        "group": lambda: nn.GroupNorm(4, 8),
    }


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: F.max_pool2d(x, 3, 2, 1),
    "average": lambda x: F.avg_pool2d(x, 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 3),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
}
CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **{
        f"{norm} {pool}": (lambda make=make, p=p: Stage(2, make(), p), 2)
        for norm, make in norms(2).items()
        for pool, p in POOLS.items()
    },
    **{f"{norm} 3d": (lambda make=make: Stage(3, make(), torch.relu), 3) for norm, make in norms(3).items()},
}


def is_image(buffer: Buffer) -> bool:
    """Of several channels and positions, so that its layout can be told."""
    shape = buffer.type.shape
    return len(shape) > 3 and shape[1] > 1 and all(n > 1 for n in shape[2:]) and 0 not in buffer.strides


def lies_channels_last(buffer: Buffer) -> bool:
    channel, *positions = buffer.strides[1:]
    return channel == 1 and positions == sorted(positions, reverse=True)


def moves_only(step: Launch) -> bool:
    """Whether a launch computes nothing: it writes what it reads, in another place or order."""
    kinds = {node.op.kind for node in topological(step.kernel.body.outputs)}
    return kinds <= {Kind.LEAF, Kind.MOVEMENT, Kind.PROJECTION}


def changes(program: Program) -> list[str]:
    """The images that lie otherwise, and the launches that only move."""
    lie = [name for name, b in program.buffers.items() if is_image(b) and not lies_channels_last(b)]
    return lie + [s.kernel.name for s in program.steps if isinstance(s, Launch) and moves_only(s)]


@pytest.mark.parametrize("name", CASES)
def test_no_plan_changes_a_layout(name: str) -> None:
    make, dims = CASES[name]
    layout = torch.channels_last if dims == 2 else torch.channels_last_3d
    x = torch.randn(2, 8, *(6,) * dims, dtype=torch.bfloat16).to(memory_format=layout).requires_grad_()
    model = make().to(torch.bfloat16).to(memory_format=layout)
    schedule = egcompile.optimize(egcompile.trace(model, (x,)), target="cuda:90").compiled().schedule
    assert schedule.backward is not None
    assert changes(schedule.forward) == []
    assert changes(schedule.backward) == []
    images = [b for b in schedule.forward.buffers.values() if is_image(b)]
    assert len(images) > 3  # the test sees them
