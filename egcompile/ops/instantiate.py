"""A pattern with its variables filled in: the nodes that a rule speaks about, to evaluate or to build."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from egcompile.ir.node import Attr, Node
from egcompile.ir.types import DTYPES, TensorType
from egcompile.ops.core import input
from egcompile.ops.term import AttrTerm, Pattern, Term, Var

Binding = Mapping[str, Any]
"""A `Node` for each tensor variable, a value for each attribute variable."""


def bind(variables: Mapping[str, Var | AttrTerm], example: Mapping[str, Any]) -> dict[str, Any]:
    """A rule's example as a binding: an input node for each type's text, a dtype for its name, and so on.

    Raises KeyError for a variable that the example leaves out.
    """
    binding: dict[str, Any] = {}
    for name, variable in variables.items():
        value = example[name]
        if isinstance(variable, Var):
            type = TensorType.parse(value)
            value = input(name=name, shape=type.shape, dtype=type.dtype)
        elif variable.kind == "dtype":
            value = DTYPES[value]
        binding[name] = value
    return binding


def instantiate(pattern: Pattern, binding: Binding) -> Node:
    """The node of `pattern` under `binding`; raises TypeMismatch where its types do not fit."""
    if isinstance(pattern, Var):
        return binding[pattern.name]
    inputs = [instantiate(i, binding) for i in pattern.inputs]
    attrs = [attribute(a, binding) for a in pattern.attrs]
    return pattern.op(*inputs, **dict(zip(pattern.op.attr_names, attrs, strict=True)))


def attribute(term: AttrTerm, binding: Binding) -> Attr:
    """The value of an attribute term under `binding`.

    Raises ValueError where an `AttrFunction` has no value for its arguments: a rule does not match there.
    """
    args = [_argument(a, binding) for a in term.args]
    match term.head:
        case "var":
            return binding[term.args[0]]
        case "lit":
            return term.args[0]
        case "shape":
            return args[0].shape
        case "dtype":
            return args[0].dtype
        case "get":
            return args[0][args[1]]
        case "vec":
            return tuple(args)
        case "+":
            return args[0] + args[1]
        case "-":
            return args[0] - args[1]
        case "*":
            return args[0] * args[1]
        case "/":
            return args[0] // args[1] if term.kind == "int" else args[0] / args[1]
        case "call":
            value = term.args[0].function(*args[1:])
            if value is None:
                raise ValueError(f"{term.args[0].name} has no value for {args[1:]}")
            return value
    raise ValueError(f"unknown attribute term {term.head!r}")


def _argument(value: Any, binding: Binding) -> Any:
    match value:
        case AttrTerm():
            return attribute(value, binding)
        case Var() | Term():
            return instantiate(value, binding)
    return value
