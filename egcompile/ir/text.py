"""The text form: one typed line a node. It is what graphs print, goldens hold and the parser reads.

    graph(%x: f32[4,8], %w: f32[8]):
      %0, %1: f32[4,8], f32[4,1] = rms_norm(%x, %w, eps=1e-05, cast_first=False)
      return out0=%0

A node of several outputs is one line, and its projections are names, not lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from egcompile.ir.node import Attr, Node
from egcompile.ir.types import DTYPE_NAMES

if TYPE_CHECKING:
    from egcompile.ir.graph import Graph


def attr_text(value: Attr) -> str:
    match value:
        case torch.dtype():
            return DTYPE_NAMES[value]
        case tuple():
            return f"[{','.join(map(str, value))}]"
    return repr(value)


def _call_text(node: Node, operands: list[str]) -> str:
    attrs = (f"{k}={attr_text(v)}" for k, v in zip(node.op.attr_names, node.attrs, strict=True))
    return f"{node.op.name}({', '.join([*operands, *attrs])})"


def _type_text(node: Node) -> str:
    return ", ".join(map(str, node.type)) if isinstance(node.type, tuple) else str(node.type)


def node_text(node: Node) -> str:
    """One node with the types of its operands: `f32[4] = add(f32[4], f32[4])`."""
    return f"{_type_text(node)} = {_call_text(node, [_type_text(i) for i in node.inputs])}"


def graph_text(graph: Graph) -> str:
    names: dict[Node, str] = {i: f"%{i.attr('name')}" for i in graph.inputs}
    signature = ", ".join(f"{names[i]}: {i.type}" for i in graph.inputs)
    lines = [f"graph({signature}):"]
    count = 0
    for node in graph.nodes:
        if node in names:
            continue
        if node.op.name == "out":
            names[node] = f"{names[node.inputs[0]].split(', ')[node.attr('index')]}"
            continue
        width = len(node.type) if isinstance(node.type, tuple) else 1
        names[node] = ", ".join(f"%{count + i}" for i in range(width))
        count += width
        call = _call_text(node, [names[i] for i in node.inputs])
        origin = graph.origins.get(node)
        comment = f"  # {', '.join(sorted(origin))}" if origin else ""
        lines.append(f"  {names[node]}: {_type_text(node)} = {call}{comment}")
    returned = ", ".join(f"{n}={names[o]}" for n, o in zip(graph.output_names, graph.outputs, strict=True))
    return "\n".join([*lines, f"  return {returned}"])
