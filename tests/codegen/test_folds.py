"""Tiles folded into runs of neighbours that share an element of some input, as a channel's weight."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from egcompile.codegen import Config, generate
from egcompile.codegen.heuristics import fold
from egcompile.ir import Node
from egcompile.ops import (
    add,
    amax,
    broadcast_to,
    exp,
    mean,
    mul,
    pad,
    reshape,
    softmax,
    sub,
    sum,
)
from egcompile.schedule.kernel import Kernel
from egcompile.target import Target
from tests.codegen.harness import build, check, cubins
from tests.codegen.test_loops import CLOSE, group_norm


def text_of(kernel: Kernel, config: Config | None = None) -> str:
    return generate(kernel, Target.parse("cuda:90"), config).text


def by_channel(w: Node, x: Node) -> Node:
    return broadcast_to(reshape(w, shape=(x.shape[1], 1, 1)), x.shape)


def scaled(x: Node, w: Node, b: Node) -> Node:
    return add(mul(exp(x), by_channel(w, x)), by_channel(b, x))


@pytest.mark.parametrize(
    ("runs", "block", "expected"),
    [
        ((), 512, 0),
        ((0, 1), 512, 0),
        ((196,), 512, 4),
        ((1024, 10240), 16384, 1024),
        ((3136, 1), 8192, 64),
        ((49,), 512, 0),
        ((49, 256), 512, 256),
        ((2**20,), 512, 512),
    ],
)
def test_the_fold_divides_a_tile_and_what_shares(runs: tuple[int, ...], block: int, expected: int) -> None:
    assert fold(runs, block) == expected


PLANES = [(14, 14), (16, 16), (20, 20), (7, 7), (6, 6), (8, 40), (1, 12)]


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("config", [None, Config(block_cols=64), Config(block_cols=1024)])
def test_pointwise_work_with_an_element_a_channel(plane: tuple[int, int], config: Config | None) -> None:
    shape = f"f32[2,6,{plane[0]},{plane[1]}]"
    kernel = build(scaled, shape, "f32[6]", "f32[6]")
    check(kernel, config, **CLOSE)
    text, folds = text_of(kernel, config), math.prod(plane) % 4 == 0
    assert ("RUN" in text) == folds
    if folds:
        (index,) = set(re.findall(r"[yz]_ptr \+ (\w+)", text))
        assert re.search(rf"{index} = run( // \d+)?( % 6)?\n", text), text


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("config", [None, Config(block_cols=32), Config(block_cols=64, num_stages=2)])
def test_rows_with_an_element_a_channel(plane: tuple[int, int], config: Config | None) -> None:
    """A GroupNorm's, held whole or in tiles."""
    kernel = build(lambda x, w: group_norm(x, w, 2), f"f32[3,6,{plane[0]},{plane[1]}]", "f32[6]")
    check(kernel, config, **CLOSE)


REDUCED = {
    "sum": lambda x, s: sum(add(x, s), dims=(1,)),
    "of shares alone": lambda x, s: add(x, broadcast_to(sum(s, dims=(1,)), x.shape)),
    "largest of shares alone": lambda x, s: sub(x, broadcast_to(amax(s, dims=(1,)), x.shape)),
    "softmax": lambda x, s: softmax(add(x, s), dim=1),
    "softmax of shares alone": lambda x, s: mul(x, softmax(s, dim=1)),
    "over rows": lambda x, s: (sum(mul(x, s), dims=(0,)), mul(x, s)),
    "over all": lambda x, s: (sum(s, dims=(0, 1)), add(x, s)),
    "mean": lambda x, s: sub(x, broadcast_to(mean(mul(s, s), dims=(1,)), x.shape)),
}


def reduced(name: str, n: int, run: int) -> Kernel:
    """Nine rows, of which `run` neighbours share each of `n` elements of another tensor."""

    def body(x: Node, s: Node) -> Any:
        shared = reshape(broadcast_to(reshape(s, shape=(9, n, 1)), (9, n, run)), shape=(9, n * run))
        return REDUCED[name](x, shared)

    return build(body, f"f32[9,{n * run}]", f"f32[9,{n}]")


@pytest.mark.parametrize("config", [None, Config(block_cols=32), Config(block_rows=4, block_cols=32)])
@pytest.mark.parametrize("cols", [(6, 16), (5, 12), (4, 32), (3, 49)])
@pytest.mark.parametrize("name", REDUCED)
def test_reductions_of_what_runs_share(name: str, cols: tuple[int, int], config: Config | None) -> None:
    """Each of a run's points counts, of which a folded tile has one value."""
    check(reduced(name, *cols), config, **CLOSE)


@pytest.mark.parametrize("config", [Config(block_rows=1), Config(block_rows=1, block_cols=32)])
@pytest.mark.parametrize("name", REDUCED)
def test_folded_reductions_compile(name: str, config: Config) -> None:
    """Whole rows and tiles of them, whose last one overhangs: the compiler is stricter with shapes."""
    kernel = reduced(name, 5, 12)
    assert "RUN" in text_of(kernel, config)
    assert cubins(kernel, 90, config)


def test_guards_are_not_folded() -> None:
    """What is padded has lanes without an element; their tiles stay as they are."""

    def padded(x: Node, w: Node) -> Node:
        wide = pad(x, axis=0, before=1, after=1, step=1)
        return mul(wide, by_channel(w, wide))

    kernel = build(padded, "f32[2,6,16,16]", "f32[6]")
    check(kernel, None, **CLOSE)
    assert "RUN" not in text_of(kernel)


def test_offsets_of_large_tensors_are_wide() -> None:
    kernel = build(scaled, "bf16[65536,320,16,16]", "bf16[320]", "bf16[320]")
    (run,) = re.findall(r"run = (.*)", text_of(kernel))
    assert ".to(tl.int64)" in run
