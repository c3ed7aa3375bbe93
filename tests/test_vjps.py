"""The derivative of every op of the registry, against finite differences, PyTorch's, and PyTorch's second."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from egcompile import ops
from egcompile.derive import derive
from egcompile.errors import TypeMismatch
from egcompile.ir import Graph, Node
from egcompile.ir.joint import Joint
from egcompile.ops import evaluate
from egcompile.ops.opdef import REGISTRY, Kind, OpDef, Sample
from egcompile.rules import VJPS

from .samples import IDS, SAMPLES, graph_of, values_of

every_sample = pytest.mark.parametrize(("op", "sample"), SAMPLES, ids=IDS)


def floating(nodes: Sequence[Node]) -> list[bool]:
    return [node.dtype.is_floating_point for node in nodes]


def masks(graph: Graph) -> list[list[bool]]:
    """Which outputs have a cotangent: each floating one alone, and all of them."""
    count = len(graph.outputs)
    alone = [[i == j for i in range(count)] for j in range(count) if floating(graph.outputs)[j]]
    return alone if len(alone) < 2 else [*alone, floating(graph.outputs)]


def derived(joint: Joint, inputs: Sequence[Tensor], cts: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the floating inputs by the joint graph; zeros where none flows."""
    results = iter(evaluate(joint.graph, [*inputs, *cts])[len(joint.outputs) :])
    return [
        torch.zeros_like(x) if gradient is None else next(results)
        for x, gradient in zip(inputs, joint.gradients, strict=True)
        if x.dtype.is_floating_point
    ]


def autograd(
    graph: Graph, mask: Sequence[bool], inputs: Sequence[Tensor], cts: Sequence[Tensor]
) -> list[Tensor]:
    """PyTorch's gradients of the floating inputs, through the ops' reference meanings."""
    leaves = [x.detach().requires_grad_(x.dtype.is_floating_point) for x in inputs]
    outputs = [y for y, wanted in zip(evaluate(graph, leaves), mask, strict=True) if wanted]
    pairs = [(y, ct) for y, ct in zip(outputs, cts, strict=True) if y.requires_grad]
    sources = [x for x in leaves if x.requires_grad]
    if not pairs or not sources:
        return [torch.zeros_like(x) for x in sources]
    ys, gs = zip(*pairs, strict=True)
    found = torch.autograd.grad(ys, sources, gs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(sources, found, strict=True)]


def check(graph: Graph, mask: Sequence[bool], inputs: Sequence[Tensor]) -> Joint:
    joint = derive(graph, floating(graph.inputs), mask, rules={})
    cts = values_of([ct for ct in joint.cotangents if ct is not None])
    found = derived(joint, inputs, cts)
    for mine, theirs in zip(found, autograd(graph, mask, inputs, cts), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    return joint


@every_sample
def test_first_and_second_derivative_are_pytorchs(op: OpDef, sample: Sample) -> None:
    graph = graph_of(op, sample)
    inputs = values_of(graph.inputs, sample.low, sample.high)
    for mask in masks(graph):
        joint = check(graph, mask, inputs)
        if any(gradient is not None for gradient in joint.gradients):
            cts = values_of([ct for ct in joint.cotangents if ct is not None])
            check(joint.graph, floating(joint.graph.outputs), [*inputs, *cts])


@every_sample
def test_derivative_is_the_limit_of_differences(op: OpDef, sample: Sample) -> None:
    graph = graph_of(op, sample)
    double = [x.dtype for x in (*graph.inputs, *graph.outputs) if x.dtype.is_floating_point]
    if not graph.inputs or set(double) != {torch.float64} or not any(floating(graph.outputs)):
        pytest.skip("no real function of real arguments in fp64")
    inputs = values_of(graph.inputs, sample.low, sample.high)
    joint = derive(graph, floating(graph.inputs), rules={})
    cts = values_of([ct for ct in joint.cotangents if ct is not None])
    step = 1e-6
    for x, gradient in zip(
        [x for x in inputs if x.is_floating_point()], derived(joint, inputs, cts), strict=True
    ):
        direction = torch.randn_like(x)

        def along(t: float, x: Tensor = x, direction: Tensor = direction) -> Tensor:
            moved = [x + t * direction if i is x else i for i in inputs]
            ys = [y for y in evaluate(graph, moved) if y.is_floating_point()]
            return sum((y * ct).sum() for y, ct in zip(ys, cts, strict=True))  # type: ignore[return-value]

        slope = (along(step) - along(-step)) / (2 * step)
        if op is ops.stop_gradient:
            slope = torch.zeros(())
        torch.testing.assert_close((gradient * direction).sum(), slope.double(), rtol=1e-6, atol=1e-6)


NO_DERIVATIVE = {
    "input": "a leaf",
    "full": "a leaf",
    "iota": "a leaf",
    "out": "the walk passes cotangents through projections itself",
}


@pytest.mark.parametrize("op", REGISTRY.values(), ids=lambda op: op.name)
def test_every_op_has_a_derivative_or_says_why_not(op: OpDef) -> None:
    """By a row, by its definition, or it has no differentiable operand."""
    names = {name.lstrip("*") for name in op.operands}
    rows = [key for key in VJPS if key[0] == op.name]
    if op.name in NO_DERIVATIVE or names == op.nondifferentiable:
        assert not rows
    else:
        assert rows or op.definition is not None
    if op.operands and op.kind is not Kind.PROJECTION:
        assert op.samples, "nothing tests its derivative"


TIES: dict[str, Callable[..., Tensor]] = {
    "relu": torch.relu,
    "abs": torch.abs,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "amax": lambda x: torch.amax(x, (1,), keepdim=True),
    "amin": lambda x: torch.amin(x, (1,), keepdim=True),
    "pow": torch.pow,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
}


@pytest.mark.parametrize("name", TIES)
def test_ties_are_pytorchs(name: str) -> None:
    """Small integers: zeros and equal operands all over. relu' is 0 at 0, a tie of two is halved."""
    op = REGISTRY[name]
    low = 0 if name == "pow" else -1
    inputs = [torch.randint(low, 2, (6, 7)).double().requires_grad_() for _ in op.operands]
    nodes = [ops.input(name=f"x{i}", shape=x.shape, dtype=x.dtype) for i, x in enumerate(inputs)]
    attrs = {"dims": (1,)} if op.kind is Kind.REDUCTION else {}
    joint = derive(Graph(tuple(nodes), (op(*nodes, **attrs),)), [True] * len(nodes))
    y = TIES[name](*inputs)
    ct = torch.randn_like(y)
    expected = torch.autograd.grad(y, inputs, ct)
    for mine, theirs in zip(derived(joint, inputs, [ct]), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_padding_gets_no_gradient_and_gives_none_back() -> None:
    weight = ops.input(name="weight", shape=(5, 4), dtype=torch.float64)
    ids = ops.input(name="ids", shape=(2, 3), dtype=torch.int64)
    graph = Graph((weight, ids), (ops.embedding(weight, ids, padding_idx=2),))
    joint = derive(graph, [True, False])
    w, i = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.tensor([[0, 2, 2], [4, 0, 1]])
    y = torch.nn.functional.embedding(i, w, padding_idx=2)
    ct = torch.randn_like(y, requires_grad=True)
    (expected,) = torch.autograd.grad(y, w, ct, create_graph=True)
    (mine,) = derived(joint, [w, i], [ct])
    torch.testing.assert_close(mine, expected)

    again = derive(joint.graph, [False, False, True], [False, True])
    outer = torch.randn_like(w)
    (back,) = torch.autograd.grad(expected, ct, outer)
    torch.testing.assert_close(evaluate(again.graph, [w, i, ct, outer])[-1], back)


def test_gradients_have_the_type_of_their_input() -> None:
    """Every sample in bf16."""
    for op, sample in SAMPLES:
        narrow = Sample(tuple(t.replace("f64", "bf16") for t in sample.operands), sample.attrs)
        try:
            graph = graph_of(op, narrow)
            if op.definition is not None:
                op.define(tuple(x.type for x in graph.inputs), tuple(narrow.attrs.values()))
        except TypeMismatch:
            continue  # a row's statistics are never bf16
        for mask in masks(graph):
            joint = derive(graph, floating(graph.inputs), mask, rules={})
            for primal, gradient in zip(joint.primals, joint.gradients, strict=True):
                assert gradient is None or gradient.type == primal.type
