"""Prepared launches, with a jit function that stands in for Triton's and a driver without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher

from egcompile.runtime import launch
from egcompile.runtime._triton import hooked, prepared

STREAM = 7


class Function:
    """Counts what is dispatched by Triton's way, and what by the prepared one."""

    arg_names = ("x", "y", "BLOCK", "num_warps")

    def __init__(self) -> None:
        self.dispatched: list[tuple[Any, ...]] = []
        self.run: list[tuple[Any, ...]] = []

    def prepared(self, *arguments: Any) -> None:
        self.run.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def dispatch(*arguments: Any, **constants: Any) -> Any:
            self.dispatched.append(arguments)
            assert constants["enable_fp_fusion"], "which must not depend on Triton's default"
            return SimpleNamespace(function="f", packed_metadata="m", run=self.prepared)

        return dispatch


@pytest.fixture(name="function")
def _function(monkeypatch: pytest.MonkeyPatch) -> Function:
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "current_stream", lambda device: STREAM)
    return Function()


def test_a_second_launch_is_prepared(function: Function) -> None:
    direct = launch._Direct(function)
    memory = torch.zeros(64)
    x, y = memory[:16], memory[16:32]
    for _ in range(3):
        direct[(4,)](x, y, BLOCK=8, num_warps=2)
    assert len(function.dispatched) == 1
    expected = (4, 1, 1, STREAM, "f", "m", None, None, None, x.data_ptr(), y.data_ptr(), 8, 2)
    assert function.run == [expected, expected]


def test_pointers_that_are_not_aligned_have_a_kernel_of_their_own(function: Function) -> None:
    direct = launch._Direct(function)
    memory = torch.zeros(64)
    for first in (0, 1, 0, 1, 2):  # 4 and 8 bytes off are off alike
        direct[(4,)](memory[first : first + 16], memory[16:32], BLOCK=8, num_warps=2)
    direct[(4,)](memory[16:32], memory[1:17], BLOCK=8, num_warps=2)
    assert len(function.dispatched) == 3
    assert [a[9] - memory.data_ptr() for a in function.run] == [0, 4, 8]


def test_a_tensor_descriptor_is_passed_as_it_is(function: Function) -> None:
    direct = launch._Direct(function)
    descriptor, y = SimpleNamespace(base=torch.zeros(4)), torch.zeros(16)
    for _ in range(2):
        direct[(4,)](descriptor, y, BLOCK=8, num_warps=2)
    assert function.run[0][9:11] == (descriptor, y.data_ptr())


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chained", [True, False])
def test_hooks_hear_of_each_launch(
    function: Function, monkeypatch: pytest.MonkeyPatch, hook: str, chained: bool
) -> None:
    direct, x, y = launch._Direct(function), torch.zeros(16), torch.zeros(16)
    runtime = triton.knobs.runtime
    assert not hooked()
    with monkeypatch.context() as patch:
        if chained:
            patch.setattr(getattr(runtime, hook), "calls", [print])
        else:
            patch.setattr(runtime, hook, print)
        for _ in range(3):
            direct[(4,)](x, y, BLOCK=8, num_warps=2)
    monkeypatch.setattr(runtime, hook, None)
    direct[(4,)](x, y, BLOCK=8, num_warps=2)
    assert (len(function.dispatched), len(function.run)) == (3, 1)


class Flat:
    """A launcher as Triton 3.6 has it, whose C function takes the arguments one by one."""

    launch: Callable[..., None]
    """Given among `more`: the C function."""

    def __init__(self, scratch: int = 0, **more: Any) -> None:
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        self.launch_cooperative_grid, self.launch_pdl = False, True
        self.__dict__.update(more)

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        scratch = f"{self.global_scratch_size} bytes" if self.global_scratch_size else None
        fields = (self.launch_cooperative_grid, self.launch_pdl, scratch, None)
        self.launch(x, y, z, stream, function, *fields, *args)


def installed(**more: Any) -> CudaLauncher:
    """The launcher of the Triton that is installed, of a kernel that needs no scratch memory."""
    made = object.__new__(CudaLauncher)
    fields = {"global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0}
    fields |= {"profile_scratch_align": 1, "num_ctas": 1, "launch_cooperative_grid": False}
    made.__dict__.update(fields, launch_pdl=True, gsan_enabled=False, **more)
    made.__dict__.update(arg_annotations=["a", "b"], kernel_signature=b"sig")
    return made


@pytest.fixture(name="without_driver")
def _without_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace()))
    yield


def heard(run: Any) -> tuple[Any, list[tuple[Any, ...]]]:
    """A launcher, and what its C function gets from then on."""
    calls: list[tuple[Any, ...]] = []
    run.launch = lambda *arguments: calls.append(arguments)
    return run, calls


@pytest.mark.usefixtures("without_driver")
@pytest.mark.parametrize("passed", [[], [16], [16, 32, 48]])
@pytest.mark.parametrize("values", [(), (8, 2)])
@pytest.mark.parametrize("make", [Flat, installed])
def test_the_c_function_gets_what_the_launcher_hands_on(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], values: tuple[int, ...], passed: list[int]
) -> None:
    run, expected = heard(make())
    run(4, 1, 1, STREAM, "f", (4, 1, 0), None, None, None, *passed, *values)
    run, calls = heard(make())
    kernel = SimpleNamespace(function="f", packed_metadata=(4, 1, 0), run=run)
    launched = prepared(kernel, (4,), len(passed), values)
    assert not calls, "preparing launches nothing"
    monkeypatch.setattr(type(run), "__call__", None)
    launched(STREAM, passed)
    assert calls == expected


@pytest.mark.usefixtures("without_driver")
@pytest.mark.parametrize(
    "make", [lambda: Flat(scratch=64), lambda: Flat(gsan_enabled=True), lambda: Flat(something="new")]
)
def test_a_launcher_that_does_more_is_called_itself(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]
) -> None:
    run, _ = heard(make())
    called: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Flat, "__call__", lambda self, *arguments: called.append(arguments))
    prepared(SimpleNamespace(function="f", packed_metadata="m", run=run), (4, 1, 1), 1, (8,))(STREAM, [16])
    assert called == [(4, 1, 1, STREAM, "f", "m", None, None, None, 16, 8)]
