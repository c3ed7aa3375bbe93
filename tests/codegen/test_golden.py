"""Whole kernels as text: what a change of the generators changes shows here.

`pytest tests/codegen/test_golden.py --update-golden` writes the files anew; read the diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from egcompile.codegen import generate
from egcompile.ir import Node
from egcompile.ops import (
    add,
    add_rms_norm,
    cross_entropy,
    cross_entropy_backward,
    gelu,
    mean,
    rms_norm_backward_add,
    softmax,
    sum,
    transpose,
)
from egcompile.schedule.kernel import Kernel
from egcompile.target import Target
from tests.codegen.harness import build

FOLDER = Path(__file__).with_name("golden")


def _loss(logits: Node, target: Node, ct: Node) -> tuple[Node, ...]:
    loss, lse = cross_entropy(logits, target, ignore_index=-100)
    return mean(loss, dims=(0,)), cross_entropy_backward(logits, target, lse, ct, ignore_index=-100)


ROW, ROWS = "bf16[4096]", "bf16[8192,4096]"
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        build(lambda x, y: gelu(add(x, y)), "bf16[8192,1000]", "bf16[8192,1000]", name="add_gelu"),
        build(lambda x, y: add(transpose(x), y), "f32[512,384]", "f32[384,512]", name="add_transposed"),
        build(lambda x, r, w: add_rms_norm(x, r, w, 1e-5, False), ROWS, ROWS, ROW, name="add_rms_norm"),
        build(
            lambda x, w, r, ct, s: rms_norm_backward_add(x, w, r, ct, s, False),
            *(ROWS, ROW, "f32[8192,1]", ROWS, ROWS),
            name="rms_norm_backward_add",
        ),
        build(lambda x: softmax(x, dim=1), "f16[1000,77]", name="softmax"),
        build(_loss, "bf16[8192,128256]", "i64[8192]", "f32[8192]", name="cross_entropy"),
        build(lambda x: sum(x, dims=(0, 1)), "bf16[8,1024,4096]", name="bias_gradient"),
    )
}


@pytest.mark.parametrize("name", KERNELS)
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    text = generate(KERNELS[name], Target.parse("cuda:90")).text
    path = FOLDER / f"{name}.py.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; --update-golden accepts the new text"
