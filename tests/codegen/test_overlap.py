"""Launches that overlap the end of the one before: every function waits before it touches memory."""

from __future__ import annotations

import re

import pytest

from egcompile.codegen import generate
from egcompile.target import TARGETS, Target
from tests.codegen.test_golden import KERNELS

GPUS = [target for target in TARGETS.values() if target.kind == "cuda"]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_a_launched_function_first_waits(name: str, target: Target) -> None:
    text = generate(KERNELS[name], target).text
    launches = re.findall(r"^    (\w+)\[\([\d, ]+\)\]\((.*)\)$", text, re.MULTILINE)
    assert launches
    for function, passed in launches:
        overlaps = target.overlaps_launches
        assert passed.endswith(", launch_pdl=True") == overlaps
        lines = text.partition(f"def {function}(")[2].split("\n")[1:]
        code = [line.strip() for line in lines if not line.strip().startswith("#")]
        assert (code[0] == "gdc_wait()") == overlaps
    assert text.count("gdc_wait()") == (len(launches) if target.overlaps_launches else 0)
