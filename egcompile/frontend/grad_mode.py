"""No-grad regions as explicit `detach`: what they compute carries no gradient out of them.

Covers both forms that a region takes: `_set_grad_enabled` calls in Dynamo's one flat graph, and
torch.export's `wrap_with_set_grad_enabled` over a submodule.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import fx

from egcompile.errors import TraceError
from egcompile.frontend._torch import GRAD_REGION, SET_GRAD_ENABLED, OpOverload, example, storage_key
from egcompile.frontend.origins import origin_of
from egcompile.ir import is_differentiable

DETACH = torch.ops.aten.detach.default

_IN_PLACE_OPERATORS = frozenset(
    {
        operator.setitem,
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.itruediv,
        operator.ifloordiv,
        operator.imod,
        operator.ipow,
        operator.imatmul,
        operator.iand,
        operator.ior,
        operator.ixor,
    }
)


def enables_grad(gm: fx.GraphModule) -> bool:
    """Whether a part of Dynamo's graph has gradients on, whatever its caller has."""
    return any(node.target is SET_GRAD_ENABLED and node.args[0] for node in gm.graph.nodes)


def detach_no_grad_values(gm: fx.GraphModule, enabled: bool = True) -> None:
    """Inserts `detach` where a value computed with gradients off is read with gradients on, or returned.

    `x = f(y)` under no_grad, then `g(x)`  -->  `x = f(y)`, `g(detach(x))`. The graph is entered with
    gradients on or off.

    `x.detach_()` is a `detach` of `x` that later reads of `x` see.

    Raises TraceError where a change in place crosses the border: under no_grad or through `detach()` or
    `.data`, of a value that needs a gradient, or outside, of a value made under no_grad by one that does.
    The functional graph would give the changed value another gradient than eager does.
    """
    live = {node for node in gm.graph.find_nodes(op="placeholder") if _needs_gradient(node)}
    region = _Region(gm, live, enabled)
    region.rewrite()
    region.detach_operands(gm.graph.output_node())
    gm.recompile()


class _Region:
    """One graph, entered with gradients on or off.

    live    values that a gradient may flow through
    dead    values computed with gradients off, and the detached value once there is one
    cut     what `detach` made of live values, and the views of that
    """

    def __init__(self, gm: fx.GraphModule, live: set[fx.Node], enabled: bool) -> None:
        self.gm = gm
        self.live = live
        self.enabled = enabled
        self.dead: dict[fx.Node, fx.Node | None] = {}
        self.cut: set[fx.Node] = set()

    def rewrite(self) -> None:
        for node in list(self.gm.graph.nodes):
            if node.target is SET_GRAD_ENABLED:
                self.enabled = bool(node.args[0])
            elif node.target is GRAD_REGION:
                self.enter(node)
            elif node.op == "output" and self.enabled:
                self.detach_operands(node)
            elif node.op in ("call_function", "call_method", "call_module"):
                self.call(self.without_detach_in_place(node))
        self.gm.recompile()

    def call(self, node: fx.Node) -> None:
        whole: Any = node.args[0] if node.args else None
        if _is_item(node) and not _is_tensor(whole):
            if whole.target is GRAD_REGION:
                return
            if whole in self.dead:
                self.dead[node] = None
                return
        changed = _changed_in_place(node)
        live = any(operand in self.live for operand in node.all_input_nodes)
        if self.enabled and (detached := [x for x in changed if x in self.cut]):
            read_later = [x for x in self.live if any(user > node for user in x.users)]
            if _share_memory(detached, read_later):
                _refuse(node, f"{detached[0]} is a detached view of what needs a gradient, changed in place")
        changes_dead = _share_memory(changed, self.dead)
        if self.enabled and live and changes_dead:
            _refuse(node, "a value made under no_grad is changed in place by one that needs a gradient")
        if not self.enabled:
            if _share_memory(changed, self.live):
                _refuse(node, f"{changed[0]} needs a gradient and is changed in place under no_grad")
            if changed:
                self.detach_written(node, changed)
            self.dead[node] = None
        elif changes_dead:
            self.dead[node] = None
        else:
            self.detach_operands(node)
            if _is_detach(node) or (not live and any(x in self.cut for x in node.all_input_nodes)):
                self.cut.add(node)
            elif live:
                self.live.update(filter(_is_float, (node, *changed)))

    def without_detach_in_place(self, node: fx.Node) -> fx.Node:
        """For `x.detach_()`, a `detach` that stands for `x` from here on; any other call as it is."""
        if getattr(node.target, "__name__", node.target) not in ("detach_", "detach_.default"):
            return node
        value: Any = node.args[0]
        if value.op == "placeholder":
            _refuse(node, f"{value}, which comes from outside, is detached in place")
        with self.gm.graph.inserting_before(node):
            detached = self.gm.graph.call_function(DETACH, (value,))
        detached.meta = dict(node.meta)
        node.replace_all_uses_with(detached)
        earlier = set(itertools.takewhile(lambda other: other is not detached, self.gm.graph.nodes))
        value.replace_all_uses_with(detached, lambda user: user not in earlier and user is not detached)
        self.gm.graph.erase_node(node)
        return detached

    def enter(self, node: fx.Node) -> None:
        """A region of torch.export, `(enabled, body, *operands)`; its results are read by getitem."""
        region: Any = node.args[1]
        enabled, body = bool(node.args[0]), getattr(self.gm, str(region.target))
        if enabled:
            self.detach_operands(node)
        operands = zip(body.graph.find_nodes(op="placeholder"), node.args[2:], strict=True)
        inner = _Region(body, {inside for inside, operand in operands if operand in self.live}, enabled)
        inner.rewrite()
        results = body.graph.output_node().args[0]
        for item in node.users:
            result = results[item.args[1]]
            if result in inner.dead:
                self.dead[item] = None
            elif result in inner.live:
                self.live.add(item)

    def detach_operands(self, user: fx.Node) -> None:
        for operand in user.all_input_nodes:
            if operand in self.dead and _is_tensor(operand):
                user.replace_input_with(operand, self.detached(operand, user))

    def detach_written(self, call: fx.Node, changed: list[fx.Node]) -> None:
        """What is written to memory from outside the region, a buffer say, brings no gradient there."""
        self.detach_operands(call)
        for operand in call.all_input_nodes:
            if operand in self.live and operand not in changed and _is_tensor(operand):
                with self.gm.graph.inserting_before(call):
                    detached = self.gm.graph.call_function(DETACH, (operand,))
                detached.meta = dict(operand.meta)
                call.replace_input_with(operand, detached)

    def detached(self, value: fx.Node, before: fx.Node) -> fx.Node:
        known = self.dead[value]
        if known is None:
            with self.gm.graph.inserting_before(before):
                known = self.gm.graph.call_function(DETACH, (value,))
            known.meta = dict(value.meta)
            self.dead[value] = known
        return known


def _refuse(node: fx.Node, what: str) -> NoReturn:
    raise TraceError(f"{what}; clone it first, at {origin_of(node.meta) or node.name}")


def _changed_in_place(node: fx.Node) -> list[fx.Node]:
    """The operands that a call writes to."""
    target = node.target
    changed: list[Any] = [node.kwargs.get("out")]
    if isinstance(target, OpOverload):
        given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)) | node.kwargs
        written = (a.name for a in target._schema.arguments if a.alias_info and a.alias_info.is_write)
        changed += [given.get(name) for name in written]
    elif node.args and (
        target in _IN_PLACE_OPERATORS
        or node.kwargs.get("inplace") is True
        or _is_in_place_name(target if node.op == "call_method" else getattr(target, "__name__", ""))
    ):
        changed.append(node.args[0])
    return [value for value in changed if isinstance(value, fx.Node)]


def _share_memory(changed: Iterable[fx.Node], others: Iterable[fx.Node]) -> bool:
    """Whether a changed value is one of the others, or a view of one or the other way round."""
    memory = {m for value in changed if (m := _memory(value)) is not None}
    return bool(memory) and any(_memory(other) in memory for other in others)


def _is_in_place_name(name: Any) -> bool:
    """`add_` and `__setitem__` are, `add` and `__add__` are not."""
    return name == "__setitem__" or (str(name).endswith("_") and not str(name).endswith("__"))


def _is_detach(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", node.target)
    return name in ("detach", "detach.default", "_get_data_attr")


def _is_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _memory(node: fx.Node) -> int | None:
    value = example(node)
    return storage_key(value) if isinstance(value, torch.Tensor) else None


def _is_tensor(node: Any) -> bool:
    return isinstance(example(node), torch.Tensor)


def _is_float(node: fx.Node) -> bool:
    """Whether a gradient may flow through a value; a value of several tensors counts."""
    value = example(node)
    return not isinstance(value, torch.Tensor) or is_differentiable(value.dtype)


def _needs_gradient(node: fx.Node) -> bool:
    return bool(getattr(example(node), "requires_grad", False))
