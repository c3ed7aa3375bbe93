"""Values that depend on no input: computed while importing, and named by a leaf where one says them.

Masks and positions are traced as long chains of index arithmetic on `arange`. What such a chain comes to
is mostly a `full` or an `iota`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from egcompile import ops
from egcompile.frontend._torch import OpOverload
from egcompile.ir import DTYPE_NAMES, Node
from egcompile.ops import Kind

SMALL = 1 << 16
"""Results of more elements are not computed only to see whether they are a leaf."""


class Constants:
    """Knows, for the nodes of one import, which depend on no input, and their values on a CPU."""

    def __init__(self) -> None:
        self._constant: dict[Node, bool] = {}
        self._values: dict[Node, Tensor] = {}

    def is_constant(self, node: Node) -> bool:
        if node not in self._constant:
            varies = node.op is ops.input or node.op.random
            self._constant[node] = not varies and all(map(self.is_constant, node.inputs))
        return self._constant[node]

    def value(self, node: Node) -> Tensor:
        if node not in self._values:
            (self._values[node],) = ops.evaluate_nodes([node], self._values)
        return self._values[node]

    def simplify(self, node: Node) -> Node:
        """The node, or the leaf that has its value. Called for every result, so recursion stays shallow."""
        constant = self.is_constant(node)
        if not constant or node.op.kind is Kind.LEAF or node.tensor.numel > SMALL:
            return node
        return leaf_of(self.value(node)) or node

    def compute(self, op: OpOverload, arguments: Sequence[Any]) -> Tensor | None:
        """What `op(*arguments)`, in schema order, gives; None if it depends on an input or on chance."""
        by_chance = torch.Tag.nondeterministic_seeded in op.tags
        if by_chance or op._schema.is_mutable or not all(map(self.is_constant, nodes_in(arguments))):
            return None
        schema = op._schema.arguments
        named = {a.name: self._real(v) for a, v in zip(schema, arguments, strict=True) if a.name != "device"}
        result = op(**named)
        return result if isinstance(result, Tensor) else None

    def _real(self, argument: Any) -> Any:
        if isinstance(argument, (tuple, list)):
            return [self._real(a) for a in argument]
        return self.value(argument) if isinstance(argument, Node) else argument


def nodes_in(value: Any) -> list[Node]:
    """The nodes among arguments, lists of them too."""
    if isinstance(value, (tuple, list)):
        return [node for v in value for node in nodes_in(v)]
    return [value] if isinstance(value, Node) else []


def leaf_of(value: Tensor) -> Node | None:
    """The `full` or `iota` that has this value, if there is one."""
    if value.dtype not in DTYPE_NAMES or value.is_complex():
        return None
    shape = tuple(value.shape)
    if (number := _uniform(value)) is not None:
        return ops.full(value=number, shape=shape, dtype=value.dtype)
    if value.dtype in (torch.int64, torch.int32):
        for axis, size in enumerate(shape):
            view = [1] * len(shape)
            view[axis] = size
            if bool((value == torch.arange(size, device=value.device).view(view)).all()):
                return ops.iota(shape=shape, axis=axis, dtype=value.dtype)
    return None


def _uniform(value: Tensor) -> float | None:
    """The number that every element is; None if they differ, or if a float could not hold it."""
    if value.numel() == 0:
        return 0.0
    first = value.reshape(-1)[0]
    if not bool((value == first).all()):
        return None
    number = first.item()
    return float(number) if float(number) == number else None
