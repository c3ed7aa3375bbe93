"""Rows wider than a tile: loops over column tiles, one for each level of reductions and one that writes.

A softmax's largest element and its sum are one loop: the running sum is rescaled where the running largest
grows (Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from egcompile.codegen.evictions import Instance, evictions
from egcompile.codegen.index import Axis
from egcompile.codegen.nest import Nest, Partial
from egcompile.codegen.reduce import Reducer, one_hot, shifted_exp
from egcompile.codegen.text import Line, Loop, Value
from egcompile.codegen.tile import Scope
from egcompile.codegen.walk import Indices, Write
from egcompile.ir.node import Node, topological

START = Axis("start", 0)
"""Stands for the loop over column tiles in the axes of values that change with it."""


class Phases:
    """Writes a nest over rows that are not held whole.

    bind_cols    binds the columns in a scope, from a loop's `start`
    accumulate, write   what is done at each point with a sum over rows, an output
    """

    def __init__(
        self,
        nest: Nest,
        reducer: Reducer,
        bind_cols: Callable[[Scope], None],
        accumulate: Callable[[Partial], None],
        write: Callable[[Write], None],
    ) -> None:
        self.nest, self.reducer, self.tile = nest, reducer, reducer.tile
        self.bind_cols, self.accumulate, self.write = bind_cols, accumulate, write

    def render(self, scope: Scope, spans_cols: Callable[[Partial], bool]) -> None:
        """Appends to `scope`, in which the rows are bound."""
        instances = [i for i in self.nest.walk.reductions if one_hot(i[0]) is None]
        levels = self.levels([node for node, _ in self.nest.walk.reductions])
        full = [w for w in self.nest.writes if any(self.nest.cols in i.axes for i in w.index)]
        totals = [p for p in self.nest.partials if spans_cols(p)]
        numbers = sorted({levels[node] for node, _ in instances})
        phases = [[i for i in instances if levels[i[0]] == number] for number in numbers]
        last = [(w.node, w.index) for w in full] + [(p.node.inputs[0], p.operand) for p in totals]
        policies = evictions([*(list(map(self.operand_of, phase)) for phase in phases), last], self.nest)
        for phase, policy in zip(phases, policies):
            self.phase(scope, phase, policy)
        for partial in (p for p in self.nest.partials if p not in totals):
            self.accumulate(partial)
        for write in (w for w in self.nest.writes if w not in full):
            self.write(write)
        if full or totals:
            inner = self.open(scope, policies[-1])
            for partial in totals:
                self.accumulate(partial)
            for write in full:
                self.write(write)
            self.close(scope, inner)

    def levels(self, reductions: Iterable[Node]) -> dict[Node, int]:
        """In which loop each reduction happens: after what it reads, but a softmax's sum with its largest."""
        levels: dict[Node, int] = {}
        for node in reductions:
            below = [levels[n] for n in topological(node.inputs) if n in levels]
            if (top := online_pair(node)) is not None and top in levels:
                levels[node] = levels[top]
            else:
                levels[node] = max(below, default=0) + (one_hot(node) is None)
        return levels

    def phase(self, scope: Scope, instances: list[Instance], policy: Mapping[Node, str]) -> None:
        """One loop that computes reductions of one level, and their results after it."""
        both = frozenset({self.nest.rows, self.nest.cols})
        sums = {online_pair(node): (node, index) for node, index in instances if online_pair(node)}
        online = {i: sums[i[0]] for i in instances if i[0] in sums}
        plain = [i for i in instances if i not in online and i not in online.values()]
        accumulators = {i: self.reducer.accumulator(i[0], both, scope) for i in (*online.values(), *plain)}
        for top in online:
            accumulators[top] = self.reducer.accumulator(top[0], frozenset({self.nest.rows}), scope)
        inner = self.open(scope, policy)
        for top, total in online.items():
            self.online(top, accumulators[top], accumulators[total], inner)
        for node, index in plain:
            value = self.reducer.neutral(node, self.operand(node, index), (self.nest.cols,))
            self.reducer.update(node, accumulators[node, index], value, inner)
        self.close(scope, inner)
        for node, index in instances:
            accumulator = accumulators[node, index]
            result = self.reducer.reduce(node, accumulator, self.nest.cols, masked=False)
            scope.memo[node, index, None] = result
        for top, total in online.items():
            scope.memo[(*total, None)] = self.of_a_finite_row(
                scope.memo[(*top, None)], scope.memo[(*total, None)]
            )

    def online(self, top: Instance, largest: Value, total: Value, inner: Scope) -> None:
        """The running largest element of each row, and the sum of exponentials relative to it.

        Relative to 0 while all that was seen is -inf, which adds nothing to the sum.
        """
        node, index = top
        emit = self.reducer.emit
        x = self.reducer.spread(self.operand(node, index))
        x = self.reducer.neutral(node, x, (self.nest.cols,))
        tile_top = x  # which may be one value for the tile, or for the row, and then before the loop
        if self.nest.cols in x.axes:
            tile_top = self.reducer.across(node, x, self.nest.cols, frozenset({START}))
        new = emit(self.reducer.pair(node), largest, tile_top, hint="new_largest", inline=False)
        origin = emit('tl.where({0} == float("-inf"), 0.0, {0})', new, hint="origin", inline=False)
        # The accumulators change below: what reads them is written before, by name or in the same line.
        shift = emit("tl.exp({0} - {1})", x, origin, hint="shifted")
        name = total.template
        rescaled = f"{name} = {name} * tl.exp({{0}} - {{1}}) + {{2}}"
        inner.block.items.append(Line(rescaled, (largest, origin, shift)))
        inner.block.items.append(Line(f"{largest.template} = {{0}}", (new,)))

    def of_a_finite_row(self, largest: Value, total: Value) -> Value:
        """The sum, but NaN in a row of -inf alone, as `exp(-inf - -inf)` is."""
        nan = 'tl.where({0} == float("-inf"), float("nan"), {1})'
        return self.reducer.emit(nan, largest, total, hint="total", inline=False)

    def operand(self, node: Node, index: Indices) -> Value:
        return self.tile.value(*self.operand_of((node, index)))

    def operand_of(self, reduction: Instance) -> Instance:
        operand = self.nest.walk.descend(*reduction)
        assert operand is not None
        return reduction[0].inputs[0], operand

    def open(self, scope: Scope, policy: Mapping[Node, str]) -> Scope:
        inner = Scope(scope.axes | {self.nest.cols, START})
        self.tile.scopes.append(inner)
        self.bind_cols(inner)
        self.tile.evictions = policy
        return inner

    def close(self, scope: Scope, inner: Scope) -> None:
        self.tile.scopes.pop()
        self.tile.evictions = {}
        self.tile.tiles.pop(self.nest.cols, None)
        config = self.nest.config
        span = f"0, {self.nest.cols.size}, {'BLOCK_COLS' if self.reducer.cols_vector else 1}"
        header = f"for start in range({span}):"
        if config.num_stages > 1:
            header = f"for start in tl.range({span}, num_stages={config.num_stages}):"
        scope.block.items.append(Loop(header, (), inner.block))


def online_pair(node: Node) -> Node | None:
    """For `sum(exp(x - amax(x)))` over one set of axes: the `amax`."""
    if node.op.name != "sum" or (pair := shifted_exp(node.inputs[0])) is None:
        return None
    top = pair[0]
    return top if top.attr("dims") == node.attr("dims") and top.dtype == node.dtype else None
