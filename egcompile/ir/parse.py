"""Reads the text form back: `parse_graph(str(graph))` has the same nodes, by interning, and the same text."""

from __future__ import annotations

import ast
import re
from typing import NoReturn

from egcompile.ir.graph import Graph
from egcompile.ir.node import Attr, Node
from egcompile.ir.types import DTYPES, TensorType
from egcompile.ops.core import input as input_op
from egcompile.ops.opdef import REGISTRY, OpDef

_TYPE = r"\w+\[[\d,]*\]"
_NAME = r"%[^\s:,()=]+"
_INPUT = re.compile(rf"({_NAME}): ({_TYPE})")
_HEADER = re.compile(rf"graph\((?:{_NAME}: {_TYPE}(?:, )?)*\):")
_STATEMENT = re.compile(rf"  ({_NAME}(?:, {_NAME})*): ({_TYPE}(?:, {_TYPE})*) = (\w+)\((.*)")
_RETURN = re.compile(rf"([^\s=,]+)=({_NAME})")
_ARGUMENT = re.compile(
    rf"({_NAME})"  # an operand
    r"|(\w+)=(\[[-\d,]*\]"  # or an attribute: a tuple of integers,
    r"|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""  # a string,
    r"|[^\s,()]+)"  # or a number, a boolean, a dtype
)


def parse_graph(text: str) -> Graph:
    """The graph that `text` shows; raises ValueError, with the line, where it is not the text of one."""
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines or not _HEADER.fullmatch(lines[0][1]):
        _fail(1, lines[0][1] if lines else "", "expected `graph(%name: type, ...):`")
    nodes: dict[str, Node] = {}
    for name, type_text in _INPUT.findall(lines[0][1]):
        of = TensorType.parse(type_text)
        nodes[name] = input_op(name=name[1:], shape=of.shape, dtype=of.dtype)
    inputs = tuple(nodes.values())
    origins: dict[Node, frozenset[str]] = {}
    for number, line in lines[1:-1]:
        _statement(number, line, nodes, origins)
    number, last = lines[-1]
    if not last.startswith("  return"):
        _fail(number, last, "expected `  return name=%value, ...`")
    returned = _RETURN.findall(last)
    for _, value in returned:
        if value not in nodes:
            _fail(number, last, f"{value} is not defined")
    names, values = tuple(n for n, _ in returned), tuple(nodes[v] for _, v in returned)
    return Graph(inputs, values, names, origins)


def _statement(number: int, line: str, nodes: dict[str, Node], origins: dict[Node, frozenset[str]]) -> None:
    """Adds what one line defines to `nodes`, and where it came from to `origins`."""
    match = _STATEMENT.fullmatch(line)
    if match is None:
        _fail(number, line, "expected `  %name: type = op(...)`")
    names, types, op_name = match[1].split(", "), match[2].split(", "), match[3]
    if op_name not in REGISTRY:
        _fail(number, line, f"no op {op_name!r} is registered")
    op = REGISTRY[op_name]
    operands, attrs, rest = _arguments(number, line, match[4], op, nodes)
    node = op(*operands, **attrs)
    found = [str(t) for t in node.type] if isinstance(node.type, tuple) else [str(node.type)]
    if found != types or len(names) != len(types):
        _fail(number, line, f"its type is {', '.join(found)}")
    for i, name in enumerate(names):
        if name in nodes:
            _fail(number, line, f"{name} is defined already")
        nodes[name] = node[i] if isinstance(node.type, tuple) else node
    if rest:
        if not rest.startswith("  # "):
            _fail(number, line, f"unexpected {rest!r}")
        origins[node] = frozenset(rest[4:].split(", "))


def _arguments(
    number: int, line: str, text: str, op: OpDef, nodes: dict[str, Node]
) -> tuple[list[Node], dict[str, Attr], str]:
    """Operands and attributes up to the closing parenthesis, and the text after it."""
    operands: list[Node] = []
    attrs: dict[str, Attr] = {}
    at = 0
    while not text.startswith(")", at):
        match = _ARGUMENT.match(text, at)
        if match is None:
            _fail(number, line, f"not an operand or attribute: {text[at:]!r}")
        operand, name, value = match.groups()
        if operand is not None:
            if operand not in nodes:
                _fail(number, line, f"{operand} is not defined")
            operands.append(nodes[operand])
        elif name not in op.attrs:
            _fail(number, line, f"{op.name} has no attribute {name!r}")
        else:
            attrs[name] = _attr(value, op.attrs[name])
        at = match.end()
        if text.startswith(", ", at):
            at += 2
    return operands, attrs, text[at + 1 :]


def _attr(text: str, kind: str) -> Attr:
    match kind:
        case "ints":
            return tuple(int(n) for n in text[1:-1].split(",") if n)
        case "dtype":
            return DTYPES[text]
        case "float":
            return float(text)  # reads inf and nan, which literal_eval does not
    value: Attr = ast.literal_eval(text)
    return value


def _fail(number: int, line: str, why: str) -> NoReturn:
    raise ValueError(f"line {number}: {why}\n{line}")
