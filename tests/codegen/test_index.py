"""Index arithmetic agrees with PyTorch's movement on every element, and cancels where it should."""

from __future__ import annotations

import math
import random

import pytest
import torch

from egcompile.codegen.index import Axis, Index, linear, offset, operand_index, regroup, unravel
from egcompile.ops import input as input_op
from egcompile.ops import permute, reshape


def factors(n: int, random: random.Random) -> tuple[int, ...]:
    found = []
    while n > 1:
        divisor = random.choice([d for d in range(2, n + 1) if n % d == 0])
        found.append(divisor)
        n //= divisor
    for _ in range(random.randint(0, 2)):
        found.insert(random.randint(0, len(found)), 1)
    return tuple(found)


@pytest.mark.parametrize("seed", range(40))
def test_chain_of_movements(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.choice([6, 12, 24, 36, 60, 7])
    axis = Axis("i", n)
    shape = factors(n, rng)
    node = input_op(name="x", shape=shape, dtype=torch.float32)
    value = torch.arange(n).reshape(shape)
    chain = []
    for _ in range(4):
        if rng.random() < 0.4:
            perm = rng.sample(range(len(node.shape)), len(node.shape))
            node = permute(node, perm=tuple(perm))
            value = value.permute(perm)
        else:
            shape = factors(n, rng)
            node = reshape(node, shape=shape)
            value = value.reshape(shape)
        chain.append(node)
    index = unravel(Index.of(axis), node.shape)
    for movement in reversed(chain):
        index = operand_index(movement, index)
    position = linear(index, chain[0].inputs[0].shape)
    assert [position.at({axis: i}) for i in range(n)] == value.flatten().tolist()


def test_contiguous_offsets_cancel() -> None:
    i = Index.of(Axis("i", 24))
    assert offset(unravel(i, (2, 3, 4)), (12, 4, 1)) == i
    assert str(offset(unravel(i, (2, 3, 4)), (0, 4, 1))) == "((i) % 12)"
    rows, cols = Index.of(Axis("rows", 8)), Index.of(Axis("cols", 4096))
    heads = regroup((rows, cols), (8, 4096), (8, 64, 64))
    assert heads[0] == rows
    assert regroup(heads, (8, 64, 64), (8, 4096)) == (rows, cols)


@pytest.mark.parametrize("seed", range(200))
def test_a_position_gives_back_its_digits(seed: int) -> None:
    """However two loops interleave along the axes: so tensors of one shape are read at one index."""
    rng = random.Random(seed)
    shape = tuple(rng.choice([1, 2, 3, 4, 6, 8]) for _ in range(rng.randint(2, 5)))
    loop = [rng.choice(("rows", "cols")) for _ in shape]
    digits: dict[int, Index] = {}
    for name in ("rows", "cols"):
        own = [i for i, other in enumerate(loop) if other == name]
        rng.shuffle(own)
        sizes = [shape[i] for i in own]
        digits |= zip(own, unravel(Index.of(Axis(name, math.prod(sizes))), sizes))
    index = tuple(digits[i] for i in range(len(shape)))
    assert unravel(linear(index, shape), shape) == index


def test_what_never_carries_is_no_part_of_a_digit() -> None:
    cols, lane = Axis("cols", 64), Axis("lane", 8)
    for shift in (0, 3, 8, -8, 11):
        position = Index.of(cols) * 8 + Index.of(lane) + shift
        for div, mod in ((8, 0), (32, 0), (32, 4), (16, 3), (12, 0), (4, 5)):
            digit = position.digit(div, mod)
            assert shift % 8 or div % 8 or digit.axes == {cols}
            for i in range(64):
                for j in range(8):
                    want = (8 * i + j + shift) // div
                    assert digit.at({cols: i, lane: j}) == (want % mod if mod else want)


def test_digits_are_floor_division() -> None:
    axis = Axis("i", 50)
    i = Index.of(axis)
    for shift in (-7, 0, 5):
        for div in (1, 2, 6):
            for mod in (0, 1, 4, 9):
                digit = (i * 3 + shift).digit(div, mod)
                for at in range(50):
                    want = (3 * at + shift) // div
                    assert digit.at({axis: at}) == (want % mod if mod else want)


def test_bounds_hold() -> None:
    axis = Axis("i", 17)
    index = (Index.of(axis) * 5 + 3).digit(4, 6) * 2 + (-1)
    values = [index.at({axis: i}) for i in range(17)]
    assert index.low <= min(values) and max(values) <= index.high
