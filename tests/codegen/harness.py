"""Runs and compiles generated kernels: through Triton's interpreter, on a GPU, or to cubins with neither."""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from egcompile.codegen import Config, KernelSource, generate
from egcompile.ir import Graph, Node, TensorType
from egcompile.ops import evaluate
from egcompile.ops import input as input_op
from egcompile.schedule.kernel import Buffer, Kernel
from egcompile.target import Target
from tests.codegen import compilers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADER = "import torch\nimport triton\nimport triton.language as tl\n"
HEADER += "from egcompile.runtime.memory import empty_beside\n\n\n"
_count = itertools.count()
_folder = tempfile.TemporaryDirectory(prefix="egcompile-kernels-")


def build(
    function: Callable[..., Any],
    *types: str,
    strides: Sequence[tuple[int, ...] | None] = (),
    out_strides: Sequence[tuple[int, ...] | None] = (),
    name: str = "kernel",
) -> Kernel:
    """The kernel that computes `function` of inputs of these types; contiguous where no strides are given."""
    names = "xyzuvwabcdefgh"
    inputs = []
    for label, text in zip(names, types, strict=False):
        t = TensorType.parse(text)
        inputs.append(input_op(name=label, shape=t.shape, dtype=t.dtype))
    results = function(*inputs)
    several = isinstance(results, tuple) or isinstance(results.type, tuple)
    outputs = tuple(results) if several else (results,)
    return Kernel(
        name, Graph(tuple(inputs), outputs), _buffers(inputs, strides), _buffers(outputs, out_strides)
    )


def _buffers(nodes: Sequence[Node], strides: Sequence[tuple[int, ...] | None]) -> tuple[Buffer, ...]:
    padded = [*strides, *[None] * (len(nodes) - len(strides))]
    return tuple(
        Buffer.contiguous(n.tensor) if s is None else Buffer(n.tensor, s) for n, s in zip(nodes, padded)
    )


def load(source: KernelSource) -> Any:
    """The module that a source's text makes: `triton.jit` wants functions that lie in a file."""
    path = Path(_folder.name) / f"kernel_{next(_count)}.py"
    path.write_text(HEADER + source.text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def allocate(buffer: Buffer) -> torch.Tensor:
    """Memory for a buffer, filled with what no kernel should leave behind."""
    size = 1 + sum((n - 1) * s for n, s in zip(buffer.type.shape, buffer.strides) if n)
    base = torch.full((max(size, 1),), 77, dtype=buffer.type.dtype, device=DEVICE)
    return base.as_strided(buffer.type.shape, buffer.strides)


def random_inputs(kernel: Kernel, low: float = -2.0, high: float = 2.0) -> list[torch.Tensor]:
    """Random values in the memory that the kernel's input buffers describe."""
    tensors = []
    for buffer in kernel.inputs:
        tensor = allocate(buffer)
        base = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,))
        dtype = buffer.type.dtype
        if dtype.is_floating_point:
            base.copy_(torch.rand(base.shape, dtype=torch.float64) * (high - low) + low)
        elif dtype == torch.bool:
            base.copy_(torch.rand(base.shape) < 0.5)
        else:
            base.copy_(torch.randint(int(low), int(high) + 1, base.shape))
        tensors.append(tensor)
    return tensors


def run(kernel: Kernel, inputs: Sequence[torch.Tensor], config: Config | None = None) -> list[torch.Tensor]:
    """The kernel's outputs, computed by its generated source.

    Its launcher sees the first element of each input alone: a plan may pass it another view of the memory.
    """
    source = generate(kernel, Target.parse("cuda:90"), config)
    outputs = [allocate(buffer) for buffer in kernel.outputs]
    starts = [x.as_strided((min(x.numel(), 1),), (1,)) for x in inputs]
    getattr(load(source), kernel.name)(*starts, *outputs)
    return outputs


def truth(kernel: Kernel, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same by the reference meaning of the body, in the body's own dtypes."""
    return evaluate(kernel.body, [x.cpu() for x in inputs])


def check(
    kernel: Kernel,
    config: Config | None = None,
    *,
    low: float = -2.0,
    high: float = 2.0,
    rtol: float | None = None,
    atol: float | None = None,
    inputs: Sequence[torch.Tensor] | None = None,
) -> None:
    """Asserts that the generated kernel computes its body."""
    inputs = random_inputs(kernel, low, high) if inputs is None else inputs
    for got, want in zip(run(kernel, inputs, config), truth(kernel, inputs), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=atol, equal_nan=True)


def cubins(kernel: Kernel, arch: int, config: Config | None = None) -> list[dict[str, Any]]:
    """Compiles each jit function to a cubin for sm_`arch`, in a process that does not interpret.

    One dict a function: `name`, `shared` bytes, `registers` and `spills` (bytes of local memory).
    """
    source = generate(kernel, Target.parse(f"cuda:{arch}"), config)
    path = Path(_folder.name) / f"cubin_{next(_count)}.py"
    path.write_text(HEADER + source.text)
    tensors = [
        (list(b.type.shape), list(b.strides), str(b.type.dtype)) for b in (*kernel.inputs, *kernel.outputs)
    ]
    request = {"path": str(path), "launcher": kernel.name, "arch": arch, "tensors": tensors}
    answer = compilers.ask(request)
    assert "functions" in answer, f"{answer['error'][-3000:]}\n\n{source.text}"
    functions: list[dict[str, Any]] = answer["functions"]
    return functions
