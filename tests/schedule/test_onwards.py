"""Norms whose kernels go on with the pointwise work behind them: which do, and that the values are right."""

from __future__ import annotations

import pytest
import torch

from egcompile.extract import extract
from egcompile.ir.node import Node
from egcompile.ops import (
    add,
    add_layer_norm,
    batch_moments,
    batch_norm_sums,
    cast,
    evaluate,
    expand,
    full,
    gelu,
    group_moments,
    gt,
    layer_norm,
    mul,
    relu,
    reshape,
    rms_norm,
    silu,
    sub,
    sum,
    transpose,
)
from egcompile.schedule import schedule
from egcompile.schedule.kernel import Launch
from egcompile.target import Target
from tests.codegen.harness import check
from tests.extract.builder import egraph, forward, leaf
from tests.schedule.interpret import run_program

H200 = Target.parse("cuda:90")


def launches(*outputs: Node, strides: dict[str, tuple[int, ...]] | None = None) -> list[Launch]:
    """Those of the program that computes `outputs`; its values and its kernels' are checked."""
    made = schedule(extract(egraph(forward(*outputs)), H200, strides=strides), H200).forward
    inputs = [torch.randn(made.buffers[n].type.shape) for n in made.inputs]
    given = [x.as_strided(x.shape, made.buffers[n].strides) for x, n in zip(inputs, made.inputs, strict=True)]
    for found, want in zip(run_program(made, given), evaluate(forward(*outputs).graph, given), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    found = [step for step in made.steps if isinstance(step, Launch)]
    for launch in found:
        check(launch.kernel, rtol=1e-4, atol=1e-4)
    return found


def normalized(x: Node, groups: int) -> tuple[Node, Node]:
    """A group norm without parameters by its moments, and `rstd`."""
    moments = group_moments(x, groups=groups, eps=1e-5)
    samples, channels = x.shape[:2]

    def of_pixels(column: Node) -> Node:
        each = reshape(column, shape=(samples, groups, 1))
        wide = expand(each, shape=(samples, groups, channels // groups))
        return expand(reshape(wide, shape=(samples, channels, 1, 1)), shape=x.shape)

    return mul(sub(x, of_pixels(moments[0])), of_pixels(moments[1])), moments[1]


def test_a_group_norm_and_its_activation() -> None:
    y, rstd = normalized(leaf("x", 8, 32, 4, 6), groups=16)
    (launch,) = launches(silu(y), rstd)
    assert len(launch.outputs) == 2


def test_channels_last_groups_lie_strewn() -> None:
    y, _ = normalized(leaf("x", 8, 32, 4, 6), groups=16)
    assert len(launches(silu(y), strides={"x": (32 * 24, 1, 32 * 6, 32)})) == 2


def by_channel(vector: Node, x: Node) -> Node:
    return expand(reshape(vector, shape=(1, x.shape[1], 1, 1)), shape=x.shape)


def batch_norm(x: Node) -> tuple[Node, Node, Node]:
    """Without parameters, by its moments; and these."""
    mean, _, rstd = batch_moments(x, eps=1e-5)
    return mul(sub(x, by_channel(mean, x)), by_channel(rstd, x)), mean, rstd


def batch_norm_backward(x: Node, mean: Node, rstd: Node, ct: Node) -> tuple[Node, Node]:
    """Of a batch norm with a ReLU's gradient before it: what the input gets, and the weight."""
    ct = mul(ct, cast(gt(x, full(0.0, x.shape, torch.float32)), torch.float32))
    total, along, dw, _ = batch_norm_sums(x, mean, rstd, ct, dtype=torch.float32)
    count = full(1.0 / (x.tensor.numel // x.shape[1]), x.shape, torch.float32)
    x_hat = mul(sub(x, by_channel(mean, x)), by_channel(rstd, x))
    shares = mul(count, add(by_channel(total, x), mul(x_hat, by_channel(along, x))))
    return mul(by_channel(rstd, x), sub(ct, shares)), dw


@pytest.mark.parametrize("plane", [(7, 7), (6, 6), (4, 20)])
def test_a_batch_norm_of_small_planes(plane: tuple[int, int]) -> None:
    x, ct = leaf("x", 5, 80, *plane), leaf("ct", 5, 80, *plane)
    y, mean, rstd = batch_norm(x)
    (launch,) = launches(relu(y), mean, rstd)
    assert len(launch.outputs) == 3
    (launch,) = launches(*batch_norm_backward(x, leaf("mean", 80), leaf("rstd", 80), ct))
    assert len(launch.outputs) == 2


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((5, 80, 6, 6), (80 * 36, 1, 80 * 6, 80)),
        ((2, 80, 3, 4), None),
        ((5, 40, 6, 6), None),
        ((2, 80, 92, 92), None),
    ],
    ids=["channels_last", "tiny planes", "few channels", "large planes"],
)
def test_other_batch_norms_stay_apart(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
    y, _, _ = batch_norm(leaf("x", *shape))
    assert len(launches(relu(y), strides=None if strides is None else {"x": strides})) > 1


@pytest.mark.parametrize("kept", [False, True], ids=["alone", "read by others"])
def test_an_activation_after_a_norm(kept: bool) -> None:
    x, w = leaf("x", 128, 40), leaf("w", 40)
    y = layer_norm(x, w, leaf("b", 40), eps=1e-5)[0]
    (launch,) = launches(gelu(y), *([y] if kept else []))
    assert len(launch.outputs) == 1 + kept


def test_more_operands_behind_a_sum_and_its_norm() -> None:
    x, r, z = (leaf(name, 128, 40) for name in "xrz")
    made = add_layer_norm(x, r, leaf("w", 40), leaf("b", 40), eps=1e-5)
    (launch,) = launches(made[0], add(mul(silu(made[1]), z), made[0]))
    assert len(launch.inputs) == 5 and len(launch.outputs) == 2


def test_a_reader_in_another_order_or_of_sums_stays_apart() -> None:
    y = rms_norm(leaf("x", 128, 40), leaf("w", 40), eps=1e-5, cast_first=False)[0]
    assert len(launches(silu(transpose(y)))) == 2
    assert len(launches(add(silu(y), transpose(leaf("z", 40, 128))))) == 2
    assert len(launches(sum(y, dims=(0,)))) == 2


def test_rows_of_128_kilobytes() -> None:
    x, w = leaf("x", 64, 32768), leaf("w", 32768)
    assert len(launches(gelu(layer_norm(x, w, leaf("b", 32768), eps=1e-5)[0]))) == 1


@pytest.mark.parametrize("shape", [(8, 64), (64, 32776)], ids=["few rows", "long rows"])
def test_few_and_long_rows_stay_apart(shape: tuple[int, int]) -> None:
    x, w = leaf("x", *shape), leaf("w", shape[1])
    assert len(launches(gelu(layer_norm(x, w, leaf("b", shape[1]), eps=1e-5)[0]))) == 2


def test_what_a_reader_that_stays_apart_needs_is_written() -> None:
    """It waits for another that reads the norm, so no place among them is right for the two as one."""
    x, r = leaf("x", 128, 40), leaf("r", 128, 40)
    made = add_layer_norm(x, r, leaf("w", 40), leaf("b", 40), eps=1e-5)
    apart = mul(made[0], expand(sum(made[1], dims=(0,)), shape=x.shape))
    assert len(launches(apart, gelu(made[0]))) == 3
