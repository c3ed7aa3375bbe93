"""Tiles to be timed: each a way to run the same kernel, none of which is hopeless from the start."""

from __future__ import annotations

import math
import re

import pytest

from egcompile.codegen import Config, generate
from egcompile.codegen.neighbours import MOST, fits, neighbours, point_bytes, surroundings
from egcompile.ops import gelu, matmul, relu
from egcompile.schedule.kernel import Kernel
from egcompile.target import Target
from tests.codegen.harness import build, check
from tests.codegen.test_filling import BODIES
from tests.codegen.test_golden import KERNELS

H200 = Target.parse("cuda:90")
LARGE = {name: kernel for name, kernel in KERNELS.items() if name != "softmax"}


def _body(name: str, rows: int, width: int, dtype: str = "bf16") -> Kernel:
    operands, body = BODIES[name]
    types = {"x": f"{dtype}[{rows},{width}]", "w": f"{dtype}[{width}]", "r": f"f32[{rows},1]"}
    return build(body, *(types[o] for o in operands))


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("width", [64, 96, 1500, 4096, 12288, 50304])
def test_the_config_of_a_source_makes_it(name: str, width: int) -> None:
    """What `generate` says it chose makes, where it is asked for, the same source."""
    kernel = _body(name, 8192, width)
    for source in neighbours(kernel, H200):
        assert source.config is not None
        assert generate(kernel, H200, source.config).text == source.text


@pytest.mark.parametrize("name", KERNELS)
def test_neighbours_are_few_distinct_and_fit(name: str) -> None:
    kernel = KERNELS[name]
    first, *others = neighbours(kernel, H200)
    assert first == generate(kernel, H200)
    assert 4 <= len(others) < MOST
    assert len({s.text for s in (first, *others)}) == 1 + len(others)
    assert all(s.config and fits(s.config, point_bytes(kernel), H200) for s in others)


@pytest.mark.parametrize("name", LARGE)
def test_no_neighbour_leaves_the_gpu_empty(name: str) -> None:
    for source in (*neighbours(LARGE[name], H200), *surroundings(LARGE[name], H200, 24, 0)):
        grid = re.findall(r"\[\(([\d, ]+)\)\]\(", source.text)[0]
        assert math.prod(int(n) for n in grid.split(",") if n) >= H200.sms // 8, source.config


def test_what_does_not_fit() -> None:
    tile = Config(8, 256, 8, 3, 132)
    assert fits(tile, 2, H200)
    assert not fits(Config(8, 256, 64, 3, 132), 2, H200)  # more warps than a program has
    assert not fits(Config(1, 64, 4, 1, 132), 2, H200)  # fewer points than lanes
    assert not fits(Config(64, 4096, 8, 1, 132), 2, H200)  # more than registers hold
    assert not fits(Config(32, 1024, 16, 4, 132), 4, H200)  # more than shared memory holds
    assert not fits(Config(8, 256, 8, 5, 132), 2, H200)


def test_what_takes_no_tiles_has_no_neighbours() -> None:
    product = build(lambda x, y: relu(matmul(x, y)), "bf16[512,512]", "bf16[512,512]")
    several = build(lambda x, y: (relu(x), gelu(y)), "bf16[4096]", "bf16[8192]")
    for kernel in (product, several):
        (only,) = neighbours(kernel, H200)
        assert only == generate(kernel, H200)
        assert surroundings(kernel, H200, 24, 0) == (only,)


def test_surroundings_are_drawn_by_a_seed() -> None:
    kernel = KERNELS["rms_norm_backward_add"]
    drawn = surroundings(kernel, H200, 24, 1)
    assert len(drawn) == len({s.text for s in drawn}) == 24
    assert drawn[0] == generate(kernel, H200)
    assert drawn == surroundings(kernel, H200, 24, 1)
    assert drawn != surroundings(kernel, H200, 24, 2)


@pytest.mark.parametrize("name", sorted(BODIES.keys() - {"row_sum", "rms_norm_backward"}))
def test_neighbours_compute_the_same(name: str) -> None:
    kernel = _body(name, 21, 200, "f32")
    for source in neighbours(kernel, H200):
        check(kernel, config=source.config, rtol=2e-5, atol=2e-5)
