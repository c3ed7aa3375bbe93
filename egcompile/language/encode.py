"""Ops, nodes and types as egglog text. Constructors come from the registry, an op's name capitalized.

    (set (node 2) (Matmul (node 0) (node 1)))       one command a node; `(node 2)` names it afterwards
    (typed 2 "f32[4,8]")                            becomes the facts `(shape (node 2))`, `(dtype (node 2))`

Every attribute is an argument of the constructor. Operands of a variadic op are a `TVec`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from egcompile.ir.graph import Graph
from egcompile.ir.node import Attr, Node
from egcompile.ir.types import DTYPE_NAMES, TensorType, ValueType
from egcompile.ops.core import full
from egcompile.ops.opdef import OpDef
from egcompile.ops.pointwise import neg

SORTS = {"int": "i64", "float": "f64", "bool": "bool", "str": "String", "dtype": "String", "ints": "IVec"}
"""The egglog sort of each kind of attribute."""

PRELUDE = (
    "(sort Tensor)",
    "(sort Tuple)",
    "(sort IVec (Vec i64))",
    "(sort TVec (Vec Tensor))",
    "(constructor leaf (i64) Tensor)",
    "(function node (i64) Tensor :no-merge)",
    "(function tuple_node (i64) Tuple :no-merge)",
    "(function shape (Tensor) IVec :merge old)",
    "(function dtype (Tensor) String :merge old)",
    "(relation typed (i64 String))",
    "(function type_shape (String) IVec :no-merge)",
    "(function type_dtype (String) String :no-merge)",
    "(ruleset types)",
    '(rule ((= x (leaf i))) ((set (node i) x)) :ruleset types :name "leaves")',
    "(rule ((typed i t) (= x (node i)) (= s (type_shape t)) (= d (type_dtype t)))"
    ' ((set (shape x) s) (set (dtype x) d)) :ruleset types :name "types")',
)


def constructor(op: OpDef) -> str:
    """egglog's name for an op: capitalized, because egglog has primitives named `log` and `neg`."""
    return op.name.capitalize()


def declarations(ops: Iterable[OpDef]) -> list[str]:
    """The sorts, facts and handles that every program has, and a constructor for each op."""
    return [*PRELUDE, *map(_declaration, ops)]


def _declaration(op: OpDef) -> str:
    each = "Tuple" if op.name == "out" else "Tensor"
    operands = ["TVec"] if op.variadic else [each] * len(op.operands)
    sorts = " ".join([*operands, *(SORTS[kind] for kind in op.attrs.values())])
    return f"(constructor {constructor(op)} ({sorts}) {result_sort(op)})"


def result_sort(op: OpDef) -> str:
    return "Tuple" if len(op.outputs) > 1 else "Tensor"


def literal(value: Attr, kind: str) -> str:
    """An attribute of a kind as egglog text; floats are exact, infinities and NaN included."""
    held: Any = value  # of that kind
    match kind:
        case "dtype":
            return f'"{DTYPE_NAMES[held]}"'
        case "str":
            return json.dumps(value, ensure_ascii=False)
        case "bool":
            return "true" if value else "false"
        case "ints":
            return f"(vec-of {' '.join(map(str, held))})"
        case "float":
            number = float(held)
            return "NaN" if math.isnan(number) else repr(number)
    return str(value)


def application(op: OpDef, operands: Sequence[str], attrs: Sequence[str]) -> str:
    """`(Op operands attrs)`, all of them text already."""
    if op.variadic:
        operands = (f"(vec-of {' '.join(operands)})",)
    return f"({' '.join((constructor(op), *operands, *attrs))})"


class Encoder:
    """Writes nodes as commands, each once, and numbers what it writes.

    `commands` and `types` grow; whoever runs them takes them out. `number` finds a node's handle.
    """

    def __init__(self) -> None:
        self.number: dict[Node, int] = {}
        self.commands: list[str] = []
        self.types: list[tuple[int, TensorType]] = []
        self._count = 0

    def add(self, nodes: Iterable[Node]) -> None:
        """Writes the nodes that are new, operands before users as they come."""
        for node in nodes:
            if node not in self.number:
                self.number[node] = self.put(self._expression(node), node.type)

    def put(self, expression: str, type: ValueType) -> int:
        """Gives an expression of that type a number, which `handle` turns into text."""
        index = self._next(type)
        self.commands.append(f"(set {self.text(index, type)} {expression})")
        return index

    def leaf(self, node: Node) -> str:
        """The term for a tensor whose making is nothing to the rules: of it they know only the type."""
        if node not in self.number:
            self.number[node] = self._next(node.tensor)
        return f"(leaf {self.number[node]})"

    def handle(self, node: Node) -> str:
        return self.text(self.number[node], node.type)

    @staticmethod
    def text(index: int, type: ValueType) -> str:
        """The term for what has that number and type."""
        return f"(tuple_node {index})" if isinstance(type, tuple) else f"(node {index})"

    def _next(self, type: ValueType) -> int:
        index = self._count
        self._count += 1
        if isinstance(type, TensorType):
            self.types.append((index, type))
        return index

    def _expression(self, node: Node) -> str:
        if node.op is full and _is_minus_zero(node.attr("value")):  # egglog's f64 takes -0.0 for 0.0
            zero = application(full, (), [literal(0.0, "float"), *attr_literals(node)[1:]])
            return application(neg, (zero,), ())
        return application(node.op, [self.handle(i) for i in node.inputs], attr_literals(node))


def ops_of(nodes: Iterable[Node]) -> set[OpDef]:
    """The ops of which the terms of `nodes` are made."""
    nodes = list(nodes)
    minus_zero = any(n.op is full and _is_minus_zero(n.attr("value")) for n in nodes)
    return {n.op for n in nodes} | ({neg} if minus_zero else set())


def attr_literals(node: Node) -> list[str]:
    return [literal(v, k) for v, k in zip(node.attrs, node.op.attrs.values(), strict=True)]


def type_facts(types: Iterable[TensorType]) -> list[str]:
    """What `(typed i "...")` needs to know of each type: its shape and its dtype."""
    facts = []
    for type in dict.fromkeys(types):
        facts.append(f'(set (type_shape "{type}") {literal(type.shape, "ints")})')
        facts.append(f'(set (type_dtype "{type}") {literal(type.dtype, "dtype")})')
    return facts


def program_text(graph: Graph) -> str:
    """The egglog program of a graph, complete: its declarations, nodes and types."""
    nodes = graph.nodes
    encoder = Encoder()
    encoder.add(nodes)
    ops = dict.fromkeys([*(node.op for node in nodes), *ops_of(nodes)])
    typed = [f'(typed {i} "{type}")' for i, type in encoder.types]
    facts = type_facts(type for _, type in encoder.types)
    return "\n".join([*declarations(ops), *encoder.commands, *typed, *facts, "(run types 2)"])


def _is_minus_zero(value: float) -> bool:
    return value == 0.0 and math.copysign(1.0, value) < 0
