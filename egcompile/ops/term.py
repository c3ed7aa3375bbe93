"""Patterns: an op applied to variables. Rules are written in them, with the very ops that build graphs.

`Var` stands for a tensor, `AttrTerm` for an attribute or a computation on attributes, `Term` for an op
applied to them. They are data: `egcompile.language` renders them as egglog, and tests instantiate and
evaluate them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from egcompile.ops.opdef import OpDef


@dataclass(frozen=True, eq=False)
class Var:
    """A variable that stands for any one tensor (`kind` "tensor"), or for any tuple ("tuple")."""

    name: str
    kind: str = "tensor"

    def __getitem__(self, index: int) -> Term:
        from egcompile.ops.core import out

        return out(self, index)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Term:
    """An op applied to patterns. The same `Term` object met twice in a rule is the same value."""

    op: OpDef
    inputs: tuple[Pattern, ...]
    attrs: tuple[AttrTerm, ...]

    def __getitem__(self, index: int) -> Term:
        from egcompile.ops.core import out

        return out(self, index)

    def __iter__(self) -> Iterator[Term]:
        return (self[i] for i in range(len(self.op.outputs)))

    def __repr__(self) -> str:
        return f"{self.op.name}({', '.join(map(repr, (*self.inputs, *self.attrs)))})"


Pattern = Var | Term


@dataclass(frozen=True, eq=False)
class AttrTerm:
    """An attribute in a pattern: a variable, a literal, or a computation that egglog can do.

    head   "var" (args: name), "lit" (args: value), "shape" or "dtype" (args: a tensor pattern),
           "+", "-", "*", "/", "get" (args: two terms), "vec" (args: terms), or
           "call" (args: an `AttrFunction`, then terms)
    kind   "int", "float", "str", "bool", "ints" or "dtype"; "any" for a bare literal
    """

    head: str
    args: tuple[Any, ...]
    kind: str = "any"

    @staticmethod
    def of(value: Any) -> AttrTerm:
        if isinstance(value, AttrTerm):
            return value
        if isinstance(value, (tuple, list)) and any(isinstance(v, AttrTerm) for v in value):
            return AttrTerm("vec", tuple(AttrTerm.of(v) for v in value), "ints")
        return AttrTerm("lit", (tuple(value) if isinstance(value, list) else value,), _kind_of(value))

    def __getitem__(self, index: int | AttrTerm) -> AttrTerm:
        return AttrTerm("get", (self, AttrTerm.of(index)), "int")

    def __add__(self, other: Any) -> AttrTerm:
        return AttrTerm("+", (self, AttrTerm.of(other)), self.kind)

    def __sub__(self, other: Any) -> AttrTerm:
        return AttrTerm("-", (self, AttrTerm.of(other)), self.kind)

    def __rsub__(self, other: Any) -> AttrTerm:
        return AttrTerm("-", (AttrTerm.of(other), self), self.kind)

    def __mul__(self, other: Any) -> AttrTerm:
        return AttrTerm("*", (self, AttrTerm.of(other)), self.kind)

    def __neg__(self) -> AttrTerm:
        return AttrTerm("-", (AttrTerm.of(0.0 if self.kind == "float" else 0), self), self.kind)

    def __truediv__(self, other: Any) -> AttrTerm:
        return AttrTerm("/", (self, AttrTerm.of(other)), self.kind)

    def __rtruediv__(self, other: Any) -> AttrTerm:
        return AttrTerm("/", (AttrTerm.of(other), self), self.kind)

    def __repr__(self) -> str:
        match self.head:
            case "var":
                return str(self.args[0])
            case "lit":
                return repr(self.args[0])
            case "call":
                return f"{self.args[0].name}({', '.join(map(repr, self.args[1:]))})"
        return f"{self.head}({', '.join(map(repr, self.args))})"


@dataclass(frozen=True, eq=False)
class AttrFunction:
    """A computation on attributes that egglog has no primitive for, such as a permutation's inverse.

    It becomes a table in the e-graph: `function` is applied to each attribute value (or shape) of the kinds
    `params` that the graph holds, and again to those that rules have built. Calling it in a rule builds an
    `AttrTerm`. Where the function returns None it has no value, and a rule that calls it does not match. A
    table of two parameters has an entry for each pair of values: prefer one.
    """

    name: str
    params: tuple[str, ...]
    result: str
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> AttrTerm:
        return AttrTerm("call", (self, *map(AttrTerm.of, args)), self.result)


def shape(x: Pattern) -> AttrTerm:
    """The shape of a tensor in a pattern; `shape(x)[i]` is a size, for `i >= 0`."""
    return AttrTerm("shape", (x,), "ints")


def dtype(x: Pattern) -> AttrTerm:
    """The dtype of a tensor in a pattern."""
    return AttrTerm("dtype", (x,), "dtype")


def is_pattern(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(is_pattern, value))
    return isinstance(value, (Var, Term, AttrTerm))


def _kind_of(value: Any) -> str:
    match value:
        case bool():
            return "bool"
        case int():
            return "int"
        case float():
            return "float"
        case str():
            return "str"
        case torch.dtype():
            return "dtype"
        case tuple() | list():
            return "ints"
    raise TypeError(f"not an attribute: {value!r}")
