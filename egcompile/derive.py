"""Derives the backward of a forward graph: one joint graph, before anything is optimized.

    x = matmul(a, b)          ct_b = matmul_vjp(1, a, b, x, ct_x)          = contract_rows(a, ct_x)

The walk is in Python, in reverse, and states for each operand the term that is its cotangent; the
`backward` rules say in egglog what such a term is equal to. Each term appears once, so this is linear.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from egcompile.differentiable import (
    between,
    carries_gradient,
    gradient_operands,
    row_of,
    with_derivatives,
)
from egcompile.errors import NoGradientRule, TypeMismatch
from egcompile.ir.graph import Graph
from egcompile.ir.joint import Joint
from egcompile.ir.node import Node
from egcompile.ir.types import TensorType
from egcompile.language.encode import application, attr_literals, literal
from egcompile.language.render import vjp_constructor, vjp_declaration, vjp_ops, vjp_rules
from egcompile.language.session import RULESET, Contents, Session
from egcompile.ops.complex import add_complex
from egcompile.ops.core import input
from egcompile.ops.movement import expand
from egcompile.ops.pointwise import add, stop_gradient
from egcompile.recognize import recognize
from egcompile.rules import RULES
from egcompile.rules.rule import Exactness, Rule, Vjp

BACKWARD = " (backward)"
"""What the origin of a derived node adds to that of its forward node."""


def derive(
    graph: Graph,
    needed: Sequence[bool],
    cotangent_mask: Sequence[bool] | None = None,
    *,
    exactness: Collection[Exactness] = ("exact", "reassociating"),
    rules: Mapping[str, Rule] = RULES,
    keep_stops: bool = False,
) -> Joint:
    """The joint graph of `graph` and its gradients with respect to the inputs that are `needed`.

    `cotangent_mask` says which outputs have a cotangent (all, if None; never one of integers). Their inputs
    are named `ct_<output>`, the gradients `grad_<input>`; a joint graph can be derived again, and then its
    new ones are `ct2_...` and `grad2_...`; for that, `keep_stops` leaves each `stop_gradient` in. Raises
    NoGradientRule for an op with no derivative on the way.
    """
    mask = [True] * len(graph.outputs) if cotangent_mask is None else cotangent_mask
    wanted = [has and carries_gradient(o) for has, o in zip(mask, graph.outputs, strict=True)]
    forward = recognize(graph, exactness=exactness, rules=rules)
    forward, paths, reached = with_derivatives(forward, needed, wanted)
    taken = {i.attr("name") for i in forward.inputs}
    cotangents = tuple(
        _cotangent(o, name, taken) if has else None
        for o, name, has in zip(forward.outputs, forward.output_names, wanted, strict=True)
    )
    backward = _Backward(forward, paths, reached)
    gradients, origins = backward.run(cotangents, needed)
    joint = _joint(forward, cotangents, gradients, origins)
    return joint if keep_stops else _without_stops(joint)


def _cotangent(output: Node, name: str, taken: Collection[str]) -> Node:
    return input(name=_fresh("ct", name, taken), shape=output.shape, dtype=output.dtype)


def _fresh(prefix: str, name: str, taken: Collection[str]) -> str:
    """`ct_out0`; `ct2_out0` where that is taken, and so on."""
    result, order = f"{prefix}_{name}", 2
    while result in taken:
        result, order = f"{prefix}{order}_{name}", order + 1
    return result


def _joint(
    forward: Graph,
    cotangents: tuple[Node | None, ...],
    gradients: tuple[Node | None, ...],
    origins: Mapping[Node, frozenset[str]],
) -> Joint:
    inputs = (*forward.inputs, *(ct for ct in cotangents if ct is not None))
    outputs = (*forward.outputs, *(g for g in gradients if g is not None))
    names = [
        _fresh("grad", primal.attr("name"), forward.output_names)
        for primal, gradient in zip(forward.inputs, gradients, strict=True)
        if gradient is not None
    ]
    graph = Graph(inputs, outputs, (*forward.output_names, *names), {**origins, **forward.origins})
    return Joint(graph, forward.inputs, cotangents, forward.outputs, gradients)


def _without_stops(joint: Joint) -> Joint:
    """`stop_gradient` has done its work: its users read its operand."""
    if all(node.op is not stop_gradient for node in joint.graph.nodes):
        return joint
    graph = joint.graph.rewrite(
        lambda node, inputs: inputs[0] if node.op is stop_gradient else Node.make(node.op, inputs, node.attrs)
    )
    new = dict(zip(joint.graph.outputs, graph.outputs, strict=True))
    outputs = tuple(new[o] for o in joint.outputs)
    gradients = tuple(None if g is None else new[g] for g in joint.gradients)
    return Joint(graph, joint.primals, joint.cotangents, outputs, gradients)


@dataclass(frozen=True)
class _Term:
    """What stands for a cotangent: its number, whose operand or sum it is, and the type it must have."""

    number: int
    node: Node
    what: str
    type: TensorType


class _Backward:
    """The reverse walk over one forward graph. Cotangents are egglog text until the e-graph is read.

    The rules see the forward's values as leaves: what they build depends on how nothing was computed. An
    opaque op's derivative is nodes already, over placeholders for its cotangents: a leaf too, until the end.
    """

    def __init__(
        self, forward: Graph, paths: Collection[Node], reached: Mapping[Node, frozenset[int]]
    ) -> None:
        self.forward = forward
        self.paths = paths
        self.reached = reached
        self.rows = {node: row for node, outputs in reached.items() if (row := row_of(node, outputs))}
        self.cotangent: dict[Node, str] = {}
        self.terms: dict[str, _Term] = {}
        self.placeholders: dict[Node, str] = {}  # and the terms that they stand for
        self.spliced: dict[Node, frozenset[str]] = {}  # nodes of opaque derivatives, and their origins
        rows = list(dict.fromkeys(self.rows.values()))
        ops = {add, add_complex}.union(*map(vjp_ops, rows))
        self.session = Session(sorted(ops, key=lambda op: op.name))
        self.session.execute([vjp_declaration(row) for row in rows])
        self.session.execute([text for row in rows for text in vjp_rules(row, RULESET)])

    def run(
        self, cotangents: Sequence[Node | None], needed: Sequence[bool]
    ) -> tuple[tuple[Node | None, ...], dict[Node, frozenset[str]]]:
        """The gradient of each input that is needed and has one, and the origins of the new nodes."""
        if not self.reached:
            return (None,) * len(needed), {}
        self._walk(cotangents)
        self.session.flush()
        self.session.run()
        built, origins = self._read(self.session.read())
        origins |= self.spliced
        if self.placeholders:
            built, origins = self._filled(built, origins)
        gradients = tuple(
            built[self.cotangent[primal]] if wants and primal in self.cotangent else None
            for primal, wants in zip(self.forward.inputs, needed, strict=True)
        )
        return gradients, origins

    def _walk(self, cotangents: Sequence[Node | None]) -> None:
        nodes = self.forward.nodes
        position = {node: i for i, node in enumerate(nodes)}
        parts: dict[Node, list[tuple[int, str]]] = defaultdict(list)  # where it comes from, and its term
        for i, (output, ct) in enumerate(zip(self.forward.outputs, cotangents, strict=True)):
            if ct is not None and output in self.reached:
                parts[output].append((len(nodes) + i, self.session.encoder.leaf(ct)))
        for node in self.reached:  # last first
            if parts[node]:
                in_order = sorted(parts[node], key=lambda part: part[0])
                self.cotangent[node] = self._sum(node, [term for _, term in in_order])
            if node in self.rows:
                for i, term in self._operands(node, self.rows[node]):
                    parts[node.inputs[i]].append((position[node], term))
            elif node.op.derivative is not None:
                for i, term in self._opaque_operands(node):
                    parts[node.inputs[i]].append((position[node], term))

    def _sum(self, node: Node, terms: Sequence[str]) -> str:
        """The sum of a value's cotangents, in the order in which the forward uses the value."""
        total = terms[0]
        op = add_complex if node.tensor.dtype.is_complex else add
        for term in terms[1:]:
            total = self._put(application(op, (total, term), ()), node.tensor, node, "sum")
        return total

    def _operands(self, node: Node, row: Vjp) -> Iterable[tuple[int, str]]:
        """The positions of operands that get a cotangent, each with the term that is its cotangent."""
        if node.op is expand and node.inputs[0].type == node.type:
            return [(0, self.cotangent[node])]
        leaf = self.session.encoder.leaf
        outputs = list(node) if isinstance(node.type, tuple) else [node]
        operands = [leaf(i) for i in node.inputs]
        if node.op.variadic:
            operands = [f"(vec-of {' '.join(operands)})"]
        values = [*map(leaf, outputs), *(self.cotangent[outputs[i]] for i in row.cts)]
        fixed = [*operands, *attr_literals(node), *values]
        positions = gradient_operands(node, self.reached[node], self.paths)
        return [(i, self._term(node, row, i, fixed)) for i in positions]

    def _opaque_operands(self, node: Node) -> Iterable[tuple[int, str]]:
        """The same for an opaque op, whose derivative is spliced in."""
        assert node.op.derivative is not None
        outputs = tuple(node) if isinstance(node.type, tuple) else (node,)
        cotangents = {i: self._placeholder(outputs[i]) for i in sorted(self.reached[node])}
        positions = gradient_operands(node, self.reached[node], self.paths)
        results = node.op.derivative(node, cotangents, positions)
        origin = _backward_of(self.forward.origins.get(node, frozenset()))
        known = (*node.inputs, node, *outputs, *cotangents.values())
        self.spliced |= {new: origin for new in between(known, tuple(results.values())) if origin}
        for i, result in results.items():
            if result.type != node.inputs[i].type:
                raise TypeMismatch(f"the derivative of operand {i} of {node} is {result!r}")
            yield i, self.session.encoder.leaf(result)

    def _placeholder(self, value: Node) -> Node:
        """An input that stands for the cotangent of `value` until that is known."""
        placeholder = input(name=f"%{len(self.placeholders)}", shape=value.shape, dtype=value.dtype)
        self.placeholders[placeholder] = self.cotangent[value]
        return placeholder

    def _filled(
        self, built: Mapping[str, Node], origins: Mapping[Node, frozenset[str]]
    ) -> tuple[dict[str, Node], dict[Node, frozenset[str]]]:
        """What was built, with the cotangents in the places of their placeholders."""
        new = {node: node for node in self.forward.nodes}
        stack = [*built.values(), *origins]
        while stack:
            node = stack[-1]
            stands_for = self.placeholders.get(node)
            operands = node.inputs if stands_for is None else (built[stands_for],)
            if node in new:
                stack.pop()
            elif waiting := [i for i in operands if i not in new]:
                stack += waiting
            else:
                inputs = tuple(new[i] for i in operands)
                filled = Node.make(node.op, inputs, node.attrs) if stands_for is None else inputs[0]
                new[node] = filled
        moved: dict[Node, frozenset[str]] = {}
        for node, origin in origins.items():
            moved[new[node]] = moved.get(new[node], frozenset()) | origin
        return {text: new[node] for text, node in built.items()}, moved

    def _term(self, node: Node, row: Vjp, index: int, fixed: Sequence[str]) -> str:
        types = tuple(i.type for i in node.inputs)
        attrs = dict(zip(node.op.attr_names, node.attrs, strict=True))
        derived = [literal(f(types, attrs, index), kind) for kind, f in row.derived.values()]
        text = f"({' '.join((vjp_constructor(row), str(index), *fixed, *derived))})"
        return self._put(text, node.inputs[index].tensor, node, f"operand {index}")

    def _put(self, text: str, type: TensorType, node: Node, what: str) -> str:
        encoder = self.session.encoder
        number = encoder.put(text, type)
        term = encoder.text(number, type)
        self.terms[term] = _Term(number, node, what, type)
        return term

    def _read(self, contents: Contents) -> tuple[dict[str, Node], dict[Node, frozenset[str]]]:
        """The node of every term, built from what the rules made its class equal to."""
        leaves = self.session.encoder.number
        node_of = {contents.class_of[i]: node for node, i in leaves.items() if i in contents.class_of}
        built = {f"(leaf {i})": node for node, i in leaves.items()}
        origins: dict[Node, frozenset[str]] = {}

        def build(c: int, origin: frozenset[str]) -> Node:
            if c not in node_of:
                enode = contents.classes[c][0]
                operands = tuple(build(i, origin) for i in enode.operands)
                node_of[c] = Node.make(enode.op, operands, enode.attrs)
                if origin:
                    origins[node_of[c]] = origin
            return node_of[c]

        for text, term in self.terms.items():  # operands come first, so `build` does not go deep
            c = contents.class_of[term.number]
            origin = self.forward.origins.get(term.node, frozenset())
            where = f"{term.what} of {term.node}" + (f" ({', '.join(sorted(origin))})" if origin else "")
            if c not in node_of and c not in contents.classes:
                raise NoGradientRule(f"no rule rewrote the cotangent of {where}")
            built[text] = build(c, _backward_of(origin))
            if built[text].type != term.type:
                raise TypeMismatch(f"the vjp of {term.node.op.name} gives {built[text]!r} for {where}")
        return built, origins


def _backward_of(origin: frozenset[str]) -> frozenset[str]:
    return frozenset(f"{o.removesuffix(BACKWARD)}{BACKWARD}" for o in origin)
