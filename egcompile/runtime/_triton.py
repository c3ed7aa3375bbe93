"""Triton's private parts that the runtime uses, for Triton 3.6 to 3.9."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import triton

Launch = Callable[[int, Sequence[Any]], None]
"""`launch(stream, passed)`: a compiled kernel on its grid, with what is passed before its constants."""

_SCRATCH = ("global_scratch_size", "profile_scratch_size")
_NEEDED = {"launch", *_SCRATCH}
_KNOWN = _NEEDED | {"global_scratch_align", "profile_scratch_align", "num_ctas", "gsan_enabled"}
_KNOWN |= {"launch_cooperative_grid", "launch_pdl", "arg_annotations", "kernel_signature"}
"""What a launcher has; one that has more may do more at each launch."""


def hooked() -> bool:
    """Whether something, such as a profiler, wants to hear of each launch."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # one was set to a function, or to None, where Triton has a chain of them
        return any(getattr(hook, "calls", hook) for hook in (enter, leave))


def prepared(kernel: Any, grid: tuple[int, ...], count: int, values: tuple[Any, ...]) -> Launch:
    """A kernel's launches with `count` arguments, then `values`; hooks hear nothing of them.

    A kernel's launcher hands what it is given on to a C function, with scratch memory and with fields of its
    own. Without scratch memory the rest is the same at each launch, and the C function can be called at once.
    """
    run, grid = kernel.run, (*grid, 1, 1)[:3]
    fixed = (kernel.function, kernel.packed_metadata, None, None, None)
    handed_on = _handed_on(run, grid, fixed, count + len(values))
    if handed_on is None:
        before, after, together = grid, fixed, False
    else:
        run, (before, after, together) = run.launch, handed_on

    def apart(stream: int, passed: Sequence[Any]) -> None:
        run(*before, stream, *after, *passed, *values)

    def in_one(stream: int, passed: Sequence[Any]) -> None:
        run(*before, stream, *after, (*passed, *values))

    return in_one if together else apart


def _handed_on(
    run: Any, grid: tuple[int, ...], fixed: tuple[Any, ...], count: int
) -> tuple[tuple[Any, ...], tuple[Any, ...], bool] | None:
    """What a launcher hands on before and after the stream, and whether the arguments come as one tuple.

    It is learnt from a copy that hands on to nobody. None for a launcher that does more, or is not known.
    """
    fields = getattr(run, "__dict__", {})
    if not _NEEDED <= fields.keys() <= _KNOWN or fields.get("gsan_enabled"):
        return None
    if any(fields[size] for size in _SCRATCH):
        return None
    calls: list[tuple[Any, ...]] = []
    twin, stream = copy.copy(run), object()
    twin.launch = lambda *arguments: calls.append(arguments)
    marks = tuple(object() for _ in range(count))
    twin(*grid, stream, *fixed, *marks)
    (handed,) = calls
    at = handed.index(stream)
    before, after = handed[:at], handed[at + 1 :]
    if after[-1] == marks:
        return before, after[:-1], True
    first = len(after) - count
    return (before, after[:first], False) if after[first:] == marks else None
