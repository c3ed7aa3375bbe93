"""What one kernel can compute, and the reason where it cannot."""

import pytest
import torch

from egcompile.extract.fusible import Role, Site, Space, covers, fusible
from egcompile.ir.node import Node
from egcompile.ops import (
    add,
    cast,
    contract_rows,
    embedding,
    exp,
    expand,
    full,
    linear_act,
    linear_act_backward,
    linear_add,
    matmul,
    mean,
    mul,
    neg,
    relu,
    reshape,
    rms_norm,
    sdpa,
    slice_,
    softmax,
    sum,
    swiglu,
    transpose,
)
from tests.extract.builder import leaf

X, Y, ROW = leaf("x", 4, 8), leaf("y", 4, 8), leaf("row", 4, 1)
W, B, SQUARE = leaf("w", 8, 16), leaf("b", 16), leaf("square", 8, 8)
ROWS = Space((4,), 8)


def why(reader: Node, position: int, root: Node | None = None, *carried: Space) -> str | None:
    around = Site.of(reader) if root is None else Site.of(root)
    consumer = around if root is reader or root is None else Site.of(reader)
    return fusible(Site.of(reader.inputs[position]), consumer, position, around, carried)


@pytest.mark.parametrize(
    ("node", "role"),
    [
        (X, Role.INPUT),
        (full(1.0, (4,), torch.float32), Role.CONSTANT),
        (mean(X, (1,)), Role.ROW_REDUCTION),
        (sum(X, (0,)), Role.REDUCTION),
        (sum(X, (0, 1)), Role.REDUCTION),
        (sum(leaf("long", 2, 1 << 19), (1,)), Role.REDUCTION),
        (rms_norm(X, leaf("g", 8), 1e-5, False), Role.ROW_KERNEL),
        (swiglu(X, Y), Role.ROW_KERNEL),
        (linear_act(X, W, B, "relu"), Role.GEMM),
        (linear_add(X, SQUARE, Y), Role.GEMM),
        (matmul(X, W), Role.CALL),
        (embedding(W, leaf("ids", 3, dtype=torch.int64), -1), Role.CALL),
        (sdpa(*[leaf("q", 1, 2, 3, 4)] * 3, 0.5, True), Role.CALL),
        (softmax(X, 1)[0] if isinstance(softmax(X, 1).type, tuple) else softmax(X, 1), Role.ROW_KERNEL),
        (rms_norm(X, leaf("g", 8), 1e-5, False)[0], Role.PROJECTION),
    ],
    ids=lambda v: v.op.name if isinstance(v, Node) else v.name,
)
def test_roles(node: Node, role: Role) -> None:
    assert Site.of(node).role is role


@pytest.mark.parametrize(
    ("reader", "position"),
    [
        (add(relu(X), Y), 0),
        (mean(relu(X), (1,)), 0),
        (sum(relu(X), (0,)), 0),
        (transpose(relu(X)), 0),
        (slice_(relu(X), 0, 1, 3, 1), 0),
        (add(transpose(transpose(X)), Y), 0),
        (rms_norm(add(X, Y), leaf("g", 8), 1e-5, False), 0),
        (swiglu(X, mul(Y, Y)), 1),
        (linear_act(X, W, full(0.0, (16,), torch.float32), "none"), 2),
        (linear_act(X, W, cast(leaf("b16", 16, dtype=torch.bfloat16), torch.float32), "none"), 2),
        (linear_act(X, W, reshape(leaf("b1", 1, 16), (16,)), "none"), 2),
    ],
    ids=lambda v: v.op.name if isinstance(v, Node) else "",
)
def test_can_be_computed_inside(reader: Node, position: int) -> None:
    assert why(reader, position) is None


@pytest.mark.parametrize(
    ("reader", "position", "reason"),
    [
        (relu(X), 0, "an input"),
        (relu(matmul(X, W)), 0, "matmul is a call of ATen"),
        (relu(rms_norm(X, leaf("g", 8), 1e-5, False)[0]), 0, "out is an output of a named kernel"),
        (relu(swiglu(X, Y)), 0, "swiglu is a named kernel"),
        (matmul(relu(X), W), 0, "reads from memory"),
        (contract_rows(X, relu(Y)), 1, "reads from memory"),
        (linear_act(relu(X), W, B, "none"), 0, "'x' of linear_act feeds its contraction"),
        (linear_act(X, relu(W), B, "none"), 1, "'weight' of linear_act feeds its contraction"),
        (linear_act(X, W, relu(B), "none"), 2, "computes no relu"),
        (
            linear_act_backward(X, W, cast(leaf("s", 4, 16, dtype=torch.bfloat16), torch.float32), "relu"),
            2,
            "more than a vector",
        ),
        (relu(sum(X, (0,))), 0, "complete only when its kernel ends"),
    ],
    ids=lambda v: v.op.name if isinstance(v, Node) else str(v),
)
def test_the_reason_why_not(reader: Node, position: int, reason: str) -> None:
    found = why(reader, position)
    assert found is not None
    assert reason in found


def test_a_row_reduction_stays_on_its_own_rows() -> None:
    scaled = mul(X, expand(ROW, (4, 8)))  # as if ROW were a reduction over rows of 8
    assert why(exp(neg(ROW)), 0, None, ROWS) is None
    assert why(expand(neg(ROW), (4, 8)), 0, None, ROWS) is None
    assert why(reshape(neg(ROW), (1, 4, 1)), 0, None, ROWS) is None
    assert why(mean(scaled, (1,)), 0, None, ROWS) is None
    refused = {
        "slice": slice_(scaled, 1, 0, 4, 1),
        "transpose": transpose(scaled),
        "reshape": reshape(scaled, (8, 4)),
        "expand": expand(neg(ROW), (4, 9)),
        "mean": mean(neg(ROW), (1,)),
        "sum": sum(scaled, (0,)),
        "rms_norm": rms_norm(scaled, leaf("g", 8), 1e-5, False),
    }
    for name, reader in refused.items():
        reason = why(reader, 0, None, ROWS)
        assert reason is not None, name
        assert "rows of 8 over [4]" in reason, name


def test_two_row_spaces_do_not_meet() -> None:
    reason = why(exp(neg(X)), 0, None, ROWS, Space((8,), 4))
    assert reason is not None
    assert "rows of 8 over [4] and rows of 4 over [8]" in reason


def test_what_a_kernel_computes_whole() -> None:
    norm = Site.of(rms_norm(X, leaf("g", 8), 1e-5, False))
    assert covers(norm, 0, norm)
    assert not covers(norm, 1, norm), "the weight is computed again for every row"
    for reader in (add(X, Y), mean(X, (1,)), sum(X, (0,)), reshape(X, (4, 1, 8))):
        assert covers(Site.of(reader), 0, Site.of(reader))
    for reader in (slice_(X, 0, 1, 3, 1), transpose(X), reshape(X, (8, 4))):
        assert not covers(Site.of(reader), 0, Site.of(reader))
