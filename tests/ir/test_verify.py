"""The verifier accepts what ops build, and names what they cannot have built."""

import sys
import threading

import pytest
import torch

from egcompile import ops
from egcompile.errors import TypeMismatch
from egcompile.ir import Graph, Node, TensorType
from egcompile.ir.joint import Joint
from egcompile.ir.verify import verify, verify_joint
from egcompile.ops.opdef import OpDef

X = ops.input(name="x", shape=(4, 8), dtype=torch.float32)
W = ops.input(name="w", shape=(8,), dtype=torch.float32)


def test_a_graph_passes_and_is_returned() -> None:
    graph = Graph((X, W), (ops.rms_norm(X, W, eps=1e-5, cast_first=False)[0],))
    assert verify(graph) is graph


def _node(op: OpDef, inputs: tuple[Node, ...], type: TensorType) -> Node:
    """A node that no op made."""
    node = object.__new__(Node)
    node.op, node.inputs, node.attrs, node.type = op, inputs, (), type
    return node


def test_a_node_outside_the_intern_table() -> None:
    keep = ops.neg(X)
    with pytest.raises(TypeMismatch, match="not interned after fusion"):
        verify(Graph((X,), (_node(ops.neg, (X,), keep.tensor),)), "fusion")


def test_a_wrong_type() -> None:
    node = ops.exp(X)
    right = node.type
    try:
        node.type = TensorType((4, 9), torch.float32)
        with pytest.raises(TypeMismatch, match=r"should be f32\[4,8\]"):
            verify(Graph((X,), (node,)))
    finally:
        node.type = right


def test_inputs() -> None:
    with pytest.raises(TypeMismatch, match="input 'w' is read but not declared"):
        verify(Graph((X,), (ops.rms_norm(X, W, eps=1e-5, cast_first=False)[0],)))
    twin = ops.input(name="x", shape=(4,), dtype=torch.float32)
    with pytest.raises(TypeMismatch, match="two inputs are named 'x'"):
        verify(Graph((X, twin), (ops.neg(X),)))
    with pytest.raises(TypeMismatch, match="declared as an input"):
        verify(Graph((ops.neg(X),), (ops.neg(X),)))


def test_a_tuple_is_no_output() -> None:
    with pytest.raises(TypeMismatch, match="projections"):
        verify(Graph((X, W), (ops.rms_norm(X, W, eps=1e-5, cast_first=False),)))


def test_joint() -> None:
    y = ops.exp(X)
    ct = ops.input(name="ct", shape=(4, 8), dtype=torch.float32)
    gradient = ops.mul(ct, y)
    good = Joint(Graph((X, ct), (y, gradient)), (X,), (ct,), (y,), (gradient,))
    assert verify_joint(good) is good
    with pytest.raises(TypeMismatch, match=r"the gradient of f32\[4,8\] is f32\[4,1\]"):
        wrong = ops.sum(gradient, dims=(1,))
        verify_joint(Joint(Graph((X, ct), (y, wrong)), (X,), (ct,), (y,), (wrong,)))
    with pytest.raises(TypeMismatch, match="an output reads the cotangent 'ct'"):
        verify_joint(Joint(Graph((X, ct), (gradient, gradient)), (X,), (ct,), (gradient,), (gradient,)))
    with pytest.raises(TypeMismatch, match="not its parts"):
        verify_joint(Joint(Graph((X, ct), (y,)), (X,), (ct,), (y,), (gradient,)))


def test_threads_make_one_node() -> None:
    """Two threads that compile at once must not intern two nodes for one term."""
    made: list[list[Node]] = [[] for _ in range(4)]

    def make(nodes: list[Node], barrier: threading.Barrier) -> None:
        barrier.wait()
        nodes += [ops.full(value=float(i), shape=(71, i), dtype=torch.float32) for i in range(20)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            made = [[] for _ in made]  # so that the last round's are gone
            barrier = threading.Barrier(len(made))
            threads = [threading.Thread(target=make, args=(nodes, barrier)) for nodes in made]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert all(len({id(node) for node in same}) == 1 for same in zip(*made, strict=True))
    finally:
        sys.setswitchinterval(interval)
