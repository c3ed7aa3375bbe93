"""Contractions. Operands have one dtype; products are summed in fp32 at least and rounded once."""

from __future__ import annotations

import math

import torch

from egcompile.errors import TypeMismatch
from egcompile.ir.types import TensorType
from egcompile.ops.opdef import Kind, OpDef, Sample, register


def _refuse(name: str, a: TensorType, b: TensorType) -> TypeMismatch:
    return TypeMismatch(f"{name} of {a} and {b}")


def _matmul_type(a: TensorType, b: TensorType) -> TensorType:
    if a.rank < 2 or b.rank != 2 or a.shape[-1] != b.shape[0] or a.dtype != b.dtype:
        raise _refuse("matmul", a, b)
    return TensorType((*a.shape[:-1], b.shape[1]), a.dtype)


def _bmm_type(a: TensorType, b: TensorType) -> TensorType:
    fits = a.rank == b.rank >= 3 and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]
    if not fits or a.dtype != b.dtype:
        raise _refuse("bmm", a, b)
    return TensorType((*a.shape[:-1], b.shape[-1]), a.dtype)


def _contract_rows_type(a: TensorType, b: TensorType) -> TensorType:
    if a.rank < 2 or a.shape[:-1] != b.shape[:-1] or a.dtype != b.dtype:
        raise _refuse("contract_rows", a, b)
    return TensorType((a.shape[-1], b.shape[-1]), a.dtype)


def _contract_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.reshape(-1, a.shape[-1]).mT @ b.reshape(-1, b.shape[-1])


matmul = register(
    OpDef(
        "matmul",
        Kind.CONTRACTION,
        ("a", "b"),
        type_rule=_matmul_type,
        evaluate=torch.matmul,
        flops=lambda a, b: 2 * a.numel * b.shape[1],
        samples=(Sample(("f64[3,4]", "f64[4,2]")), Sample(("f64[2,3,4]", "f64[4,2]"))),
    )
)
"""`a[*, K] @ b[K, N] -> [*, N]`: a linear layer, `b` its transposed weight."""

bmm = register(
    OpDef(
        "bmm",
        Kind.CONTRACTION,
        ("a", "b"),
        type_rule=_bmm_type,
        evaluate=torch.matmul,
        flops=lambda a, b: 2 * a.numel * b.shape[-1],
        samples=(Sample(("f64[2,3,4]", "f64[2,4,2]")),),
    )
)
"""`a[B.., M, K] @ b[B.., K, N] -> [B.., M, N]`, equal batch axes."""

contract_rows = register(
    OpDef(
        "contract_rows",
        Kind.CONTRACTION,
        ("a", "b"),
        type_rule=_contract_rows_type,
        evaluate=_contract_rows,
        flops=lambda a, b: 2 * math.prod(a.shape) * b.shape[-1],
        samples=(Sample(("f64[5,3]", "f64[5,2]")), Sample(("f64[2,5,3]", "f64[2,5,2]"))),
    )
)
"""`sum over the leading axes of a[*, M] b[*, N] -> [M, N]`: the gradient of a linear layer's weight."""
