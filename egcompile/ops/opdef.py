"""What an op is: one declaration that every stage reads.

An op's type rule, its meaning in PyTorch, its scalar Triton expression and its sample inputs stand
together; whatever *relates* ops (derivatives, algebra, fusion) is a rule in `egcompile.rules`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from egcompile.errors import TypeMismatch
from egcompile.ir.node import Attr, Node
from egcompile.ir.types import TensorType, ValueType
from egcompile.ops.term import AttrTerm, Term, is_pattern


class Kind(enum.Enum):
    """How an op may take part in a kernel."""

    LEAF = "leaf"  # input, full, iota: no operands
    POINTWISE = "pointwise"  # one element of each operand to one element
    MOVEMENT = "movement"  # the same elements elsewhere: an index map
    REDUCTION = "reduction"  # over `dims`, which stay with size 1
    CONTRACTION = "contraction"  # matmul and its like
    EXTERN = "extern"  # one call of ATen
    COMPOSITE = "composite"  # its definition, forced into one kernel
    PROJECTION = "projection"  # one output of a node of several


TypeRule = Callable[..., ValueType]
Evaluate = Callable[..., Any]
Definition = Callable[..., Any]
"""From operand nodes and attributes to a node, or a tuple of nodes for several outputs."""

Derivative = Callable[[Node, Mapping[int, Node], Sequence[int]], dict[int, Node]]
"""From a node, the cotangents of its outputs and positions of operands to the cotangents of these operands.

Operands through which nothing flows are left out. Raises NoGradientRule.
"""


@dataclass(frozen=True)
class Sample:
    """Operand types (`"f32[4,8]"`) and attributes that make a small valid call.

    `low` and `high` bound random values of floating operands and integers alike.
    """

    operands: tuple[str, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    low: float = -2.0
    high: float = 2.0


@dataclass(frozen=True, eq=False)
class OpDef:
    """One op. Calling it builds a node, or, where an argument holds variables, a pattern term.

    name             egglog's constructor and the text's word for it
    operands         names; a last name that starts with `*` takes any number
    attrs            name -> kind: int, float, str, bool, ints or dtype, in argument order
    outputs          names of the outputs; more than one makes a tuple, read as `node[i]`
    type_rule        operand types, then attributes by name -> type; raises TypeMismatch.
                     A composite needs none: it has the type of its definition
    evaluate         tensors, then attributes by name -> tensor(s): the reference meaning
    scalar           a Triton expression of one element: `{0}`, `{1}`, ... are the operands
    definition       the op in terms of simpler ones; rounding included
    nondifferentiable  operands through which no gradient flows
    flops            operand types -> floating-point operations (contractions; else the elements count)
    derivative       of an *opaque* op, one that no rule knows: what builds its cotangents
    random           each call draws anew; an attribute says which call it is, so that two stay two
    """

    name: str
    kind: Kind
    operands: tuple[str, ...] = ()
    attrs: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)
    type_rule: TypeRule | None = None
    evaluate: Evaluate | None = None
    scalar: str | None = None
    definition: Definition | None = None
    samples: tuple[Sample, ...] = ()
    nondifferentiable: frozenset[str] = frozenset()
    flops: Callable[..., int] | None = None
    derivative: Derivative | None = None
    random: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "attr_names", tuple(self.attrs))
        object.__setattr__(self, "_inferred", functools.lru_cache(maxsize=4096)(self._infer))

    attr_names: tuple[str, ...] = field(init=False)
    _inferred: TypeRule = field(init=False)

    @property
    def variadic(self) -> bool:
        return bool(self.operands) and self.operands[-1].startswith("*")

    def __call__(self, *operands: Any, **attrs: Any) -> Any:
        """`op(*operands, *attrs by position or name)` -> Node, or Term where an argument is a pattern."""
        if self.variadic:
            inputs, rest = operands, ()
        else:
            inputs, rest = operands[: len(self.operands)], operands[len(self.operands) :]
        values = dict(zip(self.attr_names, rest, strict=False)) | attrs
        if values.keys() != self.attrs.keys() or len(rest) > len(self.attr_names):
            raise TypeError(f"{self.name} takes attributes {self.attr_names}, got {tuple(values)}")
        ordered = tuple(values[name] for name in self.attr_names)
        if any(map(is_pattern, (*inputs, *ordered))):
            return Term(self, tuple(inputs), tuple(AttrTerm.of(v) for v in ordered))
        return Node.make(self, tuple(inputs), tuple(map(_normal, ordered, self.attrs.values())))

    def infer(self, types: tuple[ValueType, ...], attrs: tuple[Attr, ...]) -> ValueType:
        """The type of `op(types, attrs)`; raises TypeMismatch."""
        if not self.variadic and len(types) != len(self.operands):
            raise TypeMismatch(f"{self.name} takes {len(self.operands)} operands, got {len(types)}")
        return self._inferred(types, attrs)

    def _infer(self, types: tuple[ValueType, ...], attrs: tuple[Attr, ...]) -> ValueType:
        named = dict(zip(self.attr_names, attrs, strict=True))
        if self.type_rule is not None:
            return self.type_rule(*types, **named)
        return _types(self.define(types, attrs)[1])

    def define(
        self, types: tuple[ValueType, ...], attrs: tuple[Attr, ...]
    ) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """The definition at these operand types: its input nodes, and a node for each output."""
        from egcompile.ops.core import input as input_op

        if self.definition is None:
            raise TypeMismatch(f"{self.name} has no definition")
        leaves = []
        for i, t in enumerate(types):
            if isinstance(t, tuple):
                raise TypeMismatch(f"operand {i} of {self.name} is a tuple; take one output of it")
            leaves.append(input_op(name=f"%{i}", shape=t.shape, dtype=t.dtype))
        result = self.definition(*leaves, **dict(zip(self.attr_names, attrs, strict=True)))
        return tuple(leaves), tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


REGISTRY: dict[str, OpDef] = {}


def register(op: OpDef) -> OpDef:
    """Adds an op to the registry; raises ValueError if the name is taken."""
    if op.name in REGISTRY:
        raise ValueError(f"op {op.name!r} is registered already")
    REGISTRY[op.name] = op
    return op


def ops_of(*kinds: Kind) -> Iterator[OpDef]:
    return (op for op in REGISTRY.values() if op.kind in kinds)


def _normal(value: Any, kind: str) -> Attr:
    """The attribute as its declared kind, so that equal nodes are equal however they were written."""
    match kind:
        case "ints":
            return tuple(int(v) for v in value)
        case "float":
            return float(value)
        case "int":
            return int(value)
        case "bool":
            return bool(value)
        case "str":
            return str(value)
        case "dtype":
            if not isinstance(value, torch.dtype):
                raise TypeError(f"expected a torch.dtype, got {value!r}")
            return value
    raise TypeError(f"unknown attribute kind {kind!r}")


def _types(nodes: Sequence[Node]) -> ValueType:
    types = tuple(node.tensor for node in nodes)
    return types[0] if len(types) == 1 else types


def same_type(*types: TensorType) -> TensorType:
    """The type rule of most pointwise ops: all operands alike, and so the result."""
    if any(t != types[0] for t in types):
        raise TypeMismatch(f"operands differ: {', '.join(map(str, types))}; expand and cast are explicit")
    return types[0]
