"""Large kernels over the same elements become one: which do, and that it is still the same program."""

from __future__ import annotations

import pytest
import torch

from egcompile.extract import extract
from egcompile.ir.node import Node
from egcompile.ops import add, amax, evaluate, exp, expand, mul, reshape, sin, sub, sum, tanh, transpose
from egcompile.schedule import schedule
from egcompile.schedule.kernel import Launch, Program
from egcompile.target import Target
from tests.extract.builder import egraph, forward, leaf
from tests.schedule.interpret import run_program

H200 = Target.parse("cuda:90")
LARGE = (512, 1024)


def launches(*outputs: Node) -> list[Launch]:
    """Those of the program that computes `outputs`, whose values are checked."""
    made = schedule(extract(egraph(forward(*outputs)), H200), H200).forward
    inputs = [torch.randn(made.buffers[n].type.shape).to(made.buffers[n].type.dtype) for n in made.inputs]
    for found, want in zip(run_program(made, inputs), evaluate(forward(*outputs).graph, inputs), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-3)
    return _launches(made)


def _launches(program: Program) -> list[Launch]:
    return [step for step in program.steps if isinstance(step, Launch)]


def test_two_readers_of_one_value_read_it_once() -> None:
    x, y = leaf("x", *LARGE), leaf("y", *LARGE)
    (launch,) = launches(mul(sin(x), y), tanh(add(x, y)))
    assert (len(launch.inputs), len(launch.outputs)) == (2, 2)


def test_what_one_writes_for_the_other_alone_stays_on_chip() -> None:
    """A chain's two gradients: `g` is neither's own, and no output of the one kernel."""
    x, y, row = leaf("x", *LARGE), leaf("y", *LARGE), leaf("row", 1, LARGE[1])
    wide = expand(row, shape=LARGE)
    g = mul(y, tanh(mul(x, wide)))
    (launch,) = launches(mul(g, wide), sum(mul(g, x), dims=(0,)))
    assert len(launch.outputs) == 2


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_a_sum_and_pointwise_work(dims: tuple[int, ...]) -> None:
    x, y = leaf("x", *LARGE), leaf("y", *LARGE)
    assert len(launches(mul(sin(x), y), sum(mul(x, y), dims=dims))) == 1


def test_transposed_and_reshaped_readers() -> None:
    x, y = leaf("x", *LARGE), leaf("y", *LARGE[::-1])
    across = transpose(y)
    assert len(launches(mul(x, across), transpose(add(sin(x), across)))) == 1
    flat = reshape(x, shape=(LARGE[0] * LARGE[1],))
    assert len(launches(sin(x), tanh(flat))) == 1


def test_sums_along_different_axes_stay_apart() -> None:
    x = leaf("x", *LARGE)
    assert len(launches(sum(sin(x), dims=(0,)), sum(tanh(x), dims=(1,)))) == 2


def test_what_needs_a_whole_sum_runs_after_it() -> None:
    x = leaf("x", *LARGE)
    top = amax(x, dims=(0,))
    first, second = launches(exp(sub(x, expand(top, shape=LARGE))), top)
    assert first.kernel.name.startswith("amax") and not second.kernel.name.startswith("amax")


def test_other_sizes_and_unrelated_work_stay_apart() -> None:
    x, y, z = leaf("x", *LARGE), leaf("y", *LARGE), leaf("z", 2 * LARGE[0], LARGE[1])
    assert len(launches(sin(x), tanh(y))) == 2
    assert len(launches(sin(z), tanh(add(sin(x), y)))) == 2


def test_the_unfused_plan_keeps_them_apart() -> None:
    x = leaf("x", *LARGE)
    found = extract(egraph(forward(sin(x), tanh(x))), H200, mode="unfused")
    assert len(_launches(schedule(found, H200).forward)) == 2
