"""Which nests of a kernel share a launch: as many launches as must wait for one another, and right values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from egcompile.codegen import Config, generate, launches, strewn
from egcompile.ir import Node
from egcompile.ops import (
    OpDef,
    Sample,
    add,
    amax,
    batch_moments,
    broadcast_to,
    exp,
    group_moments,
    mean,
    mul,
    reshape,
    sub,
    sum,
)
from egcompile.ops.channel_norm import group_norm_terms
from egcompile.schedule.kernel import Buffer, Kernel
from egcompile.schedule.together import SMALL
from egcompile.target import Target
from tests.codegen.harness import build, check, cubins
from tests.codegen.test_registry import CASES, kernel_of

H200 = Target.parse("cuda:90")
ARCHITECTURES = [80, 90, 100]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def launched(kernel: Kernel, config: Config | None = None) -> list[tuple[str, list[str]]]:
    """The functions that a kernel's launcher launches, in order, and their tensors."""
    text = generate(kernel, H200, config).text
    calls = re.findall(r"^    (\w+)\[\(.*?\)\]\((.*)\)$", text, re.MULTILINE)
    return [(name, [a for a in arguments.split(", ") if "=" not in a]) for name, arguments in calls]


def depth(kernel: Kernel) -> int:
    """The longest line of launches of which each reads what the one before writes."""
    inputs = {node.attr("name") for node in kernel.body.inputs}
    level: dict[str, int] = {}
    for _, tensors in launched(kernel):
        made = [name for name in tensors if name not in inputs]
        own = 1 + max((level.get(name, 0) for name in made), default=0)
        for name in made:
            level.setdefault(name, own)
    return max(level.values(), default=0)


def channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    _, c, h, w = shape
    return (c * h * w, 1, w * c, c)


def in_channels_last(kernel: Kernel) -> Kernel:
    """The kernel on images of which each pixel's channels lie side by side."""

    def turned(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        return tuple(Buffer(b.type, channels_last(b.type.shape)) if b.type.rank == 4 else b for b in buffers)

    return Kernel(kernel.name, kernel.body, turned(kernel.inputs), turned(kernel.outputs))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("op", "sample"), CASES)
def test_no_small_nest_has_a_launch_that_it_could_share(
    op: OpDef, sample: Sample, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any op, strewn memory in two reductions included."""
    monkeypatch.setattr(strewn, "SMALL", 1)
    kernel = kernel_of(op, sample, "f32")
    kernel = in_channels_last(kernel) if last else kernel
    assert len(launched(kernel)) == depth(kernel)


# ---- norms of channels, in the sizes of a model ----

IMAGES = (32, 256, 64, 64)


def moments(op: Callable[..., Any], shape: tuple[int, ...] = IMAGES) -> Kernel:
    return build(op, f"bf16[{','.join(map(str, shape))}]", strides=[channels_last(shape)])


def terms(n: int, c: int, groups: int) -> Kernel:
    sums = f"f32[{n},{c}]"
    return build(lambda t, a, w: group_norm_terms(t, a, w, groups, 64.0), sums, sums, f"bf16[{c}]")


MOMENTS = {
    "groups": lambda x: group_moments(x, 32, 1e-5),
    "one group": lambda x: group_moments(x, 1, 1e-5),
    "instances": lambda x: group_moments(x, 256, 1e-5),
    "batch": lambda x: batch_moments(x, 1e-5),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_moments_have_one_finalize(name: str) -> None:
    """Both sums over the same rows of partial results, and all that is made of them."""
    kernel = moments(MOMENTS[name])
    assert [function for function, _ in launched(kernel)] == ["_kernel", "_kernel_finalize"]
    assert generate(kernel, H200).text.count("@triton.jit\ndef _kernel") == 2


@pytest.mark.parametrize("config", [None, Config(block_rows=16, programs=3)], ids=str)
@pytest.mark.parametrize("groups", [1, 4, 16])
def test_moments_of_strewn_groups(
    groups: int, config: Config | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strewn, "SMALL", 2**16)
    kernel = moments(lambda x: group_moments(x, groups, 1e-5), (2, 32, 40, 40))
    assert len(launched(kernel, config)) == 2
    check(kernel, config, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 8, 32, 256])
def test_group_norm_terms_are_one_launch(groups: int) -> None:
    assert [function for function, _ in launched(terms(32, 256, groups))] == ["_kernel"]
    assert [function for function, _ in launched(terms(3, 256, groups))] == ["_kernel"]


@pytest.mark.parametrize("config", [None, Config(programs=3), Config(block_rows=2, num_warps=2)], ids=str)
def test_group_norm_terms(config: Config | None) -> None:
    for groups in (1, 4, 12):
        check(terms(5, 12, groups), config, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nests_do_not_spill(arch: int) -> None:
    for kernel in (
        moments(MOMENTS["groups"]),
        terms(32, 256, 32),
        build(several, "f32[60,500]", "f32[90,60]"),
    ):
        assert all(function["spills"] == 0 for function in cubins(kernel, arch))


# ---- several nests ----


def several(x: Node, y: Node) -> tuple[Node, ...]:
    """Sums along each axis, of both inputs; a softmax's sum; and what is pointwise."""
    top = amax(x, dims=(1,))
    e = exp(sub(x, broadcast_to(top, x.shape)))
    return sum(x, dims=(0,)), mean(y, dims=(1,)), sum(e, dims=(1,)), exp(y), mean(mul(x, x), dims=(0,))


@pytest.mark.parametrize("config", [None, Config(block_rows=4, programs=3), Config(num_warps=8)], ids=str)
@pytest.mark.parametrize("strides", [(), ((1, 37), (1, 20))], ids=["contiguous", "transposed"])
def test_nests_of_every_form_share_a_launch(
    strides: tuple[tuple[int, ...], ...], config: Config | None
) -> None:
    kernel = build(several, "f32[37,50]", "f32[20,33]", strides=strides)
    assert len(launched(kernel, config)) <= 2
    check(kernel, config, **CLOSE)


def test_programs_that_share_rows_are_counted_in_two_ways() -> None:
    """Partial sums of both, several programs along columns and rows, then both finalizes."""
    kernel = build(lambda x, y: (sum(x, dims=(0,)), mean(y, dims=(0,))), "f32[50,300]", "f32[90,310]")
    config = Config(block_rows=4, block_cols=64, programs=3)
    names = [function for function, _ in launched(kernel, config)]
    assert names == ["_kernel", "_kernel_finalize"]
    check(kernel, config, **CLOSE)


def test_large_nests_stay_apart() -> None:
    n = SMALL // 4
    kernel = build(lambda x, y: (sum(x, dims=(0,)), sum(y, dims=(0,))), f"f32[{n},2]", f"f32[{n},3]")
    first = [function for function, _ in launched(kernel) if "finalize" not in function]
    assert len(first) == 2


def test_a_launch_takes_no_more_tensors_than_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = build(lambda x, y: (sum(x, dims=(0,)), sum(y, dims=(1,))), "f32[5,6]", "f32[7,9]")
    assert len(launched(kernel)) == 1
    monkeypatch.setattr(launches, "MOST_TENSORS", 3)
    assert len(launched(kernel)) == 2


def test_what_waits_runs_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small nest shares the launch of the finalize of a large one, on which it does not wait."""
    monkeypatch.setattr(launches, "SMALL", 4000)
    kernel = build(lambda x, y: (sum(x, dims=(0,)), sum(y, dims=(1,))), "f32[500,16]", "f32[7,9]")
    config = Config(block_rows=8, programs=3)
    calls = launched(kernel, config)
    assert len(calls) == 2 and "y" in calls[1][1] and "x" not in calls[1][1]
    assert generate(kernel, H200, config).config is not None, "the large nest's, which is tuned"
    check(kernel, config, **CLOSE)


def test_a_shared_launch_has_no_tiles_to_tune() -> None:
    assert generate(terms(32, 256, 32), H200).config is None


def test_one_of_several_reads_a_sum_of_another() -> None:
    def chained(x: Node, y: Node) -> tuple[Node, ...]:
        total = sum(x, dims=(0,))
        centred = sub(x, broadcast_to(total, x.shape))
        return (
            sum(mul(centred, centred), dims=(0,)),
            sum(y, dims=(1,)),
            add(y, y),
            reshape(total, shape=(16,)),
        )

    kernel = build(chained, "f32[40,16]", "f32[7,9]")
    assert len(launched(kernel)) == depth(kernel)
    check(kernel, rtol=1e-4, atol=1e-4)


def test_views_of_more_memory_than_they_touch_share_a_launch() -> None:
    kernel = build(
        lambda x, y: (sum(x, dims=(0,)), sum(y, dims=(1,))),
        *("f32[9,8]", "f32[5,6]"),
        strides=[(2**20, 4), (1, 30)],
    )
    assert len(launched(kernel)) == 1
    check(kernel, **CLOSE)
