"""Draws of random numbers. Each has the key of its call: equal calls are two draws, never one."""

from __future__ import annotations

import torch

from egcompile.ir.types import TensorType
from egcompile.ops.opdef import Kind, OpDef, register


def _dropout_mask(
    shape: tuple[int, ...], p: float, key: int, device: torch.device | None = None
) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1.0 - p)


dropout_mask = register(
    OpDef(
        "dropout_mask",
        Kind.EXTERN,
        attrs={"shape": "ints", "p": "float", "key": "int"},
        type_rule=lambda shape, p, key: TensorType(shape, torch.bool),
        evaluate=_dropout_mask,
        random=True,
    )
)
"""False with probability `p`, element by element: what a dropout keeps."""
