"""Generated kernels compile for every architecture, within its shared memory and without spills."""

from __future__ import annotations

import pytest

from egcompile.ops import rms_norm_backward_add
from egcompile.target import Target
from tests.codegen.harness import build, cubins
from tests.codegen.test_golden import KERNELS

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles(arch: int, name: str) -> None:
    for function in cubins(KERNELS[name], arch):
        assert function["shared"] <= Target.parse(f"cuda:{arch}").shared_memory, function
        assert function["spills"] == 0, function


@pytest.mark.parametrize("width", [1024, 8192])
def test_backward_of_a_norm_does_not_spill(width: int) -> None:
    x = f"bf16[4096,{width}]"
    kernel = build(
        lambda x, w, r, ct, s: rms_norm_backward_add(x, w, r, ct, s, False),
        *(x, f"bf16[{width}]", "f32[4096,1]", x, x),
    )
    for function in cubins(kernel, 90):
        assert function["spills"] == 0, function
