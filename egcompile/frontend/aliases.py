"""Outputs that share memory, with arguments or with each other, as eager's do.

y = x * 2; return y, y.t()        the graph returns y, and the caller takes the view of it
return x[1:]                      no value at all: the caller takes the view of the argument
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from egcompile.frontend import _torch
from egcompile.frontend._torch import example


@dataclass(frozen=True)
class Window:
    """A view of a tensor's memory; `offset` counts the elements between their starts.

    `detached` cuts its gradient, as a view made by `detach` or under `no_grad` has none.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    detached: bool

    def of(self, x: Tensor) -> Tensor:
        x = x.detach() if self.detached else x
        return x.as_strided(self.shape, self.strides, x.storage_offset() + self.offset)


@dataclass(frozen=True)
class Argument:
    """An output that is the argument of that index itself, or a view of its memory; not a copy of it."""

    index: int
    window: Window | None = None

    def of(self, args: Sequence[Any]) -> Any:
        """The output itself, from the arguments of a call."""
        x = args[self.index]
        return x if self.window is None else self.window.of(x)


@dataclass(frozen=True)
class Shared:
    """An output that is the value at `position`, laid out with `strides`, or a view of its memory."""

    position: int
    strides: tuple[int, ...]
    window: Window | None = None


def _memory(nodes: Iterable[Any]) -> Counter[int]:
    """How many of these nodes' values each memory holds."""
    return Counter(_torch.storage_key(x) for n in nodes if _is_plain(x := example(n)))


def return_bases(gm: fx.GraphModule) -> int:
    """Appends, for outputs that share memory with each other, what they are views of; how many these are.

    Where no value covers that memory, as between the pieces that one call gives, nothing is appended.
    """
    output = gm.graph.output_node()
    returned: Any = output.args[0]
    given = _memory(gm.graph.find_nodes(op="placeholder"))
    shared = {key for key, count in _memory(returned).items() if count > 1 and key not in given}
    bases: dict[int, fx.Node] = {}
    for node in gm.graph.nodes:
        if _is_plain(value := example(node)) and (key := _torch.storage_key(value)) in shared:
            bases.setdefault(key, node)
    output.args = ((*returned, *bases.values()),)
    gm.recompile()
    return len(bases)


def may_share(gm: fx.GraphModule, bases: int) -> bool:
    """Whether an output is an argument, or shares memory with one or with a base."""
    returned: Any = gm.graph.output_node().args[0]
    given = _memory(gm.graph.find_nodes(op="placeholder"))
    return bool(bases) or not given.keys().isdisjoint(_memory(returned))


def sharing(
    arguments: Sequence[Any], results: Sequence[Any], bases: Sequence[Any]
) -> list[Argument | Shared | None]:
    """What each result of a call shares memory with; `Shared.position` counts `bases`.

    All are values of one run of the captured graph, fake or not.
    """
    return [_argument(value, arguments) or _shared(value, bases) for value in results]


def _argument(value: Any, arguments: Sequence[Any]) -> Argument | None:
    for i, argument in enumerate(arguments):
        if argument is value and isinstance(value, Tensor):
            return Argument(i)
    for i, argument in enumerate(arguments):
        if _share_memory(argument, value):
            return Argument(i, _window(argument, value))
    return None


def _shared(value: Any, bases: Sequence[Any]) -> Shared | None:
    for i, base in enumerate(bases):
        covers = _share_memory(base, value) and base.untyped_storage().nbytes() == base.nbytes
        if covers and (base.requires_grad or not value.requires_grad):
            window = _window(base, value)
            whole = Window(tuple(base.shape), base.stride(), 0, detached=False)
            return Shared(i, base.stride(), None if window == whole else window)
    return None


def _share_memory(x: Any, y: Any) -> bool:
    if not (_is_plain(x) and _is_plain(y)) or x.dtype != y.dtype:
        return False
    return _torch.storage_key(x) == _torch.storage_key(y)


def _window(of: Tensor, value: Tensor) -> Window:
    offset = int(value.storage_offset()) - int(of.storage_offset())
    return Window(
        tuple(value.shape), value.stride(), offset, detached=of.requires_grad and not value.requires_grad
    )


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided
