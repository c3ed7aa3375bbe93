"""Loop nests with reductions: rows, sums over rows, both at once, wide rows, and what needs several nests."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from egcompile.codegen import Config, KernelSource, division, generate
from egcompile.errors import CompileError
from egcompile.ir import Node
from egcompile.ops import (
    add,
    add_rms_norm,
    amax,
    amin,
    batch_moments,
    broadcast_to,
    cast,
    cat,
    constant,
    cross_entropy,
    cross_entropy_backward,
    gelu_backward,
    log_softmax,
    log_softmax_backward,
    mean,
    mul,
    neg,
    pad,
    permute,
    reshape,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_add,
    rsqrt,
    slice_,
    softmax,
    softmax_backward,
    sub,
    sum,
)
from egcompile.schedule.kernel import Kernel
from egcompile.target import Target
from tests.codegen.harness import build, check, run

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
SHARED = Config(block_rows=8, programs=3)
NARROW = Config(block_cols=32)


def source(kernel: Kernel, config: Config | None = None) -> KernelSource:
    return generate(kernel, Target.parse("cuda:90"), config)


def jit_functions(kernel: Kernel, config: Config | None = None) -> int:
    return source(kernel, config).text.count("@triton.jit\ndef _kernel")


def norm(x: Node, w: Node) -> Any:
    return rms_norm(x, w, eps=1e-5, cast_first=False)


def layer_norm(x: Node, w: Node, b: Node) -> tuple[Node, ...]:
    """LayerNorm over the last axis, written out."""
    last = (len(x.shape) - 1,)
    centre = mean(x, dims=last)
    centred = sub(x, broadcast_to(centre, x.shape))
    rstd = rsqrt(add(mean(mul(centred, centred), dims=last), constant(1e-5, centre)))
    scaled = mul(mul(centred, broadcast_to(rstd, x.shape)), broadcast_to(w, x.shape))
    return add(scaled, broadcast_to(b, x.shape)), centre, rstd


def layer_norm_backward(x: Node, w: Node, m: Node, r: Node, ct: Node) -> tuple[Node, ...]:
    last, lead = (len(x.shape) - 1,), tuple(range(len(x.shape) - 1))
    x_hat = mul(sub(x, broadcast_to(m, x.shape)), broadcast_to(r, x.shape))
    g = mul(ct, broadcast_to(w, x.shape))
    along = mul(x_hat, broadcast_to(mean(mul(g, x_hat), dims=last), x.shape))
    dx = mul(broadcast_to(r, x.shape), sub(sub(g, broadcast_to(mean(g, dims=last), x.shape)), along))
    dw, db = sum(mul(ct, x_hat), dims=lead), sum(ct, dims=lead)
    return dx, reshape(dw, shape=w.shape), reshape(db, shape=w.shape)


def group_norm(x: Node, w: Node, groups: int) -> tuple[Node, ...]:
    """GroupNorm of [N, C, H, W] without its shift."""
    n, c, h, width = x.shape
    grouped = reshape(x, shape=(n, groups, c // groups * h * width))
    centre = mean(grouped, dims=(2,))
    centred = sub(grouped, broadcast_to(centre, grouped.shape))
    rstd = rsqrt(add(mean(mul(centred, centred), dims=(2,)), constant(1e-5, centre)))
    x_hat = reshape(mul(centred, broadcast_to(rstd, grouped.shape)), shape=x.shape)
    return mul(x_hat, broadcast_to(reshape(w, shape=(c, 1, 1)), x.shape)), rstd


def batch_norm(x: Node, w: Node) -> tuple[Node, ...]:
    dims = (0, 2, 3)
    centre = mean(x, dims=dims)
    centred = sub(x, broadcast_to(centre, x.shape))
    rstd = rsqrt(add(mean(mul(centred, centred), dims=dims), constant(1e-5, centre)))
    x_hat = mul(centred, broadcast_to(rstd, x.shape))
    return mul(x_hat, broadcast_to(reshape(w, shape=(x.shape[1], 1, 1)), x.shape)), centre, rstd


# ---- rows ----


@pytest.mark.parametrize("n", [1, 7, 64, 1000])
@pytest.mark.parametrize("m", [1, 5, 133])
def test_row_norms(m: int, n: int) -> None:
    x, w, r = f"f32[{m},{n}]", f"f32[{n}]", f"f32[{m},1]"
    check(build(norm, x, w), **CLOSE)
    check(build(lambda x, s, w: add_rms_norm(x, s, w, eps=1e-5, cast_first=False), x, x, w), **CLOSE)
    check(build(layer_norm, x, w, w), rtol=1e-4, atol=1e-4)
    backward = build(lambda x, w, r, ct: rms_norm_backward(x, w, r, ct, cast_first=False), x, w, r, x)
    check(backward, SHARED, rtol=1e-4, atol=1e-4)
    skip = build(lambda x, w, r, ct, s: rms_norm_backward_add(x, w, r, ct, s, False), x, w, r, x, x)
    check(skip, SHARED, rtol=1e-4, atol=1e-4)
    check(build(layer_norm_backward, x, w, r, r, x), SHARED, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", ["f16", "f64"])
def test_row_norms_in_other_dtypes(dtype: str) -> None:
    tolerance = {"f16": 2e-2, "f64": 1e-12}[dtype]
    x, r = f"{dtype}[3,4,100]", f"{'f64' if dtype == 'f64' else 'f32'}[3,4,1]"
    for cast_first in (False, True):
        forward = build(lambda x, w, c=cast_first: rms_norm(x, w, 1e-5, c), x, f"{dtype}[100]")
        check(forward, rtol=tolerance, atol=tolerance)
        backward = build(
            lambda x, w, r, ct, c=cast_first: rms_norm_backward(x, w, r, ct, c), x, f"{dtype}[100]", r, x
        )
        check(backward, SHARED, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("config", [None, NARROW, Config(block_rows=4, block_cols=32)])
@pytest.mark.parametrize("n", [1, 7, 100])
def test_softmax_family(n: int, config: Config | None) -> None:
    x = f"f32[6,{n}]"
    check(build(lambda x: softmax(x, dim=1), x), config, **CLOSE)
    check(build(lambda x: log_softmax(x, dim=1), x), config, **CLOSE)
    check(build(lambda y, ct: softmax_backward(y, ct, dim=1), x, x), config, **CLOSE)
    check(build(lambda y, ct: log_softmax_backward(y, ct, dim=1), x, x), config, **CLOSE)


@pytest.mark.parametrize("config", [None, NARROW])
def test_cross_entropy(config: Config | None) -> None:
    def both(logits: Node, target: Node, ct: Node) -> tuple[Node, ...]:
        loss, lse = cross_entropy(logits, target, ignore_index=2)
        return loss, lse, cross_entropy_backward(logits, target, lse, ct, ignore_index=2)

    def average(logits: Node, target: Node) -> Node:
        return mean(cross_entropy(logits, target, ignore_index=-100)[0], dims=(0,))

    types = "f32[9,77]", "i64[9]"
    check(build(lambda x, t: cross_entropy(x, t, ignore_index=2), *types), config, low=0, high=5, **CLOSE)
    check(build(both, *types, "f32[9]"), config, low=0, high=5, **CLOSE)
    check(build(average, *types), config, low=0, high=5, **CLOSE)


def test_softmax_of_a_middle_axis() -> None:
    kernel = build(lambda x: softmax(x, dim=1), "f32[3,17,40]")
    assert "BLOCK_ROWS" in source(kernel).text
    check(kernel, **CLOSE)
    check(kernel, Config(block_cols=8), **CLOSE)


def test_rows_in_strided_memory() -> None:
    x, w = "f32[4,5,24]", "f32[24]"
    check(build(norm, x, w, strides=[(24, 96, 1)], out_strides=[(24, 96, 1)]), **CLOSE)
    check(build(norm, x, w, strides=[(0, 24, 1)]), **CLOSE)
    check(build(norm, x, w, strides=[(1, 96, 4)]), **CLOSE)
    backward = build(
        lambda x, w, r, ct: rms_norm_backward(x, w, r, ct, cast_first=False),
        x,
        w,
        "f32[4,5,1]",
        x,
        strides=[None, None, None, (0, 0, 0)],
    )
    check(backward, SHARED, rtol=1e-4, atol=1e-4)


def test_movement_around_a_row_reduction() -> None:
    x = "f32[6,4,10]"
    check(build(lambda x: permute(softmax(x, dim=2), perm=(1, 0, 2)), x), **CLOSE)
    check(build(lambda x: cast(permute(softmax(x, dim=2), perm=(1, 0, 2)), dtype=torch.float64), x), **CLOSE)
    check(build(lambda x: softmax(reshape(x, shape=(24, 10)), dim=1), x), **CLOSE)
    check(build(lambda x: softmax(permute(x, perm=(1, 2, 0)), dim=2), x), **CLOSE)


def test_group_norm() -> None:
    kernel = build(lambda x, w: group_norm(x, w, 4), "f32[3,8,5,6]", "f32[8]")
    assert jit_functions(kernel) == 1
    check(kernel, **CLOSE)
    check(kernel, NARROW, **CLOSE)
    channels_last = (240, 1, 48, 8)
    strides = {"strides": [channels_last], "out_strides": [channels_last]}
    check(build(lambda x, w: group_norm(x, w, 4), "f32[3,8,5,6]", "f32[8]", **strides), **CLOSE)


def test_nan_is_the_largest() -> None:
    kernel = build(lambda x: (amax(x, dims=(1,)), amin(x, dims=(1,))), "f32[3,10]")
    x = torch.rand(3, 10)
    x[1, 4] = float("nan")
    check(kernel, inputs=[x])
    check(kernel, Config(block_cols=4), inputs=[x])
    softened = build(lambda x: softmax(x, dim=1), "f32[3,10]")
    check(softened, inputs=[x], **CLOSE)
    check(softened, Config(block_cols=4), inputs=[x], **CLOSE)


# ---- sums over rows ----


@pytest.mark.parametrize("dims", [(0,), (0, 1), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("op", [sum, mean, amax, amin])
def test_reductions_over_any_axes(op: Callable[..., Node], dims: tuple[int, ...]) -> None:
    for shape in ("f32[5,7,33]", "f32[1,40,1]", "f32[300,3,2]"):
        kernel = build(lambda x: op(x, dims=dims), shape)
        check(kernel, **CLOSE)
        check(kernel, Config(block_rows=4, block_cols=4, programs=3), **CLOSE)


def test_gradient_of_a_bias_beside_the_pointwise_work() -> None:
    def body(ct: Node, pre: Node) -> tuple[Node, ...]:
        dpre = gelu_backward(ct, pre)
        return dpre, reshape(sum(dpre, dims=(0, 1)), shape=dpre.shape[-1:])

    kernel = build(body, "f32[4,50,24]", "f32[4,50,24]")
    text = source(kernel, SHARED).text
    assert text.count("tl.load(x_ptr") == 1
    check(kernel, SHARED, rtol=1e-4, atol=1e-4)


def test_sums_over_rows_share_a_nest_and_a_finalize() -> None:
    kernel = build(lambda x, y: (sum(x, dims=(0,)), sum(mul(x, y), dims=(0,))), "f32[90,40]", "f32[90,40]")
    assert jit_functions(kernel, SHARED) == 2
    check(kernel, SHARED, rtol=1e-4, atol=1e-4)


def test_loss_in_one_nest_and_a_finalize() -> None:
    def mse(x: Node, y: Node) -> Node:
        error = sub(x, y)
        return reshape(mean(mul(error, error), dims=(0, 1)), shape=())

    kernel = build(mse, "f32[700,30]", "f32[700,30]")
    assert jit_functions(kernel, SHARED) == 2
    check(kernel, SHARED, **CLOSE)


def test_backward_of_a_norm_is_one_pass_and_a_finalize() -> None:
    x = "bf16[8192,4096]"
    kernel = build(
        lambda x, w, r, ct, s: rms_norm_backward_add(x, w, r, ct, s, False),
        x,
        "bf16[4096]",
        "f32[8192,1]",
        x,
        x,
    )
    text = source(kernel).text
    assert jit_functions(kernel) == 2
    for name in "xyzuv":
        assert text.count(f"tl.load({name}_ptr") == 1
    assert text.index("total_acc +=") < text.index("tl.store(out0_ptr")


def test_square_shapes_are_not_mistaken() -> None:
    kernel = build(
        lambda x, w, r, ct: rms_norm_backward(x, w, r, ct, False),
        *["f32[40,40]", "f32[40]", "f32[40,1]", "f32[40,40]"],
    )
    assert jit_functions(kernel, SHARED) == 2
    check(kernel, SHARED, rtol=1e-4, atol=1e-4)


# ---- several nests ----


def test_statistics_of_channels() -> None:
    kernel = build(batch_norm, "f32[4,3,5,6]", "f32[3]")
    check(kernel, rtol=1e-4, atol=1e-4)
    large = build(batch_norm, "bf16[32,64,32,32]", "bf16[64]")
    assert jit_functions(large) > 1


def test_row_scaled_by_the_whole() -> None:
    def body(x: Node) -> tuple[Node, ...]:
        rows = mul(x, broadcast_to(amax(x, dims=(1,)), x.shape))
        return mul(rows, broadcast_to(mean(x, dims=(0,)), x.shape)), sum(rows, dims=(0, 1))

    check(build(body, "f32[20,30]"), rtol=1e-4, atol=1e-4)


def test_softmax_over_both_axes_in_turn() -> None:
    check(build(lambda x: softmax(softmax(x, dim=1), dim=0), "f32[12,20]"), **CLOSE)


def test_outputs_of_unrelated_sizes() -> None:
    def body(x: Node, y: Node) -> tuple[Node, ...]:
        return softmax(x, dim=1), mul(y, y), sum(y, dims=(0,))

    check(build(body, "f32[6,10]", "f32[7,3]"), **CLOSE)


@pytest.mark.parametrize("config", [NARROW, Config(block_rows=4, block_cols=32), Config(block_cols=64), None])
@pytest.mark.parametrize("op", [softmax, log_softmax, sum, mean, amax])
def test_what_many_columns_share(op: Callable[..., Node], config: Config | None) -> None:
    """Read once a tile where a tile lies within such a run: alone, and with what differs between points."""

    def of_runs(p: Node) -> Node:
        return reshape(broadcast_to(reshape(p, shape=(6, 4, 1)), (6, 4, 32)), shape=(6, 128))

    def reduced(x: Node) -> Node:
        return op(x, dim=1) if op in (softmax, log_softmax) else op(x, dims=(1,))

    def body(x: Node, p: Node) -> tuple[Node, ...]:
        both = add(x, of_runs(p))
        return reduced(of_runs(p)), reduced(both), mul(of_runs(p), softmax(both, dim=1))

    check(build(body, "f32[6,128]", "f32[6,4]"), config, **CLOSE)


@pytest.mark.parametrize("config", [NARROW, Config(block_rows=4, block_cols=32), Config(block_cols=16)])
def test_what_many_columns_share_in_a_part_of_the_row(config: Config) -> None:
    """The last tile is masked, a run is cut, or another operand is beside it."""

    def of_runs(p: Node) -> Node:
        return reshape(broadcast_to(reshape(p, shape=(6, 4, 1)), (6, 4, 32)), shape=(6, 128))

    def body(x: Node, p: Node) -> tuple[Node, ...]:
        cut = slice_(of_runs(p), axis=1, start=0, stop=100, step=1)
        beside = cat(of_runs(p), x, axis=1)
        padded = pad(of_runs(p), axis=1, before=3, after=5, step=1)
        return tuple(f(y, dim=1) for y in (cut, beside, padded) for f in (softmax, log_softmax))

    check(build(body, "f32[6,100]", "f32[6,4]"), config, **CLOSE)


@pytest.mark.parametrize("config", [None, NARROW, Config(block_rows=4, block_cols=8)])
@pytest.mark.parametrize("op", [sum, mean, amax, amin])
def test_a_reduction_behind_a_guard(op: Callable[..., Node], config: Config | None) -> None:
    """Of which a loop has the result already, for what reads it without one."""

    def body(x: Node, y: Node) -> tuple[Node, ...]:
        moved = sub(x, broadcast_to(op(x, dims=(1,)), x.shape))
        joined = cat(slice_(moved, 1, 0, 70, 1), y, axis=1)
        return mul(moved, joined), add(moved, pad(slice_(moved, 1, 5, 70, 1), 1, 3, 28, 1))

    check(build(body, "f32[6,96]", "f32[6,26]"), config, **CLOSE)


@pytest.mark.parametrize("config", [None, NARROW, Config(block_rows=4, block_cols=8)])
def test_losses_of_one_target(config: Config | None) -> None:
    """Rows whose target is no class are written too, whichever loss is computed first."""

    def loss(x: Node, target: Node) -> tuple[Node, ...]:
        each, lse = cross_entropy(x, target, ignore_index=-100)
        return each, cross_entropy_backward(x, target, lse, each, ignore_index=-100)

    kernel = build(lambda x, y: (*loss(x, y), *loss(mul(x, x), y)), "f32[6,96]", "i64[6]")
    check(kernel, config, inputs=[torch.randn(6, 96), torch.tensor([5, -100, 0, 95, -100, 33])], **CLOSE)


def test_a_weight_of_many_columns_is_no_vector() -> None:
    kernel = build(lambda x, w: group_norm(x, w, 32), "bf16[32,256,64,64]", "bf16[256]")
    text = source(kernel).text
    assert re.search(r"tl.load\(y_ptr \+ \w+ \* 8 \+ start // BLOCK_COLS\)", text), text
    ragged = build(lambda x, w: group_norm(x, w, 32), "bf16[32,256,62,62]", "bf16[256]")
    text = source(ragged).text
    assert "RUN=4" in text and "run // 961" in text, text


def policies(kernel: Kernel) -> list[tuple[str, str]]:
    """Of each load with an eviction policy in the first nest, which loops over a row: parameter, policy."""
    first = source(kernel).text.split("@triton.jit")[1]
    assert "for start in" in first
    return re.findall(r'tl\.load\((\w+)_ptr\b[^\n]*?eviction_policy="evict_(\w+)"', first)


def test_rows_stay_in_the_l2_until_their_last_loop() -> None:
    x, w = "bf16[1024,65536]", "bf16[65536]"
    assert policies(build(norm, x, w)) == [("x", "last"), ("x", "first")]
    assert policies(build(norm, "bf16[1024,65600]", "bf16[65600]")) == [("x", "last"), ("x", "first")]
    assert policies(build(lambda x: softmax(x, dim=1), x)) == [("x", "last"), ("x", "first")]
    assert policies(build(lambda x: sum(x, dims=(1,)), x)) == []  # one loop

    def by_its_first(x: Node, y: Node) -> Node:
        row = add(slice_(x, axis=1, start=0, stop=1, step=1), mean(x, dims=(1,)))
        return mul(y, broadcast_to(row, y.shape))

    assert policies(build(by_its_first, x, x)) == []  # of which the second loop reads only y


def test_rows_that_a_later_nest_reads_ask_for_less() -> None:
    def backward(n: int) -> Kernel:
        x, w, s = f"f32[1024,{n}]", f"f32[{n}]", "f32[1024,1]"
        return build(layer_norm_backward, x, w, s, s, x)

    assert policies(backward(16384)) == []
    found = policies(backward(32768))
    assert sorted(found[:2]) == [("v", "last"), ("x", "last")]  # v: the cotangent
    assert sorted(found[2:]) == [("v", "first"), ("x", "first")]


def test_wide_rows_with_column_sums_take_two_nests() -> None:
    x = "f32[6,100]"
    kernel = build(lambda x, w, r, ct: rms_norm_backward(x, w, r, ct, False), x, "f32[100]", "f32[6,1]", x)
    check(kernel, NARROW, rtol=1e-4, atol=1e-4)


def test_columns_for_programs_in_twos_are_one_programs() -> None:
    """Half as wide, and no other kernel adds up."""
    assert jit_functions(build(lambda x: sum(x, dims=(0,)), "bf16[2048,65536]")) == 1
    assert jit_functions(build(lambda x: sum(x, dims=(0,)), "bf16[2048,16384]")) == 2
    x = "bf16[2048,32768]"
    backward = build(lambda *xs: rms_norm_backward(*xs, False), x, "bf16[32768]", "f32[2048,1]", x)
    assert jit_functions(backward) == 2


def test_empty_axes() -> None:
    check(build(lambda x: sum(x, dims=(1,)), "f32[3,0]"))
    check(build(lambda x: mean(x, dims=(1,)), "f32[3,0]"))
    check(build(lambda x: softmax(x, dim=1), "f32[0,4]"))
    check(build(lambda x: sum(x, dims=(0,)), "f32[0,4]"))
    with pytest.raises(CompileError, match="empty"):
        source(build(lambda x: amax(x, dims=(1,)), "f32[3,0]"))


def test_same_bits_twice() -> None:
    kernel = build(
        lambda x, y: (sum(mul(x, y), dims=(0,)), mean(x, dims=(0, 1))), "f32[200,40]", "f32[200,40]"
    )
    inputs = [torch.randn(200, 40), torch.randn(200, 40)]
    first, second = run(kernel, inputs, SHARED), run(kernel, inputs, SHARED)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_statistics_of_low_precision_rows_are_wide() -> None:
    """A sum of squares in fp16 would overflow."""
    kernel = build(
        lambda x: rms_norm(x, constant(1.0, reshape(sum(x, dims=(0,)), shape=(600,))), 1e-5, False),
        "f16[2,600]",
    )
    x = torch.full((2, 600), 200.0, dtype=torch.float16)
    y, rstd = run(kernel, [x])
    torch.testing.assert_close(y, torch.ones_like(y))
    torch.testing.assert_close(rstd, torch.full_like(rstd, 1 / 200.0))


def test_moments_in_one_pass_do_not_cancel() -> None:
    channels_last = (2400, 1, 80, 4)
    for strides in ([None], [channels_last]):
        kernel = build(lambda x: batch_moments(x, 1e-5), "f32[40,4,30,20]", strides=strides)
        # the rows once; a first and a last element for the sums, and again for what is made of them
        assert source(kernel).text.count("tl.load(x_ptr") == 5
        check(kernel, low=1000.0, high=1001.0, rtol=1e-4, atol=1e-6)
    wide = build(lambda x: group_norm(x, constant(1.0, reshape(sum(x, (0, 2, 3)), (8,))), 4), "f32[3,8,5,6]")
    check(wide, NARROW, low=1000.0, high=1001.0, rtol=1e-3, atol=1e-3)


def test_what_no_nest_computes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no recursion without end."""
    kernel = build(lambda x: sum(x, dims=(0,)), "f32[4,5]")
    anchor = kernel.body.outputs[0]
    monkeypatch.setattr(division, "choose_nest", lambda *_: (None, [0], anchor))
    with pytest.raises(CompileError, match="no nest of kernel computes"):
        generate(kernel, Target.parse("cuda:90"))


def test_a_row_of_column_means_beside_other_work() -> None:
    """The reduction that everything waits for waits for another itself."""

    def body(x: Node) -> tuple[Node, ...]:
        column = mean(x, dims=(0,))
        row = sum(column, dims=(2,))
        return neg(column), mul(broadcast_to(row, column.shape), column), mul(x, x)

    check(build(body, "f32[3,8,5]"), rtol=1e-5, atol=1e-5)
