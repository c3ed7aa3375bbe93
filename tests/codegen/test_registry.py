"""Every op that a generated kernel can hold computes what the op means, on the registry's own samples."""

from __future__ import annotations

import pytest
import torch

from egcompile.codegen import generate
from egcompile.errors import CompileError
from egcompile.ir import Graph, TensorType
from egcompile.ops import REGISTRY, Kind, OpDef, Sample, ops_of
from egcompile.ops import input as input_op
from egcompile.ops.lower import lower
from egcompile.schedule.kernel import Buffer, Kernel
from egcompile.target import Target
from tests.codegen.harness import check, random_inputs

KINDS = (Kind.LEAF, Kind.POINTWISE, Kind.MOVEMENT, Kind.REDUCTION, Kind.COMPOSITE)
NEEDS_LIBDEVICE = {"pow", "log1p", "expm1", "binary_cross_entropy"}


def kernel_of(op: OpDef, sample: Sample, dtype: str) -> Kernel:
    """A kernel of one op, its floating operands in `dtype`."""
    leaves = []
    for i, text in enumerate(sample.operands):
        t = TensorType.parse(text.replace("f64", dtype))
        leaves.append(input_op(name=f"x{i}", shape=t.shape, dtype=t.dtype))
    node = op(*leaves, **sample.attrs)
    outputs = tuple(node) if isinstance(node.type, tuple) else (node,)
    body = Graph(tuple(leaves), outputs)
    buffers = [tuple(Buffer.contiguous(n.tensor) for n in nodes) for nodes in (leaves, outputs)]
    return Kernel(op.name, body, *buffers)


CASES = [
    pytest.param(op, sample, id=f"{op.name}-{i}")
    for op in ops_of(*KINDS)
    for i, sample in enumerate(op.samples)
]


@pytest.mark.parametrize("dtype", ["f64", "f32"])
@pytest.mark.parametrize(("op", "sample"), CASES)
def test_sample_is_computed(op: OpDef, sample: Sample, dtype: str) -> None:
    if op.name in NEEDS_LIBDEVICE and not torch.cuda.is_available():
        pytest.skip("libdevice needs an NVIDIA GPU")
    kernel = kernel_of(op, sample, dtype)
    inputs = random_inputs(kernel, sample.low, sample.high)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == "f64" else {"rtol": 2e-5, "atol": 2e-5}
    check(kernel, inputs=inputs, **tolerance)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_no_kernel_has_atomics(dtype: str) -> None:
    """Equal inputs give equal bits: sums over programs go through memory, in a fixed order."""
    for op in ops_of(*KINDS):
        for sample in op.samples:
            text = generate(kernel_of(op, sample, dtype), Target.parse("cuda:90")).text
            assert "def " in text and "atomic" not in text, op.name


def test_every_pointwise_op_has_a_spelling_or_a_definition() -> None:
    for op in ops_of(Kind.POINTWISE):
        assert op.scalar is not None or op.definition is not None, op.name


def test_lowering_leaves_primitives() -> None:
    for op in ops_of(Kind.COMPOSITE, Kind.POINTWISE):
        for sample in op.samples:
            body = lower(kernel_of(op, sample, "f64").body)
            for node in body.nodes:
                assert node.op.kind not in (Kind.COMPOSITE, Kind.EXTERN, Kind.PROJECTION), node
                assert node.op.kind is not Kind.POINTWISE or node.op.scalar is not None, node


def test_extern_op_is_refused_by_name() -> None:
    op = REGISTRY["embedding"]
    with pytest.raises(CompileError, match="embedding"):
        generate(kernel_of(op, op.samples[0], "f32"), Target.parse("cuda:90"))
