"""Movement ops: the same elements at other indices. `evaluate` returns views where PyTorch has them."""

from __future__ import annotations

import math
from typing import Any

import torch

from egcompile.errors import TypeMismatch
from egcompile.ir.types import TensorType
from egcompile.ops.opdef import Kind, OpDef, Sample, register


def _reshape_type(x: TensorType, shape: tuple[int, ...]) -> TensorType:
    if math.prod(shape) != x.numel:
        raise TypeMismatch(f"cannot reshape {x} to {list(shape)}")
    return TensorType(shape, x.dtype)


def _expand_type(x: TensorType, shape: tuple[int, ...]) -> TensorType:
    if len(shape) != x.rank or any(a not in (1, b) for a, b in zip(x.shape, shape, strict=True)):
        raise TypeMismatch(f"cannot expand {x} to {list(shape)}; reshape adds axes")
    return TensorType(shape, x.dtype)


def _permute_type(x: TensorType, perm: tuple[int, ...]) -> TensorType:
    if sorted(perm) != list(range(x.rank)):
        raise TypeMismatch(f"{list(perm)} does not permute the axes of {x}")
    return TensorType(tuple(x.shape[p] for p in perm), x.dtype)


def _transpose_type(x: TensorType) -> TensorType:
    if x.rank < 2:
        raise TypeMismatch(f"transpose wants two axes at least, got {x}")
    return TensorType((*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype)


def _slice_type(x: TensorType, axis: int, start: int, stop: int, step: int) -> TensorType:
    if not (0 <= axis < x.rank and 0 <= start <= stop <= x.shape[axis] and step >= 1):
        raise TypeMismatch(f"slice [{start}:{stop}:{step}] on axis {axis} of {x}")
    return TensorType((*x.shape[:axis], len(range(start, stop, step)), *x.shape[axis + 1 :]), x.dtype)


def _slice(x: torch.Tensor, axis: int, start: int, stop: int, step: int) -> torch.Tensor:
    return x[(slice(None),) * axis + (slice(start, stop, step),)]


def _pad_type(x: TensorType, axis: int, before: int, after: int, step: int) -> TensorType:
    if not (0 <= axis < x.rank and before >= 0 and after >= 0 and step >= 1):
        raise TypeMismatch(f"pad ({before}, {after}) on axis {axis} of {x}")
    size = before + max(0, (x.shape[axis] - 1) * step + 1) + after
    return TensorType((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)


def _pad(x: torch.Tensor, axis: int, before: int, after: int, step: int) -> torch.Tensor:
    result = x.new_zeros(_pad_type(TensorType.of(x), axis, before, after, step).shape)
    _slice(result, axis, before, result.shape[axis] - after, step).copy_(x)
    return result


def _cat_type(*xs: TensorType, axis: int) -> TensorType:
    first = xs[0]
    sizes = [x.shape[axis] for x in xs]
    shape = (*first.shape[:axis], sum(sizes), *first.shape[axis + 1 :])
    for x in xs:
        if x.dtype != first.dtype or (*x.shape[:axis], sum(sizes), *x.shape[axis + 1 :]) != shape:
            raise TypeMismatch(f"cat on axis {axis} of {', '.join(map(str, xs))}")
    return TensorType(shape, first.dtype)


def _movement(name: str, attrs: dict[str, str], type_rule: Any, evaluate: Any, **sample: Any) -> OpDef:
    return register(
        OpDef(
            name,
            Kind.MOVEMENT,
            ("x",),
            attrs,
            type_rule=type_rule,
            evaluate=evaluate,
            samples=(Sample((sample.pop("x"),), sample),),
        )
    )


reshape = _movement("reshape", {"shape": "ints"}, _reshape_type, torch.reshape, x="f64[3,4]", shape=(2, 6))
expand = _movement(
    "expand", {"shape": "ints"}, _expand_type, lambda x, shape: x.expand(shape), x="f64[3,1]", shape=(3, 4)
)
permute = _movement(
    "permute",
    {"perm": "ints"},
    _permute_type,
    lambda x, perm: x.permute(perm),
    x="f64[2,3,4]",
    perm=(2, 0, 1),
)
transpose = _movement("transpose", {}, _transpose_type, lambda x: x.mT, x="f64[3,4]")
"""Swaps the last two axes: PyTorch's `mT`."""
slice_ = _movement(
    "slice",
    {"axis": "int", "start": "int", "stop": "int", "step": "int"},
    _slice_type,
    _slice,
    x="f64[3,6]",
    axis=1,
    start=1,
    stop=6,
    step=2,
)
pad = _movement(
    "pad",
    {"axis": "int", "before": "int", "after": "int", "step": "int"},
    _pad_type,
    _pad,
    x="f64[3,2]",
    axis=1,
    before=1,
    after=2,
    step=2,
)
"""Zeros around each element: `before` of them, then the elements `step` apart, then `after`.

The transpose of `slice`: `pad(slice(x))` puts what was taken back where it was.
"""

cat = register(
    OpDef(
        "cat",
        Kind.MOVEMENT,
        ("*xs",),
        {"axis": "int"},
        type_rule=_cat_type,
        evaluate=lambda *xs, axis: torch.cat(xs, axis),
        samples=(Sample(("f64[3,2]", "f64[3,4]", "f64[3,1]"), {"axis": 1}),),
    )
)
