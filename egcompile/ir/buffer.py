"""How a tensor lies in memory: a type with strides, and the rules by which views keep or lose them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from egcompile.ir.types import TensorType


@dataclass(frozen=True)
class Buffer:
    """A tensor in memory: its type, and its strides in elements. `offset` is that of a view in its base."""

    type: TensorType
    strides: tuple[int, ...]
    offset: int = 0

    @staticmethod
    def contiguous(type: TensorType) -> Buffer:
        return Buffer(type, contiguous_strides(type.shape))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps; axes of size 1 do not count."""
        return normal_strides(self.type.shape, self.strides) == contiguous_strides(self.type.shape)

    @property
    def distinct_bytes(self) -> int:
        """Bytes of the elements that are distinct: an expanded axis counts once."""
        sizes = (n for n, s in zip(self.type.shape, self.strides) if s or n == 0)
        return math.prod(sizes) * self.type.dtype.itemsize


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides as `torch.empty` gives them, sizes of 0 counted as 1."""
    return tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


def normal_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """`strides` with those of size-1 axes, which are never used, as row-major order would have them."""
    normal = list(strides)
    right = 1
    for axis in reversed(range(len(shape))):
        if shape[axis] == 1:
            normal[axis] = right
        right = max(shape[axis], 1) * normal[axis]
    return tuple(normal)


def dense_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps in the order of the strides `like`, as `torch.empty_like` chooses them.

    An axis that `like` repeats (stride 0) or that has size 1 stays beside its right neighbour.
    """
    order: list[tuple[int, int]] = []
    right = 1
    for axis in reversed(range(len(shape))):
        effective = like[axis] if shape[axis] > 1 and like[axis] > 0 else right
        order.append((-effective, axis))
        right = effective * (max(shape[axis], 1) if shape[axis] > 1 and like[axis] > 0 else 1)
    strides = [0] * len(shape)
    step = 1
    for _, axis in sorted(order, reverse=True):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return normal_strides(shape, strides)


def reshaped_strides(
    shape: Sequence[int], strides: Sequence[int], to: Sequence[int]
) -> tuple[int, ...] | None:
    """The strides of a view of another shape, or None where the strides do not allow one.

    As `at::detail::computeStride`: axes that lie evenly one in another form chunks, and each chunk is
    divided anew.
    """
    if 0 in shape:
        return contiguous_strides(to)
    chunks: list[tuple[int, int]] = []  # (elements, stride of the innermost), innermost chunk first
    for n, stride in zip(reversed(shape), reversed(strides)):
        if n == 1:
            continue
        if chunks and stride == chunks[-1][0] * chunks[-1][1]:
            chunks[-1] = (chunks[-1][0] * n, chunks[-1][1])
        else:
            chunks.append((n, stride))
    result: list[int] = []
    pending = iter(chunks)
    left, step = next(pending, (1, 1))
    for n in reversed(to):
        if n == 1:
            result.append(step)
            continue
        if left == 1:
            left, step = next(pending, (1, 1))
        if left % n:
            return None
        result.append(step)
        left, step = left // n, step * n
    return normal_strides(to, tuple(reversed(result)))
