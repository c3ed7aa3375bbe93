"""Small kernels that share a launch: which do, when they run, and that it is still the same program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import egcompile
from egcompile.extract import extract
from egcompile.ir.node import Node
from egcompile.ops import add, cast, evaluate, exp, expand, full, matmul, mul, relu, slice_, sum
from egcompile.schedule import schedule
from egcompile.schedule.kernel import Buffer, Call, Launch, Program, Schedule
from egcompile.schedule.together import MOST_TENSORS, SMALL
from egcompile.target import Target
from tests.extract.builder import egraph, forward, leaf
from tests.schedule.interpret import run_program

H200 = Target.parse("cuda:90")


def plan(*outputs: Node, mode: str = "exact") -> tuple[Schedule, int]:
    """The schedule, and how many kernels were planned."""
    found = extract(egraph(forward(*outputs)), H200, mode=mode)  # type: ignore[arg-type]
    made = schedule(found, H200)
    inputs = [torch.randn(b.type.shape).to(b.type.dtype) for b in _inputs(made.forward)]
    results = run_program(made.forward, inputs)
    expected = evaluate(forward(*outputs).graph, inputs)
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b)
    return made, len(found.kernels)


def _inputs(program: Program) -> list[Buffer]:
    return [program.buffers[name] for name in program.inputs]


def steps(program: Program) -> list[Launch | Call]:
    return [s for s in program.steps if isinstance(s, Launch | Call)]


def vectors(count: int, size: int = 64) -> list[Node]:
    return [leaf(f"v{i}", size + i % 3) for i in range(count)]


def test_independent_small_updates_are_one_launch() -> None:
    made, planned = plan(*(mul(v, full(0.9, v.shape, v.dtype)) for v in vectors(20)))
    assert planned == 20
    assert len(steps(made.forward)) == 1
    assert made.shared == 19


def test_other_dtypes_and_sizes_share_too() -> None:
    count = leaf("count", dtype=torch.int64)
    w = leaf("w", 7, 5, dtype=torch.bfloat16)
    made, _ = plan(add(count, full(1, (), torch.int64)), cast(w, torch.float32), exp(leaf("x", 33)))
    (launch,) = steps(made.forward)
    assert isinstance(launch, Launch)
    assert launch.kernel.name.startswith("foreach_")


def test_large_kernels_stay_apart() -> None:
    x, y = (leaf(name, SMALL // 8 + 1) for name in "xy")
    made, planned = plan(relu(x), relu(y))
    assert planned == len(steps(made.forward)) == 2
    assert made.shared == 0


def test_a_small_view_of_large_memory_is_not_held_back() -> None:
    """Its kernel would keep all of that memory alive."""
    x = leaf("x", 512, 512)
    large = exp(x)
    made, planned = plan(exp(slice_(large, 0, 0, 2, 1)), exp(leaf("y", 3)), sum(large, dims=(0, 1)))
    assert planned == len(steps(made.forward))


def test_what_is_waited_for_runs_before_its_reader() -> None:
    """Each product waits for a vector; what nobody waits for rides along with the first."""
    x = leaf("x", 512, 512)
    updates = [mul(v, v) for v in vectors(6)]
    w = [leaf(f"w{i}", 512, 64) for i in range(2)]
    products = [matmul(x, exp(each)) for each in w]
    made, planned = plan(*products, *updates)
    assert [type(s) for s in steps(made.forward)] == [Launch, Call, Call]
    assert made.shared == planned - 3


def test_a_chain_of_small_kernels_is_a_launch_each() -> None:
    a, b = leaf("a", 8, 8), leaf("b", 8, 8)
    first = exp(a)
    made, planned = plan(first, exp(matmul(first, b)), exp(b))
    assert planned == 4
    assert len(steps(made.forward)) == 3, "exp(b) waits for either of the others"


def test_a_launch_has_a_limit_of_arguments() -> None:
    made, planned = plan(*(exp(v) for v in vectors(MOST_TENSORS)))
    assert planned == MOST_TENSORS
    assert len(steps(made.forward)) == 2
    for launch in steps(made.forward):
        assert len(launch.inputs) + len(launch.outputs) <= MOST_TENSORS


def test_equal_groups_are_one_kernel() -> None:
    """As BatchNorm has it: of each layer's sums, two updates, and a weight that the next layer waits for."""
    value, outputs = leaf("x", 4096, 64), []
    for i in range(3):
        m, n, w = leaf(f"m{i}", 1, 64), leaf(f"n{i}", 1, 64), leaf(f"w{i}", 64, 64)
        total = sum(value, dims=(0,))
        updates = [mul(total, m), add(total, n)]
        outputs += updates if i % 2 else updates[::-1]
        value = matmul(value, mul(w, expand(total, (64, 64))))
    made, planned = plan(value, *outputs)
    shared = [s.kernel for s in steps(made.forward) if isinstance(s, Launch) and len(s.outputs) > 1]
    assert len(shared) == 3
    assert len(set(shared)) == 1
    assert planned - made.shared == 9


def test_the_unfused_plan_keeps_each_kernel() -> None:
    made, planned = plan(*(exp(v) for v in vectors(5)), mode="unfused")
    assert planned == len(steps(made.forward)) == 5


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_running_statistics_are_no_launches_of_their_own(target: str) -> None:
    """In training a BatchNorm updates two vectors and a counter: none is a launch beside the layers'."""
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())))
    traced = egcompile.trace(model, (torch.randn(4, 8, 24, 24),))
    made = egcompile.optimize(traced, target=target).compiled()
    assert made.schedule.shared >= 3 * 4 - 1
    assert "share" in egcompile.optimize(traced, target=target).explain()


def test_a_batch_norms_root_is_the_end_of_its_sums_kernel() -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    traced = egcompile.trace(model, (torch.randn(32, 8, 64, 64),))
    made = egcompile.optimize(traced, target="cuda:90").compiled().schedule
    assert made.backward is not None
    bodies = [s.kernel.body for p in (made.forward, made.backward) for s in p.steps if isinstance(s, Launch)]
    names = [node.op.name for body in bodies for node in body.nodes]
    assert "batch_moments" in names
    assert "rsqrt" not in names
