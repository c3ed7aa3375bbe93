"""Norms and softmax over rows of every length: short, ragged ones run, long ones compile and fit the chip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from egcompile.codegen import generate
from egcompile.ops import (
    add_layer_norm,
    add_rms_norm,
    evaluate,
    layer_norm,
    layer_norm_backward_add,
    log_softmax,
    log_softmax_backward,
    rms_norm,
    rms_norm_backward_add,
    softmax,
    softmax_backward,
)
from egcompile.schedule.kernel import Kernel
from egcompile.target import Target
from tests.codegen.harness import build, cubins, random_inputs, run
from tests.codegen.widths import overflows

pytest.importorskip("triton")

SHORT = (1, 2, 3, 31, 64, 100, 257, 1000, 1024, 4097)
LONG = (16384, 32768, 50304, 131072)

BODIES: dict[str, tuple[Callable[..., Any], str]] = {
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5, False), "xw"),
    "rms_norm_cast_first": (lambda x, w: rms_norm(x, w, 1e-5, True), "xw"),
    "add_rms_norm": (lambda x, r, w: add_rms_norm(x, r, w, 1e-5, False), "xxw"),
    "layer_norm": (lambda x, w, b: layer_norm(x, w, b, 1e-5), "xww"),
    "add_layer_norm": (lambda x, r, w, b: add_layer_norm(x, r, w, b, 1e-5), "xxww"),
    "rms_norm_backward": (lambda *values: rms_norm_backward_add(*values, False), "xwcxx"),
    "layer_norm_backward": (lambda *values: layer_norm_backward_add(*values), "xwccxx"),
    "softmax": (lambda x: softmax(x, dim=1), "x"),
    "softmax_backward": (lambda y, ct: softmax_backward(y, ct, dim=1), "xx"),
    "log_softmax": (lambda x: log_softmax(x, dim=1), "x"),
    "log_softmax_backward": (lambda y, ct: log_softmax_backward(y, ct, dim=1), "xx"),
}


def kernel(name: str, rows: int, length: int, dtype: str) -> Kernel:
    """Operands are `x[rows, length]`, `w[length]` and columns of statistics, in fp32 at least."""
    body, operands = BODIES[name]
    column = f"{'f64' if dtype == 'f64' else 'f32'}[{rows},1]"
    types = {"x": f"{dtype}[{rows},{length}]", "w": f"{dtype}[{length}]", "c": column}
    return build(body, *(types[o] for o in operands))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("length", SHORT)
@pytest.mark.parametrize("name", BODIES)
def test_short_rows_against_fp64(name: str, length: int, rows: int) -> None:
    short = kernel(name, rows, length, "f32")
    inputs = random_inputs(short, 0.5, 2.0)
    truth = evaluate(kernel(name, rows, length, "f64").body, [x.cpu().double() for x in inputs])
    for found, exact in zip(run(short, inputs), truth, strict=True):
        size = exact.abs().max().item()
        torch.testing.assert_close(found.cpu().double(), exact, rtol=1e-4, atol=2e-5 * max(size, 1.0))


@pytest.mark.parametrize("name", BODIES)
def test_a_thousand_rows_against_fp64(name: str) -> None:
    many = kernel(name, 1000, 31, "f32")
    inputs = random_inputs(many, 0.5, 2.0)
    truth = evaluate(kernel(name, 1000, 31, "f64").body, [x.cpu().double() for x in inputs])
    for found, exact in zip(run(many, inputs), truth, strict=True):
        torch.testing.assert_close(found.cpu().double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", BODIES)
def test_no_rows(name: str) -> None:
    none = kernel(name, 0, 64, "f32")
    inputs = random_inputs(none)
    for found, exact in zip(run(none, inputs), evaluate(none.body, [x.cpu() for x in inputs]), strict=True):
        torch.testing.assert_close(found.cpu(), exact)


@pytest.mark.parametrize("length", [8192, 65536])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("name", BODIES)
def test_offsets_of_2_to_the_33_elements_do_not_overflow(name: str, dtype: str, length: int) -> None:
    source = generate(kernel(name, 2**33 // length, length, dtype), Target.parse("cuda:90"))
    found, widest = overflows(source.text, source.name)
    assert not found
    assert widest >= 2**33 - 1


# Each is a process that compiles; a part of the grid, in which each length, dtype and architecture occurs.
LONG_CASES = [
    *(("bf16", length, 90) for length in LONG),
    *(("f32", length, 90) for length in (16384, 131072)),
    *(("bf16", 16384, arch) for arch in (80, 100)),
    ("f32", 50304, 90),
    ("bf16", 131072, 80),
]


SPILLS = {
    ("rms_norm_backward", "bf16", 16384): 256,  # by a quarter
    ("softmax_backward", "bf16", 32768): 128,  # by 4%
    ("softmax_backward", "bf16", 131072): 128,  # by 6%
}
"""Bytes of a thread that may spill where large tiles are faster all the same."""


def fits(large: Kernel, arch: int, spills: int = 0) -> None:
    for function in cubins(large, arch):
        assert function["shared"] <= Target.parse(f"cuda:{arch}").shared_memory, function
        assert function["spills"] <= spills, function


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "length", "arch"), LONG_CASES)
@pytest.mark.parametrize("name", BODIES)
def test_long_rows_fit(name: str, dtype: str, length: int, arch: int) -> None:
    fits(kernel(name, 4096, length, dtype), arch, SPILLS.get((name, dtype, length), 0))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "length"), [("bf16", 1), ("f32", 1000), ("bf16", 8192)])
@pytest.mark.parametrize("name", BODIES)
def test_a_million_rows_fit(name: str, dtype: str, length: int) -> None:
    fits(kernel(name, 2**20, length, dtype), 90)
