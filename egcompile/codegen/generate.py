"""From a kernel to its source: lower the body, divide it into nests, render each."""

from __future__ import annotations

from egcompile.codegen.heuristics import Config
from egcompile.codegen.pointwise import pointwise_function
from egcompile.codegen.source import Allocation, JitFunction, KernelSource, assemble
from egcompile.errors import CompileError
from egcompile.ir.graph import Graph
from egcompile.ops.lower import lower
from egcompile.ops.opdef import Kind
from egcompile.schedule.kernel import Kernel
from egcompile.target import Target


def generate(kernel: Kernel, target: Target, config: Config | None = None) -> KernelSource:
    """Triton source of `kernel`; `config` overrides the heuristics of its first nest.

    Raises CompileError where the body holds an op that no generated kernel can hold.
    """
    body = lower(kernel.body)
    lowered = Kernel(kernel.name, body, kernel.inputs, kernel.outputs)
    arguments = [*(node.attr("name") for node in body.inputs), *body.output_names]
    steps: list[JitFunction | Allocation] = [pointwise_function(f"_{kernel.name}", lowered, target, config)]
    return assemble(kernel.name, arguments, steps)
