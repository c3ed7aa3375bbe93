"""Renders a loop nest with reductions as a jit function: rows, sums over rows, and phases over wide rows."""

from __future__ import annotations

import math

import torch

from egcompile.codegen.index import Axis, Index
from egcompile.codegen.nest import Nest, Partial, Write
from egcompile.codegen.pointwise import pointers, program_id
from egcompile.codegen.scalar import TL_DTYPES, literal
from egcompile.codegen.source import JitFunction
from egcompile.codegen.text import Line, Loop, Value, named
from egcompile.codegen.tile import AxisTile, Scope, Tile
from egcompile.codegen.walk import Indices
from egcompile.errors import CompileError
from egcompile.ir.node import Node
from egcompile.ir.types import accumulate_dtype
from egcompile.schedule.kernel import Buffer, Kernel

_REDUCE = {"sum": "tl.sum({0}, axis=%s)", "mean": "tl.sum({0}, axis=%s)"}
_LARGEST = {
    "amax": ("tl.max", "_larger", "maximum", -math.inf),
    "amin": ("tl.min", "_smaller", "minimum", math.inf),
}
_HINTS = {"sum": "total", "mean": "mean", "amax": "largest", "amin": "smallest"}


def render_nest(name: str, nest: Nest, temporaries: dict[Node, tuple[str, Buffer]]) -> JitFunction:
    """The jit function of a nest; `temporaries` are where the partials go, for those that need a finalize."""
    return _Renderer(nest, temporaries).render(name)


class _Renderer:
    def __init__(self, nest: Nest, temporaries: dict[Node, tuple[str, Buffer]]) -> None:
        self.nest, self.temporaries = nest, temporaries
        self.rows, self.cols = nest.rows, nest.cols
        config = nest.config
        self.rows_vector = config.block_rows > 1
        self.cols_vector = config.block_cols > 1
        self.flat = not (self.rows_vector and self.cols_vector)
        self.program = Axis("program", nest.parts)
        self.accumulators: dict[object, Value] = {}
        self.taken: set[str] = set()
        self.tile = Tile(pointers(nest.kernel), {}, [], self.reduction)
        self.absorbed = _absorbed(nest.kernel)

    # ---- the function ----

    def render(self, name: str) -> JitFunction:
        nest = self.nest
        outer = Scope(frozenset({self.program}))
        self.tile.scopes = [outer]
        self.tile.axes[self.program] = AxisTile(named("tl.program_id(0)"))
        grid = self.rows_nest(outer) if nest.kind == "rows" else self.columns_nest(outer)
        self.finish()
        constants = {}
        if self.rows_vector:
            constants["BLOCK_ROWS"] = nest.config.block_rows
        if self.cols_vector:
            constants["BLOCK_COLS"] = nest.config.block_cols
        outputs = [w.name for w in (*nest.writes, *(() if self.temporaries else nest.after))]
        outputs += [n for n, _ in self.temporaries.values()]
        inputs = [n.attr("name") for n in nest.kernel.body.inputs if n in self.tile.loaded]
        return JitFunction(name, "", (*inputs, *outputs), constants, grid, nest.config.num_warps, outer.block)

    def rows_nest(self, outer: Scope) -> tuple[int, ...]:
        """A program for each tile of rows; with sums over rows, programs that go over several."""
        nest, size = self.nest, self.nest.config.block_rows
        tiles = -(-self.rows.size // size)
        if nest.whole:
            self.bind_cols(outer, None)
        if not nest.partials or nest.parts == tiles:
            self.bind_rows(outer, Value(program_id(0, nest.kernel)))
            if nest.partials:
                self.start(nest.partials)
            self.body(outer)
            return (tiles,)
        self.start(nest.partials)
        inner = Scope(outer.axes | {self.rows})
        self.tile.scopes.append(inner)
        if self.rows_vector:
            header = f"for tile in range(tl.program_id(0), {tiles}, {nest.parts}):"
            self.bind_rows(inner, Value(self.widened("tile")))
        else:
            header = f"for row in range(tl.program_id(0), {tiles}, {nest.parts}):"
            self.tile.axes[self.rows] = AxisTile(named(self.widened("row"), axes=frozenset({self.rows})))
        self.body(inner)
        self.tile.scopes.pop()
        outer.block.items.append(Loop(header, (), inner.block))
        return (nest.parts,)

    def columns_nest(self, outer: Scope) -> tuple[int, ...]:
        """Programs along columns and, with several parts, along rows too; each goes over its rows."""
        nest, config = self.nest, self.nest.config
        tiles = -(-self.rows.size // config.block_rows)
        across = -(-self.cols.size // config.block_cols)
        self.tile.axes[self.program] = AxisTile(named("tl.program_id(1)"))
        self.bind_cols(outer, Value(program_id(0, nest.kernel)) if across > 1 else None)
        self.start(nest.partials)
        inner = Scope(outer.axes | {self.rows})
        self.tile.scopes.append(inner)
        first, step = ("0", "") if nest.parts == 1 else ("tl.program_id(1)", f", {nest.parts}")
        if self.rows_vector:
            header = f"for tile in range({first}, {tiles}{step}):"
            self.bind_rows(inner, Value(self.widened("tile")))
        else:
            header = f"for row in range({first}, {tiles}{step}):"
            self.tile.axes[self.rows] = AxisTile(named(self.widened("row"), axes=frozenset({self.rows})))
        self.body(inner)
        self.tile.scopes.pop()
        outer.block.items.append(Loop(header, (), inner.block))
        return (across, nest.parts)

    def widened(self, name: str) -> str:
        return f"{name}.to(tl.int64)" if "int64" in program_id(0, self.nest.kernel) else name

    def body(self, scope: Scope) -> None:
        """The work of one tile of rows: sums over rows first, since what they read then dies early."""
        nest = self.nest
        if nest.kind == "columns" or nest.whole:
            if nest.kind == "rows":
                scope.axes |= {self.cols}
            for partial in nest.partials:
                self.accumulate(partial)
            for write in nest.writes:
                self.write(write)
        else:
            self.phases(scope)

    # ---- axes ----

    def bind_rows(self, scope: Scope, tile: Value) -> None:
        scope.axes |= {self.rows}
        own = frozenset({self.rows})
        if not self.rows_vector:
            self.tile.axes[self.rows] = AxisTile(
                self.tile.emit(Value(tile.template, axes=own, hint="row", inline=False))
            )
            return
        text = f"{tile.template} * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)"
        self.bind(self.rows, text if self.flat else f"({text})[:, None]", "rows", self.nest.config.block_rows)

    def bind_cols(self, scope: Scope, tile: Value | None, start: str = "") -> None:
        scope.axes |= {self.cols}
        if self.cols.size == 1 and not self.cols_vector:
            self.tile.axes[self.cols] = AxisTile(Value("0", literal=0))
            return
        if not self.cols_vector:
            text = tile.template if tile is not None else start or "0"
            self.bind(self.cols, text, "col", 1)
            return
        text = "tl.arange(0, BLOCK_COLS)"
        text = f"{tile.template} * BLOCK_COLS + {text}" if tile is not None else text
        text = f"{start} + {text}" if start else text
        if not self.flat:
            text = f"({text})[None, :]" if "+" in text else f"{text}[None, :]"
        self.bind(self.cols, text, "cols", self.nest.config.block_cols)

    def bind(self, axis: Axis, text: str, hint: str, size: int) -> None:
        own = frozenset({axis})
        index = self.tile.emit(Value(text, axes=own, hint=hint, inline=False))
        mask = None
        if axis.size % size:
            condition = Value(f"{{0}} < {axis.size}", (index,), torch.bool, own, f"{hint}_mask", inline=False)
            mask = self.tile.emit(condition)
        self.tile.axes[axis] = AxisTile(index, mask)

    # ---- reductions ----

    def reduction(self, tile: Tile, node: Node, index: Indices) -> Value:
        """A reduction over columns, of a row that the tile holds whole."""
        if not self.nest.whole:
            raise CompileError(f"{node.op.name} is not computed before it is read: {node}")
        inner = self.nest.walk.descend(node, index)
        if inner is None:
            raise CompileError(f"the loop nest cannot reduce {node}")
        value = tile.value(node.inputs[0], inner)
        return self.reduce(node, value, self.cols)

    def reduce(self, node: Node, value: Value, axis: Axis, masked: bool = True) -> Value:
        """`value` reduced along a loop axis; a mean is divided by the axis' size."""
        name = node.op.name
        if math.prod(node.inputs[0].shape[d] for d in node.attr("dims")) == 1:
            return value
        acc = accumulate_dtype(node.dtype)
        if axis not in value.axes:
            if name == "sum":
                count = literal(axis.size, acc)
                return self.emit_pointwise("{0} * {1}", value, count, hint="total")
            return value
        if masked:
            value = self.neutral(node, value, (axis,))
        reduced = self.across(node, value, axis)
        if name == "mean":
            reduced = self.emit_pointwise(f"{{0}} / {axis.size}", reduced, hint="mean", inline=False)
        return reduced

    def emit_pointwise(self, template: str, *operands: Value, hint: str, inline: bool = True) -> Value:
        axes = frozenset().union(*(o.axes for o in operands))
        dtype = operands[0].dtype
        return self.tile.emit(Value(template, operands, dtype, axes, hint, inline=inline))

    def neutral(self, node: Node, value: Value, axes: tuple[Axis, ...]) -> Value:
        """`value` with the reduction's neutral element in lanes out of range."""
        masks = []
        for axis in axes:
            mask = self.tile.axes[axis].mask
            held = axis in value.zero and node.op.name in ("sum", "mean")
            if mask is not None and not held:
                masks.append(mask)
        if not masks:
            return value
        condition = self.tile.both(*masks)
        assert condition is not None
        return self.tile.select(condition, value, self.identity(node))

    def identity(self, node: Node) -> Value:
        acc = accumulate_dtype(node.dtype)
        if node.op.name in ("sum", "mean"):
            return literal(0.0, acc)
        smallest = node.op.name == "amax"
        if acc.is_floating_point:
            return literal(-math.inf if smallest else math.inf, acc)
        info = torch.iinfo(torch.uint8 if acc == torch.bool else acc)
        return literal(info.min if smallest else info.max, acc)

    def across(self, node: Node, value: Value, axis: Axis) -> Value:
        """Combines a tile along one of its dimensions; an accumulator over scalars is combined already."""
        if not (self.rows_vector if axis is self.rows else self.cols_vector):
            return named(value.template, value.dtype, value.axes - {axis})
        dim = 1 if axis is self.cols and not self.flat else 0
        keep = "" if self.flat else ", keep_dims=True"
        name = node.op.name
        if name in ("sum", "mean"):
            template = f"tl.sum({{0}}, axis={dim}{keep})"
        else:
            plain, combine, _, _ = _LARGEST[name]
            if node in self.absorbed:
                template = f"{plain}({{0}}, axis={dim}{keep})"
            else:
                template = f"tl.reduce({{0}}, {dim}, {combine}{keep})"
        axes = value.axes - {axis}
        result = Value(
            template, (value,), value.dtype, axes, _HINTS[name], value.zero - {axis}, inline=name == "mean"
        )
        return self.tile.emit(result)

    # ---- sums over rows ----

    def shape_of(self, axes: frozenset[Axis]) -> str:
        """The shape of a tile over some of the axes; empty for a scalar."""
        sizes = []
        for axis, vector, name in (
            (self.rows, self.rows_vector, "BLOCK_ROWS"),
            (self.cols, self.cols_vector, "BLOCK_COLS"),
        ):
            if vector:
                sizes.append(name if axis in axes else "1")
        if not axes or all(s == "1" for s in sizes):
            return ""
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"

    def new_accumulator(self, node: Node, axes: frozenset[Axis], scope: Scope) -> Value:
        """A named accumulator at the reduction's neutral element, set in `scope`."""
        name = f"{_HINTS[node.op.name]}_acc"
        count = 1
        while name in self.taken:
            count += 1
            name = f"{_HINTS[node.op.name]}_acc_{count}"
        self.taken.add(name)
        acc = accumulate_dtype(node.dtype)
        neutral = self.identity(node)
        shape = self.shape_of(axes)
        if shape and not neutral.literal:
            text = f"tl.zeros({shape}, {TL_DTYPES[acc]})"
        else:
            text = f"tl.full({shape or '()'}, {neutral.template}, {TL_DTYPES[acc]})"
        scope.block.items.append(Line(f"{name} = {text}"))
        return named(name, acc, axes)

    def update(self, node: Node, accumulator: Value, value: Value, scope: Scope) -> None:
        if node.op.name in ("sum", "mean"):
            line = Line(f"{accumulator.template} += {{0}}", (value,))
        else:
            function = _LARGEST[node.op.name][2]
            nan = ", propagate_nan=tl.PropagateNan.ALL"
            line = Line(
                f"{accumulator.template} = tl.{function}({accumulator.template}, {{0}}{nan})", (value,)
            )
        scope.block.items.append(line)

    def start(self, partials: tuple[Partial, ...]) -> None:
        for p in partials:
            axes = frozenset({self.rows, self.cols}) if self.spans_cols(p) else frozenset({self.rows})
            self.accumulators[p.node] = self.new_accumulator(p.node, axes, self.tile.scopes[0])

    def spans_cols(self, partial: Partial) -> bool:
        operand = partial.node.inputs[0]
        return operand.tensor.numel == self.rows.size * self.cols.size and self.cols.size > 1

    def accumulate(self, partial: Partial) -> None:
        value = self.tile.value(partial.node.inputs[0], partial.operand)
        axes = (self.rows, self.cols) if partial.total and self.spans_cols(partial) else (self.rows,)
        value = self.neutral(partial.node, value, axes)
        self.update(partial.node, self.accumulators[partial.node], value, self.tile.scopes[-1])

    def finish(self) -> None:
        """After the rows: the partials go to memory, or are the result."""
        for p in self.nest.partials:
            value = self.across(p.node, self.accumulators[p.node], self.rows)
            if p.total and self.spans_cols(p):
                value = self.across(p.node, value, self.cols)
            if p.node in self.temporaries:
                name, buffer = self.temporaries[p.node]
                index = (Index.of(self.program), *p.index)
                self.tile.store(f"{name}_ptr", buffer, index, value)
                continue
            if p.node.op.name == "mean":
                count = p.node.inputs[0].tensor.numel // p.node.tensor.numel
                value = self.emit_pointwise(f"{{0}} / {count}", value, hint="mean")
            self.tile.scopes[0].memo[p.node, p.index, None] = value
        if not self.temporaries:
            for write in self.nest.after:
                self.write(write)

    def write(self, write: Write) -> None:
        value = self.tile.value(write.node, write.index)
        self.tile.store(f"{write.name}_ptr", write.buffer, write.where, value)

    # ---- wide rows ----

    def phases(self, scope: Scope) -> None:
        """A loop over column tiles for each level of reductions, and one for what is written."""
        levels: dict[Node, int] = {}
        instances = list(self.nest.walk.reductions)
        for node, _ in instances:
            levels[node] = 1 + max((levels[n] for n in _below(node) if n in levels), default=0)
        for level in range(1, max(levels.values(), default=0) + 1):
            self.phase(scope, [(n, i) for n, i in instances if levels[n] == level])
        full = [w for w in self.nest.writes if self.cols in _axes(w.index)]
        totals = [p for p in self.nest.partials if self.spans_cols(p)]
        for partial in self.nest.partials:
            if partial not in totals:
                self.accumulate(partial)
        for write in self.nest.writes:
            if write not in full:
                self.write(write)
        if full or totals:
            inner = self.open(scope)
            for partial in totals:
                self.accumulate(partial)
            for write in full:
                self.write(write)
            self.close(scope, inner)

    def phase(self, scope: Scope, instances: list[tuple[Node, Indices]]) -> None:
        both = frozenset({self.rows, self.cols})
        accumulators = [self.new_accumulator(node, both, scope) for node, _ in instances]
        inner = self.open(scope)
        for (node, index), accumulator in zip(instances, accumulators):
            operand = self.nest.walk.descend(node, index)
            assert operand is not None
            value = self.neutral(node, self.tile.value(node.inputs[0], operand), (self.cols,))
            self.update(node, accumulator, value, inner)
        self.close(scope, inner)
        for (node, index), accumulator in zip(instances, accumulators):
            scope.memo[node, index, None] = self.reduce(node, accumulator, self.cols, masked=False)

    def open(self, scope: Scope) -> Scope:
        inner = Scope(scope.axes | {self.cols})
        self.tile.scopes.append(inner)
        self.bind_cols(inner, None, "start")
        return inner

    def close(self, scope: Scope, inner: Scope) -> None:
        self.tile.scopes.pop()
        step = self.nest.config.block_cols
        stages = self.nest.config.num_stages
        span = f"0, {self.cols.size}, BLOCK_COLS" if self.cols_vector else f"0, {self.cols.size}, {step}"
        header = f"for start in range({span}):"
        if stages > 1:
            header = f"for start in tl.range({span}, num_stages={stages}):"
        scope.block.items.append(Loop(header, (), inner.block))


def _axes(index: Indices) -> frozenset[Axis]:
    return frozenset().union(*(i.axes for i in index))


def _below(node: Node) -> set[Node]:
    found: set[Node] = set()
    pending = list(node.inputs)
    while pending:
        if (n := pending.pop()) not in found:
            found.add(n)
            pending.extend(n.inputs)
    return found


def _absorbed(kernel: Kernel) -> set[Node]:
    """Largest elements that are read only to be subtracted before an `exp`: NaN reaches the sum by itself."""
    absorbed: set[Node] = set()
    for node in kernel.body.nodes:
        if node.op.name == "exp" and node.inputs[0].op.name == "sub":
            x, top = node.inputs[0].inputs
            while top.op.name in ("expand", "reshape"):
                top = top.inputs[0]
            if top.op.name == "amax" and top.inputs[0] is x:
                absorbed.add(top)
    return absorbed - set(kernel.body.outputs)
