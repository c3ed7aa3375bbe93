"""Other tiles for a kernel, to be timed: a step from the heuristics' choice, or drawn from all around it.

They are for the kernel's first nest, which moves most of its bytes. Two that make one text are one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from egcompile.codegen.division import generate
from egcompile.codegen.heuristics import Config
from egcompile.codegen.source import KernelSource
from egcompile.schedule.kernel import Kernel
from egcompile.target import Target

MOST = 12
"""Sources that `neighbours` gives, the heuristics' among them."""

MOST_WARPS = 32
MOST_WORDS = 128
"""32-bit words of its inputs that a thread may hold: of 255 registers, some are for what is made of them."""

STEPS = (("num_warps",), ("block_rows",), ("block_cols",), ("programs",))
TOGETHER = (("block_rows", "num_warps"), ("block_cols", "num_warps"), ("num_stages", "programs"))
"""What is doubled, or halved, alone and together."""

STAGES = range(1, 5)


def neighbours(kernel: Kernel, target: Target) -> tuple[KernelSource, ...]:
    """The heuristics' source of `kernel`, then those one step away, `MOST` at most.

    The heuristics' is alone where the kernel takes no `Config`.
    """
    first = generate(kernel, target)
    if first.config is None:
        return (first,)
    found = _distinct(kernel, target, first, _one_step(_shared(first.config, target)))
    return tuple(itertools.islice(found, MOST))


def surroundings(kernel: Kernel, target: Target, count: int, seed: int) -> tuple[KernelSource, ...]:
    """The heuristics' source, then as many as make `count`, drawn from up to two steps along every axis."""
    first = generate(kernel, target)
    if first.config is None:
        return (first,)
    around = list(_all_around(_shared(first.config, target)))
    random.Random(seed).shuffle(around)
    return tuple(itertools.islice(_distinct(kernel, target, first, around), count))


def _shared(config: Config, target: Target) -> Config:
    """`config`, with the programs that share rows, should another number of stages make them shared."""
    return replace(config, programs=config.programs or 2 * target.sms)


def _one_step(config: Config) -> Iterator[Config]:
    yield from (step for names in STEPS for step in _doubled_and_halved(config, names))
    yield from (replace(config, num_stages=n) for n in STAGES)
    yield from (step for names in TOGETHER for step in _doubled_and_halved(config, names))


def _doubled_and_halved(config: Config, names: Sequence[str]) -> Iterator[Config]:
    yield replace(config, **{name: getattr(config, name) * 2 for name in names})
    yield replace(config, **{name: max(1, getattr(config, name) // 2) for name in names})


def _all_around(config: Config) -> Iterator[Config]:
    def steps(value: int) -> list[int]:
        return sorted({max(1, value // 4), max(1, value // 2), value, 2 * value, 4 * value})

    sizes = (config.block_rows, config.block_cols, config.num_warps, config.programs)
    for rows, cols, warps, programs in itertools.product(*map(steps, sizes)):
        yield from (Config(rows, cols, warps, n, programs) for n in STAGES)


def _distinct(
    kernel: Kernel, target: Target, first: KernelSource, configs: Iterable[Config]
) -> Iterator[KernelSource]:
    """`first`, and the sources by other configs that can run, each once."""
    seen = {first.text}
    yield first
    nbytes = point_bytes(kernel)
    for config in configs:
        if not fits(config, nbytes, target):
            continue
        source = generate(kernel, target, config)
        if source.text not in seen:
            seen.add(source.text)
            yield source


def point_bytes(kernel: Kernel) -> int:
    """What a nest reads at each of its points: an element of each input that is about as large as any."""
    largest = max((b.type.numel for b in (*kernel.inputs, *kernel.outputs)), default=0)
    return sum(b.type.dtype.itemsize for b in kernel.inputs if 2 * b.type.numel > largest)


def fits(config: Config, nbytes: int, target: Target) -> bool:
    """Whether the tiles that `config` asks for fit registers and shared memory, at `nbytes` a point.

    Lanes of a program without a point of their own would be wasted.
    """
    points, lanes = config.block_rows * config.block_cols, 32 * config.num_warps
    if config.num_warps > MOST_WARPS or config.num_stages not in STAGES or lanes > points:
        return False
    held = points * max(nbytes, 4)
    in_flight = points * nbytes * config.num_stages if config.num_stages > 1 else 0
    return held <= 4 * MOST_WORDS * lanes and in_flight <= target.shared_memory
