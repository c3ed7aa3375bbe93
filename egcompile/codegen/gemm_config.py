"""Tiles of a contraction's kernel, chosen from static tables.

The sizes come from measurements on an H200 (bf16): descriptor tiles of 128x256x64 with 8 warps and 3 or 4
stages match cuBLAS from 4096x1024x1024 up; pointer tiles of 256x128x64 are the best of their kind, 20 to
25% behind. A tile's epilogue holds every extra operand and output beside the accumulator, so a wide tile
is taken in column pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from egcompile.target import Target


@dataclass(frozen=True)
class GemmConfig:
    """How a contraction's kernel is tiled.

    descriptors      the main loop reads tiles through tensor descriptors, in a persistent grid
    tile_descriptors the epilogue reads and writes tiles through tensor descriptors too
    subtiles         column pieces (a power of two) in which the epilogue goes over a tile
    group_m          row tiles that are taken together, column by column, to stay in the L2
    flatten          one software pipeline over all tiles of a program (descriptors only)
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    subtiles: int = 1
    group_m: int = 8
    descriptors: bool = False
    tile_descriptors: bool = False
    flatten: bool = True
    warp_specialize: bool = False


def choose_config(
    m: int, n: int, itemsize: int, target: Target, *, descriptors: bool, tiles_held: int
) -> GemmConfig:
    """The tile for a contraction of these sizes.

    descriptors  whether both operands can be read through tensor descriptors
    tiles_held   result tiles that the epilogue reads or writes, the result itself among them
    """
    candidates = _candidates(itemsize, target, descriptors and m >= 64, tiles_held)
    return min(candidates, key=lambda c: _cost(c, m, n, target.sms))


def _candidates(itemsize: int, target: Target, descriptors: bool, tiles_held: int) -> Sequence[GemmConfig]:
    if itemsize == 8:
        return [GemmConfig(32, 32, 16, 4, 2)]
    if itemsize == 4:
        return [GemmConfig(64, 64, 32, 4, 3), GemmConfig(32, 32, 32, 4, 3), GemmConfig(16, 32, 64, 4, 3)]
    small = [GemmConfig(64, 64, 64, 4, 4), GemmConfig(16, 64, 128, 4, 3)]
    if not descriptors:
        wide = GemmConfig(256, 128, 64, 8, 3, subtiles=2)
        if target.arch < 90:
            wide = GemmConfig(128, 256, 32, 8, 3, subtiles=2)
        return [wide, GemmConfig(128, 128, 64, 8, 3), GemmConfig(128, 64, 64, 4, 3), *small]
    stages = 3 if tiles_held > 1 else 4
    return [
        GemmConfig(128, 256, 64, 8, stages, 2, descriptors=True, tile_descriptors=True),
        GemmConfig(128, 128, 64, 8, 4, 1, descriptors=True, tile_descriptors=True),
        GemmConfig(64, 128, 64, 4, 4, 1, descriptors=True, tile_descriptors=True),
        GemmConfig(64, 64, 64, 4, 4, 1, descriptors=True, tile_descriptors=True),
    ]


def _cost(config: GemmConfig, m: int, n: int, sms: int) -> float:
    """Time in units of one multiprocessor's multiply: whole waves of tiles, small ones less efficient.

    An operand element that a tile loads is used once for each row (or column) of the tile, so what a tile
    costs beside its products falls with its harmonic size; 24 was fitted to 128x256 against 128x128 tiles.
    """
    rows, cols = config.block_m, config.block_n
    tiles = math.ceil(m / rows) * math.ceil(n / cols)
    return math.ceil(tiles / sms) * rows * cols * (1 + 24 * (1 / rows + 1 / cols))
