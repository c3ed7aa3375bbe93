"""The contraction benchmark's sites compute what eager computes, and its tilings can be generated."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gemm
from egcompile.codegen import GemmConfig, generate
from egcompile.target import Target
from tests.codegen.harness import DEVICE

HOPPER = Target.parse("cuda:90")


@pytest.mark.parametrize("name", gemm.EPILOGUES)
def test_a_site_agrees_with_eager(name: str) -> None:
    site = gemm.EPILOGUES[name](40, 48, 24, torch.float16)
    device = torch.device(DEVICE)
    inputs, outputs = gemm.inputs_of(site, device), gemm.outputs_of(site, device)
    gemm.launcher(site, HOPPER, GemmConfig(32, 32, 16, 4, 2))(*inputs, *outputs)
    assert max(gemm.Reference.of(site, inputs).errors(outputs)) < 1.2


@pytest.mark.parametrize("name", gemm.EPILOGUES)
def test_tilings_can_be_generated(name: str) -> None:
    for size in gemm.SHAPES:
        site = gemm.EPILOGUES[name](*size, torch.bfloat16)
        assert gemm.table_config(site, HOPPER).descriptors
        for config in gemm.CONFIGS.values():
            compile(generate(site.kernel, HOPPER, config).text, "kernel", "exec")


def test_the_table_shows_what_failed() -> None:
    rows = {
        "product alone": {"us": 10.0},
        "eager": {"us": 14.0},
        "table": {"config": {}, "us": 11.0, "errors": [0.9]},
        "wide": {"config": {}, "failed": "OutOfResources: shared memory"},
    }
    text = gemm.table([{"epilogue": "none", "m": 8, "n": 8, "k": 8, "variants": rows}])
    assert "11.0" in text and "0.90" in text
    assert "wide: OutOfResources" in text
