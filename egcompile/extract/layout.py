"""Where values lie: which movements are free views, and the strides that each op's result has."""

from __future__ import annotations

from collections.abc import Sequence

from egcompile.ir.buffer import Buffer, dense_strides, normal_strides, reshaped_strides
from egcompile.ir.node import Attr
from egcompile.ir.types import TensorType
from egcompile.ops.opdef import Kind, OpDef


def view(op: OpDef, attrs: tuple[Attr, ...], type: TensorType, source: Buffer) -> Buffer | None:
    """The result of a movement as a view of its operand, or None where it moves elements.

    The offset is that in the memory which `source.offset` counts from too.
    """
    shape, strides, offset = source.type.shape, source.strides, source.offset
    match op.name, attrs:
        case "reshape", _:
            reshaped = reshaped_strides(shape, strides, type.shape)
            if reshaped is None:
                return None
            strides = reshaped
        case "permute", (tuple() as perm,):
            strides = tuple(strides[axis] for axis in perm)
        case "transpose", _:
            strides = (*strides[:-2], strides[-1], strides[-2])
        case "expand", _:
            strides = tuple(0 if a != b else s for a, b, s in zip(shape, type.shape, strides))
        case "slice", (int() as axis, int() as start, _, int() as step):
            offset += start * strides[axis] if type.numel else 0
            strides = tuple(s * step if i == axis else s for i, s in enumerate(strides))
        case _:
            return None
    return Buffer(type, normal_strides(type.shape, strides), offset)


def results(op: OpDef, types: Sequence[TensorType], operands: Sequence[Buffer]) -> list[Buffer]:
    """How an op that is written lies in memory: one buffer an output.

    Pointwise work, reductions, `cat` and `pad` keep the order of their widest operand; so do no other
    movements, which are row-major where they are no views. Flash attention allocates `out`
    in q's memory order, and its backward each gradient in the order of its operand. Contractions, named
    kernels and other calls are row-major.
    """
    if op.kind is Kind.LEAF:
        return [Buffer(t, (0,) * t.rank) for t in types]  # a constant has no order of its own
    if op.kind in (Kind.POINTWISE, Kind.REDUCTION) or op.name in ("cat", "pad"):
        widest = max(operands, key=lambda b: b.distinct_bytes)
        return [Buffer(t, dense_strides(t.shape, widest.strides)) for t in types]
    order = _MEMORY_ORDER.get(op.name, {})
    return [
        Buffer(t, dense_strides(t.shape, operands[order[i]].strides)) if i in order else Buffer.contiguous(t)
        for i, t in enumerate(types)
    ]


_MEMORY_ORDER = {"sdpa": {0: 0}, "sdpa_backward": {0: 0, 1: 1, 2: 2}}
"""Per op: output -> the operand whose memory order it takes."""


def dense(buffer: Buffer) -> Buffer:
    """Fresh memory in the same order: what a kernel writes where a view would have been."""
    return Buffer(buffer.type, dense_strides(buffer.type.shape, buffer.strides))
