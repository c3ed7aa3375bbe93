"""Tile sizes of generated loops. Plain rules, from what keeps about 16 to 64 bytes a thread in flight.

Every number here can be overridden: `generate(kernel, target, config=Config(num_warps=16))`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from egcompile.target import Target

WHOLE_ROW = 32768
"""The widest row that a program holds in registers; half or a quarter of it with sums over rows beside."""

MOST_PARTS = 8
"""Programs an SM that share the rows of one column: another kernel adds up what each has."""

AHEAD = 4
"""Bytes of the narrowest load that can be on its way into shared memory while a loop is at work."""

RUN_TILE = 4096
"""Columns of a tile that lies within a run of columns which share an element of some input."""

BACKWARDS = 10_000_000
"""Bytes from which a kernel goes through memory from its end, where what the one before left is in the L2."""


@dataclass(frozen=True)
class Config:
    """How a loop nest is tiled. 0 leaves a choice to the heuristics.

    block_rows    rows of a tile (pointwise: of a two-dimensional tile)
    block_cols    columns of a tile; for row nests a row is held whole if it fits, else looped over
    num_warps     warps a program
    num_stages    loads that loops over tiles keep in flight; 1 leaves loops to the compiler
    programs      programs that share the rows where they are summed over
    """

    block_rows: int = 0
    block_cols: int = 0
    num_warps: int = 0
    num_stages: int = 0
    programs: int = 0

    def override(self, other: Config | None) -> Config:
        """`self`, with what `other` sets."""
        if other is None:
            return self
        return replace(self, **{f.name: v for f in fields(self) if (v := getattr(other, f.name))})


@dataclass(frozen=True)
class Shape:
    """What a choice depends on.

    reads         of each tensor that is read at every point, the bytes of an element
    words         32-bit registers that a point takes: what is read, and sums over rows
    along_cols    whether memory is contiguous along the columns, else along the rows
    passes        over a row that is not held whole
    peaks         whether a row's largest element is sought, to which its exponentials are relative
    slow          exponentials and the like at a point
    runs          lengths of runs of columns that share an element of some input, as of a GroupNorm's weight
    vector        neighbours in memory that one load may take, at most 8
    """

    rows: int
    cols: int
    reads: tuple[int, ...]
    along_cols: bool
    words: float = 0.0
    passes: int = 2
    peaks: bool = False
    slow: int = 0
    runs: tuple[int, ...] = ()
    vector: int = 8

    @property
    def row_bytes(self) -> int:
        """What is read of a row."""
        return self.cols * sum(self.reads)

    @property
    def load_bytes(self) -> int:
        """What one load of a thread takes, of the narrowest tensor, at most."""
        return self.vector * min(self.reads, default=4)


def pow2(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def flat_config(length: int, numel: int, reads: int, target: Target, shared: Collection[int] = ()) -> Config:
    """Pointwise work on `numel` points in runs of `length`, 16 a thread; fewer where that leaves SMs idle.

    Where it `reads` several tensors of as many points, a program is one warp; of a run of up to 1024 it takes
    all, with four. Beside no more than one tensor, loads of what short runs share keep twice the warps busy.

    shared   how many neighbours share an element of each input
    """
    if reads > 1 and 512 < length <= 1024 and numel >= 2**11 * target.sms:
        return Config(1, 1024, 4, 1)
    block = 512 if reads > 1 else 2048
    while block > 128 and -(-numel // block) < 2 * target.sms:
        block //= 2
    warps = max(1, min(4, block // 512))
    if reads < 2 and any(2 <= run < 512 and run % 8 for run in shared):
        warps *= 2
    return Config(1, min(block, pow2(length)), warps, 1)


def fold(runs: Collection[int], block: int) -> int:
    """Length of the runs into which a tile of `block` neighbours is folded; 0 where it is not.

    `runs` are how many neighbours share an element of each input. What all of a folded run share is read and
    computed once a run, not at each point; a fold of fewer than four would gain less than it costs.
    """
    shared = [run for run in runs if run and math.gcd(run, block) >= 4]
    return math.gcd(block, *shared) if shared else 0


def is_tiled(rows: int, cols: int) -> bool:
    """Whether pointwise work goes in tiles of rows and columns that fill them, where columns repeat.

    Of shorter rows, what repeats is in the L1 when a program needs it again.
    """
    return cols % 32 == 0 and cols >= 512 and rows >= 16


def repeating_config(rows: int, cols: int, reads: int, target: Target) -> Config:
    """Pointwise work in which something is the same in each row, which is read for many rows at once.

    The tile is twice the flat one of a single tensor, however many it `reads`; of several it has more warps.
    """
    flat = flat_config(rows * cols, rows * cols, 1, target)
    run = math.gcd(cols, 128)
    warps = flat.num_warps * (2 if reads > 1 else 1)
    return Config(max(1, min(2 * flat.block_cols // run, pow2(rows))), run, warps, 1)


def transposing_config(rows: int, cols: int) -> Config:
    """Pointwise work that reads along the rows and writes along the columns: through shared memory."""
    return Config(min(64, pow2(rows)), min(32, pow2(cols)), 4, 1)


def stages(tile_bytes: float, programs: float, most: int, target: Target) -> int:
    """How many tiles of a loop to have in flight: what the programs of an SM can hold on chip together."""
    room = (target.shared_memory - 2**14) / (max(1.0, tile_bytes) * max(1.0, programs))
    return min(most, int(room)) if room >= 2 else 1


def keeps_rows(shape: Shape, read_again: bool, target: Target) -> bool:
    """Whether programs should own rows whole: where there are enough of them to fill the GPU, or little work.

    read_again   whether the rows are read after their reduction, and so would be found on chip
    """
    if shape.rows * shape.cols <= (2**16 if read_again else 2**13):
        return True
    programs = shape.rows if shape.along_cols else shape.rows // 32
    if not read_again:
        return programs >= 4 * target.sms
    return programs >= target.sms // 2 and (shape.along_cols or shape.cols <= 8192)


def keeps_in_l2(shape: Shape, read_again: bool, target: Target) -> bool:
    """Whether loops over a row ask the L2 to keep it till the last of them.

    That evicts what a later nest, if it reads the same rows again, would find there: then only rows ask of
    which the L2 could not hold many more than one for each SM.
    """
    return not read_again or 5 * target.sms * shape.row_bytes > 3 * target.l2


def rows_config(shape: Shape, sums: bool, target: Target) -> Config:
    """Tiles of a row nest; `sums` where sums over rows are accumulated beside it."""
    width = pow2(shape.cols)
    if not shape.along_cols:
        rows = min(32, pow2(shape.rows))
        cols = width if width * rows <= 8192 else 8192 // rows
        return Config(rows, cols, 4 if rows * cols <= 4096 else 8, 1, 4 * target.sms)
    if sums and width <= WHOLE_ROW // 4:
        return _summed_rows_config(shape, width, target)
    if sums and width == WHOLE_ROW // 2 and shape.words < 4:
        return Config(1, width, 16, 1, 2 * target.sms)  # as RMSNorm's: of two sums, they would spill
    if sums:  # of rows in tiles, only sums over all points: `_classify` gives others a nest of their own
        return Config(1, _loop_tile(shape), 32, 1) if width > WHOLE_ROW else Config(1, 8192, 16, 1)
    if width >= WHOLE_ROW:
        return _long_rows_config(shape, width, target)
    if width == WHOLE_ROW // 2 and shape.words >= 3 and not _is_light(shape):
        return Config(1, 4096, 16, 1)
    if width <= 1024 and shape.cols < width and shape.rows * width >= 2**14 * target.sms:
        warps = 1 if shape.words <= 3 and max(shape.reads, default=4) <= 4 else 2  # or they would spill
        # lanes beyond the row idle: fewer of them, with more each
        return Config(1024 // width, width, warps, 1)
    rows = 1
    while rows * width < 2048 and shape.rows // (2 * rows) >= 4 * target.sms:
        rows *= 2
    warps = rows * width // (1024 if width > 1024 else 512)
    light = shape.words <= 0.5 or (shape.words <= 1 and (shape.passes == 1 or width > 8192))
    if width > 1024 and 5 * shape.cols <= 4 * width and light:
        warps //= 2
    return Config(rows, width, max(1, min(16, warps)), 1)


def _is_light(shape: Shape) -> bool:
    """Whether little is held but two tensors of 16 bits: as in a norm of a sum, or softmax's backward."""
    return shape.reads == (2, 2) and shape.words <= 3 and shape.passes > 1


def _long_rows_config(shape: Shape, width: int, target: Target) -> Config:
    """Rows of 16385 elements or more: held in registers where that is faster than a loop that reads again."""
    if shape.passes == 1:
        return Config(1, 4096, 4 if shape.peaks else 8, 1)
    if width == WHOLE_ROW and shape.peaks:
        return Config(1, width, 32, stages(shape.row_bytes, 1, 3, target), target.sms)
    if width == WHOLE_ROW and _is_light(shape):
        return Config(1, width, 16, 1)
    ragged = shape.cols % _loop_tile(shape) != 0
    if (width == WHOLE_ROW and shape.runs) or (ragged and any(run % RUN_TILE == 0 for run in shape.runs)):
        return Config(1, RUN_TILE, 16, 1)
    if width == WHOLE_ROW:
        return Config(1, 8192, 32, 1)
    if shape.peaks and 5 * target.sms * shape.row_bytes <= 2 * target.l2:
        return Config(1, 8192, 16, 1)  # two programs an SM, whose rows the L2 holds
    if _is_light(shape) and shape.words < 2 and shape.cols % WHOLE_ROW == 0:
        return Config(1, WHOLE_ROW, 32, 1)  # without weights, as softmax's backward
    return Config(1, _loop_tile(shape), 32, 1)


def _loop_tile(shape: Shape) -> int:
    """Columns of a tile of 32 warps, which leave a thread 64 registers."""
    return 16384 if shape.words < 4 else 8192


def _summed_rows_config(shape: Shape, width: int, target: Target) -> Config:
    """Rows held whole, with sums over them: few programs that load the next rows while they are at work.

    As many programs as run at once: one more would be a second wave.
    """
    most = 3
    if width > 4096 and shape.cols < width:
        points, warps, resident, most = width, 8 if 4 * shape.cols < 3 * width else 16, 1, 4
    elif width > 4096:
        points, warps, resident = width, 16, 1
    elif width > 1024:
        points, warps, resident = 4096, 8 if width > 2048 else 4, 2
    elif width > 512:
        points, warps, resident = 2048, 4, 4
    elif width > 64:
        waits = shape.load_bytes < AHEAD  # in registers
        points, warps, resident = 1024 if width <= 128 or waits else 2048, 1, 8
        if stages(points * sum(shape.reads), resident, most, target) < most:
            points, resident = 2048, 4
        if stages(points * sum(shape.reads), resident, most, target) < most:
            points = 1024
    else:
        points, warps, resident = 4096, 8, 2
    rows = min(max(1, points // width), pow2(shape.rows))
    while rows > 1 and shape.rows // rows < resident * target.sms:
        rows //= 2
    in_flight = stages(rows * width * sum(shape.reads), resident, most, target)
    if in_flight == 1:
        warps = max(1, min(16, rows * width // 512))
        registers = 24 + shape.words * rows * width / (32 * warps)
        resident = max(1, min(8, int(65536 / (32 * warps * min(registers, 255)))))
    return Config(rows, width, warps, in_flight, resident * target.sms)


def columns_config(shape: Shape, target: Target) -> Config:
    """Tiles of sums over rows, wide along memory; programs share the rows to fill the GPU.

    Few rows, as in a finalize, are one program's for each piece of the columns, and few points one program's.
    """
    if shape.along_cols and shape.rows <= 2048 and shape.rows * shape.cols <= 2**21 and shape.cols < 2**16:
        cols = min(256, max(8, pow2(shape.cols // target.sms)), pow2(shape.cols))
        rows = min(4096 // cols, pow2(shape.rows))
        return Config(rows, cols, max(1, min(8, rows * cols // 256)), 1, 1)
    if shape.rows * shape.cols <= 2**15:
        return Config(min(8192, pow2(shape.rows)), 1, 16, 1, 1)
    if shape.along_cols and shape.cols >= 2**16 and shape.rows < 64:
        return Config(1, 512, 4, 1, 1)
    tile = _tile_of_sums(shape)
    if not shape.along_cols and shape.load_bytes < AHEAD:
        lane = 32 if _summed_words(shape) < 8 else 16  # which all wait in registers
        tile = tile._replace(points=256 * lane, lane=lane, stages=1)
    elif not shape.along_cols and shape.load_bytes < 16:
        tile = tile._replace(points=tile.points // 2, lane=8)
    if shape.along_cols:
        cols = min(tile.run, pow2(shape.cols))
        rows = min(tile.points // cols, pow2(shape.rows))
    else:
        rows = min(tile.points, pow2(shape.rows))
        cols = min(max(1, tile.points // rows), pow2(shape.cols))
    across = -(-shape.cols // cols)
    parts = min(tile.resident * target.sms // across, MOST_PARTS * target.sms, -(-shape.rows // (4 * rows)))
    warps = max(1, min(8, rows * cols // (32 * tile.lane)))
    if parts == 2 and shape.along_cols and cols >= 256:
        rows, cols, parts = 2 * rows, cols // 2, 1  # as many programs, and no other kernel to add up theirs
    elif parts == 2 and not shape.along_cols and tile.stages > 1 and across >= target.sms:
        rows, parts = 2 * rows, 1  # half as many, with as much in flight
    in_flight = stages(rows * cols * sum(shape.reads), tile.resident, tile.stages, target)
    return Config(rows, cols, warps, in_flight, max(1, parts))


def _summed_words(shape: Shape) -> float:
    """Registers of a point of sums over rows: what is read, widened to 32 bits, and each sum, as wide."""
    held = shape.words - sum(shape.reads) / 4
    return (len(shape.reads) + held) * max(4, *shape.reads, 0) / 4


class _Sums(NamedTuple):
    """A tile of sums over rows.

    points     of a tile
    run        of columns side by side, at most
    lane       points of one
    stages     tiles in flight
    resident   programs an SM
    """

    points: int
    run: int
    lane: int
    stages: int
    resident: int


def _tile_of_sums(shape: Shape) -> _Sums:
    """As many programs as run at once, or so many that the last round does not matter.

    Of a few, one more than fits is a second wave. What only waits for memory does with few warps that have
    much in flight.
    """
    if shape.slow > 1:
        return _Sums(256, 64, 8, 1, 64)
    if shape.slow:
        return _Sums(4096, 256, 16, 3, 4)
    if len(shape.reads) > 1 and max(shape.reads) <= 2:  # of 32 bits, so many points would not fit a lane
        return _Sums(2048, 256, 32, 4, 2)
    return _Sums(2048, 256, 16, 4, 4)


def balanced(tiles: int, programs: int) -> int:
    """The fewest programs that finish `tiles` in as many rounds as `programs` do."""
    rounds = -(-tiles // programs)
    return -(-tiles // rounds)
