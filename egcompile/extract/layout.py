"""Where values lie: which movements are free views, and the strides that each op's result has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from egcompile.ir.buffer import (
    Buffer,
    contiguous_strides,
    dense_strides,
    normal_strides,
    reshaped_strides,
)
from egcompile.ir.joint import Joint
from egcompile.ir.node import Attr, Node, topological
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

    Pointwise work, reductions, `cat` and `pad` keep the order of their widest operand, and so does a reshape
    that merges axes; other movements are row-major where they are no views. A convolution and its gradients
    are channels_last where an operand is, as ATen has it. Some calls and kernels keep an operand's order
    (`_MEMORY_ORDER`); contractions, other named kernels and other calls are row-major.
    """
    if op.kind is Kind.LEAF:
        return [Buffer(t, (0,) * t.rank) for t in types]  # a constant has no order of its own
    if op.kind in (Kind.POINTWISE, Kind.REDUCTION) or op.name in ("cat", "pad"):
        widest = max(operands, key=lambda b: b.distinct_bytes)
        return [Buffer(t, dense_strides(t.shape, widest.strides)) for t in types]
    if op.name == "reshape" and (order_of := _merged(operands[0], types[0].shape)) is not None:
        return [Buffer(types[0], dense_strides(types[0].shape, order_of))]
    if op.name in _CONVOLUTIONS and any(map(is_channels_last, operands)):
        return [Buffer(t, channels_last_strides(t.shape)) for t in types]
    order = _MEMORY_ORDER.get(op.name, {})
    return [
        Buffer(t, dense_strides(t.shape, operands[order[i]].strides)) if i in order else Buffer.contiguous(t)
        for i, t in enumerate(types)
    ]


def _merged(source: Buffer, shape: Sequence[int]) -> list[int] | None:
    """Strides in the order of the nearest axes of `source` that each of `shape` merges; None if it does not.

    An upsampled image is one: each of its sides is two axes of the source, one of them repeated.
    """
    axes = [(n, s) for n, s in zip(source.type.shape, source.strides) if n != 1]
    steps: list[int] = []
    for size in shape:
        own: list[tuple[int, int]] = []
        while axes and math.prod(n for n, _ in own) < size:
            own.append(axes.pop(0))
        if math.prod(n for n, _ in own) != size:
            return None
        steps.append(min((s for _, s in own if s), default=0))
    return steps


_MEMORY_ORDER = {
    "sdpa": {0: 0},
    "sdpa_backward": {0: 0, 1: 1, 2: 2},
    "batch_norm": {0: 0},
    "group_norm": {0: 0},
    "max_pool2d": {0: 0, 1: 0},
    "max_pool2d_backward": {0: 0},
}
"""Per op: output -> the operand whose memory order it takes."""

_CONVOLUTIONS = ("convolution", "convolution_transpose", "convolution_weight_grad")


def channels_last_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of `[N, C, *]` with its channels next to each other, as `torch.channels_last` has them."""
    order = (0, *range(2, len(shape)), 1)
    strides = dict(zip(order, contiguous_strides([shape[axis] for axis in order])))
    return normal_strides(shape, [strides[axis] for axis in range(len(shape))])


def is_channels_last(buffer: Buffer) -> bool:
    """Whether planes or volumes lie so, and not row-major as well."""
    shape = buffer.type.shape
    last = len(shape) in (4, 5) and normal_strides(shape, buffer.strides) == channels_last_strides(shape)
    return last and not buffer.is_contiguous


def dense(buffer: Buffer) -> Buffer:
    """Fresh memory in the same order: what a kernel writes where a view would have been."""
    return Buffer(buffer.type, dense_strides(buffer.type.shape, buffer.strides))


def cotangent_strides(joint: Joint, strides: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Strides, by name, of the cotangents of outputs that are channels_last; `strides` are the inputs'."""
    lies: dict[Node, list[Buffer]] = {}
    for node in topological(joint.outputs):
        types = node.type if isinstance(node.type, tuple) else (node.type,)
        if node.op.kind is Kind.PROJECTION:
            lies[node] = [lies[node.inputs[0]][node.attr("index")]]
            continue
        if node.op.name == "input":
            given = strides.get(str(node.attr("name")))
            lies[node] = [Buffer.contiguous(types[0]) if given is None else Buffer(types[0], given)]
            continue
        operands = [lies[i][0] for i in node.inputs]
        seen = view(node.op, node.attrs, types[0], operands[0]) if operands else None
        lies[node] = results(node.op, types, operands) if seen is None else [seen]
    pairs = zip(joint.outputs, joint.cotangents, strict=True)
    return {
        str(ct.attr("name")): channels_last_strides(ct.shape)
        for output, ct in pairs
        if ct is not None and is_channels_last(lies[output][0])
    }
