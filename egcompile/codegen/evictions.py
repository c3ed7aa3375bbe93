"""Which rows the L2 should keep from one loop over them to the next.

A load says how soon the L2 may let go of what it brings: "evict_last" where a later loop reads the same,
"evict_first" where no later loop does but an earlier one did. What one loop reads is left to the L2.
"""

from __future__ import annotations

from collections.abc import Sequence

from egcompile.codegen.nest import Nest, inputs_of_points
from egcompile.codegen.walk import Indices, Walk, index_axes
from egcompile.ir.node import Node

Instance = tuple[Node, Indices]


def evictions(loops: Sequence[Sequence[Instance]], nest: Nest) -> list[dict[Node, str]]:
    """For each loop, in order, the policies of the inputs that it reads at each of its points.

    loops   what each evaluates, given the results of all reductions
    """
    if not nest.keeps:
        return [{} for _ in loops]
    reads = [_reads(values, nest) for values in loops]
    found = []
    for i, here in enumerate(reads):
        again = here & set().union(*reads[i + 1 :])
        last = here & set().union(*reads[:i]) - again
        found.append(dict.fromkeys(again, "evict_last") | dict.fromkeys(last, "evict_first"))
    return found


def _reads(values: Sequence[Instance], nest: Nest) -> set[Node]:
    walk = Walk(lambda reduction, index: None)  # which stops at reductions
    for node, index in values:
        walk.visit(node, index)
    at_points = {node for node, index in walk.loads if nest.cols in index_axes(index)}
    return at_points.intersection(inputs_of_points(nest.kernel, nest.rows.size * nest.cols.size))
