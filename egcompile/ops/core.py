"""Leaves and projections: the ops that every graph has."""

from __future__ import annotations

import torch

from egcompile.errors import TypeMismatch
from egcompile.ir.types import TensorType, ValueType
from egcompile.ops.opdef import Kind, OpDef, Sample, register


def _typed(shape: tuple[int, ...], dtype: torch.dtype, **_: object) -> TensorType:
    return TensorType(shape, dtype)


def _projection(operand: ValueType, index: int) -> TensorType:
    if not isinstance(operand, tuple) or not 0 <= index < len(operand):
        raise TypeMismatch(f"out({index}) of {operand}")
    return operand[index]


input = register(
    OpDef("input", Kind.LEAF, attrs={"name": "str", "shape": "ints", "dtype": "dtype"}, type_rule=_typed)
)

full = register(
    OpDef(
        "full",
        Kind.LEAF,
        attrs={"value": "float", "shape": "ints", "dtype": "dtype"},
        type_rule=_typed,
        evaluate=lambda value, shape, dtype: torch.full(shape, value, dtype=dtype),
        samples=(Sample((), {"value": -1.5, "shape": (2, 3), "dtype": torch.float64}),),
    )
)


def _iota(shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> torch.Tensor:
    view = [1] * len(shape)
    view[axis] = shape[axis]
    return torch.arange(shape[axis], dtype=dtype).view(view).expand(shape)


iota = register(
    OpDef(
        "iota",
        Kind.LEAF,
        attrs={"shape": "ints", "axis": "int", "dtype": "dtype"},
        type_rule=_typed,
        evaluate=_iota,
        samples=(Sample((), {"shape": (2, 3), "axis": 1, "dtype": torch.int64}),),
    )
)
"""Each element is its own position along `axis`, as `torch.arange` expanded."""

out = register(
    OpDef(
        "out",
        Kind.PROJECTION,
        ("tuple",),
        {"index": "int"},
        type_rule=_projection,
        evaluate=lambda values, index: values[index],
    )
)
