"""Derives the backward of a forward graph: one joint graph, before anything is optimized.

    x = matmul(a, b)          ct_b = matmul_vjp(1, a, b, x, ct_x)          = contract_rows(a, ct_x)

The walk is in Python, in reverse, and states for each operand the term that is its cotangent; the
`backward` rules say in egglog what such a term is equal to. Each term appears once, so this is linear.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from egcompile.differentiable import carries_gradient, gradient_operands, row_of, with_derivatives
from egcompile.errors import NoGradientRule, TypeMismatch
from egcompile.ir.graph import Graph
from egcompile.ir.joint import Joint
from egcompile.ir.node import Node
from egcompile.ir.types import TensorType
from egcompile.language.encode import application, attr_literals, literal
from egcompile.language.render import vjp_constructor, vjp_declaration, vjp_ops, vjp_rules
from egcompile.language.session import RULESET, Contents, Session
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

    The rules see the forward's values as leaves: what they build depends on how nothing was computed.
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
        rows = list(dict.fromkeys(self.rows.values()))
        ops = {add}.union(*map(vjp_ops, rows))
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

    def _sum(self, node: Node, terms: Sequence[str]) -> str:
        """The sum of a value's cotangents, in the order in which the forward uses the value."""
        total = terms[0]
        for term in terms[1:]:
            total = self._put(application(add, (total, term), ()), node.tensor, node, "sum")
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
        return [(i, self._term(node, row, i, fixed)) for i in gradient_operands(node, row, self.paths)]

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
            built[text] = build(c, frozenset(f"{o.removesuffix(BACKWARD)}{BACKWARD}" for o in origin))
            if built[text].type != term.type:
                raise TypeMismatch(f"the vjp of {term.node.op.name} gives {built[text]!r} for {where}")
        return built, origins
