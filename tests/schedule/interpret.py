"""Runs a schedule step by step with the reference meaning of each op: what every renderer must agree with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from egcompile.ops import REGISTRY, call, evaluate
from egcompile.schedule.kernel import Buffer, Call, Free, Launch, Program, Schedule, View

Values = dict[str, torch.Tensor]


def run_schedule(
    schedule: Schedule, count: int, primals: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The `count` outputs, and one gradient a primal."""
    forward = run_program(schedule.forward, primals)
    if schedule.backward is None:
        return [x for x in forward if x is not None], []
    known = dict(zip(schedule.forward.inputs, primals)) | dict(zip(schedule.forward.outputs, forward))
    saved = [known[name] for name in schedule.saved]
    assert len(forward) == count + sum(
        name not in (*schedule.forward.inputs, *schedule.forward.outputs[:count]) for name in schedule.saved
    )
    outputs = [x for x in forward[:count] if x is not None]
    return outputs, run_program(schedule.backward, [*saved, *cotangents])


def run_program(program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Every value is checked to lie as the program says; freed names are gone."""
    values: Values = {}
    for name, x in zip(program.inputs, inputs, strict=True):
        values[name] = _placed(x, program.buffers[name])
    for step in program.steps:
        match step:
            case Launch():
                arguments = [values[name] for name in step.inputs]
                for x, buffer in zip(arguments, step.kernel.inputs, strict=True):
                    assert _lies(x, buffer), f"{step.kernel.name} reads {buffer}, given strides {x.stride()}"
                results = evaluate(step.kernel.body, arguments)
                for name, x, buffer in zip(step.outputs, results, step.kernel.outputs, strict=True):
                    assert program.buffers[name] == buffer
                    values[name] = _placed(x, buffer)
            case Call():
                attrs = dict(step.attrs)
                result = call(REGISTRY[step.op], [values[name] for name in step.inputs], attrs)
                results = result if isinstance(result, tuple) else (result,)
                for name, x in zip(step.outputs, results, strict=True):
                    if name is not None:
                        values[name] = _placed(x, program.buffers[name])
            case View():
                source, buffer = values[step.source], step.buffer
                offset = source.storage_offset() + buffer.offset
                values[step.output] = source.as_strided(buffer.type.shape, buffer.strides, offset)
            case Free():
                for name in step.names:
                    del values[name]
    return [None if name is None else values[name] for name in program.outputs]


def _placed(x: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    assert tuple(x.shape) == buffer.type.shape and x.dtype == buffer.type.dtype, f"{x.shape} is not {buffer}"
    return torch.empty_strided(x.shape, buffer.strides, dtype=x.dtype).copy_(x)


def _lies(x: torch.Tensor, buffer: Buffer) -> bool:
    return all(n <= 1 or a == b for n, a, b in zip(x.shape, x.stride(), buffer.strides))
