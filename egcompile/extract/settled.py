"""Values that a comparison must find again, to the bit: what was chosen among them is compared with them.

    top = amax(z);  eq(z, top)

Were `z` computed in two kernels, as by two roundings of a mean that it is made of, `top` could be equal to
none of its elements. Such a value is in memory; what hands on its elements unchanged, and the comparison,
read it there (`fusible`); and the backward does not make it again (`egcompile.partition.recipes`).
"""

from __future__ import annotations

from collections.abc import Iterator

from egcompile.extract.choices import Choices
from egcompile.extract.fusible import COMPARISONS, Role, Site, hands_on

CHOOSING = frozenset({"amax", "amin", "maximum", "minimum", "where"})
"""Ops whose elements are some of their operands', as those of many of ATen's calls."""


def settled(table: Choices) -> frozenset[int]:
    """The classes of such values: each is made by an op that computes, not by one that hands on others."""
    found: set[int] = set()
    for a, b in _comparisons(table):
        mine, theirs = _handed(table, a), _handed(table, b)
        found |= {c for c in mine.keys() & theirs.keys() if mine[c] or theirs[c]}
    return frozenset(c for c in found if any(_computes(table.sites[n]) for n in table.nodes[c]))


def _comparisons(table: Choices) -> Iterator[tuple[int, int]]:
    """The classes of two different floating values that are compared."""
    found: dict[tuple[int, int], None] = {}
    for n, site in enumerate(table.sites):
        if site.op.name in COMPARISONS and all(hands_on(site, i) for i in (0, 1)):
            a, b = table.operands[n]
            if a != b:
                found[a, b] = None
    yield from found


def _handed(table: Choices, c: int) -> dict[int, bool]:
    """The classes whose elements a class may have, itself among them -> whether by a choice among them."""
    found = {c: False}
    stack = [c]
    while stack:
        k = stack.pop()
        for n in table.nodes[k]:
            site = table.sites[n]
            chosen = found[k] or site.op.name in CHOOSING or site.role is Role.CALL
            for position, operand in enumerate(table.operands[n]):
                if hands_on(site, position) and found.get(operand) not in (chosen, True):
                    found[operand] = chosen
                    stack.append(operand)
    return found


def _computes(site: Site) -> bool:
    if site.role in (Role.INPUT, Role.CONSTANT):
        return False
    return not any(hands_on(site, position) for position in range(len(site.operands)))
