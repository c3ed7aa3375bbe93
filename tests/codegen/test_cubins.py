"""Generated kernels compile for every architecture, within its shared memory and without spills."""

from __future__ import annotations

import functools

import pytest

from egcompile.ir import Node
from egcompile.ops import (
    Kind,
    add,
    amax,
    logical_not,
    logical_or,
    mul,
    neg,
    ops_of,
    rms_norm_backward,
    rms_norm_backward_add,
    sum,
    transpose,
    where,
)
from egcompile.target import Target
from tests.codegen.harness import build, cubins
from tests.codegen.test_golden import KERNELS
from tests.codegen.test_registry import NEEDS_LIBDEVICE

pytest.importorskip("triton")


SPILLS = {(80, "cross_entropy"): 16}
"""Bytes of a thread that may spill: of values that are used once a row, not in its loops."""


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles(arch: int, name: str) -> None:
    for function in cubins(KERNELS[name], arch):
        assert function["shared"] <= Target.parse(f"cuda:{arch}").shared_memory, function
        assert function["spills"] <= SPILLS.get((arch, name), 0), function


@pytest.mark.parametrize("arch, width", [(90, 1024), (90, 8192), (80, 197), (90, 197)])
def test_backward_of_a_norm_does_not_spill(arch: int, width: int) -> None:
    x = f"bf16[{2**25 // width},{width}]"
    kernel = build(
        lambda x, w, r, ct, s: rms_norm_backward_add(x, w, r, ct, s, False),
        *(x, f"bf16[{width}]", f"f32[{2**25 // width},1]", x, x),
    )
    for function in cubins(kernel, arch):
        assert function["spills"] == 0, function


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64"])
@pytest.mark.parametrize("images", ["512,128,7,7", "16,128,129,129"])
@pytest.mark.parametrize("count", [2, 6])
def test_sums_of_images_of_odd_sizes_do_not_spill(count: int, images: str, dtype: str) -> None:
    """What single elements are read into waits in registers, as no load of 16 bits can be ahead."""

    def sums(*values: Node) -> tuple[Node, ...]:
        total = functools.reduce(add, values)
        return sum(total, dims=(0, 2, 3)), sum(mul(total, values[0]), dims=(0, 2, 3))

    for function in cubins(build(sums, *[f"{dtype}[{images}]"] * count), 90):
        assert function["spills"] == 0, function


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_every_spelling_compiles(dtype: str) -> None:
    floats = [
        op for op in ops_of(Kind.POINTWISE) if op.samples and op.samples[0].operands[0].startswith("f64")
    ]

    def body(x: Node, y: Node) -> tuple[Node, ...]:
        operands = (x, y)
        return tuple(
            op(*operands[: len(op.operands)], **op.samples[0].attrs)
            for op in floats
            if len(op.operands) <= 2 and op.name not in NEEDS_LIBDEVICE
        )

    assert cubins(build(body, f"{dtype}[300]", f"{dtype}[300]"), 90)


def test_integers_booleans_and_wide_offsets_compile() -> None:
    assert cubins(build(lambda x: (amax(x, dims=(1,)), sum(x, dims=(1,))), "i64[50,90]"), 90)
    assert cubins(
        build(lambda x, y: (logical_or(x, y), where(x, y, logical_not(y))), "bool[9]", "bool[9]"), 90
    )
    x, row = "bf16[1048576,4096]", "bf16[4096]"
    assert cubins(
        build(lambda x, w, r, ct: rms_norm_backward(x, w, r, ct, False), x, row, "f32[1048576,1]", x), 90
    )
    assert cubins(build(lambda x: neg(transpose(x)), "bf16[65536,65536]"), 90)
