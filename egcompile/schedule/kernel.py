"""What a schedule is made of: kernels over a body graph, and the straight line that launches them."""

from __future__ import annotations

from dataclasses import dataclass

from egcompile.ir.buffer import Buffer, contiguous_strides
from egcompile.ir.graph import Graph

__all__ = [
    "Buffer",
    "Call",
    "Free",
    "Kernel",
    "Launch",
    "Program",
    "Schedule",
    "Step",
    "View",
    "contiguous_strides",
]


@dataclass(frozen=True, eq=False)
class Kernel:
    """A generated kernel: `body` over whole tensors, computed in one launch (and a finalize, where rows
    are summed over programs).

    `body.inputs` are leaves named as the arguments, `body.outputs` what is written; `inputs` and
    `outputs` say how each lies in memory. The body may hold composite ops; `ops.lower` expands them.
    """

    name: str
    body: Graph
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]


@dataclass(frozen=True, eq=False)
class Launch:
    """Run a generated kernel: names of argument values, names of the values that it writes.

    `origins` are the model's places that this launch is the work of.
    """

    kernel: Kernel
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    origins: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Call:
    """Call ATen through an op of the registry: `outputs = op(*inputs, **attrs)`.

    `outputs` has None for outputs that nobody reads.
    """

    op: str
    inputs: tuple[str, ...]
    attrs: tuple[tuple[str, object], ...]
    outputs: tuple[str | None, ...]


@dataclass(frozen=True, eq=False)
class View:
    """A value that lies in another's memory: `output = source.as_strided(...)`, costing nothing."""

    source: str
    buffer: Buffer
    output: str


@dataclass(frozen=True)
class Free:
    """The last use has passed: drop these names."""

    names: tuple[str, ...]


Step = Launch | Call | View | Free


@dataclass(frozen=True, eq=False)
class Program:
    """A straight line of steps. Names are unique; `buffers` says what each holds.

    inputs     argument names, in call order; saved values come first in a backward
    outputs    returned names, in order; None for a gradient that is not computed
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    steps: tuple[Step, ...]
    buffers: dict[str, Buffer]


@dataclass(frozen=True, eq=False)
class Schedule:
    """A plan's forward and backward. `saved` are values of the forward that the backward takes first;
    `shared` counts kernels that extraction planned and that run in another's launch.

    forward(*primals)               -> (*outputs, *those of `saved` that are neither primals nor outputs)
    backward(*saved, *cotangents)   -> one gradient a primal, None where not needed
    """

    forward: Program
    backward: Program | None
    saved: tuple[str, ...]
    shared: int = 0
