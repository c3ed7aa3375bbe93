"""What the forward saves and what the backward makes again, under a budget of memory.

Everything that the forward's outputs need is the forward, what is left is the backward, and what it reads of
the forward is saved, or made again by kernels of the forward that run in the backward a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from egcompile.extract.cost import Costs
from egcompile.extract.extraction import Extraction, KernelPlan
from egcompile.ir.node import Node
from egcompile.partition.cut import Choice, Network
from egcompile.partition.recipes import Recipe, Recipes, base, part_of, restricted
from egcompile.target import Target

__all__ = ["Partition", "base", "partition"]


@dataclass(frozen=True)
class Partition:
    """Kernels of the forward and of the backward, and what lies between.

    recomputed     kernels of the forward, or parts of them, for the backward to run again
    saved          primals and written values of the forward that the backward or those read
    saved_bytes    of `saved`, but for primals
    fastest_bytes, smallest_bytes   what budgets of 1 and of 0 save; the latter None where the budget is 1
    cost           microseconds that `recomputed` adds
    """

    forward: tuple[KernelPlan, ...]
    backward: tuple[KernelPlan, ...]
    recomputed: tuple[KernelPlan, ...]
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
    network, kept = _network(extraction, recipes, forward, backward)
    choice, fastest, smallest = _choose(network, memory_budget)
    recomputed = _again(choice)
    read = _bases(recipes, [*backward, *recomputed], extraction.joint.gradients)
    written = [n for kernel in forward for n in kernel.writes]
    saved = [n for n in (*extraction.joint.primals, *written) if n in read and n not in choice.made]
    wanted = kept | set(saved)
    return Partition(
        tuple(k if wanted.issuperset(k.writes) else restricted(k, wanted) for k in forward),
        backward,
        recomputed,
        tuple(saved),
        sum(n.tensor.nbytes for n in saved if n in recipes.maker),
        fastest,
        smallest,
        sum(recipes.cost(kernel) for kernel in recomputed),
    )


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


def _bases(recipes: Recipes, kernels: Iterable[KernelPlan], nodes: Iterable[Node | None]) -> dict[Node, None]:
    """The values in whose memory lies what kernels read, and `nodes`."""
    read = (node for kernel in kernels for node in kernel.reads)
    return dict.fromkeys(recipes.base(node) for node in (*read, *nodes) if node is not None)


def _network(
    extraction: Extraction,
    recipes: Recipes,
    forward: Sequence[KernelPlan],
    backward: Sequence[KernelPlan],
) -> tuple[Network, set[Node]]:
    """What can be saved or made again; and what the forward itself needs in memory."""
    joint = extraction.joint
    early = {node for kernel in forward for node in kernel.writes}
    kept = set(_bases(recipes, forward, joint.outputs))
    roots = tuple(n for n in _bases(recipes, backward, joint.gradients) if n in early)
    found: dict[Node, Recipe | None] = {}
    stack = list(roots)
    while stack:
        value = stack.pop()
        if value not in found:
            recipe = found[value] = recipes.of(value)
            stack.extend(recipe.reads if recipe else ())
    rank = {node: i for i, node in enumerate(joint.graph.nodes)}
    ordered = {value: found[value] for value in sorted(found, key=lambda n: rank.get(n, 0))}
    return Network(roots, ordered, {v: 0.0 if v in kept else recipes.spared(v, kept) for v in found}), kept


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


def _again(choice: Choice) -> tuple[KernelPlan, ...]:
    """The kernels that make values again; values that one kernel made and can make again share it again."""
    kernels: dict[int, KernelPlan] = {}
    values: dict[int, list[Node]] = {}
    for value, recipe in choice.made.items():
        kernels[id(recipe.of)] = recipe.of
        values.setdefault(id(recipe.of), []).append(value)
    again: list[KernelPlan] = []
    for i, made in values.items():
        kernel = kernels[i]
        left = dict.fromkeys(made)
        if any(choice.made[value].kernel is kernel for value in made):
            again.append(restricted(kernel, left))
            continue
        if len(made) > 1 and kernel.root in left:
            whole = part_of(kernel, kernel.root, set(kernel.writes) - set(made))
            if whole is not None:
                shared = tuple(n for n in kernel.writes if n in whole.nodes and n in left)
                again.append(replace(whole, writes=shared))
                for node in shared:
                    del left[node]
        again.extend(choice.made[value].kernel for value in left)
    return tuple(again)
