"""Nests without reductions: a flat loop in the memory order of the output, or tiles.

Tiles are for memory that is transposed, and for what is the same along a row, or in each of long rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from egcompile.codegen.heuristics import (
    Config,
    flat_config,
    fold,
    is_tiled,
    repeating_config,
    transposing_config,
)
from egcompile.codegen.index import Axis, Index, offset, operand_index, regroup, run_length, unravel
from egcompile.codegen.source import JitFunction, is_backwards, is_large
from egcompile.codegen.text import Value
from egcompile.codegen.tile import AxisTile, Scope, Tile
from egcompile.codegen.walk import Indices, Walk, Write, align, peel, unpeel
from egcompile.ir.node import Node
from egcompile.schedule.kernel import Buffer, Kernel
from egcompile.target import Target


def pointwise_function(
    name: str, kernel: Kernel, target: Target, config: Config | None, program: str = ""
) -> JitFunction:
    """The jit function of a body of pointwise and movement ops, all of whose outputs have one size.

    `program` names the parameter that is the program's number, where another function calls this one.

    Raises CompileError for an op that is neither.
    """
    buffer = kernel.outputs[0]
    order = sorted(range(buffer.type.rank), key=lambda i: (-buffer.strides[i], i))
    sizes = [buffer.type.shape[i] for i in order]
    points = Axis("offsets", math.prod(sizes))
    writes, walk = _writes(kernel, _in_order(unravel(Index.of(points), sizes), order))
    reads = sum(2 * node.tensor.numel > points.size for node, _ in walk.loads)
    if (turned := _turned_axis(kernel, walk, points, sizes)) is not None:
        others = [n for i, n in enumerate(sizes[:-1]) if i != turned]
        axes = Axis("batch", math.prod(others)), Axis("rows", sizes[turned]), Axis("cols", sizes[-1])
        digits = list(unravel(Index.of(axes[0]), others))
        digits.insert(turned, Index.of(axes[1]))
        digits.append(Index.of(axes[2]))
        settings = transposing_config(axes[1].size, axes[2].size).override(config)
    elif (inner := _row_length(kernel, walk, points, sizes)) is not None:
        axes = Axis("batch", 1), Axis("row", points.size // inner), Axis("cols", inner)
        digits = _rows_and_columns(axes[1], axes[2], sizes)
        settings = flat_config(inner, points.size, reads, target).override(config)
    elif (inner := _period(kernel, walk, points, sizes)) is not None:
        axes = Axis("batch", 1), Axis("rows", points.size // inner), Axis("cols", inner)
        digits = _rows_and_columns(axes[1], axes[2], sizes)
        settings = repeating_config(points.size // inner, inner, reads, target).override(config)
    else:
        runs = _runs(kernel, walk, points)
        settings = flat_config(points.size, points.size, reads, target, runs).override(config)
        run = 0 if walk.guarded else fold(runs, settings.block_cols)
        return _flat(name, kernel, points, writes, settings, program, run)
    writes, walk = _writes(kernel, _in_order(digits, order))
    return _tiled(name, kernel, axes, writes, settings, bool(walk.guarded), program)


def _rows_and_columns(rows: Axis, cols: Axis, sizes: Sequence[int]) -> list[Index]:
    """An index along each of the axes of these sizes, the last of which make up the columns."""
    cut = next(i for i in range(len(sizes) + 1) if math.prod(sizes[i:]) == cols.size)
    return [*unravel(Index.of(rows), sizes[:cut]), *unravel(Index.of(cols), sizes[cut:])]


def _in_order(digits: Sequence[Index], order: Sequence[int]) -> Indices:
    return tuple(digits[order.index(i)] for i in range(len(order)))


def _writes(kernel: Kernel, first: Indices) -> tuple[list[Write], Walk]:
    """Each output's value and index, where the first output's element is `first`."""
    walk = Walk(lambda node, index: None)
    writes: list[Write] = []
    for name, node, buffer in zip(kernel.body.output_names, kernel.body.outputs, kernel.outputs):
        root, movements = peel(node)
        if not writes:
            index = first
            for movement in movements:
                index = operand_index(movement, index)
        else:
            default = regroup(first, kernel.outputs[0].type.shape, root.shape)
            index = align(root, walk.known) or default
        walk.visit(root, index)
        writes.append(Write(name, buffer, root, index, unpeel(index, movements)))
    return writes, walk


def _steps(where: Index, points: Axis, sizes: Sequence[int]) -> list[int]:
    """How far apart in memory neighbours along each axis of `sizes` are; `points` counts their elements."""
    return [where.at({points: math.prod(sizes[i + 1 :])}) - where.at({}) for i in range(len(sizes))]


def _turned_axis(kernel: Kernel, walk: Walk, points: Axis, sizes: Sequence[int]) -> int | None:
    """The axis, in the output's memory order, along which most inputs are contiguous, if not the last."""
    buffers = dict(zip(kernel.body.inputs, kernel.inputs))
    last = max((i for i, n in enumerate(sizes) if n > 1), default=0)
    votes = dict.fromkeys(range(last), 0)
    against = 0
    for node, index in walk.loads:
        if 2 * node.tensor.numel < points.size or last != len(sizes) - 1:
            continue
        steps = _steps(offset(index, buffers[node].strides), points, sizes)
        against += steps[last] == 1
        for i in votes:
            votes[i] += steps[i] == 1 and sizes[i] >= 8 and steps[last] > 1
    best = max(votes, key=lambda i: votes[i], default=None)
    return best if best is not None and votes[best] and sizes[last] >= 8 else None


def is_narrow(kernel: Kernel) -> bool:
    """Whether all that is written is rounded to 16 bits, so that a division need not be exact to the last."""
    dtypes = [b.type.dtype for b in kernel.outputs if b.type.dtype.is_floating_point]
    return all(dtype.itemsize <= 2 for dtype in dtypes)


def _runs(kernel: Kernel, walk: Walk, points: Axis) -> list[int]:
    """How many neighbours share an element of each input."""
    buffers = dict(zip(kernel.body.inputs, kernel.inputs))
    return [run_length(offset(index, buffers[node].strides), points) for node, index in walk.loads]


def _row_length(kernel: Kernel, walk: Walk, points: Axis, sizes: Sequence[int]) -> int | None:
    """The length of the rows along which some input is constant, if they are long; None for no such input.

    What belongs to a row is then read and computed once a program, not once a point.
    """
    rows = {math.prod(sizes[i:]) for i in range(1, len(sizes))}
    long = [n for n in _runs(kernel, walk, points) if n >= 512 and n in rows and n < points.size]
    return min(long, default=None)


def _period(kernel: Kernel, walk: Walk, points: Axis, sizes: Sequence[int]) -> int | None:
    """The length of the rows in each of which some input, as a bias, is the same; None for no such input.

    What belongs to a column is then read once for several rows. None, too, where an input is the same all
    along a row, or changes but seldom, as a group's mean does.
    """
    buffers = dict(zip(kernel.body.inputs, kernel.inputs))
    lengths = []
    for node, index in walk.loads:
        where = offset(index, buffers[node].strides)
        steps = _steps(where, points, sizes)
        if where.terms and steps[-1] != 1:
            return None
        outer = [i for i, step in enumerate(steps) if not step and sizes[i] > 1 and any(steps[i + 1 :])]
        lengths += [math.prod(sizes[i + 1 :]) for i in outer[-1:]]
    return next((n for n in sorted(lengths) if is_tiled(points.size // n, n)), None)


def pointers(kernel: Kernel) -> dict[Node, tuple[str, Buffer]]:
    """For each input node, its parameter and how the argument lies in memory."""
    names = [node.attr("name") for node in kernel.body.inputs]
    return {n: (f"{name}_ptr", b) for n, name, b in zip(kernel.body.inputs, names, kernel.inputs)}


def parameters(kernel: Kernel) -> tuple[str, ...]:
    """The names of a kernel's tensors, inputs first."""
    return (*(node.attr("name") for node in kernel.body.inputs), *kernel.body.output_names)


def program_id(kernel: Kernel, tiles: int, program: str = "") -> str:
    """The number of a program's tile, of `tiles`, wide enough to be multiplied into any offset of the kernel.

    It counts along the first axis of the grid, or is what is named `program`.
    """
    return widened(program or from_end("tl.program_id(0)", kernel, tiles), kernel)


def from_end(number: str, kernel: Kernel, tiles: int) -> str:
    """The number of a tile, counted from the last of `tiles` where the kernel goes backwards."""
    return f"{tiles - 1} - {number}" if tiles > 1 and is_backwards(kernel) else number


def widened(number: str, kernel: Kernel) -> str:
    """An index as wide as the kernel's offsets: what is multiplied into one must not overflow before."""
    return f"{grouped(number)}.to(tl.int64)" if is_large(kernel) else number


def grouped(number: str) -> str:
    """A number's text as a factor."""
    return f"({number})" if " " in number else number


def _tile(kernel: Kernel, axes: frozenset[Axis], writes: Sequence[Write]) -> Tile:
    hints = {(write.node, write.index): write.name for write in writes}
    return Tile(pointers(kernel), {}, [Scope(axes)], hints=hints, exact=not is_narrow(kernel))


def _flat(
    name: str, kernel: Kernel, points: Axis, writes: Sequence[Write], config: Config, program: str, run: int
) -> JitFunction:
    """A program a tile of points; in runs of `run`, if that is not 0, which share elements of some input."""
    block = config.block_cols
    tiles = -(-points.size // block)
    constants = {"BLOCK": block} | ({"RUN": run} if run else {})
    own = frozenset({points})
    tile = _tile(kernel, own, writes)
    number = grouped(program_id(kernel, tiles, program))
    if run:
        numbers = f"{number} * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)"
        index = tile.bind_runs(tile.scopes[0], points, numbers, block, run)
    else:
        index = Value(f"{number} * BLOCK + tl.arange(0, BLOCK)", axes=own, inline=False)
    index = tile.emit(index, "offsets")
    mask = None
    if points.size % block:
        mask = tile.emit(
            Value(f"{{0}} < {points.size}", (index,), axes=index.axes, hint="mask", inline=False)
        )
    tile.axes[points] = AxisTile(index, mask)
    _store_all(tile, writes)
    return _function(name, kernel, tile, constants, (tiles,), config, program)


def _tiled(
    name: str,
    kernel: Kernel,
    axes: tuple[Axis, Axis, Axis],
    writes: Sequence[Write],
    config: Config,
    guarded: bool,
    program: str,
) -> JitFunction:
    """A program a tile of rows x cols; of one row, where no guard asks for a tile (see `Reducer`)."""
    batch, rows, cols = axes
    constants = {"BLOCK_ROWS": config.block_rows, "BLOCK_COLS": config.block_cols}
    tile = _tile(kernel, frozenset(axes), writes)
    down, across = -(-rows.size // config.block_rows), -(-cols.size // config.block_cols)
    tiles = down * across * batch.size
    pid = tile.emit(Value(program_id(kernel, tiles, program), hint="pid", inline=False))
    if batch.size > 1:
        number = Value(
            f"{{0}} // {down * across}", (pid,), axes=frozenset({batch}), hint="batch", inline=False
        )
        tile.axes[batch] = AxisTile(tile.emit(number))
        pid = tile.emit(Value(f"{{0}} % {down * across}", (pid,), hint="tile", inline=False))
    row_tile = "0" if down == 1 else "{0}" if across == 1 else f"{{0}} // {across}"
    col_tile = "0" if across == 1 else f"{{0}} % {across}"
    one_row = config.block_rows == 1 and not guarded
    if one_row:
        del constants["BLOCK_ROWS"]
        row = Value(row_tile, (pid,), axes=frozenset({rows}), hint="row", inline=False)
        tile.axes[rows] = AxisTile(tile.emit(row))
    for axis, number_text, block, broadcast in (
        (rows, row_tile, "BLOCK_ROWS", "[:, None]"),
        (cols, col_tile, "BLOCK_COLS", "" if one_row else "[None, :]"),
    ):
        if axis in tile.axes:
            continue
        if number_text != "0":  # what is one value for all of a tile is read once
            tile.bind_number(tile.scopes[0], axis, number_text, pid, constants[block])
        own = frozenset({axis})
        lanes = widened(f"tl.arange(0, {block})", kernel)
        text = lanes if number_text == "0" else f"{number_text} * {block} + {lanes}"
        text = f"({text}){broadcast}" if broadcast and text != lanes else text + broadcast
        index = tile.emit(Value(text, (pid,), axes=own, hint=axis.name, inline=False))
        mask = None
        if axis.size % constants[block]:
            mask = tile.emit(Value(f"{{0}} < {axis.size}", (index,), axes=own, hint=f"{axis.name}_mask"))
        tile.axes[axis] = AxisTile(index, mask)
    _store_all(tile, writes)
    return _function(name, kernel, tile, constants, (tiles,), config, program)


def _store_all(tile: Tile, writes: Sequence[Write]) -> None:
    for write in writes:
        value = tile.value(write.node, write.index)
        tile.store(f"{write.name}_ptr", write.buffer, write.where, value)


def _function(
    name: str,
    kernel: Kernel,
    tile: Tile,
    constants: dict[str, int],
    grid: tuple[int, ...],
    config: Config,
    program: str,
) -> JitFunction:
    block = tile.scopes[0].block
    return JitFunction(name, "", parameters(kernel), constants, grid, config, block, program)
