"""Which values to make again: minimum cuts between what the backward reads and what recomputing costs.

A value that is needed is saved, or its recipe runs, and then what the recipe reads is needed:

    start -> value             for each that the backward reads
    value -> its recipe        cut where the value is saved: its bytes, and the time to write it
    recipe -> what it reads    never cut
    recipe -> end              cut where the recipe runs: its time

The smallest cut, with bytes and time weighed against each other, is a best choice of what to save, as in
AOTAutograd's min-cut partitioner (`torch._functorch.partitioners`); a recipe that makes several values is
paid for once. Recomputation instead of memory is from Chen et al., "Training Deep Nets with Sublinear Memory
Cost" (2016).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import networkx
from networkx.algorithms.flow import boykov_kolmogorov

from egcompile.ir.node import Node
from egcompile.partition.recipes import Recipe

PARTS = 1e6
"""Times are whole millionths of microseconds: minimum cuts of whole numbers are exact."""

_START, _END = "start", "end"


@dataclass(frozen=True, eq=False)
class Choice:
    """How values are made again, and which are saved; the bytes of these, and the time that both take."""

    made: Mapping[Node, Recipe]
    saved: tuple[Node, ...]
    bytes: int
    time: int


@dataclass(frozen=True, eq=False)
class Network:
    """What the backward needs of the forward, and how it may come by it.

    roots     values of the forward that the backward reads
    recipes   value -> how it is made again, or None where it must be saved
    stored    value -> microseconds to write it, where nothing but the backward reads it; else 0
    """

    roots: tuple[Node, ...]
    recipes: Mapping[Node, Recipe | None]
    stored: Mapping[Node, float]

    def where(self, allowed: Callable[[Recipe], bool]) -> Network:
        """With those of the recipes alone that are allowed."""
        kept = {v: r if r is not None and allowed(r) else None for v, r in self.recipes.items()}
        return Network(self.roots, kept, self.stored)

    def choose(self, allowed: Iterable[Recipe]) -> Choice:
        """What is saved where these recipes may run. Those that nothing needs do not.

        Where a kernel runs again as a whole, no part of it does.
        """
        recipes = frozenset(allowed)
        whole: dict[int, Recipe] = {}
        while True:
            made: dict[Node, Recipe] = {}
            saved: dict[Node, None] = {}
            stack = list(self.roots)
            seen = set(stack)
            while stack:
                value = stack.pop()
                recipe = self.recipes[value]
                if recipe is None or recipe not in recipes:
                    saved[value] = None
                    continue
                made[value] = recipe = whole.get(id(recipe.of), recipe)
                fresh = [v for v in recipe.reads if v not in seen]
                seen.update(fresh)
                stack.extend(fresh)
            running = dict.fromkeys(made.values())
            found = {id(r.of): r for r in running if r.kernel is r.of}
            if found == whole:
                break
            whole = found
        time = sum(_whole(r.cost) for r in running) + sum(_whole(self.stored[v]) for v in saved)
        return Choice(made, tuple(saved), sum(v.tensor.nbytes for v in saved), time)

    def fastest(self) -> Choice:
        """The choice of least time; of equally fast ones, that of the fewest bytes.

        A recipe that takes longer than it saves by not writing its values has no part in it.
        """
        gain: dict[Recipe, float] = {}
        for value, recipe in self.recipes.items():
            if recipe is not None:
                gain[recipe] = gain.get(recipe, 0.0) + self.stored[value]
        free = self.where(lambda recipe: recipe.cost <= gain[recipe])
        return free.cut(1 + sum(v.tensor.nbytes for v in self.recipes), 1)

    def smallest(self) -> Choice:
        """The choice of the fewest bytes; of these, the fastest."""
        times = (_whole(r.cost) for r in set(self.recipes.values()) if r is not None)
        return self.cut(1, 1 + sum(times) + sum(map(_whole, self.stored.values())))

    def cut(self, time: int, bytes: int) -> Choice:
        """The choice with the least `time` times its time plus `bytes` times its bytes."""
        if not any(self.recipes.values()):
            return self.choose(())
        graph: networkx.DiGraph[object] = networkx.DiGraph()
        graph.add_edges_from((_START, value) for value in self.roots)
        for recipe in {r for r in self.recipes.values() if r is not None}:
            graph.add_edge(recipe, _END, capacity=time * _whole(recipe.cost))
            graph.add_edges_from((recipe, read) for read in recipe.reads)
        for value, made in self.recipes.items():
            saving = time * _whole(self.stored[value]) + bytes * value.tensor.nbytes
            graph.add_edge(value, _END if made is None else made, capacity=saving)
        _, (needed, _) = networkx.minimum_cut(graph, _START, _END, flow_func=boykov_kolmogorov)
        return self.choose(r for r in self.recipes.values() if r is not None and r in needed)

    def within(self, limit: int, fastest: Choice) -> Choice:
        """A choice of no more than `limit` bytes, or else the smallest; never one of more bytes for less.

        Minimum cuts give the choices that are best at some price of a byte; each cut is at the price at which
        the last two, of more bytes and of fewer than the limit, cost the same. In the end these are
        neighbours. What they differ in is then made again one by one, in the forward's order, until the
        limit is kept: of many equal layers, as many as it takes.
        """
        more, fewer = fastest, self.smallest()
        if more.bytes <= limit or fewer.bytes >= more.bytes:
            return more
        while fewer.bytes <= limit:
            middle = self.cut(more.bytes - fewer.bytes, max(fewer.time - more.time, 1))
            if not fewer.bytes < middle.bytes < more.bytes:
                break
            more, fewer = (more, middle) if middle.bytes <= limit else (middle, fewer)
        running = {self.recipes[value] for value in more.made}
        for value, recipe in self.recipes.items():
            if value in fewer.made and recipe not in running:
                running.add(recipe)
                found = self.choose(r for r in running if r is not None)
                if fewer.bytes <= found.bytes <= limit:
                    return found
        return fewer


def _whole(microseconds: float) -> int:
    return round(microseconds * PARTS)
