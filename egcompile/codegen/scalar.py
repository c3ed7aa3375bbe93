"""One element of a pointwise op as Triton: spellings, literals, and the rounding that casts ask for.

A value is held in its accumulation dtype (fp32 at least); an explicit cast to a narrower dtype rounds and
widens again, and everything else is rounded where it is stored, or where a boolean is made of it: whether two
values are equal must not depend on which of them were stored.
"""

from __future__ import annotations

import math

import torch

from egcompile.codegen.index import Axis
from egcompile.codegen.text import Value
from egcompile.errors import CompileError
from egcompile.ir.node import Node
from egcompile.ir.types import accumulate_dtype

TL_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}

# Triton's correctly rounded forms exist for fp32 alone; fp64's plain ones are correctly rounded.
_IN_FP32 = {"div": "tl.div_rn({0}, {1})", "reciprocal": "tl.div_rn(1.0, {0})", "sqrt": "tl.sqrt_rn({0})"}
_IN_FP64 = {"div": "{0} / {1}", "reciprocal": "1.0 / {0}", "sqrt": "tl.sqrt({0})", "tanh": "_tanh_fp64({0})"}

_NARROW = {"tanh": "_tanh_narrow({0})"}
"""In fp32, where all that is written is rounded to 16 bits."""

HELPERS: dict[str, str] = {
    "_tanh": """
@triton.jit
def _tanh(x):
    # Near 0 the quotient cancels, so an odd polynomial stands in (Cephes tanhf).
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    e = tl.exp(2.0 * tl.abs(x))
    far = 1.0 - 2.0 / (e + 1.0)
    return tl.where(tl.abs(x) < 0.625, x + x * z * p, tl.where(x < 0, -far, far))
""",
    "_tanh_narrow": """
@triton.jit
def _tanh_narrow(x):
    # Right to 2e-6 of itself: near 0 the quotient cancels, so the series stands in.
    far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return tl.where(tl.abs(x) < 0.06, x - x * x * x * 0.33333333, far)
""",
    "_tanh_fp64": """
@triton.jit
def _tanh_fp64(x):
    # Near 0 the quotient cancels, so the series stands in: its next term is below 1e-15 there.
    z = x * x
    p = -0.00145583438705131826 * z + 0.00359212803657248102
    p = p * z - 0.00886323552990219657
    p = p * z + 0.02186948853615520282
    p = p * z - 0.05396825396825396825
    p = p * z + 0.13333333333333333333
    p = p * z - 0.33333333333333333333
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.1, x + x * z * p, tl.where(x < 0, -far, far))
""",
    "_larger": """
@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "_smaller": """
@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
}
"""Functions that generated kernels call, by name."""


def literal(value: float, dtype: torch.dtype) -> Value:
    """A constant of this accumulation dtype."""
    value = value if dtype.is_floating_point else int(value)
    return Value(_number(value), dtype=dtype, literal=value)


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def typed(operand: Value) -> Value:
    """A literal as a scalar of its dtype: in an argument, a bare number would be fp32, or int32."""
    dtype = operand.dtype
    if operand.literal is None or dtype == torch.float32 or dtype is None:
        return operand
    number = bool(operand.literal) if dtype == torch.bool else _number(operand.literal)
    return Value(f"tl.full((), {number}, {TL_DTYPES[dtype]})", dtype=dtype, literal=operand.literal)


def pointwise(node: Node, operands: tuple[Value, ...], exact: bool = True) -> Value:
    """The pointwise `node` on one element; raises CompileError for an op without a spelling.

    `operands` are held in the accumulation dtypes of `node.inputs`. The result may be one of them. Unless
    `exact`, fp32 divisions and square roots may be off by 2 ulp.
    """
    acc = accumulate_dtype(node.dtype)
    axes = frozenset().union(*(o.axes for o in operands))
    if node.op.name == "stop_gradient":
        return operands[0]
    if all(o.literal is not None for o in operands) and node.op.evaluate is not None:
        return _fold(node, operands)
    if node.op.name == "cast":
        return _cast(node, operands[0])
    template = _template(node, operands, exact)
    if "(" in template or operands[0].dtype == torch.bool:
        operands = tuple(map(typed, operands))
    return Value(template, operands, acc, axes, _HINTS.get(node.op.name, node.op.name), _zero(node, operands))


def _template(node: Node, operands: tuple[Value, ...], exact: bool) -> str:
    name, dtype = node.op.name, accumulate_dtype(node.inputs[0].dtype)
    if name == "pow" and (exponent := operands[1].literal) in (2.0, 3.0, 0.5, -1.0):
        squares = {2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 0.5: "tl.sqrt({0})", -1.0: "1.0 / {0}"}
        return squares[exponent]
    in_fp32 = _IN_FP32 if exact else {name: _IN_FP64[name] for name in _IN_FP32} | _NARROW
    spellings = {torch.float64: _IN_FP64, torch.float32: in_fp32}.get(dtype, {})
    template = spellings.get(name) or node.op.scalar
    if template is None:
        raise CompileError(f"{name} has no scalar expression; lower it to its definition first")
    return template


def _cast(node: Node, x: Value) -> Value:
    """Rounds to the node's dtype, and widens again to the dtype that it is computed in."""
    target, acc = node.dtype, accumulate_dtype(node.dtype)
    source = accumulate_dtype(node.inputs[0].dtype)
    if target == torch.bool:
        template = "{0}" if source == torch.bool else "{0} != 0"
    elif target == acc:
        template = f"{{0}}.to({TL_DTYPES[target]})"
    else:
        template = f"{{0}}.to({TL_DTYPES[target]}).to({TL_DTYPES[acc]})"
    if target == acc == source:
        return x
    return Value(template, (typed(x),), acc, x.axes, x.hint, x.zero)


def rounded(x: Value, dtype: torch.dtype) -> Value:
    """An operand of `dtype` as memory would hold it; what was loaded or cast is rounded already."""
    acc = accumulate_dtype(dtype)
    if dtype == acc or x.template.endswith(f".to({TL_DTYPES[acc]})"):
        return x
    if x.literal is not None:
        return literal(torch.tensor(x.literal, dtype=dtype, device="cpu").item(), acc)
    return Value(f"{{0}}.to({TL_DTYPES[dtype]}).to({TL_DTYPES[acc]})", (x,), acc, x.axes, x.hint, x.zero)


def _fold(node: Node, operands: tuple[Value, ...]) -> Value:
    """An op on constants, in the precision that the kernel would have used."""
    tensors = [
        torch.tensor(o.literal, dtype=accumulate_dtype(i.dtype), device="cpu")
        for o, i in zip(operands, node.inputs)
    ]
    assert node.op.evaluate is not None
    result = node.op.evaluate(*tensors, **dict(zip(node.op.attr_names, node.attrs)))
    return literal(result.item(), accumulate_dtype(node.dtype))


_ZERO_PRESERVING = {"mul", "add", "sub", "neg", "abs"}
_HINTS = {
    "eq": "equal",
    "ne": "differs",
    "lt": "less",
    "gt": "greater",
    "mul": "product",
    "add": "added",
    "sub": "difference",
    "where": "chosen",
    "div": "quotient",
}


def _zero(node: Node, operands: tuple[Value, ...]) -> frozenset[Axis]:
    """Axes along which lanes out of range stay 0: where every operand holds 0 there, or a finite literal."""
    if node.op.name not in _ZERO_PRESERVING:
        return frozenset()
    zeros = [o.zero for o in operands if o.literal is None]
    literals = [o.literal for o in operands if o.literal is not None]
    if any(not math.isfinite(v) or (v != 0 and node.op.name != "mul") for v in literals):
        return frozenset()
    return frozenset.intersection(*zeros) if zeros else frozenset()
