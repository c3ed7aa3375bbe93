"""Kernel text under construction: values, blocks of lines, and how they print.

A `Value` is one expression with operands. Blocks collect them in order; printing drops what nobody reads,
writes short expressions read once into their reader, and gives the rest names after their `hint`.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from egcompile.codegen.index import Axis

INLINE_LENGTH = 48
"""Expressions up to this many characters are written into a single reader."""

_RESERVED = {"tl", "triton", "torch", "libdevice", "range", "float", "int", "abs", "sum", "min", "max", "pow"}


@dataclass(eq=False)
class Value:
    """An expression of the kernel.

    template   Python with `{0}`, `{1}`, ... for the operands
    dtype      what it is held in on chip (None: a pointer, an index or another plain thing)
    axes       the loop axes on which it depends
    zero       the axes along which lanes out of range hold exactly 0
    literal    its value, where it is a constant
    inline     whether it may be written into its reader
    """

    template: str
    operands: tuple[Value, ...] = ()
    dtype: torch.dtype | None = None
    axes: frozenset[Axis] = frozenset()
    hint: str = "value"
    zero: frozenset[Axis] = frozenset()
    literal: float | None = None
    inline: bool = True


@dataclass(eq=False)
class Line:
    """A statement with an effect: a store, an update of an accumulator."""

    template: str
    operands: tuple[Value, ...] = ()


@dataclass(eq=False)
class Loop:
    """`header`, then an indented block. The loop variable is one more name that the header binds."""

    header: str
    operands: tuple[Value, ...]
    block: Block


@dataclass(eq=False)
class Block:
    """Statements in order; a str is a comment."""

    items: list[Value | Line | Loop | str] = field(default_factory=list)


def named(name: str, dtype: torch.dtype | None = None, axes: frozenset[Axis] = frozenset()) -> Value:
    """A value that exists under this very name: a parameter, a loop variable, an accumulator."""
    return Value(name, dtype=dtype, axes=axes, hint=name)


def identifier(text: str) -> str:
    """`text` as a Python name that shadows nothing a kernel uses."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    if name[0].isdigit() or keyword.iskeyword(name) or name in _RESERVED:
        name = f"{name}_" if not name[0].isdigit() else f"v{name}"
    return name


class Names:
    """Unique names within one kernel."""

    def __init__(self, taken: set[str]) -> None:
        self.taken = set(taken)

    def fresh(self, hint: str) -> str:
        name = base = identifier(hint)
        count = 0
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        return name


def print_block(block: Block, names: Names, indent: str = "    ") -> list[str]:
    """The lines of a kernel's outermost block."""
    return _Printer(names, _uses(block)).lines(block, indent)


def _statements(block: Block) -> Iterator[Value | Line | Loop]:
    for item in block.items:
        if isinstance(item, str):
            continue
        yield item
        if isinstance(item, Loop):
            yield from _statements(item.block)


def _uses(block: Block) -> Counter[Value]:
    """How often each value is read by something that is itself read or has an effect."""
    uses: Counter[Value] = Counter()
    pending: list[Value | Line | Loop] = [i for i in _statements(block) if not isinstance(i, Value)]
    while pending:
        item = pending.pop()
        template = item.header if isinstance(item, Loop) else item.template
        for i, operand in enumerate(item.operands):
            if not uses[operand]:
                pending.append(operand)
            uses[operand] += template.count(f"{{{i}}}")
    return uses


class _Printer:
    def __init__(self, names: Names, uses: Counter[Value]) -> None:
        self.names, self.uses = names, uses
        self.known: dict[Value, str] = {}

    def lines(self, block: Block, indent: str) -> list[str]:
        here = {id(operand) for item in block.items if not isinstance(item, str) for operand in item.operands}
        out: list[str] = []
        for item in block.items:
            match item:
                case str():
                    out.append(f"{indent}# {item}")
                case Line():
                    out.append(indent + self.fill(item.template, item.operands))
                case Loop():
                    out.append(indent + self.fill(item.header, item.operands))
                    before = set(self.names.taken)
                    out.extend(self.lines(item.block, indent + "    "))
                    self.names.taken = before  # what a loop names ends with it
                case Value():
                    if not self.uses[item]:
                        continue
                    text = self.fill(item.template, item.operands)
                    once = self.uses[item] == 1 and id(item) in here
                    if item.inline and once and len(text) <= INLINE_LENGTH:
                        self.known[item] = text
                        continue
                    name = self.names.fresh(item.hint)
                    self.known[item] = name
                    out.append(f"{indent}{name} = {text}")
        return out

    def fill(self, template: str, operands: tuple[Value, ...]) -> str:
        """The template with its operands, in parentheses where precedence asks for them."""
        level = _level(template)

        def replace(match: re.Match[str]) -> str:
            operand = operands[int(match[1])]
            text = self.known.get(operand, operand.template)
            before, after = template[: match.start()], template[match.end() :]
            if _is_argument(before, after) or before.endswith("_ptr + "):
                return text
            own = _level(text)
            postfix = after.startswith(".")
            right = bool(re.search(r"[-+*/%&|<>=]\s*$", before))
            strict = own == level and right and not (template == "{0} + {1}" or template == "{0} * {1}")
            chains = level == _COMPARISON  # `a < b == 0` is `a < b and b == 0`
            keeps = not postfix and (own > level or (own == level and not (strict or right or chains)))
            return text if own == _ATOM or keeps else f"({text})"

        return re.sub(r"\{(\d+)\}", replace, template)


_ATOM = 9
_COMPARISON = 0
_OPERATORS = ((_COMPARISON, r"<=|>=|==|!=|<|>"), (1, r"[|]"), (2, r"&"), (3, r"[-+]"), (4, r"//|[*/%]"))


def _is_argument(before: str, after: str) -> bool:
    """Whether a placeholder stands alone between commas and parentheses, or after `=`."""
    opens = not before or bool(re.search(r"(\(|, |\[|(?<![=!<>])= ?)$", before))
    return opens and (not after or after[0] in "),:]" or after.startswith(" if "))


def _level(text: str) -> int:
    """How tightly an expression's loosest outer operator binds; `_ATOM` for names, numbers and calls."""
    flat, depth = [], 0
    for char in text:
        depth -= char in ")]"
        flat.append(char if depth == 0 else "_")
        depth += char in "(["
    outer = re.sub(r"(\d\.?)e[-+](\d)", r"\1e_\2", "".join(flat))
    for level, pattern in _OPERATORS:
        if re.search(pattern, outer.lstrip() if level != 3 else outer):
            return level
    return _ATOM
