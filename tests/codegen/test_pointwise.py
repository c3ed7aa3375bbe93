"""Pointwise kernels: movement as index maps, strided and broadcast memory, dtypes, several outputs."""

from __future__ import annotations

import re

import pytest
import torch

from egcompile.codegen import generate
from egcompile.ir import Node
from egcompile.ops import (
    add,
    broadcast_to,
    cast,
    cat,
    constant,
    eq,
    expand,
    gelu,
    iota,
    logical_and,
    lt,
    mul,
    ne,
    neg,
    pad,
    permute,
    pow,
    relu,
    reshape,
    silu,
    slice_,
    stop_gradient,
    sub,
    swiglu,
    tanh,
    transpose,
    where,
)
from egcompile.target import Target
from tests.codegen.harness import build, check, random_inputs, run


@pytest.mark.parametrize("shape", ["1", "7", "1000", "3,1,5", "2,3,4,5", ""])
def test_shapes(shape: str) -> None:
    x = f"f32[{shape}]"
    check(build(lambda a, b: (silu(add(a, b)), mul(a, b)), x, x))


def test_nothing_to_do_for_no_elements() -> None:
    kernel = build(lambda a: neg(a), "f32[3,0]")
    assert "triton" not in generate(kernel, Target.parse("cuda:90")).text
    check(kernel)


def test_strided_and_broadcast_memory() -> None:
    x = "f32[4,6,8]"
    check(build(add, x, x, strides=[(1, 4, 24), (0, 8, 1)]))
    check(build(add, x, x, strides=[(96, 16, 2), (0, 0, 0)]))
    check(build(add, x, x, strides=[(8, 32, 1), None], out_strides=[(1, 32, 4)]))


def test_output_memory_order_is_iterated() -> None:
    kernel = build(relu, "f32[2,6,2,5]", strides=[(60, 1, 30, 6)], out_strides=[(60, 1, 30, 6)])
    text = generate(kernel, Target.parse("cuda:90")).text
    assert "x_ptr + offsets" in text and "out0_ptr + offsets" in text
    check(kernel)


def test_transposed_input_is_read_along_its_memory() -> None:
    kernel = build(lambda a, b: add(transpose(a), b), "f32[70,100]", "f32[100,70]")
    assert "BLOCK_ROWS" in generate(kernel, Target.parse("cuda:90")).text
    check(kernel)
    check(build(lambda a: neg(permute(a, perm=(2, 0, 1))), "f32[3,20,33]"))
    check(build(lambda a: neg(permute(a, perm=(1, 0, 2))), "f32[9,20,33]"))
    check(build(lambda a: permute(neg(a), perm=(0, 2, 1)), "f32[3,20,33]"))


def test_reshape_between_transposes() -> None:
    def heads(x):  # type: ignore[no-untyped-def]
        return permute(reshape(x, shape=(2, 5, 3, 4)), perm=(0, 2, 1, 3))

    check(build(lambda x: heads(neg(x)), "f32[2,5,12]"))
    check(build(lambda x: reshape(permute(neg(x), perm=(0, 2, 1, 3)), shape=(2, 5, 12)), "f32[2,3,5,4]"))
    check(build(lambda x: reshape(transpose(x), shape=(3, 8)), "f32[6,4]"))


def test_slices_pads_and_cats() -> None:
    def rotate_half(x):  # type: ignore[no-untyped-def]
        half = x.shape[-1] // 2
        low = slice_(x, axis=1, start=0, stop=half, step=1)
        high = slice_(x, axis=1, start=half, stop=2 * half, step=1)
        return cat(neg(high), low, axis=1)

    check(build(lambda x: add(rotate_half(x), x), "f32[5,12]"))
    check(build(lambda x: pad(x, axis=1, before=3, after=2, step=2), "f32[3,6,4]"))
    check(build(lambda x: pad(reshape(x, shape=(2, 9)), axis=0, before=0, after=3, step=1), "f32[3,6]"))
    check(build(lambda x: slice_(pad(x, axis=0, before=2, after=2, step=1), 0, 1, 6, 2), "f32[3,4]"))
    check(build(lambda x, y, z: cat(x, mul(y, y), z, axis=0), "f32[2,3]", "f32[4,3]", "f32[0,3]"))
    check(build(lambda x, y, z: mul(cat(x, y, axis=0), z), "f32[2,0]", "f32[4,0]", "f32[6,0]"))
    nested = build(
        lambda x, y: cat(pad(x, axis=0, before=1, after=0, step=1), cat(y, x, axis=0), axis=1),
        "f32[2,3]",
        "f32[1,3]",
    )
    check(nested)


def test_several_outputs_of_different_shapes() -> None:
    check(build(lambda a: (neg(a), reshape(relu(a), shape=(12,)), transpose(silu(a))), "f32[3,4]"))
    check(build(lambda a, b: (neg(a), relu(b)), "f32[3,4]", "f32[5]"))


def test_one_load_for_outputs_that_lie_differently() -> None:
    kernel = build(lambda a: (neg(a), permute(relu(a), perm=(1, 0))), "f32[30,40]")
    assert generate(kernel, Target.parse("cuda:90")).text.count("tl.load") == 1
    check(kernel)


def test_common_subexpressions_are_computed_once() -> None:
    kernel = build(lambda a, b: (mul(gelu(a), b), add(gelu(a), b)), "f32[16]", "f32[16]")
    assert generate(kernel, Target.parse("cuda:90")).text.count("tl.erf") == 1
    check(kernel)


@pytest.mark.parametrize("dtype", ["f16", "f32", "f64"])
def test_floating_dtypes(dtype: str) -> None:
    x = f"{dtype}[37]"
    tolerance = {"f16": 4e-3, "f32": 2e-6, "f64": 1e-13}[dtype]
    kernel = build(lambda a, b: mul(add(a, constant(0.1, a)), tanh(b)), x, x)
    check(kernel, rtol=tolerance, atol=tolerance)


def test_values_stay_wide_until_a_cast() -> None:
    one, tiny = torch.full((8,), 1.0, dtype=torch.float16), torch.full((8,), 2e-4, dtype=torch.float16)
    wide = build(lambda a, b: add(add(a, b), neg(a)), "f16[8]", "f16[8]")
    (result,) = run(wide, [one, tiny])
    torch.testing.assert_close(result, tiny, rtol=1e-2, atol=0)

    def rounded(a, b):  # type: ignore[no-untyped-def]
        total = cast(cast(add(a, b), dtype=torch.float32), dtype=torch.float16)
        return add(total, neg(a))

    (result,) = run(build(rounded, "f16[8]", "f16[8]"), [one, tiny])
    assert result.eq(0).all()


def test_integers_and_booleans() -> None:
    i = "i64[3,5]"
    check(build(lambda a, b: (add(mul(a, b), constant(-3, a)), lt(a, b)), i, i), low=-9, high=9)
    check(build(lambda a: ne(a, constant(-100, a)), "i64[7]"), low=-101, high=-99)
    check(
        build(lambda a, b, c: where(logical_and(a, b), c, constant(1.5, c)), "bool[9]", "bool[9]", "f64[9]")
    )
    check(build(lambda a: cast(a, dtype=torch.float32), "bool[9]"))
    check(build(lambda a: cast(a, dtype=torch.bool), "f32[9]"))
    check(build(lambda a: cast(a, dtype=torch.int32), "f32[50]"), low=-9, high=9)
    check(build(lambda a: cast(a, dtype=torch.int64), "u8[50]"), low=0, high=200)
    check(build(lambda a: add(a, iota(shape=(3, 5), axis=1, dtype=torch.int64)), i))
    check(build(lambda a: constant(1.0, a), "f32[5]"))
    check(build(lambda a: constant(1, a), "bool[5]"))


def test_constants_fold_and_keep_fp64() -> None:
    third = 1.0 / 3.0
    check(build(lambda a: where(lt(a, constant(0.0, a)), constant(third, a), constant(-third, a)), "f64[20]"))
    text = generate(
        build(lambda a: mul(a, add(constant(0.25, a), constant(0.5, a))), "f32[8]"), Target.parse("cuda:90")
    ).text
    assert "0.75" in text


def test_powers_by_constants() -> None:
    for exponent in (2.0, 3.0, 0.5, -1.0):
        check(build(lambda a, e=exponent: pow(a, constant(e, a)), "f64[20]"), low=0.5, high=2.0)


def test_special_values() -> None:
    kernel = build(lambda a: (relu(a), tanh(a), swiglu(a, a)), "f32[6]")
    values = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 100.0, -100.0])
    check(kernel, inputs=[values.to(random_inputs(kernel)[0].device)])


def test_tanh_is_accurate_near_zero() -> None:
    x = torch.cat([torch.logspace(-8, 1, 200), -torch.logspace(-8, 1, 200)])
    (result,) = run(build(tanh, "f32[400]"), [x])
    error = (result.double() - x.double().tanh()).abs() / x.double().tanh().abs()
    assert error.max() < 3e-7


def test_detach_is_no_work() -> None:
    check(build(lambda a: add(stop_gradient(a), a), "f32[5]"))


def test_offsets_beyond_32_bits() -> None:
    kernel = build(neg, "f16[65536,65536]")
    assert "tl.program_id(0)).to(tl.int64)" in generate(kernel, Target.parse("cuda:90")).text
    small = build(neg, "f16[65536,1024]")
    assert "int64" not in generate(small, Target.parse("cuda:90")).text


def test_expand_loads_what_it_repeats_once() -> None:
    kernel = build(lambda a, b: add(a, broadcast_to(b, (6, 8))), "f32[6,8]", "f32[8]")
    check(kernel)
    check(build(lambda b: expand(reshape(b, shape=(2, 1, 3)), shape=(2, 4, 3)), "f32[6]"))


def test_what_belongs_to_a_long_row_is_read_once_a_program() -> None:
    def body(x, scale, target):  # type: ignore[no-untyped-def]
        place = iota(shape=x.shape, axis=1, dtype=torch.int64)
        hit = eq(place, broadcast_to(target, x.shape))
        return where(hit, constant(0.0, x), mul(x, broadcast_to(scale, x.shape)))

    kernel = build(body, "f32[3,1100]", "f32[3,1]", "i64[3,1]")
    text = generate(kernel, Target.parse("cuda:90")).text
    assert "y_ptr + row)" in text and "to(tl.int64)" not in text
    check(kernel, low=-3, high=900)


@pytest.mark.parametrize("shape", [(64, 1536), (100, 1056), (17, 3, 512), (50, 2, 1024)], ids=str)
def test_what_belongs_to_a_column_is_read_once_for_several_rows(shape: tuple[int, ...]) -> None:
    def scaled(x: Node, w: Node, s: Node) -> Node:
        several = expand(reshape(w, (1, *shape[1:])), shape)
        return mul(mul(x, several), expand(reshape(s, (1,) * len(shape)), shape))

    sizes = ",".join(map(str, shape))
    kernel = build(scaled, f"bf16[{sizes}]", f"bf16[{sizes.partition(',')[2]}]", "bf16[]")
    check(kernel)
    text = generate(kernel, Target.parse("cuda:90")).text
    assert re.search(r"tl.load\(y_ptr \+ cols\)", text) and "BLOCK_ROWS" in text


@pytest.mark.parametrize(
    "shape, channels",
    [((16, 1033), (1033,)), ((4, 2048), (2048,)), ((64, 480), (480,))],
    ids=["odd rows", "few rows", "short rows"],
)
def test_rows_that_fill_no_tiles_are_flat(shape: tuple[int, int], channels: tuple[int]) -> None:
    kernel = build(
        lambda x, w: mul(x, expand(reshape(w, (1, *channels)), shape)),
        f"f32[{shape[0]},{shape[1]}]",
        f"f32[{channels[0]}]",
    )
    check(kernel)
    assert "BLOCK_ROWS" not in generate(kernel, Target.parse("cuda:90")).text


def test_what_changes_seldom_along_a_row_is_no_column() -> None:
    """As a group's mean on channels_last: tiles were slower than a flat loop there."""

    def centered(x: Node, mean: Node, w: Node) -> Node:
        groups = expand(reshape(mean, (64, 1, 32, 1)), (64, 9, 32, 32))
        return mul(sub(x, reshape(groups, (64, 9, 1024))), expand(reshape(w, (1, 1, 1024)), (64, 9, 1024)))

    kernel = build(centered, "f32[64,9,1024]", "f32[64,32]", "f32[1024]")
    check(kernel)
    assert "BLOCK_ROWS" not in generate(kernel, Target.parse("cuda:90")).text


def test_what_is_one_value_for_a_tile_of_columns_is_read_once() -> None:
    def body(x: Node, row: Node, y: Node) -> Node:
        several = reshape(broadcast_to(reshape(y, (1, 4, 1)), (6, 4, 1024)), x.shape)
        return mul(sub(x, broadcast_to(row, x.shape)), several)

    kernel = build(body, "f32[6,4096]", "f32[6,1]", "f32[4]")
    check(kernel)
    assert "cols // 1024" not in generate(kernel, Target.parse("cuda:90")).text


def test_a_boolean_is_made_of_what_memory_would_hold() -> None:
    """Products of 16 bits that underflow, or overflow, do so whether they are stored or not."""

    def body(x: Node) -> tuple[Node, ...]:
        square = mul(x, x)
        return cast(square, torch.bool), eq(square, constant(float("inf"), square)), square

    x = torch.tensor([1e-4, 1.0, 300.0], dtype=torch.float16)
    positive, infinite, square = run(build(body, "f16[3]"), [x])
    assert positive.tolist() == (square != 0).tolist() == [False, True, True]
    assert infinite.tolist() == square.isinf().tolist() == [False, False, True]
