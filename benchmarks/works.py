"""The memory-bound work that benchmarks.kernels, .counters and .tune measure: functions, shapes, least bytes.

A `Work` is one function on tensors of one shape. Its floor counts each pass that must really happen, reading
an input or writing an output once, at two bytes an element; what is smaller than a thousandth is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = ((8192, 4096), (16384, 2048), (4096, 8192), (32768, 1024), (2048, 32768))
SMALL_ROWS = ((1048576, 64), (262144, 256))
IMAGES = (32, 256, 64, 64)


@dataclass(frozen=True)
class Work:
    """One function at one shape.

    call              its tensors -> an output, or several
    shapes            of its tensors; those of one axis are parameters, the others bf16 activations
    forward, backward passes over an activation that must happen, each of `numel` elements; a pass may be
                      narrower than an activation, so they are fractions
    nhwc              whether activations are channels_last
    liger             the name of Liger's function, where it has one
    """

    name: str
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]
    forward: float
    backward: float
    nhwc: bool = False
    liger: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.shapes[0]))}{' channels_last' if self.nhwc else ''}"

    @property
    def numel(self) -> int:
        return torch.Size(self.shapes[0]).numel()

    def inputs(self, device: str, seed: int = 0) -> list[Tensor]:
        """Fresh leaves that want gradients."""
        generator = torch.Generator(device).manual_seed(seed)
        return [self._leaf(shape, device, generator) for shape in self.shapes]

    def _leaf(self, shape: tuple[int, ...], device: str, generator: torch.Generator) -> Tensor:
        x = torch.randn(shape, device=device, dtype=torch.float32, generator=generator)
        x = (1 + 0.1 * x if len(shape) == 1 else x).to(torch.bfloat16)
        if self.nhwc and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x.requires_grad_()


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight), total


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm(total, weight, bias), total


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32, weight, bias))


def batch_norm_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


def batch_norm_add_relu(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True) + residual)


def chain(x: Tensor) -> Tensor:
    y = torch.tanh(x * 0.5 + 0.25)
    return (y * y - x).abs() * torch.exp(-y) + 1.5


def broadcast_chain(x: Tensor, row: Tensor) -> Tensor:
    y = torch.tanh(x * row + 0.25)
    return (y * y - row).abs() * torch.exp(-y) + 1.5


def transposed_chain(x: Tensor, y: Tensor) -> Tensor:
    z = torch.tanh(x * 0.5 + y.t())
    return (z * z - x).abs() * torch.exp(-z) + 1.5


RESNET = ((64, 112), (64, 56), (256, 56), (128, 56), (128, 28), (512, 28), (256, 28), (256, 14), (1024, 14))
RESNET += ((512, 14), (512, 7), (2048, 7))


PLANES = {
    (16, 1280, 16, 16): (2, 2, 3),
    (8, 320, 96, 96): (3, 3, 5),
    (64, 512, 14, 14): (2, 2, 3),
    (128, 512, 7, 7): (2, 2, 3),
}
"""Images by channel, with planes that no tile divides, or several of which make one -> passes of GroupNorm's
forward, and of BatchNorm's forward and backward: a program holds a channel's planes if they are small, the
L2 a group unless it is large.
"""


def works() -> Iterator[Work]:
    """All of them. A norm's backward reads the cotangent and the input, and writes a gradient; beside a sum
    that goes on, it also reads the sum's own cotangent."""
    for m, n in (*ROWS, *SMALL_ROWS):
        x, w = (m, n), (n,)
        yield Work("rms_norm", rms_norm, (x, w), 2, 3, liger="rms_norm")
        yield Work("layer_norm", layer_norm, (x, w, w), 2, 3, liger="layer_norm")
        yield Work("add_rms_norm", add_rms_norm, (x, x, w), 4, 4, liger="fused_add_rms_norm")
        yield Work("add_layer_norm", add_layer_norm, (x, x, w, w), 4, 4)
        yield Work("softmax", softmax, (x,), 2, 3, liger="softmax")
    c = (IMAGES[1],)
    for nhwc in (False, True):
        # a group is read again from the L2; on channels_last it is strewn over memory, which takes two passes
        least = 3 if nhwc else 2
        yield Work("group_norm_silu", group_norm_silu, (IMAGES, c, c), least, 5, nhwc, "group_norm")
        yield Work("batch_norm_relu", batch_norm_relu, (IMAGES, c, c), 3, 5, nhwc)
    for image, (group, forward, backward) in PLANES.items():
        c = (image[1],)
        yield Work("group_norm_silu", group_norm_silu, (image, c, c), group, 5, liger="group_norm")
        yield Work("batch_norm_relu", batch_norm_relu, (image, c, c), forward, backward)
    for channels, size in RESNET:
        image, c = (128, channels, size, size), (channels,)
        yield Work("batch_norm_add_relu", batch_norm_add_relu, (image, image, c, c), 4, 7, True)
    yield Work("chain", chain, ((8192, 8192),), 2, 3)
    yield Work("broadcast_chain", broadcast_chain, ((8192, 8192), (8192,)), 2, 3)
    yield Work("transposed_chain", transposed_chain, ((8192, 8192), (8192, 8192)), 3, 5)


def chosen(names: Sequence[str]) -> list[Work]:
    """Those whose title holds one of the names; all for none."""
    return [w for w in works() if not names or any(n in w.title for n in names)]
