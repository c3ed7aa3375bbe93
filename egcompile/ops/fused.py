"""Named fused ops: a definition that one kernel computes, chosen by the extractor where it pays.

A composite norm with the add before it stands with its norm; here are the contraction epilogues and the
gated activations.
"""

from __future__ import annotations

from egcompile.ir.node import Node
from egcompile.ops.activation import ACTIVATIONS, silu, silu_backward
from egcompile.ops.build import broadcast_to, sum_rows
from egcompile.ops.contraction import matmul
from egcompile.ops.opdef import Kind, OpDef, Sample, register
from egcompile.ops.pointwise import add, mul


def _linear_act(x: Node, weight: Node, bias: Node, act: str) -> tuple[Node, Node]:
    pre = add(matmul(x, weight), broadcast_to(bias, (*x.shape[:-1], weight.shape[1])))
    return (pre if act == "none" else ACTIVATIONS[act].forward(pre)), pre


def _linear_act_backward(ct: Node, weight: Node, saved: Node, act: str) -> tuple[Node, Node]:
    dpre = ACTIVATIONS[act].backward(matmul(ct, weight), saved)
    return dpre, sum_rows(dpre)


def _swiglu_backward(gate: Node, up: Node, ct: Node) -> tuple[Node, Node]:
    return silu_backward(mul(ct, up), gate), mul(ct, silu(gate))


def _linear_swiglu(x: Node, weight: Node, gate: Node) -> tuple[Node, Node]:
    up = matmul(x, weight)
    return mul(silu(gate), up), up


linear_act = register(
    OpDef(
        "linear_act",
        Kind.COMPOSITE,
        ("x", "weight", "bias"),
        {"act": "str"},
        outputs=("y", "pre"),
        definition=_linear_act,
        flops=lambda x, weight, bias: 2 * x.numel * weight.shape[1],
        samples=tuple(
            Sample(("f64[2,3,4]", "f64[4,5]", "f64[5]"), {"act": act}) for act in ("none", *ACTIVATIONS)
        ),
    )
)
"""`act(x[*, K] @ weight[K, N] + bias[N])`, and the pre-activation where it is read."""

linear_act_backward = register(
    OpDef(
        "linear_act_backward",
        Kind.COMPOSITE,
        ("ct", "weight", "saved"),
        {"act": "str"},
        outputs=("dpre", "dbias"),
        definition=_linear_act_backward,
        flops=lambda ct, weight, saved: 2 * ct.numel * weight.shape[1],
        samples=tuple(Sample(("f64[2,3,4]", "f64[4,5]", "f64[2,3,5]"), {"act": act}) for act in ACTIVATIONS),
    )
)
"""The cotangent before an activation, from the layer after it: `act'(saved) (ct[*, K] @ weight[K, N])`.

`saved` is the pre-activation, or the output where the derivative needs only that (`ACTIVATIONS`);
`dbias[N]` is the sum of `dpre` over its rows.
"""

linear_add = register(
    OpDef(
        "linear_add",
        Kind.COMPOSITE,
        ("x", "weight", "skip"),
        definition=lambda x, weight, skip: add(matmul(x, weight), skip),
        flops=lambda x, weight, skip: 2 * x.numel * weight.shape[1],
        samples=(Sample(("f64[2,3,4]", "f64[4,5]", "f64[2,3,5]")),),
    )
)
"""`x[*, K] @ weight[K, N] + skip[*, N]`: the end of a residual branch."""

swiglu = register(
    OpDef(
        "swiglu",
        Kind.COMPOSITE,
        ("gate", "up"),
        definition=lambda gate, up: mul(silu(gate), up),
        samples=(Sample(("f64[3,4]", "f64[3,4]")),),
    )
)

swiglu_backward = register(
    OpDef(
        "swiglu_backward",
        Kind.COMPOSITE,
        ("gate", "up", "ct"),
        outputs=("dgate", "dup"),
        definition=_swiglu_backward,
        samples=(Sample(("f64[3,4]",) * 3),),
    )
)

linear_bias_add = register(
    OpDef(
        "linear_bias_add",
        Kind.COMPOSITE,
        ("x", "weight", "bias", "skip"),
        definition=lambda x, weight, bias, skip: add(
            add(matmul(x, weight), broadcast_to(bias, skip.shape)), skip
        ),
        flops=lambda x, weight, bias, skip: 2 * x.numel * weight.shape[1],
        samples=(Sample(("f64[2,3,4]", "f64[4,5]", "f64[5]", "f64[2,3,5]")),),
    )
)
"""`(x[*, K] @ weight[K, N] + bias[N]) + skip[*, N]`."""

linear_swiglu = register(
    OpDef(
        "linear_swiglu",
        Kind.COMPOSITE,
        ("x", "weight", "gate"),
        outputs=("y", "up"),
        definition=_linear_swiglu,
        flops=lambda x, weight, gate: 2 * x.numel * weight.shape[1],
        samples=(Sample(("f64[2,3,4]", "f64[4,5]", "f64[2,3,5]")),),
    )
)
"""`silu(gate) up` of `up = x[*, K] @ weight[K, N]`, and `up` where the backward reads it."""

linear_swiglu_backward = register(
    OpDef(
        "linear_swiglu_backward",
        Kind.COMPOSITE,
        ("ct", "weight", "gate", "up"),
        outputs=("dgate", "dup"),
        definition=lambda ct, weight, gate, up: _swiglu_backward(gate, up, matmul(ct, weight)),
        flops=lambda ct, weight, gate, up: 2 * ct.numel * weight.shape[1],
        samples=(Sample(("f64[2,3,4]", "f64[4,5]", "f64[2,3,5]", "f64[2,3,5]")),),
    )
)
"""`swiglu_backward` of the cotangent `ct[*, K] @ weight[K, N]`, which is not stored."""
