"""Types of values: a shape and a dtype, written `bf16[4,128]`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_TYPE_TEXT = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of one tensor value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        name = DTYPE_NAMES.get(self.dtype) or str(self.dtype)  # in errors, of what no graph can hold
        return f"{name}[{','.join(map(str, self.shape))}]"

    @staticmethod
    def parse(text: str) -> TensorType:
        """`TensorType.parse("f32[4,8]")`; raises ValueError on other text."""
        match = _TYPE_TEXT.fullmatch(text)
        if match is None or match[1] not in DTYPES:
            raise ValueError(f"not a tensor type: {text!r}; expected such as 'f32[4,8]'")
        return TensorType(tuple(int(n) for n in match[2].split(",") if n), DTYPES[match[1]])

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorType:
        return TensorType(tuple(tensor.shape), tensor.dtype)


ValueType = TensorType | tuple[TensorType, ...]
"""The type of a node: one tensor, or one a projection for a node of several outputs."""


def is_differentiable(dtype: torch.dtype) -> bool:
    """Whether values of this dtype may have gradients. Only opaque nodes compute with complex ones."""
    return dtype.is_floating_point or dtype.is_complex


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel computes: fp32 at least, fp64 where the operand has it."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
