"""Independent pointwise items in one launch: which are alike, and what each computes."""

from __future__ import annotations

import pytest
import torch

from egcompile.codegen import Config, generate
from egcompile.codegen.foreach import items
from egcompile.ir import Node
from egcompile.ops import add, cast, exp, expand, full, mul, permute, reshape, slice_
from egcompile.schedule.kernel import Kernel
from egcompile.target import Target
from tests.codegen.harness import build, check, cubins

H200 = Target.parse("cuda:90")


def _text(kernel: Kernel) -> str:
    return generate(kernel, H200).text


def _updates(*operands: Node) -> tuple[Node, ...]:
    """`a + b / 2` of each pair."""
    pairs = zip(operands[::2], operands[1::2])
    return tuple(add(a, mul(b, full(0.5, b.shape, b.dtype))) for a, b in pairs)


SIZES = ["f32[5]", "f32[5]", "f32[300]", "f32[300]", "f32[5]", "f32[5]", "f16[4,7]", "f16[4,7]"]


@pytest.mark.parametrize("config", [None, Config(block_cols=16), Config(num_warps=2)])
def test_items_of_several_sizes_and_dtypes(config: Config | None) -> None:
    check(build(_updates, *SIZES), config)


def test_alike_items_share_a_function() -> None:
    text = _text(build(_updates, *SIZES))
    assert text.count("@triton.jit") == 1 + 3, "two of the four are alike"
    assert text.count("[(") == 1, "one launch"
    assert "tl.where(item_0 == 1" in text


def test_many_alike_items_are_one_function() -> None:
    kernel = build(_updates, *["f32[700]"] * 12)
    check(kernel)
    assert _text(kernel).count("@triton.jit") == 2


def test_scalars_strides_casts_and_constants() -> None:
    def several(x: Node, y: Node, z: Node, u: Node, v: Node) -> tuple[Node, ...]:
        counter = add(x, full(1, (), torch.int64))
        turned = exp(permute(y, (1, 0)))
        spread = mul(expand(reshape(u, (1, 6)), (4, 6)), v)
        return counter, turned, cast(z, torch.float32), spread, full(2.0, (3,), torch.float32)

    kernel = build(several, "i64[]", "f32[9,40]", "f16[33]", "f32[6]", "f32[4,6]")
    check(kernel)
    assert len(items(kernel)) == 5


def test_transposed_and_strided_items() -> None:
    def several(x: Node, y: Node) -> tuple[Node, ...]:
        return permute(exp(x), (1, 0)), slice_(y, 0, 1, 30, 3)

    check(build(several, "f32[70,90]", "f32[31]", strides=[(1, 70), (2,)], out_strides=[None, (3,)]))


def test_outputs_that_share_an_operand_are_one_item() -> None:
    kernel = build(lambda x, y: (add(x, x), exp(x), exp(y)), "f32[8]", "f32[9]")
    assert [len(item.outputs) for item in items(kernel)] == [2, 1]
    check(kernel)


def test_outputs_of_two_sizes_are_one_launch() -> None:
    kernel = build(lambda x, y: (exp(x), mul(expand(reshape(x, (1, 8)), (5, 8)), y)), "f32[8]", "f32[5,8]")
    check(kernel)
    assert _text(kernel).count("[(") == 1


def test_it_compiles_for_a_gpu() -> None:
    compiled = cubins(build(_updates, *SIZES), 90)
    assert len(compiled) == 1
    assert not compiled[0]["spills"]
