"""Nodes: immutable and hash-consed, so that equal terms are one object."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from egcompile.errors import TypeMismatch
from egcompile.ir.types import TensorType, ValueType

if TYPE_CHECKING:
    from egcompile.ops.opdef import OpDef

Attr = int | float | bool | str | tuple[int, ...] | torch.dtype
"""What an attribute may be. Every semantics-bearing parameter of an op is one."""


class Node:
    """One application of an op. Build nodes by calling an `OpDef`, never directly.

    Equal nodes are the same object, so `is` and the default hash are structural equality.
    A node of several outputs is read through its projections `node[i]`.
    """

    __slots__ = ("__weakref__", "attrs", "inputs", "op", "type")

    op: OpDef
    inputs: tuple[Node, ...]
    attrs: tuple[Attr, ...]
    type: ValueType

    _interned: ClassVar[weakref.WeakValueDictionary[tuple[Any, ...], Node]] = weakref.WeakValueDictionary()
    _interning: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def make(cls, op: OpDef, inputs: tuple[Node, ...], attrs: tuple[Attr, ...]) -> Node:
        """The node for `op(inputs, attrs)`; raises TypeMismatch where the op's type rule refuses."""
        key = (op.name, inputs, tuple(map(attr_key, attrs)))
        if (node := cls._interned.get(key)) is None:
            node = object.__new__(cls)
            node.op, node.inputs, node.attrs = op, inputs, attrs
            node.type = op.infer(tuple(i.type for i in inputs), attrs)
            with cls._interning:  # another thread may have made it meanwhile
                node = cls._interned.setdefault(key, node)
        return node

    def attr(self, name: str) -> Any:
        return self.attrs[self.op.attr_names.index(name)]

    @property
    def tensor(self) -> TensorType:
        """The type of a node that is one tensor; raises TypeMismatch for a tuple."""
        if isinstance(self.type, tuple):
            raise TypeMismatch(f"{self.op.name} has {len(self.type)} outputs; take one as node[i]")
        return self.type

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def __getitem__(self, index: int) -> Node:
        from egcompile.ops.core import out

        return out(self, index=index)

    def __iter__(self) -> Iterator[Node]:
        if not isinstance(self.type, tuple):
            raise TypeMismatch(f"{self.op.name} is one tensor and cannot be unpacked")
        return (self[i] for i in range(len(self.type)))

    def __repr__(self) -> str:
        from egcompile.ir.text import node_text

        return node_text(self)


def attr_key(value: Attr) -> tuple[type, Any]:
    """Tells 1, 1.0, True and -0.0 apart, which `==` does not, and finds NaN equal to itself."""
    return type(value), value.hex() if isinstance(value, float) else value


def topological(roots: Iterable[Node]) -> list[Node]:
    """Every node that the roots reach, operands before users, in a stable order."""
    order: dict[Node, None] = {}
    stack: list[tuple[Node, bool]] = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, expanded = stack.pop()
        if node in order:
            continue
        if expanded:
            order[node] = None
        else:
            stack.append((node, True))
            stack.extend((i, False) for i in reversed(node.inputs) if i not in order)
    return list(order)
