"""Plans replayed from CUDA graphs: the same numbers as launch by launch, whatever the caller holds on to."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import egcompile
from egcompile.runtime.graphs import Graphed, Results, Shared
from tests.runtime.scenarios import LAYOUTS, SCENARIOS, Pair, inputs_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", SCENARIOS)
def test_as_launch_by_launch(name: str) -> None:
    SCENARIOS[name](Pair("cuda"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_that_lie_anyhow(layout: str) -> None:
    inputs_of(layout, "cuda")


def test_dropout_draws_anew_at_each_replay() -> None:
    torch.manual_seed(0)
    model = egcompile.compile(
        nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda(), mode="reduce-overhead"
    )
    x = torch.randn(32, 64, device="cuda")
    masks = []
    for _ in range(6):
        y = model(x)
        y.sum().backward()
        masks.append(y == 0)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(masks))
    assert all(0.4 < m.float().mean().item() < 0.6 for m in masks)


def test_a_capture_that_fails_leaves_the_callers_stream() -> None:
    def reads_back(values: list[Tensor]) -> Results:
        return (values[0] * values[0].sum().item(),)

    graphed = Graphed(reads_back, Shared())
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(4):
                (y,) = graphed([torch.ones(3, device="cuda")])
                assert y is not None and y.tolist() == [3, 3, 3]
                assert torch.cuda.current_stream() == stream
                assert torch.rand(3, device="cuda").shape == (3,)  # as no capture goes on
    assert graphed.refused
