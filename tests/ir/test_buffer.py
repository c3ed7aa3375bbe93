"""Strides against PyTorch's: what is a view, and the layout that a fresh tensor takes from another."""

import random

import pytest
import torch

from egcompile.ir.buffer import Buffer, contiguous_strides, dense_strides, normal_strides, reshaped_strides
from egcompile.ir.types import TensorType


def _strided(pick: random.Random) -> torch.Tensor:
    rank = pick.randint(1, 4)
    x = torch.empty([pick.choice([1, 2, 3, 4, 6]) for _ in range(rank)], device="meta")
    x = x.permute(pick.sample(range(rank), rank))
    if pick.random() < 0.3:
        axis = pick.randrange(rank)
        x = x.narrow(axis, 0, max(1, x.shape[axis] // 2))
    if pick.random() < 0.3:
        x = x.unsqueeze(pick.randrange(rank + 1))
        x = x.expand([3 if n == 1 and pick.random() < 0.5 else n for n in x.shape])
    return x


def _factors(pick: random.Random, count: int) -> list[int]:
    shape = []
    while count > 1:
        shape.append(pick.choice([n for n in range(2, count + 1) if count % n == 0]))
        count //= shape[-1]
        shape += [1] * (pick.random() < 0.2)
    return shape


@pytest.mark.parametrize("seed", range(5))
def test_reshaped_strides_are_those_of_view(seed: int) -> None:
    pick = random.Random(seed)
    for _ in range(400):
        x = _strided(pick)
        shape = _factors(pick, x.numel())
        try:
            strides = x.view(shape).stride()
        except RuntimeError:
            expected = None
        else:
            expected = normal_strides(shape, strides)
        assert reshaped_strides(x.shape, x.stride(), shape) == expected, (x.shape, x.stride(), shape)


@pytest.mark.parametrize("seed", range(5))
def test_dense_strides_are_those_of_empty_like(seed: int) -> None:
    pick = random.Random(seed)
    for _ in range(400):
        x = _strided(pick)
        if 0 not in x.stride():
            like = normal_strides(x.shape, torch.empty_like(x).stride())
            assert dense_strides(x.shape, x.stride()) == like, (x.shape, x.stride())


def test_dense_strides_of_a_broadcast_are_a_permutation_without_gaps() -> None:
    for strides in ((0, 1), (1, 0), (0, 0)):
        assert sorted(dense_strides((3, 4), strides)) in ([1, 3], [1, 4])


def test_empty_axes_count_as_one() -> None:
    for shape in ((3, 0), (0, 3), (2, 0, 4), ()):
        assert contiguous_strides(shape) == torch.empty(shape).stride()


def test_distinct_bytes_counts_a_repeated_axis_once() -> None:
    assert Buffer(TensorType((4, 8), torch.float32), (0, 1)).distinct_bytes == 32
    assert Buffer(TensorType((4, 0), torch.float32), (0, 1)).distinct_bytes == 0


def test_axes_of_size_one_do_not_count_for_row_major_order() -> None:
    assert Buffer(TensorType((4, 1, 8), torch.float32), (8, 77, 1)).is_contiguous
    assert not Buffer(TensorType((4, 2, 8), torch.float32), (8, 32, 1)).is_contiguous
