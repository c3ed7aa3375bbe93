"""Compiles what launchers would launch to cubins, with no GPU; a script that answers until its input ends.

A line of JSON in is a launcher, a line out what became of it (`compilers.py`). The module's jit functions are
replaced by recorders, the launcher is called on meta tensors, and each recorded call is compiled with the
arguments' types as the JIT would specialize them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from egcompile.runtime import launch

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
GIVEN = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Options that a launcher may give."""


class Recorder:
    """Stands for a jit function and keeps its calls."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.calls.append((args, kwargs))


def compile_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arch: int) -> dict[str, Any]:
    options = {k: kwargs.pop(k) for k in GIVEN if k in kwargs} | launch.OPTIONS
    names = list(function.arg_names)
    values = dict(zip(names, args)) | kwargs
    signature, constants, attrs = {}, {}, {}
    for i, name in enumerate(names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            element = POINTERS[value.base.dtype].removeprefix("*")
            signature[name] = f"tensordesc<{element}{list(value.block_shape)}>"
        else:
            signature[name] = "constexpr"
            constants[(i,)] = value
    source = ASTSource(function, signature, constants, attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage = resources(compiled.asm["cubin"])
    return {"name": function.__name__, "shared": compiled.metadata.shared, **usage}


def resources(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key: int(n) for key, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "spills": found["STACK"] + found["LOCAL"]}


def compile_launcher(path: str, launcher: str, arch: int, tensors: list[Any]) -> list[dict[str, Any]]:
    """A dict for each function that `launcher` of the file `path` launches.

    `tensors` are what it takes: shape, strides and dtype.
    """
    spec = importlib.util.spec_from_file_location("generated", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recorders = []
    for name, value in list(vars(module).items()):
        if isinstance(value, triton.JITFunction) and value.__module__ == "generated":
            recorders.append(Recorder(value))
            setattr(module, name, recorders[-1])
    arguments = [
        torch.empty_strided(shape, strides, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
        for shape, strides, dtype in tensors
    ]
    getattr(module, launcher)(*arguments)
    calls = [(r.function, *call) for r in recorders for call in r.calls]
    for r in recorders:
        setattr(module, r.function.__name__, r.function)
    return [compile_call(f, args, kwargs, arch) for f, args, kwargs in calls]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the compiler prints is no answer
    for line in sys.stdin:
        try:
            answer = {"functions": compile_launcher(**json.loads(line))}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
