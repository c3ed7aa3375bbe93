"""Loop nests: what one generated loop computes, and how a body is divided into them.

A body without reductions is one pointwise nest. Otherwise the points of one reduction's operand, the
anchor's, are laid out as `rows` x `cols`, and the nest is of one of two kinds:

    rows      a program owns whole rows. Reductions over `cols` happen in place, in sequence; sums over
              `rows` are accumulated across a program's rows (column partials)
    columns   a program owns some columns and a share of the rows; there are only sums over rows

What one nest cannot compute, another computes before it (a reduction that it needs in memory) or after it.
Column partials are summed by a nest of their own, the finalize, planned as any other body.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from egcompile.codegen.heuristics import (
    Config,
    Shape,
    balanced,
    columns_config,
    keeps_in_l2,
    keeps_rows,
    pow2,
    rows_config,
)
from egcompile.codegen.index import Axis, Digit, Index, linear, offset, run_length, unravel
from egcompile.codegen.walk import Indices, Walk, Write, align, index_axes, peel, unpeel
from egcompile.ir.node import Node, topological
from egcompile.ops.opdef import Kind
from egcompile.schedule.kernel import Kernel
from egcompile.target import Target

SLOW = ("exp", "expm1", "log", "log1p", "erf", "tanh", "sigmoid", "silu", "sin", "cos", "pow")
"""Ops of many instructions."""

SECTOR_BYTES = 64
"""Runs of memory shorter than this are not read at full speed along themselves."""


@dataclass(frozen=True, eq=False)
class Partial:
    """A reduction over rows: each program has a partial result.

    operand   the index at which the summand is read
    index     the index of the result, over `cols` alone
    """

    node: Node
    operand: Indices
    index: Indices

    @property
    def total(self) -> bool:
        """Whether columns are summed too."""
        return not any(i.terms for i in self.index)


@dataclass(frozen=True, eq=False)
class Nest:
    """One loop nest over `kernel`'s body.

    writes    outputs at each point or row
    partials  reductions over rows, with the outputs `after` that are made from them
    parts     programs that share the rows
    keeps     whether a row that several loops read should stay in the L2 from one to the next
    runs      lengths of runs of columns that share an element of some input
    """

    kind: str
    kernel: Kernel
    rows: Axis
    cols: Axis
    walk: Walk
    writes: tuple[Write, ...]
    partials: tuple[Partial, ...]
    after: tuple[Write, ...]
    config: Config
    parts: int
    keeps: bool
    runs: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether a tile spans all columns."""
        return self.config.block_cols >= self.cols.size

    @property
    def persistent(self) -> bool:
        """Whether programs go over rows, though nothing is summed, to load the next while one is at work."""
        return self.kind == "rows" and self.config.num_stages > 1


@dataclass(frozen=True, eq=False)
class Layout:
    """The points of the anchor's operand as rows x cols, each group of axes in memory order.

    index     of the operand's element
    kept      row-major position among the kept axes
    reduced   row-major position among the reduced axes
    vector    neighbours in memory that lie together and start at a multiple of as many, at most 8
    """

    kind: str
    rows: Axis
    cols: Axis
    shape: tuple[int, ...]
    index: Indices
    kept: Index
    reduced: Index
    along_cols: bool
    vector: int

    @property
    def points(self) -> int:
        return self.rows.size * self.cols.size

    def default(self, node: Node) -> Indices | None:
        """An index for a value of one element a point, or a row, by row-major position; None for others."""
        if node.tensor.numel == self.points:
            return unravel(linear(self.index, self.shape), node.shape)
        if self.kind == "rows" and node.tensor.numel == self.rows.size:
            return unravel(self.kept, node.shape)
        return None

    def descend(self, node: Node, index: Indices) -> Indices | None:
        """Where a reduction over `cols` reads its operand; None where it is no such reduction."""
        dims = node.attr("dims")
        sizes = [node.inputs[0].shape[d] for d in dims]
        extent = math.prod(sizes)
        if extent == 1:
            return index
        axes = index_axes(index)
        if self.kind != "rows" or extent != self.cols.size or not axes <= {self.rows}:
            return None
        digits = dict(zip(dims, unravel(self.reduced, sizes)))
        return tuple(digits.get(i, where) for i, where in enumerate(index))


def choose_nest(kernel: Kernel, target: Target, config: Config | None) -> tuple[Nest | None, list[int], Node]:
    """The nest that computes some outputs of a body with reductions, the outputs it leaves, the anchor.

    No nest: the anchor must be in memory before anything else can be computed.
    """
    reductions = [n for n in kernel.body.nodes if n.op.kind is Kind.REDUCTION]
    inner = [r for r in reductions if _feeds_more(r, kernel.body.nodes)]
    anchor = (inner or reductions)[0]
    layout = _layout(anchor, "rows", kernel)
    shape = Shape(layout.rows.size, layout.cols.size, (), layout.along_cols)
    fits = keeps_rows(shape, bool(inner), target)
    if inner and not fits:
        return None, list(range(len(kernel.outputs))), anchor
    if not inner and not (fits and layout.along_cols):
        layout = _layout(anchor, "columns", kernel)
    nest, left = _classify(kernel, layout, anchor, target, config)
    return nest, left, anchor


def holds_rows(reduction: Node, kernel: Kernel, target: Target, config: Config | None) -> bool:
    """Whether a nest around this reduction would have a program hold whole rows of it."""
    layout = _layout(reduction, "rows", kernel)
    reads, cols = _read_at_points(kernel.body.inputs, kernel, layout), layout.cols.size
    shared = sum(node.tensor.numel == cols for node in kernel.body.inputs)
    shape = Shape(layout.rows.size, cols, reads, layout.along_cols, sum(reads) / 4 + shared)
    settings = _settings(layout, shape, False, target, config)
    return keeps_rows(shape, True, target) and settings.block_cols >= layout.cols.size


def _read_at_points(nodes: Collection[Node], kernel: Kernel, layout: Layout) -> tuple[int, ...]:
    """Bytes of an element of each input that has about one a point."""
    found = inputs_of_points(kernel, layout.points)
    return tuple(node.dtype.itemsize for node in found if node in nodes)


def inputs_of_points(kernel: Kernel, points: int) -> list[Node]:
    """The inputs that have about one element a point; what a view repeats counts once."""
    pairs = zip(kernel.body.inputs, kernel.inputs)
    return [node for node, buffer in pairs if 2 * buffer.distinct_bytes > points * node.dtype.itemsize]


def _reads_again(kernel: Kernel, left: Sequence[int], layout: Layout) -> bool:
    """Whether the outputs that another nest computes read what has about one element a point."""
    below = topological(tuple(kernel.body.outputs[i] for i in left))
    return any(node in below for node in inputs_of_points(kernel, layout.points))


def _runs(walk: Walk, kernel: Kernel, layout: Layout) -> tuple[int, ...]:
    """Lengths of the runs of columns that share an element of some input, as of a GroupNorm's weight."""
    buffers = dict(zip(kernel.body.inputs, kernel.inputs))
    found = (run_length(offset(index, buffers[node].strides), layout.cols) for node, index in walk.loads)
    return tuple(sorted({n for n in found if n > 1}))


def _feeds_more(reduction: Node, nodes: Sequence[Node]) -> bool:
    """Whether something larger than the reduction is computed from it."""
    reached = {reduction}
    for node in nodes:
        if any(i in reached for i in node.inputs):
            reached.add(node)
    return any(n.tensor.numel > reduction.tensor.numel for n in reached)


def _layout(anchor: Node, kind: str, kernel: Kernel) -> Layout:
    shape, dims = anchor.inputs[0].shape, anchor.attr("dims")
    factors = memory_factors(anchor.inputs[0], kernel)
    groups = [i for i in range(len(shape)) if i not in dims], list(dims)
    sizes = [math.prod(shape[i] for i in group) for group in groups]
    names = ("row", "cols") if kind == "rows" else ("cols", "row")
    axes = [Axis(name, size) for name, size in zip(names, sizes)]
    digits: dict[tuple[int, int], Index] = {}
    far = _distances(factors)
    for group, axis in zip(groups, axes):
        places = [(i, k) for i in group for k in range(len(factors[i]))]
        places.sort(key=lambda place: (-far[place], place))
        digits |= zip(places, unravel(Index.of(axis), [factors[i][k][0] for i, k in places]))
    index = tuple(
        linear([digits[i, k] for k in range(len(axis_factors))], [n for n, _ in axis_factors])
        for i, axis_factors in enumerate(factors)
    )
    kept, reduced = (linear([index[i] for i in g], [shape[i] for i in g]) for g in groups)
    steps = [[s for i in g for n, s in factors[i] if n > 1 and s] for g in groups]
    nearest = [min(group, default=2**62) for group in steps]
    rows, cols = axes if kind == "rows" else axes[::-1]
    along_reduced = nearest[1] <= nearest[0]

    def together(group: int) -> int:
        """Neighbours in memory along these axes, before a step along the others."""
        return math.prod(n for i in groups[group] for n, s in factors[i] if 0 < s < nearest[1 - group])

    if along_reduced and kind == "rows":
        run = together(1)
        along_reduced = run * anchor.inputs[0].dtype.itemsize >= SECTOR_BYTES or run == sizes[1]
    along_cols = along_reduced == (kind == "rows")
    run = together(int(along_reduced))
    vector = math.gcd(8, run, *(s for group in steps for s in group if s >= run))
    return Layout(kind, rows, cols, shape, index, kept, reduced, along_cols, vector)


def _distances(factors: Sequence[Sequence[tuple[int, int]]]) -> dict[tuple[int, int], int]:
    """The stride of each factor of each axis. One of stride 0 stays beside its right neighbour: as the axis
    along which a `cat` has one element of each operand.
    """
    far: dict[tuple[int, int], int] = {}
    right = 1
    for i, axis in reversed([*enumerate(factors)]):
        for k, (size, stride) in reversed([*enumerate(axis)]):
            far[i, k] = stride or right
            right = size * far[i, k]
    return far


def memory_factors(node: Node, kernel: Kernel) -> list[list[tuple[int, int]]]:
    """Each axis of `node` as factors (size, stride), as the largest input below it lies in memory.

    An axis that a reshape merged from several has a factor for each of those.
    """
    axes = [Axis(f"axis{i}", n) for i, n in enumerate(node.shape)]
    walk = Walk(lambda reduction, index: None)
    walk.visit(node, tuple(map(Index.of, axes)))
    buffers = dict(zip(kernel.body.inputs, kernel.inputs))
    loads = sorted(walk.loads, key=lambda load: -load[0].tensor.numel)
    if not loads:
        return [[(n, math.prod(node.shape[i + 1 :]))] for i, n in enumerate(node.shape)]
    where = offset(loads[0][1], buffers[loads[0][0]].strides)
    factors = []
    for axis in axes:
        cuts = [1, axis.size]
        for atom, _ in where.terms:
            if isinstance(atom, Digit) and atom.of.axes == {axis} and atom.of == Index.of(axis):
                cuts += [atom.div, *([atom.div * atom.mod] if atom.mod else [])]
        cuts = sorted({c for c in cuts if c <= axis.size})
        if any(b % a for a, b in itertools.pairwise(cuts)):
            cuts = [1, axis.size]
        pairs = [(b // a, abs(where.at({axis: a}) - where.const)) for a, b in itertools.pairwise(cuts)]
        factors.append(pairs[::-1] if axis.size > 1 else [(1, 0)])
    return factors


def _classify(
    kernel: Kernel, layout: Layout, anchor: Node, target: Target, config: Config | None
) -> tuple[Nest | None, list[int]]:
    """What of the kernel's outputs the layout can compute, as a nest, and the outputs that are left."""
    walk = Walk(layout.descend)
    walk.fits(anchor.inputs[0], layout.index)
    sums, others, left = [], [], []
    outputs = list(zip(kernel.body.output_names, kernel.body.outputs, kernel.outputs))
    for i, (name, node, buffer) in enumerate(outputs):
        root, movements = peel(node)
        if (found := _partials(root, layout, walk)) is not None:
            write = Write(name, buffer, root, (), ())
            sums.append((i, write, found))
        elif (index := _index_for(root, layout, walk)) is not None and walk.fits(root, index):
            others.append(Write(name, buffer, root, index, unpeel(index, movements)))
        else:
            left.append(i)
    reads = _read_at_points({node for node, _ in walk.loads}, kernel, layout)
    # A row that all rows share is held widened, beside the sums.
    shared = sum(index_axes(index) == {layout.cols} for _, index in walk.loads)
    held = shared + len({p.node for _, _, found in sums for p in found if not p.total})
    peaks = any(n.op.name == "amax" for n in kernel.body.nodes)
    slow = sum(n.op.name in SLOW and n.tensor.numel == layout.points for n in kernel.body.nodes)
    words = sum(reads) / 4 + held
    passes = bool(walk.reductions) + any(w.node.tensor.numel == layout.points for w in others)
    size = layout.rows.size, layout.cols.size
    runs = _runs(walk, kernel, layout)
    shape = Shape(*size, reads, layout.along_cols, words, passes, peaks, slow, runs, layout.vector)
    settings = _settings(layout, shape, bool(sums), target, config)
    if layout.kind == "rows" and settings.block_cols < layout.cols.size:
        # A row that is not held whole has no registers for column sums: they get a nest of their own.
        wide = [i for i, _, found in sums if not all(p.total for p in found)]
        sums, left = [s for s in sums if s[0] not in wide], sorted({*left, *wide})
        # `shape` still counts them: the tiles of what is left were measured by that.
        settings = _settings(layout, shape, bool(sums), target, config)
    if not others and not sums:
        return None, left
    tiles_of_rows = -(-layout.rows.size // settings.block_rows)
    shares = bool(sums) or (layout.kind == "rows" and settings.num_stages > 1)
    parts = balanced(tiles_of_rows, min(settings.programs or 4 * target.sms, tiles_of_rows)) if shares else 1
    partials = {p.node: p for _, _, found in sums for p in found}
    loops = layout.kind == "rows" and layout.along_cols and settings.block_cols < layout.cols.size
    keeps = loops and keeps_in_l2(shape, _reads_again(kernel, left, layout), target)
    after = tuple(_after(write, kernel, i, partials) for i, write, _ in sums)
    nest = Nest(
        layout.kind,
        kernel,
        layout.rows,
        layout.cols,
        walk,
        tuple(others),
        tuple(partials.values()),
        after,
        settings,
        max(parts, 1),
        keeps,
        shape.runs,
    )
    return nest, left


def _settings(layout: Layout, shape: Shape, sums: bool, target: Target, config: Config | None) -> Config:
    """The heuristics' choice, with the caller's overrides, in tiles no larger than the layout."""
    chosen = rows_config(shape, sums, target) if layout.kind == "rows" else columns_config(shape, target)
    chosen = chosen.override(config)
    rows, cols = min(chosen.block_rows, pow2(shape.rows)), min(chosen.block_cols, pow2(shape.cols))
    return replace(chosen, block_rows=rows, block_cols=cols)


def _index_for(root: Node, layout: Layout, walk: Walk) -> Indices | None:
    """The index at which an output's value is computed: as it meets values that the nest has anyway."""
    if (default := layout.default(root)) is None:
        return None
    index = align(root, walk.known) or default
    axes = index_axes(index)
    if root.tensor.numel != layout.points and not axes <= {layout.rows}:
        return None
    return index


def _partials(root: Node, layout: Layout, walk: Walk) -> list[Partial] | None:
    """The sums over rows from which `root` is made, if it is made from such alone."""
    if layout.rows.size == 1:
        return None
    found: list[Partial] = []
    seen: set[Node] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op.kind is not Kind.REDUCTION:
            pending.extend(node.inputs)
            continue
        # a reduction of sums over rows, in what follows them
        halved = twice(node)
        if (partial := _partial(halved or node, layout, walk)) is None:
            return None
        found.append(partial)
    return found or None


def twice(node: Node) -> Node | None:
    """For a reduction of a reduction of the same kind: the first."""
    again = node.op.kind is Kind.REDUCTION and node.inputs[0].op is node.op
    return node.inputs[0] if again else None


def _partial(node: Node, layout: Layout, walk: Walk) -> Partial | None:
    operand = node.inputs[0]
    index = _index_for(operand, layout, walk)
    if index is None:
        return None
    dims = node.attr("dims")
    result = tuple(Index(()) if i in dims else where for i, where in enumerate(index))
    axes = index_axes(result)
    kept = node.tensor.numel
    whole_columns = operand.tensor.numel == layout.points and kept == layout.cols.size
    if not axes <= {layout.cols} or not (kept == 1 or whole_columns):
        return None
    if kept == 1 and layout.kind == "columns" and layout.cols.size > 1:
        return None
    return Partial(node, index, result) if walk.fits(operand, index) else None


def _after(write: Write, kernel: Kernel, position: int, partials: dict[Node, Partial]) -> Write:
    """An output made of sums over rows, at the index that follows from theirs; with no index if none does."""
    given = {node: p.index for node, p in partials.items()}
    root, movements = peel(kernel.body.outputs[position])
    index = align(root, given)
    if index is None or not Walk(lambda node, where: None, given).fits(root, index):
        return write
    return Write(write.name, write.buffer, root, index, unpeel(index, movements))
