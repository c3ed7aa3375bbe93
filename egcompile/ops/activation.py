"""Activations and their derivatives as PyTorch defines them, ties included (relu' is 0 at 0)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from egcompile.ir.node import Node
from egcompile.ops.build import constant
from egcompile.ops.opdef import Kind, OpDef, Sample, register, same_type
from egcompile.ops.pointwise import add, erf, exp, le, mul, sub, where


def _activation(name: str, evaluate: Callable[..., Any], scalar: str) -> OpDef:
    sample = Sample(("f64[3,4]",), low=0.25) if name == "relu" else Sample(("f64[3,4]",))
    return register(
        OpDef(
            name,
            Kind.POINTWISE,
            ("x",),
            type_rule=same_type,
            evaluate=evaluate,
            scalar=scalar,
            samples=(sample,),
        )
    )


relu = _activation("relu", torch.relu, "tl.where({0} <= 0, 0.0, {0})")  # keeps NaN
sigmoid = _activation("sigmoid", torch.sigmoid, "tl.sigmoid({0})")
tanh = _activation("tanh", torch.tanh, "_tanh({0})")
silu = _activation("silu", F.silu, "{0} * tl.sigmoid({0})")


def _gelu_definition(x: Node) -> Node:
    half = mul(constant(0.5, x), x)
    return mul(half, add(constant(1.0, x), erf(mul(x, constant(math.sqrt(0.5), x)))))


def _gelu_tanh_inner(x: Node) -> Node:
    cube = mul(mul(x, x), x)
    inner = add(x, mul(constant(0.044715, x), cube))
    return mul(constant(math.sqrt(2.0 / math.pi), x), inner)


def _gelu_tanh_definition(x: Node) -> Node:
    half = mul(constant(0.5, x), x)
    return mul(half, add(constant(1.0, x), tanh(_gelu_tanh_inner(x))))


def _composite(name: str, operands: str, evaluate: Any, definition: Any, *samples: Sample) -> OpDef:
    names = tuple(operands.split())
    return register(
        OpDef(
            name,
            Kind.POINTWISE,
            names,
            type_rule=same_type,
            evaluate=evaluate,
            definition=definition,
            samples=samples or (Sample(("f64[3,4]",) * len(names)),),
        )
    )


gelu = _composite("gelu", "x", F.gelu, _gelu_definition)
gelu_tanh = _composite("gelu_tanh", "x", lambda x: F.gelu(x, approximate="tanh"), _gelu_tanh_definition)
"""`gelu(x, approximate="tanh")`."""


def _relu_backward(ct: Node, y: Node) -> Node:
    zero = constant(0.0, y)
    return where(le(y, zero), zero, ct)  # a NaN passes the cotangent on


def _sigmoid_backward(ct: Node, y: Node) -> Node:
    return mul(ct, mul(y, sub(constant(1.0, y), y)))


def _tanh_backward(ct: Node, y: Node) -> Node:
    return mul(ct, sub(constant(1.0, y), mul(y, y)))


def _silu_backward(ct: Node, x: Node) -> Node:
    s = sigmoid(x)
    one = constant(1.0, x)
    return mul(ct, mul(s, add(one, mul(x, sub(one, s)))))


def _gelu_backward(ct: Node, x: Node) -> Node:
    cdf = mul(constant(0.5, x), add(constant(1.0, x), erf(mul(x, constant(math.sqrt(0.5), x)))))
    pdf = mul(exp(mul(constant(-0.5, x), mul(x, x))), constant(1.0 / math.sqrt(2.0 * math.pi), x))
    return mul(ct, add(cdf, mul(x, pdf)))


def _gelu_tanh_backward(ct: Node, x: Node) -> Node:
    one, half = constant(1.0, x), constant(0.5, x)
    t = tanh(_gelu_tanh_inner(x))
    slope = add(one, mul(constant(3 * 0.044715, x), mul(x, x)))
    inner = mul(constant(math.sqrt(2.0 / math.pi), x), slope)
    right = mul(mul(half, x), mul(sub(one, mul(t, t)), inner))
    return mul(ct, add(mul(half, add(one, t)), right))


relu_backward = _composite("relu_backward", "ct y", None, _relu_backward)
sigmoid_backward = _composite("sigmoid_backward", "ct y", None, _sigmoid_backward)
tanh_backward = _composite("tanh_backward", "ct y", None, _tanh_backward)
silu_backward = _composite("silu_backward", "ct x", None, _silu_backward)
gelu_backward = _composite("gelu_backward", "ct x", None, _gelu_backward)
gelu_tanh_backward = _composite("gelu_tanh_backward", "ct x", None, _gelu_tanh_backward)


@dataclass(frozen=True)
class Activation:
    """A row of the table: forward `f(x)`, backward `g(ct, saved)`, and which value it saves."""

    forward: OpDef
    backward: OpDef
    saves_output: bool


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(relu, relu_backward, True),
    "sigmoid": Activation(sigmoid, sigmoid_backward, True),
    "tanh": Activation(tanh, tanh_backward, True),
    "silu": Activation(silu, silu_backward, False),
    "gelu": Activation(gelu, gelu_backward, False),
    "gelu_tanh": Activation(gelu_tanh, gelu_tanh_backward, False),
}
