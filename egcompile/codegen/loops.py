"""Renders a loop nest with reductions as a jit function: rows, and sums over rows."""

from __future__ import annotations

import functools

import torch

from egcompile.codegen.index import Axis, Index
from egcompile.codegen.nest import Nest, Partial
from egcompile.codegen.pointwise import (
    from_end,
    grouped,
    is_narrow,
    parameters,
    pointers,
    program_id,
    widened,
)
from egcompile.codegen.reduce import Reducer
from egcompile.codegen.source import JitFunction, is_backwards
from egcompile.codegen.text import Loop, Value, named
from egcompile.codegen.tile import AxisTile, Scope, Tile
from egcompile.codegen.walk import Indices, Write
from egcompile.codegen.wide import Phases
from egcompile.errors import CompileError
from egcompile.ir.node import Node
from egcompile.schedule.kernel import Buffer

LARGE_TILE = 8192
"""Points of a tile that leave no registers to load what they do not wait for."""


def render_nest(
    name: str, nest: Nest, temporaries: dict[Node, tuple[str, Buffer]], program: str = ""
) -> JitFunction:
    """The jit function of a nest; `temporaries` are where the partials go, for those that need a finalize.

    `program` names the parameter that is the program's number, where another function calls this one.
    """
    return _Renderer(nest, temporaries, program).render(name)


class _Renderer:
    def __init__(self, nest: Nest, temporaries: dict[Node, tuple[str, Buffer]], number: str) -> None:
        self.nest, self.temporaries, self.number = nest, temporaries, number
        self.rows, self.cols = nest.rows, nest.cols
        self.program = Axis("program", nest.parts)
        self.accumulators: dict[Node, Value] = {}
        self.tile = Tile(pointers(nest.kernel), {}, [], self.reduction)
        self.tile.hints = {(w.node, w.index): w.name for w in (*nest.writes, *nest.after)}
        self.tile.exact = not is_narrow(nest.kernel)
        self.reducer = Reducer(nest, self.tile)
        self.rows_vector, self.cols_vector = self.reducer.rows_vector, self.reducer.cols_vector
        self.flat = self.reducer.flat
        stages = nest.config.num_stages
        self.range = "tl.range" if stages > 1 else "range"
        self.stages = f", num_stages={stages}" if stages > 1 else ""

    # ---- the function ----

    def render(self, name: str) -> JitFunction:
        nest = self.nest
        outer = Scope(frozenset({self.program}))
        self.tile.scopes = [outer]
        self.tile.axes[self.program] = AxisTile(named(self.number or "tl.program_id(0)"))
        grid = self.rows_nest(outer) if nest.kind == "rows" else self.columns_nest(outer)
        self.finish()
        constants = {}
        if self.rows_vector:
            constants["BLOCK_ROWS"] = nest.config.block_rows
        if self.cols_vector:
            constants["BLOCK_COLS"] = nest.config.block_cols
        if self.reducer.run:
            constants["RUN"] = self.reducer.run
        tensors = parameters(nest.kernel) + tuple(name for name, _ in self.temporaries.values())
        return JitFunction(name, self.doc(), tensors, constants, grid, nest.config, outer.block, self.number)

    def doc(self) -> str:
        """What a program does, for the reader of the kernel."""
        nest, rows = self.nest, f"{self.rows.size} rows of {self.cols.size}"
        if nest.kind == "columns":
            share = "all rows" if nest.parts == 1 else f"every {nest.parts}th tile of rows"
            return f"{rows}: a program sums {share}, for its columns."
        own = "a tile of rows" if self.rows_vector else "a row"
        held = "held whole" if nest.whole else "in column tiles"
        if nest.parts > 1:
            own = f"every {nest.parts}th {'tile of rows' if self.rows_vector else 'row'}"
            return f"{rows}: a program takes {own}, {held}{', and sums over them' if nest.partials else ''}."
        return f"{rows}: a program takes {own}, {held}."

    def rows_nest(self, outer: Scope) -> tuple[int, ...]:
        """A program for each tile of rows; with sums over rows, programs that go over several."""
        nest, size = self.nest, self.nest.config.block_rows
        tiles = -(-self.rows.size // size)
        if nest.whole:
            self.bind_cols(outer, None)
        if nest.parts == tiles or not (nest.partials or nest.persistent):
            self.bind_rows(outer, Value(program_id(nest.kernel, tiles, self.number)))
            if not nest.whole:
                self.start(nest.partials)
            self.body(outer)
            return (tiles,)
        first = self.number or "tl.program_id(0)"
        self.over_rows(outer, f"{first}, {tiles}, {nest.parts}", is_backwards(nest.kernel))
        return (nest.parts,)

    def columns_nest(self, outer: Scope) -> tuple[int, ...]:
        """Programs along columns and, with several parts, along rows too; each goes over its rows."""
        nest, config = self.nest, self.nest.config
        tiles = -(-self.rows.size // config.block_rows)
        across = -(-self.cols.size // config.block_cols)
        place, part = "tl.program_id(0)", "tl.program_id(1)"
        if self.number:
            place = f"{self.number} % {across}" if nest.parts > 1 else self.number
            part = f"{self.number} // {across}"
        self.tile.axes[self.program] = AxisTile(named(part))
        self.bind_cols(outer, Value(self.widened(place)) if across > 1 else None)
        if tiles == 1:
            self.bind_rows(outer, None)
            self.body(outer)
            return (across, 1)
        shared = f"{part}, {tiles}, {nest.parts}"
        self.over_rows(outer, f"0, {tiles}" if nest.parts == 1 else shared, backwards=False)
        return (across, nest.parts)

    def over_rows(self, outer: Scope, steps: str, backwards: bool) -> None:
        """The loop of a program over its tiles of rows, of which `steps` is the range."""
        self.start(self.nest.partials)
        inner = Scope(outer.axes | {self.rows})
        self.tile.scopes.append(inner)
        name = "tile" if self.rows_vector else "step" if backwards else "row"
        if name == "row":
            self.tile.axes[self.rows] = AxisTile(named(self.widened(name), axes=frozenset({self.rows})))
        else:
            tiles = -(-self.rows.size // self.nest.config.block_rows)
            number = from_end(name, self.nest.kernel, tiles) if backwards else name
            self.bind_rows(inner, Value(self.widened(number)))
        self.body(inner)
        self.tile.scopes.pop()
        header = f"for {name} in {self.range}({steps}{self.stages}):"
        outer.block.items.append(Loop(header, (), inner.block))

    def widened(self, number: str) -> str:
        return widened(number, self.nest.kernel)

    def body(self, scope: Scope) -> None:
        """The work of one tile of rows: sums over rows first, since what they read then dies early."""
        nest = self.nest
        if nest.kind == "columns" or nest.whole:
            if nest.kind == "rows":
                scope.axes |= {self.cols}
            for node, index in nest.walk.loads:
                if (node, index) not in nest.walk.guarded and not self.is_late(node):
                    self.tile.value(node, index)  # in flight before anything waits
            for partial in nest.partials:
                self.accumulate(partial)
            for write in nest.writes:
                self.write(write)
        else:
            bind = functools.partial(self.bind_cols, tile=None, start="start")
            Phases(nest, self.reducer, bind, self.accumulate, self.write).render(scope, self.spans_cols)

    def is_late(self, node: Node) -> bool:
        """Whether a program's only tile, if it is large, should not hold this while it waits: a weight."""
        config, points = self.nest.config, self.rows.size * self.cols.size
        large = config.block_rows * config.block_cols >= LARGE_TILE and not self.nest.partials
        return large and not self.nest.persistent and 2 * node.tensor.numel < points

    # ---- axes ----

    def bind_rows(self, scope: Scope, tile: Value | None) -> None:
        scope.axes |= {self.rows}
        own = frozenset({self.rows})
        if not self.rows_vector:
            text = "0" if tile is None else tile.template
            self.tile.axes[self.rows] = AxisTile(
                self.tile.emit(Value(text, axes=own, hint="row", inline=False))
            )
            return
        text = self.widened("tl.arange(0, BLOCK_ROWS)")
        text = text if tile is None else f"{grouped(tile.template)} * BLOCK_ROWS + {text}"
        if not self.flat:
            text = f"{text}[:, None]" if tile is None else f"({text})[:, None]"
        if tile is not None:
            self.tile.bind_number(scope, self.rows, tile.template, None, self.nest.config.block_rows)
        self.bind(self.rows, text, "rows", self.nest.config.block_rows)

    def bind_cols(self, scope: Scope, tile: Value | None, start: str = "") -> None:
        scope.axes |= {self.cols}
        if self.cols.size == 1 and not self.cols_vector:
            self.tile.axes[self.cols] = AxisTile(Value("0", literal=0))
            return
        if not self.cols_vector:
            text = tile.template if tile is not None else self.widened(start) if start else "0"
            self.bind(self.cols, text, "col", 1)
            return
        if self.reducer.run:
            self.bind_runs(scope, tile, start)
            return
        text = self.widened("tl.arange(0, BLOCK_COLS)")
        text = f"{tile.template} * BLOCK_COLS + {text}" if tile is not None else text
        if start:
            text = f"{start} + {text}"
            number = self.widened(f"{start} // BLOCK_COLS")
            self.tile.bind_number(scope, self.cols, number, None, self.nest.config.block_cols)
        if not self.flat:
            text = f"({text})[None, :]" if "+" in text else f"{text}[None, :]"
        self.bind(self.cols, text, "cols", self.nest.config.block_cols)

    def bind_runs(self, scope: Scope, tile: Value | None, start: str) -> None:
        """The columns of a tile in two dimensions, of which the first counts runs."""
        block, run = self.nest.config.block_cols, self.reducer.run
        numbers = self.widened("tl.arange(0, BLOCK_COLS // RUN)")
        if start:
            numbers = f"{start} // RUN + {numbers}"
        if tile is not None:
            numbers = f"{grouped(tile.template)} * (BLOCK_COLS // RUN) + {numbers}"
        index = self.tile.bind_runs(scope, self.cols, numbers, block, run)
        self.bind_index(self.cols, index, "cols", block)

    def bind(self, axis: Axis, text: str, hint: str, size: int) -> None:
        self.bind_index(axis, Value(text, axes=frozenset({axis}), inline=False), hint, size)

    def bind_index(self, axis: Axis, value: Value, hint: str, size: int) -> None:
        own = frozenset({axis})
        index = self.tile.emit(value, hint)
        mask = None
        if axis.size % size:
            condition = Value(f"{{0}} < {axis.size}", (index,), torch.bool, own, f"{hint}_mask", inline=False)
            mask = self.tile.emit(condition)
        self.tile.axes[axis] = AxisTile(index, mask)

    def reduction(self, tile: Tile, node: Node, index: Indices) -> Value:
        """A reduction over columns, of a row that the tile holds whole; or of the one element that counts."""
        inner = self.nest.walk.descend(node, index)
        if inner is None:
            raise CompileError(f"the loop nest cannot reduce {node}")
        if node.tensor.numel == node.inputs[0].tensor.numel:  # of one element, along no loop
            return tile.value(node.inputs[0], inner)
        scope = tile.scope_of(frozenset({self.rows}))
        if (picked := self.reducer.pick(node, inner, scope)) is not None:
            return picked
        if not self.nest.whole:
            raise CompileError(f"{node.op.name} is not computed before it is read: {node}")
        return self.reducer.reduce(node, tile.value(node.inputs[0], inner), self.cols)

    # ---- sums over rows ----

    def start(self, partials: tuple[Partial, ...]) -> None:
        for p in partials:
            axes = frozenset({self.rows, self.cols}) if self.spans_cols(p) else frozenset({self.rows})
            self.accumulators[p.node] = self.reducer.accumulator(p.node, axes, self.tile.scopes[0])

    def spans_cols(self, partial: Partial) -> bool:
        operand = partial.node.inputs[0]
        return operand.tensor.numel == self.rows.size * self.cols.size and self.cols.size > 1

    def accumulate(self, partial: Partial) -> None:
        """Adds a tile's summands; those of a program's only tile are kept as they are."""
        value = self.tile.value(partial.node.inputs[0], partial.operand)
        axes = (self.rows, self.cols) if partial.total and self.spans_cols(partial) else (self.rows,)
        value = self.reducer.neutral(partial.node, value, axes)
        if partial.node not in self.accumulators:
            if set(axes) <= value.axes:
                self.accumulators[partial.node] = value
                return
            self.start((partial,))
        self.reducer.update(partial.node, self.accumulators[partial.node], value, self.tile.scopes[-1])

    def finish(self) -> None:
        """After the rows: the partials go to memory, or are the result."""
        self.tile.scopes[0].axes |= {self.rows, self.cols}
        for p in self.nest.partials:
            value = self.reducer.across(p.node, self.accumulators[p.node], self.rows)
            if p.total and self.spans_cols(p):
                value = self.reducer.across(p.node, value, self.cols)
            if p.node in self.temporaries:
                name, buffer = self.temporaries[p.node]
                index = (Index.of(self.program), *p.index)
                self.tile.store(f"{name}_ptr", buffer, index, value)
                continue
            if p.node.op.name == "mean":
                count = p.node.inputs[0].tensor.numel // p.node.tensor.numel
                value = self.reducer.emit(f"{{0}} / {count}", value, hint="mean")
            self.tile.scopes[0].memo[p.node, p.index, None] = value
        if not self.temporaries:
            for write in self.nest.after:
                self.write(write)

    def write(self, write: Write) -> None:
        value = self.tile.value(write.node, write.index)
        self.tile.store(f"{write.name}_ptr", write.buffer, write.where, value)
