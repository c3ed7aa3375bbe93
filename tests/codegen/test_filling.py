"""Work on much memory is spread over the GPU: no width of rows is left to a few programs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from egcompile.codegen import generate
from egcompile.ops import (
    add,
    broadcast_to,
    layer_norm_backward,
    mul,
    relu,
    rms_norm,
    rms_norm_backward,
    softmax,
    softmax_backward,
    sum,
)
from egcompile.target import TARGETS
from tests.codegen.harness import build

POINTS = 2**26
WIDTHS = [n for k in range(6, 17) for n in (2**k, 3 * 2 ** (k - 1))]
BODIES: dict[str, tuple[str, Callable[..., Any]]] = {
    # of activations x[rows, cols], vectors w[cols] and r[rows, 1]
    "rms_norm": ("xw", lambda x, w: rms_norm(x, w, eps=1e-5, cast_first=False)),
    "rms_norm_backward": ("xwrx", lambda x, w, r, ct: rms_norm_backward(x, w, r, ct, cast_first=False)),
    "layer_norm_backward": ("xwrrx", layer_norm_backward),
    "softmax": ("x", lambda x: softmax(x, dim=1)),
    "softmax_backward": ("xx", lambda y, ct: softmax_backward(y, ct, dim=1)),
    "bias_relu": ("xw", lambda x, w: relu(add(x, broadcast_to(w, x.shape)))),
    "column_sum": ("x", lambda x: sum(x, dims=(0,))),
    "row_sum": ("x", lambda x: sum(x, dims=(1,))),
    "product_and_sum": ("xx", lambda x, y: (mul(x, y), sum(mul(x, y), dims=(0,)))),
}


@pytest.mark.parametrize("target", [name for name, t in TARGETS.items() if t.kind == "cuda"])
@pytest.mark.parametrize("name", BODIES)
def test_programs_fill_the_gpu(name: str, target: str) -> None:
    operands, body = BODIES[name]
    short: dict[int, int] = {}
    for width in WIDTHS:
        rows = POINTS // width
        types = {"x": f"bf16[{rows},{width}]", "w": f"bf16[{width}]", "r": f"f32[{rows},1]"}
        text = generate(build(body, *(types[o] for o in operands)), TARGETS[target]).text
        grids = [[int(n) for n in g.split(",") if n] for g in re.findall(r"\[\(([\d, ]+)\)\]\(", text)]
        if (programs := math.prod(grids[0])) < TARGETS[target].sms // 2:
            short[width] = programs
    assert not short


@pytest.mark.parametrize("target", [name for name, t in TARGETS.items() if t.kind == "cuda"])
@pytest.mark.parametrize("channels", [3, 16, 33, 64, 66, 96, 131, 256, 700])
@pytest.mark.parametrize("count", [1, 2])
def test_sums_of_images_by_channel_fill_the_gpu(count: int, channels: int, target: str) -> None:
    """However many channels there are, as many programs as SMs, or nearly, share them."""
    x = f"bf16[{POINTS // (channels * 3136)},{channels},56,56]"
    kernel = build(lambda *xs: sum(xs[0] if count == 1 else mul(*xs), dims=(0, 2, 3)), *[x] * count)
    (grid, *_) = re.findall(r"\[\(([\d, ]+)\)\]\(", generate(kernel, TARGETS[target]).text)
    programs = math.prod(int(n) for n in grid.split(",") if n)
    assert programs >= 0.9 * TARGETS[target].sms
