"""Constants of fp64 in generated kernels keep their digits: a bare number in Triton has those of fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from egcompile.codegen import Config
from egcompile.ir import Node
from egcompile.ops import amax, amin, cat, exp, full, gt, maximum, mean, mul, neg, pad, softmax, sum, where
from tests.codegen.harness import build, check


def constant(x: Node, value: float = 0.1) -> Node:
    return full(value=value, shape=x.shape, dtype=x.dtype)


BODIES: dict[str, Callable[[Node], Any]] = {
    "stored": lambda x: (constant(x), neg(x)),
    "folded": lambda x: (mul(constant(x), constant(x, 0.7)), exp(constant(x)), neg(x)),
    "chosen": lambda x: where(gt(x, constant(x)), constant(x, 0.3), constant(x, 0.7)),
    "compared": lambda x: maximum(x, constant(x)),
    "beside values": lambda x: cat(constant(x), x, axis=1),
    "side by side": lambda x: cat(constant(x), constant(x, 0.3), axis=1),
    "padded": lambda x: pad(constant(x), axis=0, before=1, after=1, step=1),
    "sum": lambda x: (sum(constant(x), dims=(1,)), amax(x, dims=(1,))),
    "mean": lambda x: (mean(constant(x), dims=(1,)), amax(x, dims=(1,))),
    "amax": lambda x: (amax(constant(x), dims=(1,)), amin(x, dims=(1,))),
    "softmax": lambda x: (softmax(constant(x), dim=1), softmax(x, dim=1)),
    "sum over rows": lambda x: (sum(constant(x), dims=(0,)), amax(x, dims=(0,))),
    "mean over rows": lambda x: (mean(constant(x), dims=(0,)), amax(x, dims=(0,))),
    "amax over rows": lambda x: (amax(constant(x), dims=(0,)), amin(x, dims=(0,))),
    "sum over all": lambda x: (sum(constant(x), dims=(0, 1)), neg(x)),
    "amin over all": lambda x: (amin(constant(x), dims=(0, 1)), neg(x)),
}


@pytest.mark.parametrize("config", [None, Config(block_cols=4), Config(block_rows=4, block_cols=4)])
@pytest.mark.parametrize("name", BODIES)
def test_constants_in_fp64(name: str, config: Config | None) -> None:
    check(build(BODIES[name], "f64[9,12]"), config, rtol=1e-14, atol=1e-15)
