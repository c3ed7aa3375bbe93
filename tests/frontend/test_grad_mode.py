"""no_grad regions, in both routes: gradients as eager has them, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from egcompile import ops
from egcompile.errors import TraceError
from egcompile.frontend import trace
from tests.frontend.test_dynamo import Backend


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def by_export(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Tensor) -> Any:
        traced = trace(function, args)
        return traced.restore(ops.evaluate(traced.graph, traced.inputs(args)))

    return call


def by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend=Backend(), fullgraph=True)


def value_only(w: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x @ w).mean()
    return (w * scale).sum()


def enabled_inside(w: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        dead = w * 2
        with torch.enable_grad():
            live = w * 3 + dead
    return (dead + live).sum() + x.sum()


def several_results(w: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        first, second = x.chunk(2)
        kept = w
    return (first * second).sum() + kept.sum()


def changed_without_gradient(w: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        total = x.clone()
        total.mul_(2)
    total.add_(1)
    total[0] = 3
    total.masked_fill_(w > 0.5, 2)
    return (total * w).sum()


def changed_again(w: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        total = x * 1
    y = total * w
    with torch.no_grad():
        total = total.mul(2)
    return (y + total * w).sum()


def detached(w: Tensor, x: Tensor) -> Tensor:
    return (w.detach() * x).sum() + (w * x.detach()).sum()


def detached_in_place(w: Tensor, x: Tensor) -> Tensor:
    product = w * x
    before = product.view(-1) * 2
    chained = (w + x).exp().detach_() * w
    product.detach_()
    return (product * w).sum() + before.sum() + chained.sum()


def detached_and_changed(w: Tensor, x: Tensor) -> Tensor:
    distance = (w - x).square()
    nearest = distance.detach().clamp_(max=0.1)
    return (nearest * w).sum()


def a_detached_copy_changed(w: Tensor, x: Tensor) -> Tensor:
    y = w * x
    kept = y.detach().clone()
    kept[0] = 3
    return (y * kept).sum()


@pytest.mark.parametrize("route", [by_export, by_dynamo], ids=["export", "dynamo"])
@pytest.mark.parametrize(
    "function",
    [
        *(value_only, enabled_inside, several_results, changed_without_gradient, changed_again),
        *(detached, detached_in_place, detached_and_changed, a_detached_copy_changed),
    ],
)
def test_gradients(function: Callable[..., Tensor], route: Callable[..., Any]) -> None:
    w, x = torch.rand(4, 4, requires_grad=True), torch.rand(4, 4, requires_grad=True)
    found, expected = route(function)(w, x), function(w, x)
    torch.testing.assert_close(found, expected)
    mine, theirs = (
        torch.autograd.grad(y, (w, x), allow_unused=True, materialize_grads=True) for y in (found, expected)
    )
    torch.testing.assert_close(mine, theirs)


def one_of_two(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    dead = w * 2
    with torch.enable_grad():
        live = (w * 3).sum() + dead.sum() * x.sum()
        kept = w.t()
    return dead, live, dead.t(), kept, live * 2


def all_enabled(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        return w * x, w + 1


@pytest.mark.parametrize("function", [one_of_two, all_enabled])
def test_enabled_within_a_caller_s_no_grad(function: Callable[..., tuple[Tensor, ...]]) -> None:
    w, x = torch.rand(4, 4, requires_grad=True), torch.rand(4, 4, requires_grad=True)
    found = []
    for call in (function, torch.compile(function, backend="egcompile", fullgraph=True)):
        with torch.no_grad():
            results = call(w, x)
        live = [y for y in results if y.grad_fn is not None]
        gradients = torch.autograd.grad(sum(y.square().sum() for y in live), (w, x), allow_unused=True)
        found.append(([y.grad_fn is None for y in results], results, gradients))
    assert found[1][0] == found[0][0]
    torch.testing.assert_close(found[1][1:], found[0][1:])


def test_a_graph_that_ends_under_no_grad() -> None:
    def function(w: Tensor) -> Tensor:
        with torch.no_grad():
            y = w * 2
            torch._dynamo.graph_break()
            return y + w

    w = torch.rand(4, requires_grad=True)
    assert not torch.compile(function, backend="egcompile")(w).requires_grad
    with torch.no_grad():
        assert not torch.compile(lambda w: w * 2, backend="egcompile")(w).requires_grad


def changes_a_live_value(w: Tensor) -> Tensor:
    y = w * 2
    with torch.no_grad():
        y.mul_(3)
    return y.sum()


def changes_a_view_of_a_live_value(w: Tensor) -> Tensor:
    y = w * 2
    with torch.no_grad():
        y.view(-1)[0].zero_()
    return y.sum()


def fills_a_view_of_a_dead_value(w: Tensor) -> Tensor:
    with torch.no_grad():
        total = torch.zeros(3)
    total.view(3)[1:].copy_(w[1:])
    return total.sum()


def fills_a_dead_value(w: Tensor) -> Tensor:
    with torch.no_grad():
        total = torch.zeros(3)
    total[:2] = w[:2]
    return total.sum()


def changes_a_detached_view(w: Tensor) -> Tensor:
    y = w * 2
    y.detach().add_(1)
    return y * w


def changes_a_view_of_a_detached_one(w: Tensor) -> Tensor:
    y = w * 2
    v = y.view(-1)
    y.detach()[1:].zero_()
    return v * w


@pytest.mark.parametrize("route", [by_export, by_dynamo], ids=["export", "dynamo"])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (changes_a_detached_view, "is a detached view of what needs a gradient, changed in place"),
        (changes_a_view_of_a_detached_one, "is a detached view of what needs a gradient, changed in place"),
        (changes_a_live_value, r"needs a gradient and is changed in place under no_grad"),
        (changes_a_view_of_a_live_value, r"needs a gradient and is changed in place under no_grad"),
        (
            fills_a_view_of_a_dead_value,
            r"made under no_grad is changed in place by one that needs a gradient",
        ),
        (fills_a_dead_value, r"made under no_grad is changed in place by one that needs a gradient"),
    ],
)
def test_changes_across_the_border_are_refused(
    function: Callable[..., Tensor], message: str, route: Callable[..., Any]
) -> None:
    with pytest.raises(Exception, match=message + r"; clone it first, at test_grad_mode.py:\d+"):
        route(function)(torch.rand(3, requires_grad=True))


def test_an_argument_detached_in_place_is_refused() -> None:
    """By export; Dynamo breaks the graph there."""
    with pytest.raises(TraceError, match="comes from outside, is detached in place; clone it first"):
        trace(lambda w: w.detach_() * 2, (torch.rand(3, requires_grad=True),))


def test_data_changed_in_place_is_refused() -> None:
    def function(w: Tensor) -> Tensor:
        y = w.clone()
        y.data.add_(1)
        return y * w

    with pytest.raises(Exception, match="is a detached view of what needs a gradient, changed in place"):
        by_dynamo(function)(torch.rand(3, requires_grad=True))


def test_lines_inside_of_a_region() -> None:
    w, x = torch.rand(4, 4), torch.rand(4, 4)
    graph = trace(value_only, (w, x)).graph
    assert all("test_grad_mode.py:" in origin for origins in graph.origins.values() for origin in origins)


def test_a_buffer_written_under_no_grad_gets_no_gradient() -> None:
    """As in spectral norm: what is written comes from a parameter, and is read again."""

    def step(buffer: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            buffer.copy_(buffer * w)
            buffer.add_(w)
        return (w * buffer).sum()

    compiled = torch.compile(step, backend="egcompile", fullgraph=True)
    results = []
    for function in (step, compiled):
        buffer, w = torch.ones(3), torch.arange(3.0, requires_grad=True)
        for _ in range(2):
            function(buffer, w).backward()
            assert not buffer.requires_grad
        results.append((buffer, w.grad))
    torch.testing.assert_close(results[1], results[0])
