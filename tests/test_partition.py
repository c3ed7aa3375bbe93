"""Which kernels are the forward's, and what is saved for the backward."""

import torch

from egcompile.extract import Extraction, extract
from egcompile.ops import add, contract_rows, exp, gelu, gelu_backward, matmul, mul, neg, reshape, transpose
from egcompile.partition import base, partition
from egcompile.target import Target
from tests.extract.builder import egraph, forward, joint, leaf

H200 = Target.parse("cuda:90")
X, W = leaf("x", 64, 32), leaf("w", 16, 32)
CT = leaf("ct", 64, 16)


def _linear() -> Extraction:
    pre = matmul(X, transpose(W))
    dpre = gelu_backward(CT, pre)
    made = joint([gelu(pre)], [CT], {X: matmul(dpre, W), W: contract_rows(dpre, X)})
    return extract(egraph(made), H200)


def test_saves_what_the_backward_reads_and_nothing_else() -> None:
    parts = partition(_linear(), H200)
    assert [k.root.op.name for k in parts.forward] == ["gelu", "matmul"] or len(parts.forward) == 2
    assert set(parts.saved) == {X, W, matmul(X, transpose(W))}
    assert not {n for k in parts.forward for n in k.reads} & {CT}


def test_primals_are_saved_first() -> None:
    saved = partition(_linear(), H200).saved
    assert set(saved[:2]) == {X, W}


def test_views_are_made_again_and_their_base_is_saved() -> None:
    y = exp(X)
    flat = reshape(y, (2048,))
    ct = leaf("ct", 2048)
    made = joint([flat], [ct], {leaf("z", 2048): mul(ct, flat)})
    found = extract(egraph(made), H200)
    parts = partition(found, H200)
    assert base(found, flat) is y
    assert parts.saved == (y,)


def test_forward_work_that_only_the_backward_needs_runs_there() -> None:
    ct = leaf("ct", 64, 32)
    made = joint([neg(X)], [ct], {X: mul(ct, exp(add(X, X)))})
    parts = partition(extract(egraph(made), H200), H200)
    assert len(parts.forward) == len(parts.backward) == 1
    assert parts.saved == (X,)


def test_without_gradients_there_is_no_backward() -> None:
    parts = partition(extract(egraph(forward(exp(X))), H200), H200)
    assert parts.backward == parts.saved == ()


def test_a_gradient_that_is_a_forward_value_is_saved() -> None:
    z = leaf("z", 64, 32)
    ct = leaf("ct", dtype=torch.float32)
    made = joint([exp(X), neg(ct)][:1], [ct], {z: exp(X)})
    assert partition(extract(egraph(made), H200), H200).saved == (exp(X),)
