"""One graph has one device: what moves a value is refused by its line, what only makes one is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from egcompile.api import optimize
from egcompile.errors import TraceError
from egcompile.frontend import trace
from egcompile.frontend.dynamo import Number
from tests.frontend.test_dynamo import Backend
from tests.models import CASES


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def by_export(function: Callable[..., Any], *args: Tensor) -> None:
    trace(function, args)


def captured(function: Callable[..., Any], *args: Tensor) -> Backend:
    """What the backend made of the capture, which is not run: no kernel runs on a meta device."""
    backend = Backend()

    def looking(gm: Any, inputs: Any) -> Any:
        backend(gm, inputs)
        return gm.forward

    torch.compile(function, backend=looking, fullgraph=True)(*args)
    return backend


MOVES: dict[str, Callable[[Tensor], Any]] = {
    "to": lambda x: (x * 2).to("meta" if x.device.type == "cpu" else "cpu").relu(),
    "to_returned": lambda x: x.to("meta" if x.device.type == "cpu" else "cpu"),
    "to_dtype": lambda x: x.to("meta" if x.device.type == "cpu" else "cpu", torch.float64) + 1,
    "to_like": lambda x: x.to(torch.ones(3, device="meta" if x.device.type == "cpu" else "cpu")),
    "a_number": lambda x: x.sum().to("meta" if x.device.type == "cpu" else "cpu"),
    "like": lambda x: torch.zeros_like(x, device="meta" if x.device.type == "cpu" else "cpu"),
    "no_grad": torch.no_grad()(lambda x: x.to("meta" if x.device.type == "cpu" else "cpu") * 2),
    "made_and_returned": lambda x: (
        x + 1,
        torch.zeros(2, device="meta" if x.device.type == "cpu" else "cpu"),
    ),
}


@pytest.mark.parametrize("route", [by_export, captured], ids=["export", "dynamo"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MOVES)
def test_moves_are_refused(name: str, device: str, route: Callable[..., Any]) -> None:
    place = "" if name == "made_and_returned" else r".*, at test_devices.py:\d+"
    with pytest.raises(Exception, match=rf"(moves to|has tensors on) .*{place}"):
        route(MOVES[name], torch.ones(3, device=device))


def stays(x: Tensor) -> Tensor:
    return x.to(x.device) + torch.arange(3).to(x.device) + torch.tensor([1.0, 2.0, 4.0]).to(x.device).exp()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_stays_is_no_move(device: str) -> None:
    (imported,) = captured(stays, torch.ones(3, device=device)).imported
    assert imported.device.type == device
    assert trace(stays, (torch.ones(3, device=device),)).graph.outputs[0].shape == (3,)


def test_numbers_stay_where_they_are() -> None:
    def function(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return x * scale, scale * 2, torch.tensor(2.0), scale.to(x.device) + 1

    args = torch.ones(3, device="meta"), torch.tensor(2.0)
    (imported,) = captured(function, *args).imported
    assert [isinstance(output, Number) for output in imported.outputs] == [False, True, True, False]
    with pytest.raises(TraceError, match="a number on the CPU"):
        trace(function, args)


def test_a_graph_without_inputs_lies_where_its_results_do() -> None:
    (imported,) = captured(lambda: torch.zeros(3, device="meta")).imported
    assert imported.device.type == "meta"


def _far(x: Tensor) -> Tensor:
    """Constants to fold and to round, and an op whose derivative is traced."""
    folded = x * torch.full_like(x, 0.1).bfloat16().float() + torch.zeros_like(x).exp()
    return torch.cummax(folded, 0).values.sum() + torch.special.i1e(x).sum()


@pytest.mark.parametrize("name", [*CASES, "far"])
def test_the_default_device_is_not_the_compilers(name: str) -> None:
    """Plans are the same under a default device, on which nothing that the compiler computes lies."""
    if name == "far":
        traced = trace(_far, (torch.randn(3, 4, requires_grad=True),))
    else:
        traced = trace(*CASES[name].make(torch.float32))
    source = optimize(traced, target="cuda:90").source
    with torch.device("meta"):
        assert optimize(traced, target="cuda:90").source == source
