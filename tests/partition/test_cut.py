"""Minimum cuts against all choices there are, on small networks of invented recipes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from egcompile.extract import KernelPlan
from egcompile.ir.node import Node
from egcompile.ops import neg
from egcompile.partition.cut import Choice, Network
from egcompile.partition.recipes import Recipe
from tests.extract.builder import leaf


def recipe(value: Node, reads: tuple[Node, ...], cost: float, product: bool = False) -> Recipe:
    part, whole = (KernelPlan(root, (), frozenset(), (), (value,)) for root in (neg(value), value))
    return Recipe(part, whole, reads, cost, product)


def chain(seed: int, count: int = 9) -> Network:
    """Values that read some of those before them; the backward reads some, some cannot be made again."""
    pick = random.Random(seed)
    values = [leaf(f"v{i}", pick.randint(1, 40), dtype=torch.int8) for i in range(count)]
    recipes: dict[Node, Recipe | None] = {}
    for i, value in enumerate(values):
        reads = tuple(pick.sample(values[:i], min(i, pick.randint(0, 2))))
        made = recipe(value, reads, float(pick.randint(0, 20)), pick.random() < 0.3)
        recipes[value] = made if pick.random() < 0.8 else None
    stored = {value: float(pick.choice((0, 0, 0, 3))) for value in values}
    return Network(tuple(pick.sample(values, 5)), recipes, stored)


def all_choices(network: Network) -> list[Choice]:
    recipes = [r for r in network.recipes.values() if r is not None]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(recipes, n) for n in range(len(recipes) + 1)
    )
    return [network.choose(subset) for subset in subsets]


@pytest.mark.parametrize("seed", range(25))
def test_a_cut_is_the_best_of_all_choices(seed: int) -> None:
    network = chain(seed)
    choices = all_choices(network)
    for time, size in ((1, 1), (1, 100_000), (1, 1_000_000), (1, 3_000_000), (7, 2), (1, 10**9)):
        found = network.cut(time, size)
        assert time * found.time + size * found.bytes == min(time * c.time + size * c.bytes for c in choices)
    assert network.smallest().bytes == min(c.bytes for c in choices)
    fastest = network.fastest()
    assert (fastest.time, fastest.bytes) == min((c.time, c.bytes) for c in choices)


@pytest.mark.parametrize("seed", range(10))
def test_limits_are_kept_and_less_is_never_more(seed: int) -> None:
    network = chain(seed, 14)
    fastest, smallest = network.fastest(), network.smallest()
    last = fastest.bytes
    for limit in range(fastest.bytes, smallest.bytes - 1, -5):
        found = network.within(limit, fastest)
        assert smallest.bytes <= found.bytes <= min(limit, last)
        last = found.bytes
    assert network.within(smallest.bytes - 1, fastest).bytes == smallest.bytes


def test_equal_layers_are_made_again_one_after_the_other() -> None:
    """All have one price, so that a cut takes all or none: a budget of a half takes half of them."""
    values = [leaf(f"v{i}", 100, dtype=torch.int8) for i in range(8)]
    recipes = {value: recipe(value, (), 1.0) for value in values}
    network = Network(tuple(values), recipes, dict.fromkeys(values, 0.0))
    for limit, made in ((800, 0), (799, 1), (400, 4), (399, 5), (0, 8)):
        found = network.within(limit, network.fastest())
        assert (found.bytes, set(found.made)) == (800 - 100 * made, set(values[:made]))


def test_products_can_be_left_out() -> None:
    network = chain(3)
    found = network.where(lambda recipe: not recipe.product).smallest()
    assert not any(recipe.product for recipe in found.made.values())
    assert any(recipe.product for recipe in network.smallest().made.values())
