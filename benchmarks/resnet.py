"""ResNet (He et al., 2016), as torchvision has it: a bottleneck's stride is that of its 3 x 3 convolution."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class Residual(nn.Module):
    """`relu(body(x) + shortcut(x))`: the body is convolutions, each with its norm, and ReLU between them."""

    def __init__(self, inputs: int, widths: Sequence[int], kernels: Sequence[int], strided: int, stride: int):
        super().__init__()
        sizes = [inputs, *widths]
        self.convolutions = nn.ModuleList(
            _convolution(a, b, kernel, stride if i == strided else 1)
            for i, (a, b, kernel) in enumerate(zip(sizes, widths, kernels))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != widths[-1]:
            project = _convolution(inputs, widths[-1], 1, stride)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(widths[-1]))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms)):
            y = norm(convolution(F.relu(y) if i else y))
        return F.relu(y + self.shortcut(x))


def basic(inputs: int, width: int, stride: int) -> Residual:
    return Residual(inputs, [width, width], [3, 3], 0, stride)


def bottleneck(inputs: int, width: int, stride: int) -> Residual:
    return Residual(inputs, [width, width, 4 * width], [1, 3, 1], 1, stride)


class ResNet(nn.Module):
    """Images `[N, 3, H, W]` to scores `[N, classes]`; `depth` is 18 or 50."""

    def __init__(self, depth: int, classes: int = 1000) -> None:
        super().__init__()
        block, counts = {18: (basic, (2, 2, 2, 2)), 50: (bottleneck, (3, 4, 6, 3))}[depth]
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        channels, blocks = 64, []
        for stage, count in enumerate(counts):
            width = 64 << stage
            for i in range(count):
                blocks.append(block(channels, width, 2 if stage and not i else 1))
                channels = width if block is basic else 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(self.stem(x))
        scores: Tensor = self.head(F.adaptive_avg_pool2d(features, 1).flatten(1))
        return scores
