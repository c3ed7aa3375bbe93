"""Renders a contraction and what follows it on its result as a Triton kernel.

Two main loops. With tensor descriptors (sm_90 and later): a persistent grid over tiles in grouped order,
operands through the tensor memory accelerator. With pointers: one tile a program, for older devices,
unaligned strides and wide dtypes. Sums over rows go tile by tile into a partial buffer, which a second kernel
adds up in a fixed order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from egcompile.codegen.contraction import ColumnSum, Contraction
from egcompile.codegen.gemm_config import GemmConfig, Problem, choose_config
from egcompile.codegen.gemm_epilogue import DESCRIPTOR_HELPERS, Arguments, OperandTile, RegionTile, blocked
from egcompile.codegen.index import offset
from egcompile.codegen.scalar import HELPERS, TL_DTYPES, literal
from egcompile.codegen.source import Allocation, KernelSource, is_large
from egcompile.codegen.text import Block as TextBlock
from egcompile.codegen.text import Line, Loop, Names, Value, print_block
from egcompile.codegen.tile import AxisTile, Scope
from egcompile.codegen.walk import Walk
from egcompile.errors import CompileError
from egcompile.ir.node import Node
from egcompile.ir.types import TensorType
from egcompile.schedule.kernel import Buffer, Kernel
from egcompile.target import Target

FINALIZE_ROWS, FINALIZE_COLUMNS = 32, 64
"""The finalize adds up partial rows in blocks of so many, in programs of so many columns."""


def render_contraction(kernel: Kernel, target: Target, config: GemmConfig | None = None) -> KernelSource:
    """Triton source of a kernel whose lowered body holds one contraction: jit functions and their launcher.

    `config` replaces the table's choice. Raises CompileError where the body does not fit the template, or
    `config` asks for descriptors that the operands' strides do not allow.
    """
    contraction = Contraction.of(kernel)
    config = config or default_config(contraction, target)
    if config.descriptors and not contraction.allows_descriptors:
        raise CompileError(f"{kernel.name}: its operands do not allow tensor descriptors")
    return _Renderer(contraction, target, config).render()


def default_config(contraction: Contraction, target: Target) -> GemmConfig:
    """The table's choice for a contraction (`gemm_config`)."""
    c = contraction
    walk = Walk(lambda node, index: None)
    for node, index in c.tile.items():
        for operand in () if node is c.node else node.inputs:
            if operand not in c.tile:
                walk.visit(operand, index)
    whole = {c.rows, c.cols}
    loads = [x.dtype.itemsize for x, at in walk.loads if offset(at, c.buffer(x).strides).axes >= whole]
    stores = [node.dtype.itemsize for _, node in c.outputs_in(c.tile)]
    problem = Problem(
        c.rows.size,
        c.cols.size,
        c.k.size,
        c.dtype.itemsize,
        tuple(sorted(loads)),
        tuple(stores),
        c.allows_descriptors,
    )
    return choose_config(problem, target)


class _Renderer:
    def __init__(self, contraction: Contraction, target: Target, config: GemmConfig) -> None:
        c = self.contraction = contraction
        self.target, self.config, self.name = target, config, c.kernel.name
        names = Names({self.name, "TensorDescriptor"})
        self.tensors: dict[Node | int, str] = {i: names.fresh(i.attr("name")) for i in c.kernel.body.inputs}
        self.tensors |= {i: names.fresh(name) for i, name in enumerate(c.kernel.body.output_names)}
        self.partials = [names.fresh("partial") for _ in c.sums]
        self.tiles_m = math.ceil(c.rows.size / config.block_m)
        self.tiles_n = math.ceil(c.cols.size / config.block_n)
        self.programs = self.tiles_m * self.tiles_n
        self.wide = TL_DTYPES[c.accumulator]
        self.large = is_large(c.kernel)

    def render(self) -> KernelSource:
        c = self.contraction
        parts, body = [], []
        for partial in self.partials:
            buffer = Buffer.contiguous(TensorType((self.tiles_m, c.cols.size), c.accumulator))
            body.append(Allocation(partial, buffer).text(next(iter(self.tensors.values()))))
        functions, launch = self._main()
        parts += functions
        body.append(launch)
        for partial, column_sum in zip(self.partials, c.sums, strict=True):
            function, launch = self._finalize(partial, column_sum)
            parts.append(function)
            body.append(launch)
        parts.append(_function(f"def {self.name}({', '.join(self.tensors.values())}):", body))
        code = "\n".join(parts)
        known = DESCRIPTOR_HELPERS | HELPERS
        helpers = [text.strip() for name, text in known.items() if re.search(rf"\b{name}\(", code)]
        return KernelSource(self.name, "\n\n\n".join([*helpers, *parts]) + "\n", tuple(helpers))

    # ---- the tile loop ----

    def _main(self) -> tuple[list[str], str]:
        config = self.config
        operands, extra = Arguments(self.tensors), Arguments(self.tensors)
        epilogue = self._epilogue(extra)
        loop = self._by_descriptors if config.descriptors else self._by_pointers
        body = loop(operands, extra)
        passed = operands.passed | extra.passed
        grid = min(config.per_sm * self.target.sms, self.programs) if config.descriptors else self.programs
        launch = _launch(f"_{self.name}", grid, passed, config.num_warps, config.num_stages)
        return [self._order(), epilogue, _jit(f"_{self.name}", passed, body)], launch

    def _order(self) -> str:
        """Tiles go in groups of `group_m` rows, column by column, so that their operands stay in the L2."""
        group, config = self.config.group_m, self.config
        lines = [
            f"group = tile // {group * self.tiles_n} * {group}",
            f"height = min({self.tiles_m} - group, {group})",
            f"place = tile % {group * self.tiles_n}",
            f"return (group + place % height) * {config.block_m}, place // height * {config.block_n}",
        ]
        return _jit(f"_{self.name}_order", ["tile"], lines)

    def _by_descriptors(self, operands: Arguments, extra: Arguments) -> list[str]:
        config = self.config
        programs = min(config.per_sm * self.target.sms, self.programs)
        a, b = (self._operand_block(operands, side) for side in (0, 1))
        inner = [
            f"m0, n0 = _{self.name}_order(tile)",
            f"acc = tl.zeros(({config.block_m}, {config.block_n}), dtype={self.wide})",
            f"for k0 in range(0, {self.contraction.k.size}, {config.block_k}):",
            f"    acc = tl.dot({a}, {b}, acc)",
            "# Counted apart from `tile`: the next tile's loads need not wait for this one's epilogue.",
            f"done += {programs}",
            f"m0, n0 = _{self.name}_order(done)",
            *self._pieces(extra),
        ]
        head = (
            f"for tile in tl.range(tl.program_id(0), {self.programs}, {programs}, flatten={config.flatten}):"
        )
        return [f"done = tl.program_id(0) - {programs}", head, *_indented(inner)]

    def _operand_block(self, operands: Arguments, side: int) -> str:
        """The load of an operand's tile as [rows, K] or [K, columns], whichever way it lies in memory."""
        c, config = self.contraction, self.config
        seen = c.operand_block(side)
        assert seen is not None  # allows_descriptors
        tile, at = (config.block_m, config.block_k), "m0, k0"
        if side == 1:
            tile, at = (config.block_k, config.block_n), "k0, n0"
        if seen.transposed:
            tile, at = (tile[1], tile[0]), ", ".join(reversed(at.split(", ")))
        name = operands.descriptor(c.operands[side][0], ("lhs", "rhs")[side], seen, tile)
        return f"{name}.load([{at}])" + (".T" if seen.transposed else "")

    def _by_pointers(self, operands: Arguments, extra: Arguments) -> list[str]:
        c, config = self.contraction, self.config
        outer, inner = TextBlock(), TextBlock()
        outer.items.append(Line(f"m0, n0 = _{self.name}_order(tl.program_id(0))"))
        k = f"k0 + tl.arange(0, {config.block_k})"
        prelude = Scope(frozenset(), outer)
        rows, cols = self._rows(prelude), self._cols(prelude, config.block_n)
        # K runs along the columns of `a` and the rows of `b`.
        orientations = ((c.rows, rows, "[None, :]"), (c.cols, cols, "[:, None]"))
        sides = []
        for side, (axis, tile, where) in enumerate(orientations):
            scopes = [Scope(frozenset({axis}), outer), Scope(frozenset({axis, c.k}), inner)]
            summed = blocked(c.k, f"({k}){where}", config.block_k, scopes[1], large=self.large)
            axes = {axis: tile, c.k: summed}
            shape = (config.block_m, config.block_k) if side == 0 else (config.block_k, config.block_n)
            reader = OperandTile({}, axes, scopes, contraction=c, arguments=operands, shape=shape)
            sides.append(reader.operand(side))
        options = {8: ", out_dtype=tl.float64", 4: ', input_precision="ieee"'}.get(c.dtype.itemsize, "")
        inner.items.append(Line(f"acc = tl.dot({{0}}, {{1}}, acc{options})", tuple(sides)))
        outer.items.append(Line(f"acc = tl.zeros(({config.block_m}, {config.block_n}), dtype={self.wide})"))
        outer.items.append(Loop(f"for k0 in range(0, {c.k.size}, {config.block_k}):", (), inner))
        taken = {"acc", "m0", "n0", "k0", *operands.passed, *extra.passed}
        return print_block(outer, Names(taken), "") + self._pieces(extra)

    def _rows(self, scope: Scope) -> AxisTile:
        size = self.config.block_m
        text = f"(m0 + tl.arange(0, {size}))[:, None]"
        return blocked(self.contraction.rows, text, size, scope, large=self.large)

    def _cols(self, scope: Scope, width: int) -> AxisTile:
        """Columns in pieces of `width`; where tiles overhang the matrix, whole pieces may lie outside."""
        axis, text = self.contraction.cols, f"(n0 + tl.arange(0, {width}))[None, :]"
        return blocked(axis, text, self.config.block_n, scope, large=self.large)

    # ---- the epilogue ----

    def _pieces(self, extra: Arguments) -> list[str]:
        """Calls of the epilogue on the accumulator, in column pieces."""
        lines: list[str] = []
        pieces, width = ["acc"], self.config.block_n
        while len(pieces) < self.config.subtiles:
            width //= 2
            for piece in pieces:
                view = f"tl.reshape({piece}, ({self.config.block_m}, 2, {width}))"
                lines.append(f"{piece}_0, {piece}_1 = tl.split(tl.permute({view}, (0, 2, 1)))")
            pieces = [f"{piece}_{half}" for piece in pieces for half in (0, 1)]
        for i, piece in enumerate(pieces):
            start = f"n0 + {i * width}" if i else "n0"
            lines.append(f"_{self.name}_epilogue({', '.join([piece, 'm0', start, *extra.passed])})")
        return lines

    def _epilogue(self, extra: Arguments) -> str:
        c, config = self.contraction, self.config
        width = config.block_n // config.subtiles
        scope = Scope(frozenset({c.rows, c.cols}))
        axes = {c.rows: self._rows(scope), c.cols: self._cols(scope, width)}
        tile = RegionTile(
            {},
            axes,
            [scope],
            contraction=c,
            region=c.tile,
            root="acc",
            arguments=extra,
            shape=(config.block_m, width),
            place="m0, n0" if config.tile_descriptors else None,
        )
        partials = {s.value: partial for partial, s in zip(self.partials, c.sums, strict=True)}

        def add_up(node: Node, value: Value) -> None:
            if node in partials:
                self._partial_sum(tile, partials[node], value)

        tile.write(add_up)
        parameters = ["acc", "m0", "n0", *extra.passed]
        return _jit(f"_{self.name}_epilogue", parameters, tile.lines(set(parameters)))

    def _partial_sum(self, tile: RegionTile, partial: str, value: Value) -> None:
        """Stores the tile's column sums in the row of the partial buffer that is this tile's alone."""
        c = self.contraction
        tile.arguments.passed[f"{partial}_ptr"] = partial
        rows, cols = tile.axes[c.rows], tile.axes[c.cols]
        row = f"m0 // {self.config.block_m}"
        if rows.mask is not None and c.rows not in value.zero:
            value = tile.select(rows.mask, value, literal(0.0, c.accumulator))
        mask = ", mask={2}" if cols.mask is not None else ""
        total = "tl.sum({0}, axis=0, keep_dims=True)"
        operands = (value, cols.index, *([cols.mask] if cols.mask is not None else []))
        tile.line(f"tl.store({partial}_ptr + {row} * {c.cols.size} + {{1}}, {total}{mask})", *operands)

    def _finalize(self, partial: str, column_sum: ColumnSum) -> tuple[str, str]:
        c, count = self.contraction, self.tiles_m
        arguments = Arguments(self.tensors, {f"{partial}_ptr": partial})
        scope, inner = Scope(frozenset({c.cols})), TextBlock()
        text = f"tl.program_id(0) * {FINALIZE_COLUMNS} + tl.arange(0, {FINALIZE_COLUMNS})"
        cols = blocked(c.cols, text, FINALIZE_COLUMNS, scope)
        tile = RegionTile(
            {},
            {c.cols: cols},
            [scope],
            contraction=c,
            region=column_sum.region,
            root="total",
            arguments=arguments,
            shape=(FINALIZE_COLUMNS,),
        )
        mask = f"(row < {count})" + (" & {1}" if cols.mask is not None else "")
        load = f"tl.load({partial}_ptr + row * {c.cols.size} + {{0}}, mask={mask}, other=0.0)"
        operands = (cols.index, *([cols.mask] if cols.mask is not None else []))
        inner.items += [
            Line(f"row = (start + tl.arange(0, {FINALIZE_ROWS}))[:, None]"),
            Line(f"acc += {load}", operands),
        ]
        tile.line(f"acc = tl.zeros(({FINALIZE_ROWS}, {FINALIZE_COLUMNS}), dtype={self.wide})")
        scope.block.items.append(Loop(f"for start in range(0, {count}, {FINALIZE_ROWS}):", (), inner))
        tile.line("total = tl.sum(acc, axis=0)")
        tile.write()
        name, grid = f"_{self.name}_{partial}_sum", math.ceil(c.cols.size / FINALIZE_COLUMNS)
        lines = tile.lines({"acc", "total", "row", "start", *arguments.passed})
        return _jit(name, list(arguments.passed), lines), _launch(name, grid, arguments.passed, 4, 3)


def _launch(name: str, grid: int, passed: dict[str, str], num_warps: int, num_stages: int) -> str:
    arguments = "".join(f"    {text},\n" for text in passed.values())
    return f"{name}[({grid},)](\n{arguments}    num_warps={num_warps},\n    num_stages={num_stages},\n)"


def _jit(name: str, parameters: Iterable[str], lines: list[str]) -> str:
    return "@triton.jit\n" + _function(f"def {name}({', '.join(parameters)}):", lines)


def _function(head: str, lines: list[str]) -> str:
    return "\n".join([head, *_indented([row for line in lines for row in line.split("\n")])])


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
