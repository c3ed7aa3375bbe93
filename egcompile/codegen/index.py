"""Index arithmetic: which element of a tensor a point of a kernel's loop nest touches.

An `Index` is a sum of multiples of loop axes and of *digits* of such sums, `x // div % mod`. Reshapes take
sums apart into digits, strides put them together again, and the constructor undoes what cancels:

    rows * 4096 + cols  over [M, 4096], seen as [M, 64, 64]:  (.. // 64 % 64) * 64 + .. % 64  ==>  cols
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from egcompile.ir.node import Node


@dataclass(frozen=True)
class Axis:
    """A loop variable: 0 <= name < size where it is in range."""

    name: str
    size: int


@dataclass(frozen=True)
class Digit:
    """`of // div % mod`, or `of // div` where `mod` is 0."""

    of: Index
    div: int
    mod: int


Atom = Axis | Digit


@dataclass(frozen=True)
class Index:
    """`sum of coefficient * atom + const`, in a canonical order, so that equal indices are equal objects."""

    terms: tuple[tuple[Atom, int], ...]
    const: int = 0

    @staticmethod
    def of(value: int | Axis) -> Index:
        if isinstance(value, int):
            return Index((), value)
        return Index(((value, 1),)) if value.size != 1 else Index(())

    @property
    def axes(self) -> frozenset[Axis]:
        """The loop axes on which the index depends."""
        found: set[Axis] = set()
        for atom, _ in self.terms:
            found |= {atom} if isinstance(atom, Axis) else atom.of.axes
        return frozenset(found)

    @property
    def low(self) -> int:
        return self.const + sum(c * _bounds(a)[c < 0] for a, c in self.terms)

    @property
    def high(self) -> int:
        return self.const + sum(c * _bounds(a)[c > 0] for a, c in self.terms)

    def __add__(self, other: Index | int) -> Index:
        other = Index.of(other) if isinstance(other, int) else other
        return _sum((*self.terms, *other.terms), self.const + other.const)

    def __mul__(self, factor: int) -> Index:
        return _sum(((a, c * factor) for a, c in self.terms), self.const * factor) if factor else Index(())

    def digit(self, div: int, mod: int) -> Index:
        """`self // div % mod` (no `% mod` where it is 0)."""
        if mod == 1:
            return Index(())
        modulus = div * mod
        if mod:
            self = _sum(((a, c % modulus) for a, c in self.terms), self.const % modulus)
        self = _significant(self, div)
        whole = _sum(((a, c // div) for a, c in self.terms if c % div == 0), self.const // div)
        rest = _sum(((a, c) for a, c in self.terms if c % div), self.const % div)
        if rest.low >= 0 and rest.high < div:
            quotient, rest, div = whole, Index(()), 1
            if mod == 0 or (quotient.low >= 0 and quotient.high < mod):
                return quotient
            self = quotient
        elif mod == 0:
            return whole + _digit(rest, div, 0)
        if self.low >= 0 and self.high < div * mod:
            return self.digit(div, 0)
        return _digit(self, div, mod)

    def at(self, point: Mapping[Axis, int]) -> int:
        """The index at one point; axes that are not given are 0."""
        total = self.const
        for atom, c in self.terms:
            if isinstance(atom, Axis):
                total += c * point.get(atom, 0)
            else:
                digit = atom.of.at(point) // atom.div
                total += c * (digit % atom.mod if atom.mod else digit)
        return total

    def __str__(self) -> str:
        parts = [f"{_atom_text(a)} * {c}" if c != 1 else _atom_text(a) for a, c in self.terms]
        return " + ".join([*parts, str(self.const)] if self.const or not parts else parts)


def _atom_text(atom: Atom) -> str:
    if isinstance(atom, Axis):
        return atom.name
    text = f"({atom.of})" if atom.div == 1 else f"({atom.of}) // {atom.div}"
    return f"({text} % {atom.mod})" if atom.mod else f"({text})"


def _bounds(atom: Atom) -> tuple[int, int]:
    if isinstance(atom, Axis):
        return 0, max(atom.size - 1, 0)
    low, high = atom.of.low // atom.div, atom.of.high // atom.div
    if atom.mod and not (low >= 0 and high < atom.mod):
        return 0, atom.mod - 1
    return low, high


def _significant(x: Index, div: int) -> Index:
    """`x` for `x // div`: without what lies below every multiple of some factor of `div`, and never carries.

    (cols * 8 + lane) // 256  ==>  cols * 8 // 256  for 0 <= lane < 8.
    """
    for factor in sorted({math.gcd(c, div) for _, c in x.terms}, reverse=True):
        below = _sum(((a, c) for a, c in x.terms if c % factor), x.const % factor)
        if (below.terms or below.const) and below.low >= 0 and below.high < factor:
            return _sum(((a, c) for a, c in x.terms if c % factor == 0), x.const - x.const % factor)
    return x


def _digit(x: Index, div: int, mod: int) -> Index:
    """The digit of an index that does not simplify as a sum; merges with a digit that it is taken from."""
    common = math.gcd(div, x.const, *(c for _, c in x.terms))
    if common > 1:
        x, div = _sum(((a, c // common) for a, c in x.terms), x.const // common), div // common
    if len(x.terms) == 1 and not x.const and x.terms[0][1] == 1 and isinstance(x.terms[0][0], Digit):
        inner = x.terms[0][0]
        if not inner.mod:
            return _digit(inner.of, inner.div * div, mod)
        if inner.mod % div == 0 and mod and (inner.mod // div) % mod == 0:
            return _digit(inner.of, inner.div * div, mod)
        if inner.mod % div == 0 and not mod:
            return _digit(inner.of, inner.div * div, inner.mod // div)
    if div == 1 and not mod:
        return x
    return Index(((Digit(x, div, mod), 1),))


def _sum(terms: Iterable[tuple[Atom, int]], const: int) -> Index:
    total: dict[Atom, int] = {}
    for atom, c in terms:
        total[atom] = total.get(atom, 0) + c
    total = {a: c for a, c in total.items() if c}
    while (merged := _carry(total)) is not None:
        lower, upper, index, c = merged
        del total[lower], total[upper]
        for atom, k in index.terms:
            total[atom] = total.get(atom, 0) + k * c
        const += index.const * c
        total = {a: k for a, k in total.items() if k}
    ordered = sorted(total.items(), key=lambda item: (-abs(item[1]), str(Index((item,)))))
    return Index(tuple(ordered), const)


def _carry(total: dict[Atom, int]) -> tuple[Atom, Atom, Index, int] | None:
    """Two digits that stand side by side: `x // d % m + (x // (d m) % n) m  ==>  x // d % (m n)`."""
    for lower, c in total.items():
        if not isinstance(lower, Digit) or not lower.mod:
            continue
        for upper, k in total.items():
            if k != c * lower.mod:
                continue
            mod = _continues(lower, upper)
            if mod is not None:
                return lower, upper, lower.of.digit(lower.div, mod), c
    return None


def _continues(lower: Digit, upper: Atom) -> int | None:
    """The modulus of both digits together, if `upper` starts where `lower` ends; 0 for none."""
    div = lower.div * lower.mod
    if isinstance(upper, Digit) and upper.of == lower.of and upper.div == div:
        return lower.mod * upper.mod
    # The upper digit may have simplified to a plain sum of its own.
    if lower.of.digit(div, 0) == Index(((upper, 1),)):
        return 0
    return None


def run_length(where: Index, axis: Axis) -> int:
    """How many neighbours along a loop axis share a value of the index; 0 where it does not depend on it."""
    lengths = []
    for atom, _ in where.terms:
        if isinstance(atom, Digit) and atom.of == Index.of(axis):
            lengths.append(atom.div)
        elif axis in (atom.of.axes if isinstance(atom, Digit) else {atom}):
            return 1
    return min(lengths, default=0)


def linear(index: Sequence[Index], shape: Sequence[int]) -> Index:
    """The position of `index` in row-major order."""
    total = Index(())
    for i, size in zip(index, shape, strict=True):
        total = total * size + i if size != 1 else total
    return total


def unravel(position: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """The inverse of `linear`."""
    result, stride = [], math.prod(shape)
    for size in shape:
        stride //= max(size, 1)
        outermost = position.low >= 0 and position.high < stride * size
        result.append(position.digit(stride, 0 if outermost and size != 1 else size))
    return tuple(result)


def permutation(node: Node) -> tuple[int, ...]:
    if node.op.name == "permute":
        perm: tuple[int, ...] = node.attr("perm")
        return perm
    rank = len(node.shape)
    return (*range(rank - 2), rank - 1, rank - 2)


def operand_index(node: Node, index: tuple[Index, ...]) -> tuple[Index, ...]:
    """Where the movement `node` (reshape, permute, transpose, expand, slice) finds its element `index`."""
    shape = node.inputs[0].shape
    match node.op.name:
        case "reshape":
            return regroup(index, node.shape, shape)
        case "permute" | "transpose":
            perm = permutation(node)
            return tuple(index[perm.index(i)] for i in range(len(perm)))
        case "expand":
            return tuple(Index(()) if n == 1 else i for n, i in zip(shape, index, strict=True))
        case "slice":
            axis, start, step = (node.attr(name) for name in ("axis", "start", "step"))
            moved = index[axis] * step + start
            return (*index[:axis], moved, *index[axis + 1 :])
    raise ValueError(f"{node.op.name} is not a plain index map")


def result_index(node: Node, index: tuple[Index, ...]) -> tuple[Index, ...]:
    """Where the bijective movement `node` (reshape, permute, transpose) puts the element `index`."""
    if node.op.name == "reshape":
        return regroup(index, node.inputs[0].shape, node.shape)
    return tuple(index[p] for p in permutation(node))


def regroup(index: tuple[Index, ...], shape: tuple[int, ...], target: tuple[int, ...]) -> tuple[Index, ...]:
    """`index` into `shape` as one into `target`, of as many elements in the same order.

    Axes are regrouped by the shortest runs with equal products, so a batch axis stays itself.
    """
    result: list[Index] = []
    i = j = 0
    while j < len(target) or i < len(shape):
        start, stop = i, j
        a, b = (shape[i] if i < len(shape) else 1), (target[j] if j < len(target) else 1)
        i, j = min(i + 1, len(shape)), min(j + 1, len(target))
        while a != b:
            if (a < b and i < len(shape)) or j >= len(target):
                a, i = a * shape[i], i + 1
            else:
                b, j = b * target[j], j + 1
        result.extend(unravel(linear(index[start:i], shape[start:i]), target[stop:j]))
    return tuple(result)


BIJECTIVE = ("reshape", "permute", "transpose")


def offset(index: Sequence[Index], strides: Sequence[int]) -> Index:
    """The element offset of `index` in memory."""
    total = Index(())
    for i, stride in zip(index, strides, strict=True):
        total = total + i * stride
    return total
