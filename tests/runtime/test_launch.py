"""Prepared launches, with a jit function that stands in for Triton's and a driver without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from egcompile.runtime import launch


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
            return SimpleNamespace(function="f", packed_metadata="m", run=self.prepared)

        return dispatch


@pytest.fixture(name="function")
def _function(monkeypatch: pytest.MonkeyPatch) -> Function:
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
    monkeypatch.setattr(launch.triton.runtime, "driver", driver)
    return Function()


def test_a_second_launch_is_prepared(function: Function) -> None:
    direct = launch._Direct(function)
    memory = torch.zeros(64)
    x, y = memory[:16], memory[16:32]
    for _ in range(3):
        direct[(4,)](x, y, BLOCK=8, num_warps=2)
    assert len(function.dispatched) == 1
    expected = (4, 1, 1, 7, "f", "m", None, None, None, x.data_ptr(), y.data_ptr(), 8, 2)
    assert function.run == [expected, expected]


def test_pointers_that_are_not_aligned_have_a_kernel_of_their_own(function: Function) -> None:
    direct = launch._Direct(function)
    memory = torch.zeros(64)
    for x in (memory[:16], memory[1:17], memory[:16], memory[1:17]):
        direct[(4,)](x, memory[16:32], BLOCK=8, num_warps=2)
    assert len(function.dispatched) == 2
    assert [a[9] - memory.data_ptr() for a in function.run] == [0, 4]


def test_a_tensor_descriptor_is_passed_as_it_is(function: Function) -> None:
    direct = launch._Direct(function)
    descriptor, y = SimpleNamespace(base=torch.zeros(4)), torch.zeros(16)
    for _ in range(2):
        direct[(4,)](descriptor, y, BLOCK=8, num_warps=2)
    assert function.run[0][9:11] == (descriptor, y.data_ptr())
