"""Tensors of 2^31 elements and more, by the text of their kernels: no integer of 32 bits overflows."""

from __future__ import annotations

from typing import Any

import pytest

from egcompile.codegen import generate
from egcompile.ir import Node
from egcompile.ops import (
    add,
    add_rms_norm,
    batch_moments,
    batch_norm_sums,
    broadcast_to,
    cat,
    cross_entropy,
    cross_entropy_backward,
    exp,
    group_moments,
    layer_norm_backward,
    linear_act,
    linear_act_backward,
    linear_add,
    matmul,
    mul,
    pad,
    permute,
    reshape,
    rms_norm,
    rms_norm_backward,
    slice_,
    softmax,
    sum,
    transpose,
)
from egcompile.schedule.kernel import Kernel
from egcompile.target import Target
from tests.codegen.harness import build, cubins
from tests.codegen.widths import overflows

H200 = Target.parse("cuda:90")


def f(*shape: int, dtype: str = "bf16") -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _loss(x: Node, target: Node, ct: Node) -> tuple[Node, ...]:
    loss, lse = cross_entropy(x, target, ignore_index=-100)
    return loss, cross_entropy_backward(x, target, lse, ct, ignore_index=-100)


def _kernels(log: int) -> dict[str, Kernel]:
    """Kernels of each form over 2^`log` elements, and over a few more or less."""
    n = 2**log
    rows, wide = n >> 12, n >> 4
    nchw = f(n >> 16, 64, 32, 32)
    last = (64 * 1024, 1, 64 * 32, 64)
    c32 = f(64, dtype="f32")
    split: dict[str, tuple[Any, ...]] = {
        "flat": (exp, f(n)),
        "flat, ragged": (exp, f(n + 77)),
        "flat, just below": (exp, f(n - 5)),
        "two sizes": (lambda x, y: (exp(x), add(y, y)), f(n), f(77)),
        "broadcast row": (lambda x, w: mul(x, broadcast_to(w, x.shape)), f(rows, 4096), f(4096)),
        "broadcast column": (lambda x, c: mul(x, broadcast_to(c, x.shape)), f(16, wide), f(16, 1)),
        "transposed": (lambda x: permute(x, (1, 0)), f(rows, 4096)),
        "transposed, narrow": (lambda x: permute(x, (1, 0)), f(16, wide)),
        "heads": (lambda x: permute(reshape(x, (n >> 21, 2048, 16, 64)), (0, 2, 1, 3)), f(n)),
        "slice": (lambda x: slice_(x, 0, 3, n - 3, 2), f(n)),
        "late slice": (lambda x: slice_(x, 0, n - 64, n - 3, 1), f(n)),
        "pad": (lambda x: pad(x, 0, 5, 7, 1), f(n)),
        "cat": (lambda x, y: cat(x, y, axis=0), f(n), f(n >> 1)),
        "cat of columns": (lambda x, y: cat(x, y, axis=1), f(rows, 4096), f(rows, 4096)),
        "softmax": (lambda x: softmax(x, dim=1), f(rows, 4096)),
        "softmax, wide": (lambda x: softmax(x, dim=1), f(n >> 17, 2**17)),
        "softmax of the first axis": (lambda x: softmax(x, dim=0), f(4096, rows)),
        "cross-entropy": (_loss, f(n >> 17, 2**17), f"i64[{n >> 17}]", f(n >> 17, dtype="f32")),
        "add norm": (
            lambda x, r, w: add_rms_norm(x, r, w, 1e-5, False),
            *(f(rows, 4096), f(rows, 4096), f(4096)),
        ),
        "norm backward": (
            lambda x, w, r, ct: rms_norm_backward(x, w, r, ct, False),
            *(f(rows, 4096), f(4096), f(rows, 1, dtype="f32"), f(rows, 4096)),
        ),
        "layer norm backward": (
            lambda x, w, m, r, ct: tuple(layer_norm_backward(x, w, m, r, ct))[:3],
            *(f(rows, 4096), f(4096), f(rows, 1, dtype="f32"), f(rows, 1, dtype="f32"), f(rows, 4096)),
        ),
        "sum": (lambda x: sum(x, dims=(0,)), f(n)),
        "sum of rows": (lambda x: sum(x, dims=(1,)), f(rows, 4096)),
        "sum of few rows": (lambda x: sum(x, dims=(0,)), f(16, wide)),
        "sum of many rows": (lambda x: sum(x, dims=(0,)), f(rows, 4096)),
        "sum of long rows": (lambda x: sum(x, dims=(1,)), f(16, wide)),
        "batch moments": (lambda x: batch_moments(x, 1e-5), nchw),
        "batch sums": (
            lambda x, m, r, ct: batch_norm_sums(x, m, r, ct, x.dtype),
            *(nchw, c32, c32, nchw),
        ),
        "group moments": (lambda x: group_moments(x, 16, 1e-5), nchw),
        "per group": (
            lambda x, m: mul(x, broadcast_to(reshape(m, (n >> 16, 16, 1)), x.shape)),
            *(f(n >> 16, 16, 4096), f(n >> 16, 16)),
        ),
    }
    made = {name: build(*given) for name, given in split.items()}
    for name in ("batch moments", "batch sums", "group moments"):
        function, *types = split[name]
        strides = [last if t == nchw else None for t in types]
        made[f"{name}, channels last"] = build(function, *types, strides=strides)
    made["columns, transposed"] = build(lambda x: sum(x, dims=(0,)), f(rows, 4096), strides=[(1, rows)])
    made["softmax, transposed"] = build(lambda x: softmax(x, dim=1), f(rows, 4096), strides=[(1, rows)])
    rowwise = f(n >> 24, 256, 2**16), f(n >> 24, 256)
    made["softmax of runs, far apart"] = build(
        lambda x, c: softmax(
            reshape(mul(x, broadcast_to(reshape(c, (*c.shape, 1)), x.shape)), (n >> 24, 2**24)), dim=1
        ),
        *rowwise,
        strides=[None, (2**16, n >> 8)],
    )
    made["flat, with gaps"] = build(lambda x: exp(x), f(8, 16), strides=[(n >> 3, n >> 8)])
    made["row norm, with gaps"] = build(
        lambda x, w: rms_norm(x, w, 1e-5, False), f(16, 512), f(512), strides=[(n >> 4, 1), None]
    )
    return made


def _products(log: int) -> dict[str, Kernel]:
    m, k, n = 2 ** (log - 12), 4096, 4096
    x, w, b, y = f(m, k), f(k, n), f(n), f(m, n)
    return {
        "matmul": build(matmul, x, w),
        "of a transposed weight": build(lambda x, w: matmul(x, transpose(w)), x, f(n, k)),
        "bias and activation": build(lambda x, w, b: linear_act(x, w, b, "gelu"), x, w, b),
        "its backward": build(lambda ct, w, s: linear_act_backward(ct, w, s, "gelu"), x, w, y),
        "skip": build(linear_add, x, w, y),
        "large weight": build(matmul, f(64, 2 ** (log - 14)), f(2 ** (log - 14), 2**14)),
        "large result": build(matmul, f(2 ** (log - 17), 64), f(64, 2**17)),
        "fp32": build(matmul, f(m, k, dtype="f32"), f(k, 24, dtype="f32")),
        "unaligned": build(matmul, f(m, k + 1), f(k + 1, 24)),
    }


FORMS = {**_kernels(31), **_products(31)}


@pytest.mark.parametrize("log", [30, 31, 32, 33])
@pytest.mark.parametrize("name", FORMS)
def test_no_index_overflows(name: str, log: int) -> None:
    kernel = _kernels(log).get(name) or _products(log)[name]
    text = generate(kernel, H200).text
    found, widest = overflows(text, kernel.name)
    assert not found, f"{found}\n{text}"
    if log == 33 and "descriptor" not in text.lower():
        assert widest >= 2**31, "the check has seen the offsets"


@pytest.mark.parametrize("name", ["flat", "softmax", "matmul"])
def test_small_tensors_are_indexed_by_32_bits(name: str) -> None:
    kernel = _kernels(24).get(name) or _products(24)[name]
    assert "int64" not in generate(kernel, H200).text


def test_the_check_finds_what_overflows() -> None:
    text = """
def _k(x_ptr, BLOCK):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, 0.0, mask=offsets < 5)

def k(x):
    _k[(GRID,)](x, BLOCK=1024, num_warps=4)
"""
    assert overflows(text.replace("GRID", str(2**21 - 1)), "k")[0] == []
    assert "in 32 bits" in overflows(text.replace("GRID", str(2**21 + 1)), "k")[0][0]
    wide = text.replace("tl.program_id(0)", "tl.program_id(0).to(tl.int64)")
    assert overflows(wide.replace("GRID", str(2**23)), "k") == ([], 2**33 - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["transposed, narrow", "softmax of the first axis", "softmax, wide", "sum of few rows", "two sizes"],
)
def test_wide_indices_compile(name: str) -> None:
    assert cubins(_kernels(33)[name], 90)
