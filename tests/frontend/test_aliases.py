"""Outputs that share memory, with arguments or with each other: as eager has it, at every size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import egcompile


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def value_and_view(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y, y[0], y + 1


def two_views(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y.t(), y.view(-1), y[:, 1::2]


def a_transposed_base(x: Tensor) -> tuple[Tensor, ...]:
    y = x.t() * 2
    return y[0], y.t()[1:]


def pieces(x: Tensor) -> tuple[Tensor, ...]:
    return (x * 2).chunk(2, -1)


def one_value_twice(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y, y


def expanded(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sum(0)
    return y, y.expand(3, -1)


def detached(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y, y.detach().t()


def detached_by_no_grad(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    with torch.no_grad():
        z = y.t()
    return y, z


def under_no_grad(x: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        y = x * 2
        return y, y.t(), x[1:], x + 1


def changed_afterwards(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    z = y[1:]
    y.add_(1)
    return z, y.t()


def two_values(x: Tensor) -> tuple[Tensor, ...]:
    y, z = x * 2, x * 3
    return y[0], z[0], y[1], z.t()


def views_of_the_argument(x: Tensor) -> tuple[Tensor, ...]:
    return x.t(), x[1:].detach(), x.view(-1), x * 2, x


def halves_of_the_argument(x: Tensor) -> tuple[Tensor, ...]:
    return x[: x.shape[0] // 2], x[x.shape[0] // 2 :].t()


def a_view_where_it_can_be(x: Tensor) -> tuple[Tensor, ...]:
    return x.t().contiguous(), x.reshape(-1), (x * 2).t().reshape(-1)


CASES: Sequence[Callable[[Tensor], tuple[Tensor, ...]]] = [
    value_and_view,
    two_views,
    a_transposed_base,
    pieces,
    one_value_twice,
    expanded,
    detached,
    detached_by_no_grad,
    under_no_grad,
    changed_afterwards,
    two_values,
    views_of_the_argument,
    halves_of_the_argument,
    a_view_where_it_can_be,
]


def sharing(tensors: Sequence[Tensor]) -> list[list[int]]:
    memory = [x.untyped_storage().data_ptr() for x in tensors]
    return [[i for i, other in enumerate(memory) if other == mine] for mine in memory]


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_memory_is_shared_as_in_eager(
    function: Callable[[Tensor], tuple[Tensor, ...]], dynamic: bool, needs_grad: bool
) -> None:
    compiled = egcompile.compile(function, fullgraph=True, dynamic=dynamic)
    for rows in (4, 6):
        x = torch.randn(rows, 6, dtype=torch.float64, requires_grad=needs_grad)
        ours, theirs = compiled(x), function(x)
        torch.testing.assert_close(ours, theirs)
        assert sharing([*ours, x]) == sharing([*theirs, x])
        assert [y.grad_fn is None for y in ours] == [y.grad_fn is None for y in theirs]
        if needs_grad:
            mine, wanted = (_gradient(results, x) for results in (ours, theirs))
            torch.testing.assert_close(mine, wanted)


def _gradient(results: Sequence[Tensor], x: Tensor) -> Any:
    live = [(i + 1) * y.square().sum() for i, y in enumerate(results) if y.grad_fn is not None]
    return torch.autograd.grad(torch.stack(live).sum(), x, allow_unused=True) if live else ()


def test_a_change_in_place_shows_in_the_other_output() -> None:
    compiled = egcompile.compile(two_views, fullgraph=True)
    transposed, flat, _ = compiled(torch.ones(2, 4))
    flat[1] = 5.0
    assert transposed[1, 0] == 5.0
    assert transposed.stride() == (1, 4)
