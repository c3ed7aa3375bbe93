"""Tiles of a contraction's kernel, chosen from static tables.

From measurements on an H200 (bf16): descriptor tiles of 128x256x64 with 8 warps and 3 or 4 stages match
cuBLAS from 4096x1024x1024 up; pointer tiles of 256x128x64 are the best of their kind, 20 to 25% behind.
Compiled for sm_80, 90 and 100 (Triton 3.6 and 3.9), the tables' tiles spill no register with one saved tile
and GELU's derivative in the epilogue: an accumulator of 128x256 leaves room for pieces of 64 columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from egcompile.target import Target


@dataclass(frozen=True)
class GemmConfig:
    """How a contraction's kernel is tiled.

    descriptors      the main loop reads tiles through tensor descriptors, in a persistent grid
    tile_descriptors the epilogue reads and writes tiles through tensor descriptors too
    subtiles         column pieces (a power of two) in which the epilogue goes over a tile
    group_m          row tiles that are taken together, column by column, to stay in the L2
    flatten          one software pipeline over all tiles of a program (descriptors only)
    per_sm           programs of the persistent grid for each multiprocessor: with two, the epilogue of one
                     overlaps the products of the other, if both fit
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
    per_sm: int = 1


@dataclass(frozen=True)
class Problem:
    """What a choice depends on.

    loads, stores   bytes of an element of each result-sized tile that the epilogue reads or writes
    descriptors     whether both operands can be read through tensor descriptors
    """

    m: int
    n: int
    k: int
    itemsize: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]
    descriptors: bool


DESCRIPTOR_FLOPS = 4e9
"""Below this a launch takes longer to prepare its descriptors than they save: about 8 us of work."""


def choose_config(problem: Problem, target: Target) -> GemmConfig:
    """The tile for a contraction: the least estimated time among those that fit on chip."""
    p = problem
    table: Sequence[GemmConfig]
    if p.itemsize != 2:
        table = _FP32_TILES if p.itemsize == 4 else _FP64_TILES
    elif p.m <= 32:
        return _SKINNY_TILE
    elif p.descriptors and target.has_descriptors and 2.0 * p.m * p.n * p.k >= DESCRIPTOR_FLOPS:
        table = [fitted(config, p, target) for config in _DESCRIPTOR_TILES]
    else:
        table = _POINTER_TILES_90 if target.arch >= 90 else _POINTER_TILES_80
    return min(table, key=lambda config: _time(config, p, target))


_DESCRIPTOR_TILES = [
    GemmConfig(128, 256, 64, 8, 4, 2, descriptors=True, tile_descriptors=True),
    GemmConfig(128, 128, 64, 8, 4, 2, descriptors=True, tile_descriptors=True),
    GemmConfig(64, 128, 64, 4, 4, 2, descriptors=True, tile_descriptors=True),
    GemmConfig(64, 64, 64, 4, 4, 1, descriptors=True, tile_descriptors=True),
]
_SKINNY_TILE = GemmConfig(16, 64, 128, 4, 3)
_POINTER_TILES_90 = [
    GemmConfig(256, 128, 64, 8, 3, 4),
    GemmConfig(128, 128, 64, 8, 3, 2),
    GemmConfig(128, 64, 64, 4, 3, 2),
    GemmConfig(64, 64, 64, 4, 4),
]
_POINTER_TILES_80 = [
    GemmConfig(128, 256, 32, 8, 4, 4),
    GemmConfig(128, 128, 32, 8, 4, 2),
    GemmConfig(128, 64, 64, 4, 3, 2),
    GemmConfig(64, 64, 64, 4, 4),
]
_FP32_TILES = [GemmConfig(64, 64, 32, 4, 3), GemmConfig(32, 32, 32, 4, 3)]
_FP64_TILES = [GemmConfig(32, 32, 16, 4, 2)]


def fitted(config: GemmConfig, problem: Problem, target: Target) -> GemmConfig:
    """A descriptor tile with more column pieces, then fewer stages, until it fits in shared memory.

    Beside its stages a program holds a piece of each dtype that the epilogue reads, and of each that it
    writes. Tiles that are read live in registers too, so they take half as wide pieces to begin with.
    """
    if problem.loads and config.block_n >= 256:
        config = replace(config, subtiles=2 * config.subtiles)
    while _shared_memory(config, problem) > target.shared_memory:
        if config.block_n // config.subtiles > 32:
            config = replace(config, subtiles=2 * config.subtiles)
        elif config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        else:
            break
    return config


def _shared_memory(config: GemmConfig, problem: Problem) -> int:
    stage = (config.block_m + config.block_n) * config.block_k * problem.itemsize
    piece = config.block_m * config.block_n // config.subtiles
    held = sum(set(problem.loads)) + sum(set(problem.stores))
    return config.num_stages * stage + piece * held + 1024


def _time(config: GemmConfig, problem: Problem, target: Target) -> float:
    """Whole waves of tiles, in multiply-adds of one multiprocessor; small tiles are less efficient.

    A tile's loads fall with its sides, so its time is `1 + c (1/rows + 1/columns)` of the products alone;
    c = 48 puts 128x128 tiles 12% behind 128x256.
    """
    rows, cols = config.block_m, config.block_n
    tiles = math.ceil(problem.m / rows) * math.ceil(problem.n / cols)
    return math.ceil(tiles / target.sms) * rows * cols * (1 + 48 * (1 / rows + 1 / cols))
