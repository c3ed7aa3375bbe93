"""What is timed is compiled ahead, in threads, and found in Triton's cache afterwards, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget


class NoGpu:
    get_current_device = get_current_stream = lambda *_: 0
    get_current_target = lambda _: GPUTarget("cuda", 90, 32)


triton.runtime.driver.set_active(NoGpu())

from egcompile.codegen.neighbours import neighbours
from egcompile.ir import TensorType
from egcompile.ops import exp
from egcompile.runtime.loader import load_once
from egcompile.runtime.source import render_alone
from egcompile.runtime.timing import compile_ahead
from egcompile.target import Target
from tests.codegen.harness import build

target = Target.parse("cuda:90")
kernel = build(exp, "bf16[4096,4096]")
sources = neighbours(kernel, target)[:3]
modules = [load_once(render_alone(source, target)) for source in sources]
assert not Path(modules[0].__file__).exists()
before = [vars(module).copy() for module in modules]
compile_ahead(modules, kernel.name, [torch.zeros(1, dtype=torch.bfloat16) for _ in range(2)])
assert [vars(module) for module in modules] == before
print(len(list(Path(sys.argv[1]).glob("*/*.cubin"))), len(sources))
"""


def test_candidates_are_compiled_ahead(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["3", "3"], done.stderr
