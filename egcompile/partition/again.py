"""The kernels of a backward in which values of the forward are made again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from egcompile.extract.extraction import KernelPlan
from egcompile.ir.node import Node
from egcompile.partition.cut import Choice
from egcompile.partition.recipes import Recipes, part_of, restricted


def again(
    choice: Choice, recipes: Recipes, backward: Sequence[KernelPlan]
) -> tuple[tuple[KernelPlan, ...], tuple[KernelPlan, ...]]:
    """The backward's kernels, and those that run before them.

    Values that one kernel made share a kernel again where they can. A value that only loops read is computed
    inside these, where that takes no longer than to write it and read it.
    """
    shared, single = _by_kernel(choice)
    kernels = [*backward, *shared]
    readers: dict[Node, dict[int, None]] = defaultdict(dict)

    def put(i: int, kernel: KernelPlan) -> None:
        kernels[i : i + 1] = [kernel]
        for node in recipes.bases([kernel]):
            readers[node][i] = None

    for i, kernel in enumerate(kernels):
        put(i, kernel)
    for value in reversed(_in_order(single, choice)):  # what may read it has its kernel
        part = choice.made[value].kernel
        which = [i for i in readers[value] if value in recipes.bases([kernels[i]])]
        wider = recipes.inside([kernels[i] for i in which], value)
        if wider is None or wider[1] > recipes.cost(part):
            put(len(kernels), part)
        else:
            for i, kernel in zip(which, wider[0], strict=True):
                put(i, kernel)
    return tuple(kernels[: len(backward)]), tuple(kernels[len(backward) :])


def _by_kernel(choice: Choice) -> tuple[list[KernelPlan], list[Node]]:
    """Kernels that make several values again, and the values that are left for a kernel each."""
    values: dict[int, list[Node]] = defaultdict(list)
    for value, recipe in choice.made.items():
        values[id(recipe.of)].append(value)
    shared: list[KernelPlan] = []
    single = dict.fromkeys(choice.made)
    for made in values.values():
        kernel = choice.made[made[0]].of
        if any(choice.made[value].kernel is kernel for value in made):
            shared.append(restricted(kernel, made))
        elif len(made) > 1 and kernel.root in made:
            part = part_of(kernel, kernel.root, set(kernel.writes) - set(made))
            assert part is not None, "a loop is a part of its kernel"
            shared.append(replace(part, writes=tuple(n for n in made if n in part.nodes)))
        else:
            continue
        for node in shared[-1].writes:
            single.pop(node, None)
    return shared, list(single)


def _in_order(values: Sequence[Node], choice: Choice) -> list[Node]:
    """Each after those that its recipe reads."""
    order: dict[Node, None] = {}
    wanted = set(values)
    stack = [(value, False) for value in values]
    while stack:
        value, expanded = stack.pop()
        if expanded:
            order.setdefault(value)
        elif value not in order and value in wanted:
            stack.append((value, True))
            stack.extend((read, False) for read in choice.made[value].reads)
    return list(order)
