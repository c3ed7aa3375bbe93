"""Reductions on a tile: neutral elements, combination along an axis, accumulators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from egcompile.codegen.heuristics import fold
from egcompile.codegen.index import BIJECTIVE, Axis, Index
from egcompile.codegen.nest import Nest
from egcompile.codegen.scalar import TL_DTYPES, literal, typed
from egcompile.codegen.text import Line, Value, named
from egcompile.codegen.tile import AxisTile, Scope, Tile, runs_of
from egcompile.codegen.walk import Indices
from egcompile.ir.node import Node
from egcompile.ir.types import accumulate_dtype
from egcompile.schedule.kernel import Kernel

HINTS = {"sum": "total", "mean": "mean", "amax": "largest", "amin": "smallest"}
_SUMS = ("sum", "mean")
_TILE = {"amax": ("tl.max({0}, axis=%s)", "_larger"), "amin": ("tl.min({0}, axis=%s)", "_smaller")}
_PAIR = {"amax": "tl.maximum", "amin": "tl.minimum"}


class Reducer:
    """Writes the reductions of one nest.

    A tile has a dimension for each of rows and columns of which it holds several: `[BLOCK_ROWS, BLOCK_COLS]`,
    one of them, or none. Reductions of a two-dimensional tile keep the dimension, so all values broadcast.
    Columns alone may be folded into runs of `run` (0: they are not), `[BLOCK_COLS // RUN, RUN]`.
    """

    def __init__(self, nest: Nest, tile: Tile) -> None:
        self.tile, self.rows, self.cols = tile, nest.rows, nest.cols
        # A guard on a scalar index would be a scalar mask for a tile; a tile of one row is none.
        guarded = bool(nest.walk.guarded)
        self.rows_vector = nest.config.block_rows > 1 or (guarded and self.rows.size > 1)
        self.cols_vector = nest.config.block_cols > 1 or (guarded and self.cols.size > 1)
        self.flat = not (self.rows_vector and self.cols_vector)
        folds = self.flat and self.cols_vector and not guarded
        run = fold(nest.runs, nest.config.block_cols) if folds else 0
        self.run = run if run < nest.config.block_cols else 0  # one of a whole tile is the tile's number
        self.absorbed = _absorbed(nest.kernel)
        self.taken: set[str] = set()
        self.picked: set[Axis] = set()

    def reduce(self, node: Node, value: Value, axis: Axis, masked: bool = True) -> Value:
        """`value` reduced along a loop axis as `node` says; a mean is divided by the axis' size."""
        name, acc = node.op.name, accumulate_dtype(node.dtype)
        value = self.spread(value) if axis is self.cols else value
        if axis not in value.axes:
            if name == "sum" and value.literal is not None:
                return literal(value.literal * axis.size, acc)
            if name == "sum":
                return self.emit("{0} * {1}", value, literal(axis.size, acc), hint="total")
            return value
        if masked:
            value = self.neutral(node, value, (axis,))
        reduced = self.across(node, value, axis)
        if name == "mean":
            reduced = self.emit(f"{{0}} / {axis.size}", reduced, hint="mean", inline=False)
        return reduced

    def spread(self, value: Value) -> Value:
        """What is one for all of a run, as a value at each of its points."""
        if not self.run or self.cols in value.axes or runs_of(self.cols, self.run) not in value.axes:
            return value
        axes = value.axes | {self.cols}
        template = f"tl.broadcast_to({{0}}, {self.shape(frozenset({self.cols}))})"
        return self.tile.emit(Value(template, (value,), value.dtype, axes, value.hint))

    def emit(self, template: str, *operands: Value, hint: str, inline: bool = True) -> Value:
        axes = frozenset().union(*(o.axes for o in operands))
        return self.tile.emit(Value(template, operands, operands[0].dtype, axes, hint, inline=inline))

    def neutral(self, node: Node, value: Value, axes: Sequence[Axis]) -> Value:
        """`value` with the reduction's neutral element in lanes out of range."""
        masks = []
        for axis in axes:
            mask = self.tile.axes[axis].mask
            if mask is not None and not (axis in value.zero and node.op.name in _SUMS):
                masks.append(mask)
        condition = self.tile.both(*masks)
        return value if condition is None else self.tile.select(condition, value, self.identity(node))

    def identity(self, node: Node) -> Value:
        acc = accumulate_dtype(node.dtype)
        if node.op.name in _SUMS:
            return literal(0.0, acc)
        smallest = node.op.name == "amax"
        if acc.is_floating_point:
            return literal(-math.inf if smallest else math.inf, acc)
        info = torch.iinfo(torch.uint8 if acc == torch.bool else acc)
        return literal(info.min if smallest else info.max, acc)

    def across(self, node: Node, value: Value, axis: Axis, within: frozenset[Axis] = frozenset()) -> Value:
        """Combines a tile along one of its dimensions; an accumulator over scalars is combined already.

        `within` are axes beside those of `value` whose loop the result stays in.
        """
        gone = {axis, runs_of(axis, self.run)} if self.run and axis is self.cols else {axis}
        if not (self.rows_vector if axis is self.rows else self.cols_vector):
            axes = value.axes - {axis} | within
            return self.tile.emit(Value("{0}", (value,), value.dtype, axes, value.hint))
        others = value.axes & {self.rows, self.cols} - {axis}
        if self.flat:
            dim, keep = "None" if self.run and axis is self.cols else "0", ""
        elif others:
            dim, keep = str(int(axis is self.cols)), ", keep_dims=True"
        else:
            dim, keep = "None", ""  # down to a scalar
        name = node.op.name
        if name in _SUMS:
            template = f"tl.sum({{0}}, axis={dim}{keep})"
        elif node in self.absorbed:
            template = _TILE[name][0].replace("%s", f"{dim}{keep}")
        else:
            template = f"tl.reduce({{0}}, {dim}, {_TILE[name][1]}{keep})"
        axes, zero = value.axes - gone | within, value.zero - gone
        inline = name == "mean"
        return self.tile.emit(Value(template, (value,), value.dtype, axes, HINTS[name], zero, inline=inline))

    # ---- accumulators ----

    def accumulator(self, node: Node, axes: frozenset[Axis], scope: Scope) -> Value:
        """A named accumulator over some of the tile's dimensions, set in `scope` to the neutral element."""
        acc, neutral = accumulate_dtype(node.dtype), self.identity(node)
        shape = self.shape(axes)
        zeros = shape and not neutral.literal
        text = f"tl.zeros({shape}, " if zeros else f"tl.full({shape or '()'}, {neutral.template}, "
        name = self.fresh(f"{HINTS[node.op.name]}_acc")
        scope.block.items.append(Line(f"{name} = {text}{TL_DTYPES[acc]})"))
        return named(name, acc, axes)

    def update(self, node: Node, accumulator: Value, value: Value, scope: Scope) -> None:
        name = accumulator.template
        template = f"{name} += {{0}}"
        if node.op.name not in _SUMS:
            template = f"{name} = {self.pair(node).format(name, '{0}')}"
        scope.block.items.append(Line(template, (typed(value),)))

    def pair(self, node: Node) -> str:
        """The larger, or smaller, of `{0}` and `{1}`."""
        nan = "" if node in self.absorbed else ", propagate_nan=tl.PropagateNan.ALL"
        return f"{_PAIR[node.op.name]}({{0}}, {{1}}{nan})"

    def shape(self, axes: frozenset[Axis]) -> str:
        """The shape of a tile over some of the axes; empty for a scalar."""
        if self.run and self.cols in axes:
            return "(BLOCK_COLS // RUN, RUN)"
        sizes = []
        if self.rows_vector:
            sizes.append("BLOCK_ROWS" if self.rows in axes else "1")
        if self.cols_vector:
            sizes.append("BLOCK_COLS" if self.cols in axes else "1")
        if all(size == "1" for size in sizes):
            return ""
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"

    def fresh(self, hint: str) -> str:
        name, count = hint, 1
        while name in self.taken:
            count += 1
            name = f"{hint}_{count}"
        self.taken.add(name)
        return name

    # ---- reductions of one element ----

    def pick(self, node: Node, index: Indices, scope: Scope) -> Value | None:
        """`sum(where(iota == i, v, 0))` as one element of `v`, read at `i`; None for other reductions.

        `index` is the operand's; `scope` binds the rows.
        """
        found = one_hot(node)
        if found is None:
            return None
        position, value = found
        dim = node.attr("dims")[0]
        at = self.tile.value(position, index)
        size = node.inputs[0].shape[dim]
        axis = Axis(self.fresh("picked"), size)
        inside = self.emit(f"({{0}} >= 0) & ({{0}} < {size})", at, hint="inside", inline=False)
        self.tile.axes[axis] = AxisTile(at, inside)
        scope.axes |= {axis}
        self.picked.add(axis)
        picked = self.tile.value(value, (*index[:dim], Index.of(axis), *index[dim + 1 :]))
        zero = literal(0.0, accumulate_dtype(node.dtype))
        rows = picked.axes - self.picked | at.axes  # what another pick at the same place read, it shares
        return self.tile.emit(
            Value("tl.where({0}, {1}, {2})", (inside, picked, zero), zero.dtype, rows, "picked")
        )


def one_hot(node: Node) -> tuple[Node, Node] | None:
    """For `sum(where(iota == i, v, 0))` along one axis on which `i` does not depend: `i` and `v`."""
    dims = node.attr("dims")
    chosen = node.inputs[0]
    if node.op.name != "sum" or len(dims) != 1 or chosen.op.name != "where":
        return None
    condition, value, other = chosen.inputs
    if condition.op.name != "eq" or other.op.name != "full" or other.attr("value") != 0.0:
        return None
    for position, place in (condition.inputs, condition.inputs[::-1]):
        along = place.op.name == "iota" and place.attr("axis") == dims[0]
        if along and position.op.name == "expand" and position.inputs[0].shape[dims[0]] == 1:
            return position, value
    return None


def _absorbed(kernel: Kernel) -> set[Node]:
    """Largest elements that need not be NaN where an element is.

    `exp(x - amax(x))` is NaN there, and so is its sum: whatever that enters is NaN as well. What follows from
    the largest element and not from the sum would differ; if that is an output, NaN must be carried along.
    """
    pairs = [(n, pair[0]) for n in kernel.body.nodes if (pair := shifted_exp(n)) is not None]
    tops = {top for _, top in pairs}
    return {top for top in tops if not _shows(top, {n for n, other in pairs if other is top}, kernel)}


def _shows(top: Node, shifted: set[Node], kernel: Kernel) -> bool:
    """Whether an output would show that `top` is not NaN in a row with one."""
    nan: set[Node] = set()
    differs = {top}
    for node in kernel.body.nodes:
        if node in differs:
            continue
        summed = node.op.name == "sum" and node.inputs[0] in shifted
        if (summed and node.attr("dims") == top.attr("dims")) or (
            node.op.name in _CARRY_NAN and any(i in nan for i in node.inputs)
        ):
            nan.add(node)
        elif any(i in differs for i in node.inputs):
            differs.add(node)
    return not differs.isdisjoint(kernel.body.outputs)


_CARRY_NAN = {"add", "sub", "mul", "div", "neg", "exp", "log", "cast", "reciprocal", *BIJECTIVE, "expand"}
"""Ops that are NaN wherever an operand is."""


def shifted_exp(node: Node) -> tuple[Node, Node] | None:
    """For `exp(x - amax(x))`: the reduction and `x`."""
    if node.op.name != "exp" or node.inputs[0].op.name != "sub":
        return None
    x, top = node.inputs[0].inputs
    while top.op.name in ("expand", "reshape"):
        top = top.inputs[0]
    return (top, x) if top.op.name == "amax" and top.inputs[0] is x else None
