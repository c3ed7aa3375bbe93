"""Values that a comparison must find again, to the bit: what was chosen among them is compared with them.

    top = amax(z);  eq(z, top);  ge(z - top, 0)

Were `z` computed in two kernels, as by two roundings of a mean that it is made of, `top` could be equal to
none of its elements. Such a value is in memory; what hands on its elements unchanged, the comparison and the
difference read it there (`fusible`); and the backward does not make it again (`egcompile.partition.recipes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from egcompile.extract.fusible import COMPARISONS, DIFFERENCE, Role, Site, hands_on

if TYPE_CHECKING:
    from egcompile.extract.choices import Choices

CHOOSING = {"maximum": 1, "minimum": 1, "where": 1, "amax": 2, "amin": 2}
"""Ops whose elements are some of their operands' -> 1 of the same place, 2 of any, as ATen's calls may."""

SEEING = COMPARISONS | {"relu"}
"""Ops that see whether values are equal, or a difference is 0."""

Handed = dict[tuple[int, int], int]
"""The classes whose elements a class may have, itself too, with their sign -> by which choice, or 0."""


def settled(table: Choices) -> frozenset[int]:
    """The classes of such values: each is made by an op that computes, not by one that hands on others."""
    handed: dict[int, Handed] = {}

    def of(c: int) -> Handed:
        if c not in handed:
            handed[c] = _handed(table, c)
        return handed[c]

    found: set[int] = set()
    for (a, b), least in _compared(table, of).items():
        mine, theirs = of(a), of(b)
        found |= {k[0] for k in mine.keys() & theirs.keys() if max(mine[k], theirs[k]) >= least}
    return frozenset(c for c in found if _computes(table, c))


def _compared(table: Choices, handed: Callable[[int], Handed]) -> dict[tuple[int, ...], int]:
    """The classes of two different floating values that are compared, or whose difference is, as by relu.

    With the least choice that counts: differences of what is larger here and smaller there are common, as in
    the overlap of two boxes, and 0 is no bound that they are at.
    """
    pairs: dict[tuple[int, ...], int] = {}
    for sides, site in zip(table.operands, table.sites, strict=True):
        if site.op.name not in SEEING or not all(hands_on(site, i) for i in range(len(sides))):
            continue
        if site.op.name in COMPARISONS:
            pairs[sides] = 1
        for c in {c for side in sides for c, _ in handed(side)}:
            for n in table.nodes[c]:
                if table.sites[n].op.name == DIFFERENCE:
                    pairs.setdefault(table.operands[n], 2)
    return {(a, b): least for (a, b), least in pairs.items() if a != b}


def _handed(table: Choices, c: int) -> Handed:
    found = {(c, 1): 0}
    stack = [(c, 1)]
    while stack:
        k, sign = stack.pop()
        for n in table.nodes[k]:
            site = table.sites[n]
            choice = max(found[k, sign], 2 if site.role is Role.CALL else CHOOSING.get(site.op.name, 0))
            for position, operand in enumerate(table.operands[n]):
                if not hands_on(site, position):
                    continue
                for under in _signs(site, sign):
                    if found.get((operand, under), -1) < choice:
                        found[operand, under] = choice
                        stack.append((operand, under))
    return found


def _signs(site: Site, sign: int) -> tuple[int, ...]:
    """With which signs an op's operands are found in what it gives. What clips at -s and s compares no s."""
    if site.op.name == "abs" or site.role is Role.CALL:
        return (sign, -sign)
    return (-sign,) if site.op.name == "neg" else (sign,)


def _computes(table: Choices, c: int) -> bool:
    """Whether an op makes a class, or the tuple that it is an output of, of other elements than its own."""
    for n in table.nodes[c]:
        site = table.sites[n]
        if site.role is Role.PROJECTION:
            made = _computes(table, table.operands[n][0])
        else:
            kept = any(hands_on(site, position) for position in range(len(site.operands)))
            made = site.role not in (Role.INPUT, Role.CONSTANT) and not kept
        if made:
            return True
    return False
