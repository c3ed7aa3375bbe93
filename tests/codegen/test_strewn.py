"""Reductions over strewn memory in two: of every kind and dtype, one inside another, in partials."""

from __future__ import annotations

import pytest
import torch

from egcompile.codegen import Config, strewn
from egcompile.codegen.division import _replace
from egcompile.ir import Node
from egcompile.ops import (
    OpDef,
    add,
    amax,
    amin,
    broadcast_to,
    div,
    exp,
    mean,
    mul,
    reshape,
    sub,
    sum,
)
from egcompile.schedule.kernel import Kernel
from tests.codegen.harness import build, check

SHAPE = (5, 8, 6, 7)
CHANNELS_LAST = (8 * 6 * 7, 1, 7 * 8, 8)
GROUPED = (5, 4, 2, 6, 7)
DIMS = (2, 3, 4)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strewn, "SMALL", 1)


def _grouped(x: Node) -> Node:
    return reshape(x, shape=GROUPED)


def _kernel(function: object, dtype: str = "f32", inputs: int = 1) -> Kernel:
    types = [f"{dtype}[{','.join(map(str, SHAPE))}]"] * inputs
    return build(function, *types, strides=[CHANNELS_LAST] * inputs)  # type: ignore[arg-type]


def _softmax(x: Node) -> tuple[Node, ...]:
    """Over a group: its sum reads its largest element."""
    g = _grouped(x)
    top = amax(g, dims=DIMS)
    e = exp(sub(g, broadcast_to(top, g.shape)))
    total = sum(e, dims=DIMS)
    return div(e, broadcast_to(total, g.shape)), total


def _two_means(x: Node) -> tuple[Node, ...]:
    g = _grouped(x)
    centre = mean(g, dims=DIMS)
    d = sub(g, broadcast_to(centre, g.shape))
    return mean(mul(d, d), dims=DIMS), centre


@pytest.mark.parametrize("config", [None, Config(programs=3), Config(block_rows=4, programs=5)], ids=str)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64", "i64", "i32"])
@pytest.mark.parametrize("op", [sum, mean, amax, amin], ids=lambda op: op.name)
def test_each_reduction(op: OpDef, dtype: str, config: Config | None) -> None:
    if (op is mean and dtype.startswith("i")) or (op is sum and dtype == "i32"):
        pytest.skip("PyTorch has no such result")
    kernel = _kernel(lambda x: op(_grouped(x), dims=DIMS), dtype)
    assert strewn.in_two(kernel)
    close = 1e-2 if dtype in ("bf16", "f16") else None
    check(kernel, config, low=-4.0, high=5.0, rtol=close, atol=close)


@pytest.mark.parametrize("op", [sum, mean, amax, amin], ids=lambda op: op.name)
def test_nan_and_infinities_go_through_both(op: OpDef) -> None:
    kernel = _kernel(lambda x: op(_grouped(x), dims=DIMS))
    x = torch.randn(SHAPE).to(memory_format=torch.channels_last)
    x[0, 0, 0, 0], x[1, 1, 2, 3], x[2, 3, 1, 1] = torch.nan, torch.inf, -torch.inf
    check(kernel, inputs=[x], rtol=1e-5, atol=1e-5)
    check(kernel, Config(programs=3), inputs=[x], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [None, Config(programs=3)], ids=str)
@pytest.mark.parametrize("function", [_softmax, _two_means])
def test_one_inside_another(function: object, config: Config | None) -> None:
    """Both are replaced, each in what the other reads too, so that none stays and none is there twice."""
    kernel = _kernel(function)
    replaced = _replace(kernel, strewn.in_two(kernel))
    assert strewn.in_two(kernel) and not strewn.in_two(replaced)
    assert len([n for n in replaced.body.nodes if n.op.name in ("sum", "mean", "amax")]) == 4
    check(kernel, config, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [None, Config(programs=3), Config(block_rows=4, programs=3)], ids=str)
@pytest.mark.parametrize("op", [sum, mean, amax, amin], ids=lambda op: op.name)
def test_a_reduction_of_one_that_is_read_beside_it(op: OpDef, config: Config | None) -> None:
    """A mean of means divides twice, whichever of the two are results."""

    def both(x: Node) -> tuple[Node, ...]:
        rows = op(x, dims=(0,))
        again = op(rows, dims=(1,))
        return add(again, again), rows, op(again, dims=(2,))

    check(build(both, "f32[40,6,16]"), config, rtol=1e-5, atol=1e-5)
    check(build(both, "f32[40,6,16]", strides=[(1, 16 * 40, 40)]), config, rtol=1e-5, atol=1e-5)
