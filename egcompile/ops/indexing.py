"""Ops that index by data."""

from __future__ import annotations

import torch

from egcompile.errors import TypeMismatch
from egcompile.ir.types import TensorType
from egcompile.ops.opdef import Kind, OpDef, Sample, register


def _embedding_type(weight: TensorType, ids: TensorType) -> TensorType:
    if weight.rank != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise TypeMismatch(f"embedding of {weight} by {ids}")
    return TensorType((*ids.shape, weight.shape[1]), weight.dtype)


def _embedding_backward_type(ct: TensorType, ids: TensorType, rows: int, padding_idx: int) -> TensorType:
    if ct.shape[:-1] != ids.shape:
        raise TypeMismatch(f"embedding_backward of {ct} by {ids}")
    return TensorType((rows, ct.shape[-1]), ct.dtype)


embedding = register(
    OpDef(
        "embedding",
        Kind.EXTERN,
        ("weight", "ids"),
        {"padding_idx": "int"},
        type_rule=lambda weight, ids, padding_idx: _embedding_type(weight, ids),
        evaluate=lambda weight, ids, padding_idx: torch.nn.functional.embedding(
            ids, weight, padding_idx if padding_idx >= 0 else None
        ),
        nondifferentiable=frozenset({"ids"}),
        samples=(Sample(("f64[5,4]", "i64[2,3]"), {"padding_idx": -1}, low=0, high=4),),
    )
)
"""Rows of `weight[V, N]` picked by `ids[*] -> [*, N]`. `padding_idx` (-1: none) gets no gradient."""

embedding_backward = register(
    OpDef(
        "embedding_backward",
        Kind.EXTERN,
        ("ct", "ids"),
        {"rows": "int", "padding_idx": "int"},
        type_rule=_embedding_backward_type,
        evaluate=lambda ct, ids, rows, padding_idx: torch.ops.aten.embedding_dense_backward(
            ct, ids, rows, padding_idx, False
        ),
        nondifferentiable=frozenset({"ids"}),
        samples=(Sample(("f64[2,3,4]", "i64[2,3]"), {"rows": 5, "padding_idx": -1}, low=0, high=4),),
    )
)
"""The sum of `ct[*, N]` into the rows named by `ids[*] -> [rows, N]`, in a fixed order."""
