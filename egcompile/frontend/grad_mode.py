"""No-grad regions as explicit `detach`: what they compute carries no gradient out of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from egcompile.frontend._torch import GRAD_REGION, SET_GRAD_ENABLED

DETACH = torch.ops.aten.detach.default


def detach_no_grad_values(gm: fx.GraphModule, enabled: bool = True) -> None:
    """Inserts `detach` wherever a value computed with gradients off is read with gradients on.

    Covers both forms: Dynamo's `_set_grad_enabled` calls in one flat graph, and torch.export's regions
    (`wrap_with_set_grad_enabled` over a submodule), which are entered with `enabled` false.
    `x = f(y)` under no_grad, then `g(x)`  -->  `x = f(y)`, `g(detach(x))`.
    """
    dead: dict[fx.Node, None] = {}
    now = enabled
    for node in list(gm.graph.nodes):
        if node.target is SET_GRAD_ENABLED:
            now = bool(node.args[0])
        elif node.target is GRAD_REGION:
            now_inside, body = bool(node.args[0]), getattr(gm, str(node.args[1].target))
            detach_no_grad_values(body, now_inside)
            if now_inside:
                _detach_operands(gm, node, dead)
        elif node.op == "output":
            _detach_operands(gm, node, dead)
        elif node.op in ("call_function", "call_method", "call_module"):
            if not now or _is_item_of(node, dead):
                dead[node] = None
            else:
                _detach_operands(gm, node, dead)
    gm.recompile()


def _detach_operands(gm: fx.GraphModule, user: fx.Node, dead: dict[fx.Node, None]) -> None:
    for operand in user.all_input_nodes:
        if operand in dead and _is_tensor(operand):
            with gm.graph.inserting_before(user):
                detached = gm.graph.call_function(DETACH, (operand,))
            detached.meta = dict(operand.meta)
            user.replace_input_with(operand, detached)


def _is_item_of(node: fx.Node, dead: dict[fx.Node, None]) -> bool:
    return (
        getattr(node.target, "__name__", "") == "getitem"
        and node.args[0] in dead
        and not _is_tensor(node.args[0])
    )


def _is_tensor(node: Any) -> bool:
    value = node.meta.get("val", node.meta.get("example_value"))
    return isinstance(value, torch.Tensor)
