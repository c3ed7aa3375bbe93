"""What the forward saves and what the backward makes again, under a budget of memory.

Everything that the forward's outputs need is the forward, what is left is the backward, and what it reads of
the forward is saved, or made again by kernels of the forward that run in the backward a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from egcompile.extract.cost import Costs
from egcompile.extract.extraction import Extraction, KernelPlan
from egcompile.ir.node import Node
from egcompile.partition.again import again
from egcompile.partition.cut import Choice, Network
from egcompile.partition.recipes import Recipe, Recipes, base, restricted
from egcompile.target import Target

__all__ = ["Partition", "base", "partition"]


@dataclass(frozen=True, eq=False)
class Partition:
    """Kernels of the forward and of the backward, and what lies between.

    recomputed     kernels of the forward, or parts of them, for the backward to run again
    inside         values of the forward that kernels of the backward compute inside instead of reading them
    saved          primals and written values of the forward that the backward or those read
    saved_bytes    of `saved`, but for primals
    fastest_bytes, smallest_bytes   what budgets of 1 and of 0 save; the latter None where the budget is 1
    cost           predicted microseconds beyond those of saving everything
    """

    forward: tuple[KernelPlan, ...]
    backward: tuple[KernelPlan, ...]
    recomputed: tuple[KernelPlan, ...]
    inside: tuple[Node, ...]
    saved: tuple[Node, ...]
    saved_bytes: int
    fastest_bytes: int
    smallest_bytes: int | None
    cost: float


def partition(extraction: Extraction, target: Target, memory_budget: float = 1.0) -> Partition:
    """The partition that saves as much as the fastest plan (budget 1), as little as can be (0), or between.

    Matrix products, convolutions and attention are made again only where the budget cannot be kept without.
    What is drawn at random and ops that no rule knows never are. As `activation_memory_budget` of
    `torch._functorch.config`, whose partitioner this follows; the choice is `egcompile.partition.cut`'s.
    """
    recipes = Recipes(extraction, Costs(target))
    forward, backward = _phases(extraction, recipes)
    network, kept = _network(recipes, forward, backward)
    choice, fastest, smallest = _choose(network, memory_budget)

    def realized(choice: Choice) -> Partition:
        late, recomputed = again(choice, recipes, backward)
        read = recipes.bases([*late, *recomputed], extraction.joint.gradients)
        written = [node for kernel in forward for node in kernel.writes]
        saved = [n for n in (*extraction.joint.primals, *written) if n in read and n not in choice.made]
        wanted = kept | set(saved)
        early = tuple(k if wanted.issuperset(k.writes) else restricted(k, wanted) for k in forward)
        added = recipes.added((*forward, *backward), (*early, *late, *recomputed))
        count = sum(node.tensor.nbytes for node in saved if node in recipes.maker)
        inside = tuple(n for n in choice.made if all(n not in kernel.writes for kernel in recomputed))
        return Partition(early, late, recomputed, inside, tuple(saved), count, fastest, smallest, added)

    parts = realized(choice)
    return realized(network.choose(())) if memory_budget == 1.0 and parts.cost > 0.0 else parts


def _phases(
    extraction: Extraction, recipes: Recipes
) -> tuple[tuple[KernelPlan, ...], tuple[KernelPlan, ...]]:
    """The kernels that the forward's outputs need, and the others."""
    early: set[int] = set()
    stack = [recipes.base(node) for node in extraction.joint.outputs]
    while stack:
        kernel = recipes.maker.get(stack.pop())
        if kernel is not None and id(kernel) not in early:
            early.add(id(kernel))
            stack.extend(recipes.base(node) for node in kernel.reads)
    kernels = extraction.kernels
    return tuple(k for k in kernels if id(k) in early), tuple(k for k in kernels if id(k) not in early)


def _network(
    recipes: Recipes, forward: Sequence[KernelPlan], backward: Sequence[KernelPlan]
) -> tuple[Network, set[Node]]:
    """What can be saved or made again; and what the forward itself needs in memory."""
    joint = recipes.extraction.joint
    early = {node for kernel in forward for node in kernel.writes}
    kept = recipes.bases(forward, joint.outputs)
    roots = [node for node in recipes.bases(backward, joint.gradients) if node in early]
    found: dict[Node, Recipe | None] = {}
    stack = list(roots)
    while stack:
        value = stack.pop()
        if value not in found:
            recipe = found[value] = recipes.of(value)
            stack.extend(recipe.reads if recipe else ())
    stored = {value: 0.0 if value in kept else recipes.spared(value, kept) for value in found}
    for value, readers in recipes.readers(backward).items():
        recipe = found.get(value)
        wider = recipes.inside(readers, value) if recipe else None
        if recipe and wider and wider[1] < recipe.cost:
            found[value] = replace(recipe, cost=max(wider[1], 0.0))
            stored[value] += max(-wider[1], 0.0)
    ordered = {value: found[value] for value in sorted(found, key=recipes.rank.__getitem__)}
    return Network(tuple(roots), ordered, stored), set(kept)


def _choose(network: Network, memory_budget: float) -> tuple[Choice, int, int | None]:
    """The choice under the budget, and the bytes that budgets of 1 and of 0 save."""
    fastest = network.fastest()
    if memory_budget == 1.0:
        return fastest, fastest.bytes, None
    smallest = network.smallest().bytes
    limit = smallest + int(memory_budget * (fastest.bytes - smallest))
    for allowed in (network.where(lambda recipe: not recipe.product), network):
        choice = allowed.within(limit, fastest)
        if choice.bytes <= limit:
            break
    return choice, fastest.bytes, smallest
