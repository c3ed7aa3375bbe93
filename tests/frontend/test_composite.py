"""Composite ops of libraries are taken apart as ATen's are, by each of the ways into the compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import egcompile
from egcompile.frontend import _torch, trace

SPACE = "egcompile_test_composite"


@pytest.fixture(scope="module")
def _registered() -> Iterator[None]:
    """`halved`, which comes when the compiler has traced before."""
    trace(lambda x: x.sin(), (torch.ones(3),))
    egcompile.compile(lambda x: x.cumsum(0).sin())(torch.ones(3, requires_grad=True)).sum().backward()
    torch._dynamo.reset()
    with torch.library._scoped_library(SPACE, "DEF") as library:
        library.define("halved(Tensor x) -> Tensor")
        library.impl("halved", lambda x: x.cumsum(0) * 0.5, "CompositeImplicitAutograd")
        yield


@pytest.mark.usefixtures("_registered")
def test_traced() -> None:
    def function(x: Tensor) -> Tensor:
        return getattr(torch.ops, SPACE).halved(x).sin()

    text = str(trace(function, (torch.ones(3, dtype=torch.float64),)).graph)
    assert "cumsum" in text and "mul" in text and "halved" not in text


@pytest.mark.usefixtures("_registered")
def test_compiled_with_two_derivatives() -> None:
    def function(x: Tensor) -> Tensor:
        return getattr(torch.ops, SPACE).halved(x).sin()

    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    compiled = egcompile.compile(function, fullgraph=True)
    torch.testing.assert_close(compiled(x), function(x))
    assert torch.autograd.gradcheck(compiled, (x,))
    assert torch.autograd.gradgradcheck(compiled, (x,))


def test_another_export_meanwhile_has_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Divided(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.addcdiv(x, x, x)

    other = torch.export.export(Divided(), (torch.ones(3),))
    found: list[str] = []
    monkeypatch.setattr(
        _torch, "_interpret_regions", lambda _: found.append(str(other.run_decompositions({}).graph))
    )
    trace(lambda x: x.sin(), (torch.ones(3),))
    assert found == [str(other.run_decompositions({}).graph)] and "addcdiv" in found[0]
