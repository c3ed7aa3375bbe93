"""Contraction kernels against PyTorch in fp64, over tilings, operand layouts, epilogues and sums."""

import math
from collections.abc import Sequence

import pytest
import torch

from egcompile import ops
from egcompile.codegen.gemm import render_contraction
from egcompile.codegen.gemm_config import GemmConfig
from egcompile.errors import CompileError
from egcompile.ir import Graph
from egcompile.ir.node import Node
from egcompile.ops.lower import lower
from egcompile.runtime.loader import load
from egcompile.schedule.kernel import Buffer, Kernel
from egcompile.target import Target

HOPPER = Target.parse("cuda:90")
POINTERS = GemmConfig(32, 32, 16, 4, 2, group_m=2)
DESCRIPTORS = GemmConfig(32, 32, 16, 4, 2, group_m=2, subtiles=2, descriptors=True, tile_descriptors=True)
HEADER = "import torch, triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3}


def leaf(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
    return ops.input(name=name, shape=shape, dtype=dtype)


def kernel_of(
    outputs: Sequence[Node], inputs: Sequence[Node], buffers: dict[Node, Buffer] | None = None
) -> Kernel:
    body = lower(Graph(tuple(inputs), tuple(outputs)))
    given = buffers or {}
    return Kernel(
        "contraction",
        body,
        tuple(given.get(i, Buffer.contiguous(i.tensor)) for i in inputs),
        tuple(given.get(o, Buffer.contiguous(o.tensor)) for o in outputs),
    )


def random_inputs(kernel: Kernel) -> list[torch.Tensor]:
    """Values in [-1, 1], laid out as the kernel's buffers."""
    values = []
    for buffer in kernel.inputs:
        memory = torch.rand(sum((n - 1) * s for n, s in zip(buffer.type.shape, buffer.strides)) + 1) * 2 - 1
        values.append(memory.to(buffer.type.dtype).as_strided(buffer.type.shape, buffer.strides))
    return values


def run(kernel: Kernel, inputs: Sequence[torch.Tensor], config: GemmConfig | None) -> list[torch.Tensor]:
    """The kernel's outputs, from memory that held NaN before."""
    source = render_contraction(kernel, HOPPER, config)
    outputs = []
    for buffer in kernel.outputs:
        memory = torch.full(
            (sum((n - 1) * s for n, s in zip(buffer.type.shape, buffer.strides)) + 1,), math.nan
        )
        outputs.append(memory.to(buffer.type.dtype).as_strided(buffer.type.shape, buffer.strides))
    getattr(load(HEADER + source.text), kernel.name)(*inputs, *outputs)
    return outputs


def check(kernel: Kernel, config: GemmConfig | None) -> None:
    """Each output against the body in fp64; errors relative to the largest element."""
    inputs = random_inputs(kernel)
    found = run(kernel, inputs, config)
    wide = {
        i: x.double() if x.is_floating_point() else x for i, x in zip(kernel.body.inputs, inputs, strict=True)
    }
    for node, value in zip(kernel.body.outputs, found, strict=True):
        (truth,) = ops.evaluate_nodes([in_fp64(node)], {in_fp64(i): x for i, x in wide.items()})
        assert value.shape == truth.shape
        if not value.numel():
            continue
        error = (value.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-6)
        assert error <= TOLERANCE[value.dtype], f"{node.op.name}: {error}"


def in_fp64(root: Node) -> Node:
    """The same computation in fp64 throughout."""
    done: dict[Node, Node] = {}

    def widen(value: object) -> object:
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    def visit(node: Node) -> Node:
        if node not in done:
            done[node] = node.op(*map(visit, node.inputs), *map(widen, node.attrs))
        return done[node]

    return visit(root)


SIZES = [(40, 24, 48), (33, 17, 19), (1, 5, 3), (64, 1, 32), (32, 32, 1)]
BOTH = pytest.mark.parametrize("config", [POINTERS, None], ids=["small tiles", "table"])


@BOTH
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("m, n, k", SIZES)
def test_matmul(m: int, n: int, k: int, dtype: torch.dtype, config: GemmConfig | None) -> None:
    x, w = leaf("x", m, k, dtype=dtype), leaf("w", k, n, dtype=dtype)
    check(kernel_of([ops.matmul(x, w)], [x, w]), config)


def _operands(dtype: torch.dtype) -> dict[str, tuple[list[Node], Node]]:
    x, w, wt = (
        leaf("x", 2, 20, 24, dtype=dtype),
        leaf("w", 24, 40, dtype=dtype),
        leaf("wt", 40, 24, dtype=dtype),
    )
    g, xt, b = (
        leaf("g", 2, 20, 40, dtype=dtype),
        leaf("xt", 24, 40, dtype=dtype),
        leaf("b", 2, 24, 16, dtype=dtype),
    )
    return {
        "leading axes": ([x, w], ops.matmul(x, w)),
        "transposed weight": ([x, wt], ops.matmul(x, ops.transpose(wt))),
        "transposed both": ([xt, wt], ops.matmul(ops.transpose(xt), ops.transpose(wt))),
        "weight gradient": ([g, x], ops.contract_rows(g, x)),
        "batched": ([x, b], ops.bmm(x, b)),
        "batched, transposed": ([x, g], ops.bmm(ops.transpose(x), g)),
        "sliced": ([x, w], ops.matmul(ops.slice_(x, axis=1, start=3, stop=20, step=1), w)),
        "permuted": ([x, w], ops.matmul(ops.permute(x, perm=(1, 0, 2)), w)),
        "expanded": (
            [w],
            ops.matmul(ops.expand(ops.full(value=0.5, shape=(1, 24), dtype=dtype), shape=(40, 24)), w),
        ),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", _operands(torch.float32))
def test_operands(name: str, dtype: torch.dtype) -> None:
    inputs, output = _operands(dtype)[name]
    check(kernel_of([output], inputs), POINTERS)


@pytest.mark.parametrize("name", ["leading axes", "transposed weight", "transposed both", "weight gradient"])
@pytest.mark.parametrize("flatten", [True, False])
def test_operands_by_descriptor(name: str, flatten: bool) -> None:
    inputs, output = _operands(torch.float16)[name]
    kernel = kernel_of([output], inputs)
    text = render_contraction(kernel, HOPPER, DESCRIPTORS).text
    assert text.count("TensorDescriptor(") == 3
    check(kernel, GemmConfig(32, 32, 16, 4, 2, descriptors=True, tile_descriptors=flatten, flatten=flatten))


def _linear_act(act: str, dtype: torch.dtype) -> Kernel:
    x, w, b = leaf("x", 2, 20, 24, dtype=dtype), leaf("w", 40, 24, dtype=dtype), leaf("b", 40, dtype=dtype)
    both = ops.linear_act(x, ops.transpose(w), b, act=act)
    return kernel_of([both[0], both[1]], [x, w, b])


def _linear_act_backward(act: str, dtype: torch.dtype) -> Kernel:
    ct, w, saved = (
        leaf("ct", 2, 20, 24, dtype=dtype),
        leaf("w", 24, 40, dtype=dtype),
        leaf("saved", 2, 20, 40, dtype=dtype),
    )
    both = ops.linear_act_backward(ct, w, saved, act=act)
    return kernel_of([both[0], both[1]], [ct, w, saved])


@pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("act", ["none", *ops.ACTIVATIONS])
def test_linear_act(act: str, config: GemmConfig) -> None:
    check(_linear_act(act, torch.float16), config)
    if not config.descriptors:
        check(_linear_act(act, torch.float32), config)


@pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("act", ops.ACTIVATIONS)
def test_linear_act_backward(act: str, config: GemmConfig) -> None:
    check(_linear_act_backward(act, torch.float16), config)
    if not config.descriptors:
        check(_linear_act_backward(act, torch.float32), config)
        check(_linear_act_backward(act, torch.float64), config)
