"""What one kernel can compute: one pure predicate, which extraction and schedule share.

A *loop* op (pointwise, movement, reduction) is computed inside the kernel of whoever reads it, or roots a
kernel of its own. Named fused ops, contractions and ATen's ops are kernels of their own, always: they own
their epilogues and sibling outputs, and are never computed inside a reader.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch

from egcompile.ir.node import Attr, Node, topological
from egcompile.ir.types import TensorType, ValueType
from egcompile.ops.opdef import Kind, OpDef

LONGEST_ROW = 1 << 18
"""Elements of a row that one program reduces; a longer one is split over programs, in a kernel of its own."""


BITWISE = frozenset({"amax_backward", "amin_backward"})
"""Kernels of several loops which all must see the same values: what is computed in each could differ.

They compare with nothing that the forward saved: it may fuse what they read, or that may be made again.
"""

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})

DIFFERENCE = "sub"
"""Of equal elements it is 0, to the bit, and may be compared with that."""


class Role(enum.Enum):
    """How an op takes part in kernels, at given types."""

    INPUT = "an input, in memory already"
    CONSTANT = "a constant"
    POINTWISE = "pointwise work"
    MOVEMENT = "an index map"
    ROW_REDUCTION = "a reduction over the last axis"
    REDUCTION = "a reduction across rows"
    ROW_KERNEL = "a named kernel"
    GEMM = "a named kernel around a contraction"
    CALL = "a call of ATen"
    PROJECTION = "an output of a named kernel"


LOOPS = frozenset({Role.CONSTANT, Role.POINTWISE, Role.MOVEMENT, Role.ROW_REDUCTION, Role.REDUCTION})
OWNERS = frozenset({Role.ROW_KERNEL, Role.GEMM, Role.CALL})


class Space(NamedTuple):
    """The rows that a reduction runs over: sizes of the leading axes, those of size 1 left out, and width."""

    rows: tuple[int, ...]
    width: int

    def __str__(self) -> str:
        return f"rows of {self.width} over {list(self.rows)}"


@dataclass(frozen=True, slots=True)
class Site:
    """An op with the types around it: what the predicate reads of an e-node, or of a node of a graph.

    settled   whether comparisons must find its elements again (`egcompile.extract.settled`)
    """

    op: OpDef
    attrs: tuple[Attr, ...]
    operands: tuple[ValueType, ...]
    type: ValueType
    role: Role
    settled: bool = False

    @staticmethod
    def make(op: OpDef, attrs: tuple[Attr, ...], operands: tuple[ValueType, ...], type: ValueType) -> Site:
        return Site(op, attrs, operands, type, _role(op, attrs, operands))

    @staticmethod
    def of(node: Node) -> Site:
        return Site.make(node.op, node.attrs, tuple(i.type for i in node.inputs), node.type)

    @property
    def shape(self) -> tuple[int, ...]:
        return _tensor(self.type).shape

    @property
    def space(self) -> Space:
        """The rows of a row reduction."""
        return space_of(_tensor(self.operands[0]).shape)


def space_of(shape: tuple[int, ...]) -> Space:
    return Space(_squeezed(shape[:-1]), shape[-1])


def fusible(
    producer: Site, consumer: Site, position: int, root: Site, carried: Collection[Space] = ()
) -> str | None:
    """Whether operand `position` of `consumer` can be computed inside the kernel that `consumer` is in.

    root      what that kernel is made around: `consumer` itself, or what it is computed inside
    carried   rows of reductions that may be computed with `producer` in the same kernel

    None if it can, else the reason why not.
    """
    if producer.role not in LOOPS:
        return f"{producer.op.name} is {producer.role.value}"
    if root.role is Role.CALL:
        return f"{root.op.name} is a call of ATen, which reads from memory"
    if root.role is Role.GEMM and (reason := _epilogue(producer, consumer, position, root)):
        return reason
    if root.op.name in BITWISE and producer.role not in (Role.CONSTANT, Role.MOVEMENT):
        return f"{root.op.name} finds an extremum, to the bit, among values that are in memory"
    if producer.settled and (hands_on(consumer, position) or consumer.op.name == DIFFERENCE):
        return f"elements of {producer.op.name} are compared, to the bit, with some that were chosen of them"
    if producer.role is Role.REDUCTION:
        return f"{producer.op.name} across rows is complete only when its kernel ends"
    if carried:
        return _on_its_rows(producer, consumer, carried)
    return None


def hands_on(site: Site, position: int) -> bool:
    """Whether the elements of a floating operand leave an op as they are, but for a sign, or are compared."""
    operand, op = site.operands[position], site.op
    if isinstance(operand, tuple):
        return site.role is Role.PROJECTION
    if not operand.dtype.is_floating_point:
        return False
    if op.name == "cast":
        return torch.promote_types(operand.dtype, _tensor(site.type).dtype) == _tensor(site.type).dtype
    called = op.kind is Kind.EXTERN and op.flops is None
    return called or site.role is Role.MOVEMENT or op.name in _UNCHANGED


_UNCHANGED = COMPARISONS | {
    "neg", "abs", "relu", "stop_gradient", "maximum", "minimum", "where", "amax", "amin",
}  # fmt: skip


def _epilogue(producer: Site, consumer: Site, position: int, root: Site) -> str | None:
    """A contraction reads its operands from memory; constants and small vectors enter its epilogue."""
    if consumer is root and position in contracted(root.op, root.operands, root.attrs):
        return f"operand {root.op.operands[position]!r} of {root.op.name} feeds its contraction"
    if producer.role is Role.CONSTANT:
        return None
    if producer.op.name not in ("cast", "reshape", "expand"):
        return f"the epilogue of {root.op.name} computes no {producer.op.name}"
    if sum(n > 1 for n in producer.shape) > 1:
        return f"{producer.op.name} of more than a vector is not computed in the epilogue of {root.op.name}"
    return None


def _on_its_rows(producer: Site, consumer: Site, carried: Collection[Space]) -> str | None:
    """What carries a row reduction stays on its own rows: two row spaces never meet in a kernel."""
    spaces = " and ".join(map(str, carried))
    if len(carried) > 1:
        return f"{producer.op.name} may carry {spaces}"
    (space,) = carried
    match consumer.role:
        case Role.POINTWISE:
            return None
        case Role.ROW_REDUCTION if consumer.space == space:
            return None
        case Role.MOVEMENT if consumer.op.name == "reshape":
            if _squeezed(producer.shape) == _squeezed(consumer.shape):
                return None
        case Role.MOVEMENT if consumer.op.name == "expand":
            own = producer.shape[-1:] == (1,) and consumer.shape[:-1] == producer.shape[:-1]
            if own and space_of(consumer.shape) == space:
                return None
    return f"{consumer.op.name} does not stay on the {spaces}, which {producer.op.name} is computed on"


def covers(consumer: Site, position: int, root: Site) -> bool:
    """Whether a kernel that computes all of `consumer` computes each element of that operand just once.

    Only then can the operand be an output of that kernel too. An expand counts: it does on its own rows,
    where a row reduction is computed with its operand.
    """
    match consumer.role:
        case Role.POINTWISE | Role.ROW_REDUCTION | Role.REDUCTION:
            return True
        case Role.MOVEMENT if consumer.op.name == "reshape":
            return _squeezed(_tensor(consumer.operands[0]).shape) == _squeezed(consumer.shape)
        case Role.MOVEMENT:
            return consumer.op.name == "expand"
        case Role.ROW_KERNEL:
            shapes = [_tensor(t).shape for t in consumer.operands]
            return shapes[position] == max(shapes, key=lambda s: _numel(s))
    return False


def _role(op: OpDef, attrs: tuple[Attr, ...], operands: tuple[ValueType, ...]) -> Role:
    match op.kind:
        case Kind.LEAF:
            return Role.INPUT if op.name == "input" else Role.CONSTANT
        case Kind.REDUCTION:
            shape = _tensor(operands[0]).shape
            rows = attrs == ((len(shape) - 1,),) and shape[-1] <= LONGEST_ROW
            return Role.ROW_REDUCTION if rows else Role.REDUCTION
        case Kind.COMPOSITE:
            return Role.GEMM if contracted(op, operands, attrs) else Role.ROW_KERNEL
        case Kind.CONTRACTION | Kind.EXTERN:
            return Role.CALL
    return _ROLES[op.kind]


_ROLES = {Kind.POINTWISE: Role.POINTWISE, Kind.MOVEMENT: Role.MOVEMENT, Kind.PROJECTION: Role.PROJECTION}


def contracted(op: OpDef, operands: tuple[ValueType, ...], attrs: tuple[Attr, ...]) -> frozenset[int]:
    """The operands of a composite that its contractions read; none where it has no contraction.

    Which these are does not depend on types, so the first call decides for the op.
    """
    if op.name not in _CONTRACTED:
        leaves, results = op.define(operands, attrs)
        read = (n for n in topological(results) if n.op.kind is Kind.CONTRACTION)
        reached = set(topological([i for n in read for i in n.inputs]))
        _CONTRACTED[op.name] = frozenset(i for i, leaf in enumerate(leaves) if leaf in reached)
    return _CONTRACTED[op.name]


_CONTRACTED: dict[str, frozenset[int]] = {}


def _tensor(type: ValueType) -> TensorType:
    assert isinstance(type, TensorType), "a tuple is read through its projections"
    return type


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


@functools.cache
def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product
