"""Which nests of a kernel share a launch: small ones of which none waits for another.

A nest that moves little takes as long as its launch. So each small one waits as long as it can, and runs with
those for which as many others wait, one after the other. Of four nests of which the third reads the second:

    A  B  C(B)  D   ==>   B,  then A, C and D in one launch
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from egcompile.codegen.foreach import Family, Foreach
from egcompile.codegen.source import JitFunction
from egcompile.schedule.together import MOST_TENSORS, SMALL


@dataclass(frozen=True, eq=False)
class Step:
    """A nest of a kernel.

    function   what is launched, if it has a launch of its own
    families   the same as items of another function
    """

    function: JitFunction | Foreach
    families: Callable[[], tuple[Family, ...]]

    @property
    def tensors(self) -> list[str]:
        """What it reads or writes, by name."""
        return self.function.parameters


def shared(steps: Sequence[Step], inputs: Collection[str], nbytes: Mapping[str, int]) -> list[list[Step]]:
    """`steps`, which can run in their order, as groups that a launch each can run, in such an order.

    inputs   names of tensors that no step writes; any other is written by the first step that names it
    nbytes   bytes of each tensor
    """
    needs = _needs(steps, inputs)
    height = dict.fromkeys(steps, 0)  # of the longest line of steps that wait for this one
    for step in reversed(steps):
        for other in needs[step]:
            height[other] = max(height[other], height[step] + 1)
    group = {step: [step] for step in steps}
    small: dict[int, list[Step]] = {}
    for step in steps:
        if sum(nbytes[name] for name in step.tensors) <= SMALL:
            together = small.setdefault(height[step], group[step])
            if together is group[step]:
                continue
            if _fit([*together, step]):
                together.append(step)
                group[step] = together
            else:
                small[height[step]] = group[step]
    order: list[list[Step]] = []

    def run(members: list[Step]) -> None:
        if members not in order:
            for other in (other for member in members for other in needs[member]):
                run(group[other])
            order.append(members)

    for step in steps:
        if step is group[step][-1]:
            run(group[step])
    return order


def _needs(steps: Sequence[Step], inputs: Collection[str]) -> dict[Step, list[Step]]:
    """The steps whose results each step reads."""
    writer: dict[str, Step] = {}
    needs: dict[Step, list[Step]] = {}
    for step in steps:
        made = [name for name in step.tensors if name not in inputs]
        needs[step] = list(dict.fromkeys(writer[name] for name in made if name in writer))
        writer |= {name: step for name in made if name not in writer}
    return needs


def _fit(steps: Sequence[Step]) -> bool:
    return len({name for step in steps for name in step.tensors}) <= MOST_TENSORS
