"""What every plan must compute and have in memory, whichever choices it makes: as bit sets of classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from egcompile.extract.choices import Choices
from egcompile.extract.facts import Facts, writes


@dataclass(frozen=True)
class Needs:
    """Per class `c` and e-node `n`, bit sets of classes.

    computed    c -> classes that are computed wherever c is
    stored      c -> classes that are in memory wherever c is in memory
    of          c -> classes that are in memory wherever c is computed, in memory or inside a kernel
    """

    computed: list[int]
    stored: list[int]
    of: list[int]


def needs(table: Choices, known: Facts) -> Needs:
    """The greatest sets that agree with each other; round cycles they are found by iteration."""
    count = len(table.nodes)
    everything = (1 << count) - 1
    found = Needs([everything] * count, [everything] * count, [everything] * count)

    def settle(c: int) -> bool:
        computed = stored = of = everything
        for n in table.nodes[c]:
            computed &= node_computed(table, found, n)
            needed = node_stored(table, known, found, n)
            of &= needed
            stored &= _in_memory(table, known, found, n, needed)
        computed |= 1 << c
        if not isinstance(table.types[c], tuple):
            stored |= 1 << c
        if not any(known.evaluable[n] for n in table.nodes[c]):
            of = stored
        same = (computed, stored, of) == (found.computed[c], found.stored[c], found.of[c])
        found.computed[c], found.stored[c], found.of[c] = computed, stored, of
        return not same

    _until_rest(table, settle)
    return found


def _until_rest(table: Choices, settle: Callable[[int], bool]) -> None:
    late = [any(k > c for n in nodes for k in table.operands[n]) for c, nodes in enumerate(table.nodes)]
    again = True
    while again:
        again = False
        for c in range(len(table.nodes)):
            again = (settle(c) and late[c]) or again


def node_computed(table: Choices, found: Needs, n: int) -> int:
    """Classes that are computed wherever e-node `n` is picked."""
    needed = 0
    for k in table.operands[n]:
        needed |= found.computed[k]
    return needed


def node_stored(table: Choices, known: Facts, found: Needs, n: int) -> int:
    """Classes that are in memory wherever e-node `n` is picked."""
    needed = 0
    for position, k in enumerate(table.operands[n]):
        needed |= found.of[k] if known.inline[n, position] else found.stored[k]
    return needed


def _in_memory(table: Choices, known: Facts, found: Needs, n: int, needed: int) -> int:
    """The same, where the class of `n` is in memory: a view needs its operand there."""
    if known.viewable[n] and not writes(table, known.viewable, known.evaluable, n):
        return found.stored[table.operands[n][0]]
    return needed


def bits(mask: int) -> Iterator[int]:
    """The classes of a bit set, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
