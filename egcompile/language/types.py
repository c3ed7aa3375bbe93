"""The type of every class of an e-graph, by the ops' own type rules, bottom up; all e-nodes must agree."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from egcompile.errors import TypeMismatch
from egcompile.ir.text import attr_text
from egcompile.ir.types import ValueType
from egcompile.language.egraph import ENode

Blame = Callable[[ENode], str]
"""What is known of how an e-node came about, for an error's text."""


def infer_types(
    classes: Mapping[int, Sequence[ENode]], blame: Blame
) -> tuple[dict[int, ValueType], dict[int, ENode]]:
    """The type of each class, and an e-node that gives it; operands' classes come first in both.

    Raises TypeMismatch where an op refuses its operands or two e-nodes of a class differ in type.
    """
    users: dict[int, list[int]] = defaultdict(list)
    enodes = [(c, node) for c, nodes in classes.items() for node in nodes]
    missing = [len(set(node.operands)) for _, node in enodes]
    ready = deque(i for i, count in enumerate(missing) if not count)
    for i, (_, node) in enumerate(enodes):
        for operand in set(node.operands):
            users[operand].append(i)

    types: dict[int, ValueType] = {}
    first: dict[int, ENode] = {}
    while ready:
        c, node = enodes[ready.popleft()]
        type = _infer(node, types, blame)
        if c not in types:
            types[c], first[c] = type, node
            for user in users[c]:
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user)
        elif types[c] != type:
            raise TypeMismatch(
                "rewriting made two values of different types equal:\n"
                + "\n".join(_line(n, types, blame, t) for n, t in ((first[c], types[c]), (node, type)))
            )
    return types, first


def _infer(node: ENode, types: Mapping[int, ValueType], blame: Blame) -> ValueType:
    try:
        return node.op.infer(tuple(types[i] for i in node.operands), node.attrs)
    except TypeMismatch as error:
        raise TypeMismatch(f"rewriting built a node that no type fits: {error}{blame(node)}") from error


def _line(node: ENode, types: Mapping[int, ValueType], blame: Blame, type: ValueType) -> str:
    operands = [_type_text(types[i]) for i in node.operands]
    attrs = (f"{k}={attr_text(v)}" for k, v in zip(node.op.attr_names, node.attrs, strict=True))
    return f"  {_type_text(type)} = {node.op.name}({', '.join([*operands, *attrs])}){blame(node)}"


def _type_text(type: ValueType) -> str:
    return f"({', '.join(map(str, type))})" if isinstance(type, tuple) else str(type)
