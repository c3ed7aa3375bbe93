"""Source text of a kernel: its jit functions, the launcher, and the helpers they call."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from egcompile.codegen.heuristics import BACKWARDS, Config
from egcompile.codegen.scalar import HELPERS
from egcompile.codegen.text import Block, Line, Loop, Names, Value, print_block
from egcompile.schedule.kernel import Buffer, Kernel


@dataclass(frozen=True)
class KernelSource:
    """Triton source: `text` defines jit functions and the launcher `name(*inputs, *outputs)`.

    It assumes `import torch, triton` and `triton.language as tl`, and if they are used `libdevice` and
    `empty_beside`, the runtime's. `helpers` are those leading functions of the text that other kernels may
    hold too, word for word. `config` has the tiles of the first nest, which `generate` takes; None for a
    contraction, and for several items in one launch.
    """

    name: str
    text: str
    helpers: tuple[str, ...] = ()
    config: Config | None = None


@dataclass(frozen=True)
class JitFunction:
    """One jit function and how the launcher calls it.

    doc         what a program does, as a comment
    tensors     that it may read or write, by name and in order; those that its text names are parameters
    constants   `tl.constexpr` parameters with a value
    grid        programs along each axis
    config      how it is tiled
    program     a first parameter that is the program's number, where another jit function calls this one
    """

    name: str
    doc: str
    tensors: tuple[str, ...]
    constants: dict[str, int]
    grid: tuple[int, ...]
    config: Config
    block: Block
    program: str = ""

    @functools.cached_property
    def body(self) -> list[str]:
        pointers = [f"{t}_ptr" for t in self.tensors]
        return print_block(self.block, Names({*pointers, *self.constants, "tl"} | _bound(self.block)))

    @functools.cached_property
    def parameters(self) -> list[str]:
        words = set(re.findall(r"\w+", "\n".join(self.body)))
        return [t for t in self.tensors if f"{t}_ptr" in words]

    @property
    def programs(self) -> int:
        return math.prod(self.grid)

    def text(self) -> str:
        pointers = [f"{p}_ptr" for p in self.parameters]
        constants = [f"{name}: tl.constexpr" for name in self.constants]
        own = [self.program] if self.program else []
        head = f"@triton.jit\ndef {self.name}({', '.join([*own, *pointers, *constants])}):"
        return "\n".join([head, *(f"    # {line}" for line in self.doc.splitlines()), *self.body])

    def launch(self) -> str:
        grid = f"({', '.join(map(str, self.grid))}{',' if len(self.grid) == 1 else ''})"
        warps = ("num_warps", self.config.num_warps)
        options = [f"{k}={v}" for k, v in (*self.constants.items(), warps)]
        return f"{self.name}[{grid}]({', '.join([*self.parameters, *options])})"


@dataclass(frozen=True)
class Allocation:
    """A temporary of the launcher."""

    name: str
    buffer: Buffer

    def text(self, like: str) -> str:
        """Its line, where the argument `like` lies."""
        kind = self.buffer.type
        return f"{self.name} = empty_beside({like}, {kind.shape}, {self.buffer.strides}, {kind.dtype})"


class Launched(Protocol):
    """Jit functions, of which the launcher calls one."""

    def text(self) -> str: ...
    def launch(self) -> str: ...


def assemble(
    name: str, arguments: Sequence[str], steps: Sequence[Launched | Allocation], config: Config | None
) -> KernelSource:
    """The module text of one kernel: helpers, jit functions, launcher."""
    functions = [step.text() for step in steps if not isinstance(step, Allocation)]
    code = "\n".join(functions)
    helpers = tuple(text.strip() for call, text in HELPERS.items() if re.search(rf"\b{call}\b", code))
    lines = []
    for step in steps:
        lines.append(step.text(arguments[-1]) if isinstance(step, Allocation) else step.launch())
    launcher = f"def {name}({', '.join(arguments)}):\n" + "\n".join(
        f"    {line}" for line in lines or ["return"]
    )
    return KernelSource(name, "\n\n\n".join([*helpers, *functions, launcher]) + "\n", helpers, config)


def _bound(block: Block) -> set[str]:
    """Names that templates in the block bind or read by themselves: loop variables, accumulators."""
    words: set[str] = set()
    for item in block.items:
        match item:
            case str():
                continue
            case Loop():
                words |= _words(item.header) | _bound(item.block)
            case Value() | Line():
                words |= _words(item.template)
    return words


def _words(text: str) -> set[str]:
    """The names in a template, without those of keyword arguments."""
    return set(re.findall(r"\b[A-Za-z_]\w*\b(?!=)", text))


def span(buffer: Buffer) -> int:
    """The largest offset of an element, in elements."""
    return sum((n - 1) * s for n, s in zip(buffer.type.shape, buffer.strides) if n)


def is_large(kernel: Kernel) -> bool:
    """Whether offsets in a kernel need 64 bits. Blocks overhang what they tile, so some room is left."""
    return any(span(b) >= 2**31 - 2**20 for b in (*kernel.inputs, *kernel.outputs))


def is_backwards(kernel: Kernel) -> bool:
    """Whether programs that own rows or runs of a kernel's memory go through it from its end to its start.

    Contractions, convolutions and kernels that only reduce go forwards. What they left last in the L2 is so
    read first, and what is written last is what the next of them begins with. A kernel that writes less than
    an eighth of what it moves only reduces.
    """
    written = sum(b.distinct_bytes for b in kernel.outputs)
    moved = written + sum(b.distinct_bytes for b in kernel.inputs)
    return moved > BACKWARDS and 8 * written > moved
