"""Words that rules share: PyTorch's implicit broadcasts and scalars, as the importer makes them explicit.

They are patterns on both sides of a rule. On a left side an attribute that is computed, such as
`shape(x)`, is a condition.
"""

from __future__ import annotations

from typing import Any

from egcompile.ops import expand, full, reshape, sum
from egcompile.ops.term import AttrTerm, Pattern, dtype, shape
from egcompile.rules.attributes import accumulate, last_size, row
from egcompile.rules.rule import Condition


def scalar(value: Any, like: Pattern) -> Pattern:
    """`value` in the shape and dtype of `like`: a Python number in a pointwise op."""
    return full(value, shape(like), dtype(like))


def vector(value: Any, like: Pattern, dtype: AttrTerm) -> Pattern:
    """`value` in each element of a row of `like[*, N]`: the weight or bias `[N]` that is not there."""
    return full(value, last_size(shape(like)), dtype)


def rows(vector: Pattern, like: Pattern) -> Pattern:
    """`vector[N]` over the rows of `like[*, N]`: how a weight or a bias is broadcast."""
    return expand(reshape(vector, row(shape(like))), shape(like))


def across(column: Pattern, like: Pattern) -> Pattern:
    """`column[*, 1]` across the rows of `like[*, N]`: how a row's statistic is broadcast."""
    return expand(column, shape(like))


def column_sum(x: Pattern, dims: AttrTerm) -> Pattern:
    """`x[*, N] -> [N]`, summed over `dims`: how the gradient of a bias arrives."""
    return reshape(sum(x, dims), last_size(shape(x)))


def sums_rows(x: Pattern, dims: AttrTerm) -> Condition:
    """`dims` are the leading axes of `x`, those of size 1 perhaps left out."""
    return shape(sum(x, dims)), row(shape(x))


def is_wide(x: Pattern) -> Condition:
    """Kernels compute with `x` in its own dtype, so no cast is implied: fp32 and fp64."""
    return dtype(x), accumulate(dtype(x))


def is_vector(x: Pattern, like: Pattern) -> Condition:
    """`x` has one axis, the last of `like`."""
    return shape(x), last_size(shape(like))


def has_rank(x: Pattern, rank: int) -> Condition:
    """`x` has `rank` axes. A rule that indexes a shape says so: of more axes it would drop some."""
    return shape(x), tuple(shape(x)[i] for i in range(rank))
