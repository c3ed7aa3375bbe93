"""Computations on shapes, dtypes and constants that rules need and egglog has no primitive for."""

from __future__ import annotations

import math

import torch

from egcompile.ops import accumulate_dtype
from egcompile.ops.term import AttrFunction

Shape = tuple[int, ...]


def _last_axis(shape: Shape) -> Shape | None:
    return (len(shape) - 1,) if shape else None


def _row(shape: Shape) -> Shape | None:
    return (1,) * (len(shape) - 1) + shape[-1:] if len(shape) > 1 else None


def _last_size(shape: Shape) -> Shape | None:
    return shape[-1:] or None


def _round_to(value: float, dtype: torch.dtype) -> float | None:
    if math.isfinite(value) or dtype.is_floating_point:
        return torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype).item()
    return None


def _holds(narrow: torch.dtype, wide: torch.dtype) -> bool:
    floating = narrow.is_floating_point and wide.is_floating_point
    return narrow == wide or (floating and torch.promote_types(narrow, wide) == wide)


def _has_exponents_of_fp32(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.finfo(dtype).max >= torch.finfo(torch.bfloat16).max


accumulate = AttrFunction("accumulate", ("dtype",), "dtype", accumulate_dtype)
"""The dtype that kernels compute in: `bf16 -> f32`, `f64 -> f64`."""

last_axis = AttrFunction("last_axis", ("ints",), "ints", _last_axis)
"""`[B, T, N] -> [2]`: the dims of a row reduction over a tensor of that shape."""

row = AttrFunction("row", ("ints",), "ints", _row)
"""`[B, T, N] -> [1, 1, N]`: the shape in which a vector is broadcast over its rows."""

last_size = AttrFunction("last_size", ("ints",), "ints", _last_size)
"""`[B, T, N] -> [N]`."""

column = AttrFunction("column", ("ints",), "ints", lambda shape: (*shape[:-1], 1) if shape else None)
"""`[B, T, N] -> [B, T, 1]`: the shape of a row's statistic."""

numel = AttrFunction("numel", ("ints",), "float", lambda shape: float(math.prod(shape)))
"""`[B, T, N] -> B T N`."""

round_to = AttrFunction("round_to", ("float", "dtype"), "float", _round_to)
"""A constant as a dtype holds it: `(0.1, bf16) -> 0.10009765625`."""

holds = AttrFunction("holds", ("dtype", "dtype"), "bool", _holds)
"""Whether every value of the first dtype is one of the second: `(bf16, f32) -> True`."""

is_far_reaching = AttrFunction("is_far_reaching", ("dtype",), "bool", _has_exponents_of_fp32)
"""Whether a dtype has room for a product of constants: `bf16 -> True`, `f16 -> False`, `i64 -> False`."""
