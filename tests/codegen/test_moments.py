"""Means far larger than the deviation: norms are right to 1e-5 of a deviation, rows held or looped over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from egcompile.codegen import Config, generate
from egcompile.ops import batch_norm, group_norm, layer_norm
from egcompile.schedule.kernel import Kernel
from egcompile.target import Target
from tests.codegen.harness import DEVICE, build, run

EPS = 1e-12


def images(norm: Callable[..., Any], shape: tuple[int, ...], last: bool) -> Kernel:
    """A norm of channels over images, channels_last or not."""
    n, c, h, w = shape
    strides = (c * h * w, 1, w * c, c) if last else None
    vector = f"f32[{c}]"
    x = f"f32[{n},{c},{h},{w}]"
    return build(norm, x, vector, vector, strides=(strides,), out_strides=(strides,))


def rows(m: int, n: int) -> Kernel:
    return build(lambda x, w, b: layer_norm(x, w, b, EPS), f"f32[{m},{n}]", f"f32[{n}]", f"f32[{n}]")


def grouped(groups: int) -> tuple[Callable[..., Any], Callable[[Tensor], Tensor]]:
    """GroupNorm; with a group a channel it is InstanceNorm."""
    return (
        lambda x, w, b: group_norm(x, w, b, groups, EPS),
        lambda x: F.group_norm(x, groups, eps=EPS),
    )


BATCH = (
    lambda x, w, b: batch_norm(x, w, b, EPS),
    lambda x: F.batch_norm(x, None, None, training=True, eps=EPS),
)
NORMS = {"group": grouped(2), "instance": grouped(8), "one group": grouped(1), "batch": BATCH}


def check(kernel: Kernel, exact: Callable[[Tensor], Tensor], config: Config | None) -> None:
    """Against fp64 of the very values, row-major: ATen's own channels_last norms cancel."""
    torch.manual_seed(0)
    shape, strides = kernel.inputs[0].type.shape, kernel.inputs[0].strides
    x = torch.empty_strided(shape, strides, device=DEVICE)
    x.copy_(1e4 + 1e-2 * torch.randn(shape, dtype=torch.float64))
    channels = kernel.inputs[1].type.shape
    found = run(
        kernel, [x, torch.ones(channels, device=DEVICE), torch.zeros(channels, device=DEVICE)], config
    )
    error = found[0].cpu().double() - exact(x.cpu().double().contiguous())
    assert error.abs().max() < 1e-5


@pytest.mark.parametrize("config", [None, Config(block_cols=64)], ids=["heuristics", "narrow"])
@pytest.mark.parametrize(("m", "n"), [(5, 2), (4, 64), (3, 1000), (2, 4097)])
def test_layer_norm(m: int, n: int, config: Config | None) -> None:
    check(rows(m, n), lambda x: F.layer_norm(x, (n,), eps=EPS), config)


def test_layer_norm_of_a_row_that_no_program_holds() -> None:
    check(rows(1, 40000), lambda x: F.layer_norm(x, (40000,), eps=EPS), None)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("narrow", [False, True], ids=["heuristics", "narrow"])
@pytest.mark.parametrize("shape", [(2, 8, 1, 3), (2, 8, 4, 5), (2, 8, 16, 17)])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_channels(name: str, shape: tuple[int, ...], narrow: bool, last: bool) -> None:
    norm, exact = NORMS[name]
    config = Config(block_cols=4, block_rows=8, programs=3) if narrow else None
    check(images(norm, shape, last), exact, config)


def test_rows_of_16_bits_that_are_held_are_not_shifted() -> None:
    """They have fewer digits than their mean: what is measured on such rows stays as it is."""
    kernel = build(lambda x, w, b: layer_norm(x, w, b, EPS), "bf16[64,512]", "bf16[512]", "bf16[512]")
    wide = rows(64, 512)
    texts = [generate(k, Target.parse("cuda:90")).text.count("tl.load(x_ptr") for k in (kernel, wide)]
    assert texts == [1, 3]  # the wide rows' first and last element beside
