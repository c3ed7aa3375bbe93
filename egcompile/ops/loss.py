"""Softmax and the cross-entropies, by definition."""

from __future__ import annotations

import math
from typing import Any

import torch

from egcompile.errors import TypeMismatch
from egcompile.ir.node import Node
from egcompile.ir.types import accumulate_dtype
from egcompile.ops.build import broadcast_to, cast_to, constant, reshape_to
from egcompile.ops.core import full, iota
from egcompile.ops.opdef import Kind, OpDef, Sample, register, same_type
from egcompile.ops.pointwise import (
    add,
    div,
    eq,
    exp,
    ge,
    log,
    log1p,
    logical_and,
    lt,
    mul,
    ne,
    neg,
    sub,
    where,
)
from egcompile.ops.reduction import amax, sum


def _softmax(x: Node, dim: int) -> Node:
    wide = cast_to(x, accumulate_dtype(x.dtype))
    numerator = exp(sub(wide, broadcast_to(amax(wide, dims=(dim,)), x.shape)))
    return cast_to(div(numerator, broadcast_to(sum(numerator, dims=(dim,)), x.shape)), x.dtype)


def _softmax_backward(y: Node, ct: Node, dim: int) -> Node:
    acc = accumulate_dtype(y.dtype)
    y_wide, g = cast_to(y, acc), cast_to(ct, acc)
    along = broadcast_to(sum(mul(y_wide, g), dims=(dim,)), y.shape)
    return cast_to(mul(y_wide, sub(g, along)), y.dtype)


def _log_softmax(x: Node, dim: int) -> Node:
    wide = cast_to(x, accumulate_dtype(x.dtype))
    top, above = (broadcast_to(part, x.shape) for part in _logsumexp(wide, dim))
    return cast_to(sub(sub(wide, top), above), x.dtype)


def _log_softmax_backward(y: Node, ct: Node, dim: int) -> Node:
    acc = accumulate_dtype(y.dtype)
    g = cast_to(ct, acc)
    total = broadcast_to(sum(g, dims=(dim,)), y.shape)
    return cast_to(sub(g, mul(exp(cast_to(y, acc)), total)), y.dtype)


def _logsumexp(wide: Node, dim: int) -> tuple[Node, Node]:
    """The largest element, and by how much the logsumexp exceeds it.

    What subtracts a logsumexp subtracts the largest first, exactly for what lies near it; that of large
    logits has no digits left for a small loss.
    """
    top = amax(wide, dims=(dim,))
    return top, log(sum(exp(sub(wide, broadcast_to(top, wide.shape))), dims=(dim,)))


def _check(logits: Node, target: Node) -> None:
    if len(logits.shape) != 2 or target.shape != logits.shape[:1] or target.dtype != torch.int64:
        raise TypeMismatch(f"cross_entropy of {logits.type} and {target.type}")


def _columns(logits: Node, target: Node) -> tuple[Node, Node]:
    """The target as a column [M, 1], and where it stands in each row [M, V]."""
    column = reshape_to(target, (target.shape[0], 1))
    position = iota(shape=logits.shape, axis=1, dtype=torch.int64)
    return column, eq(position, broadcast_to(column, logits.shape))


def _for_each_row(column: Node, ignore_index: int, classes: int, value: Node) -> Node:
    """`value` of each row; 0 where it is ignored, NaN where its target is no class."""
    exists = logical_and(ge(column, constant(0, column)), lt(column, constant(classes, column)))
    kept = ne(column, constant(ignore_index, column))
    return where(kept, where(exists, value, constant(math.nan, value)), constant(0.0, value))


def _cross_entropy(logits: Node, target: Node, ignore_index: int) -> tuple[Node, Node]:
    _check(logits, target)
    wide = cast_to(logits, accumulate_dtype(logits.dtype))
    column, hit = _columns(logits, target)
    top, above = _logsumexp(wide, 1)
    zero = full(value=0.0, shape=logits.shape, dtype=wide.dtype)
    picked = sum(where(hit, wide, zero), dims=(1,))
    loss = _for_each_row(column, ignore_index, logits.shape[1], sub(above, sub(picked, top)))
    return reshape_to(loss, target.shape), reshape_to(add(top, above), target.shape)


def _cross_entropy_backward(logits: Node, target: Node, lse: Node, ct: Node, ignore_index: int) -> Node:
    _check(logits, target)
    wide = cast_to(logits, lse.dtype)
    column, hit = _columns(logits, target)
    g = reshape_to(cast_to(ct, lse.dtype), column.shape)
    g = _for_each_row(column, ignore_index, logits.shape[1], g)
    probability = exp(sub(wide, broadcast_to(reshape_to(lse, column.shape), logits.shape)))
    zero = constant(0.0, wide)
    one_hot = where(hit, constant(1.0, wide), zero)
    return cast_to(mul(sub(probability, one_hot), broadcast_to(g, logits.shape)), logits.dtype)


def _composite(name: str, operands: str, attrs: dict[str, str], definition: Any, **options: Any) -> OpDef:
    return register(
        OpDef(name, Kind.COMPOSITE, tuple(operands.split()), attrs, definition=definition, **options)
    )


_DIM = {"dim": "int"}
_ONE, _TWO = (Sample(("f64[3,5]",) * n, {"dim": 1}) for n in (1, 2))
softmax = _composite("softmax", "x", _DIM, _softmax, samples=(_ONE,))
softmax_backward = _composite("softmax_backward", "y ct", _DIM, _softmax_backward, samples=(_TWO,))
log_softmax = _composite("log_softmax", "x", _DIM, _log_softmax, samples=(_ONE,))
log_softmax_backward = _composite(
    "log_softmax_backward", "y ct", _DIM, _log_softmax_backward, samples=(_TWO,)
)

_IGNORE = {"ignore_index": "int"}
cross_entropy = _composite(
    "cross_entropy",
    "logits target",
    _IGNORE,
    _cross_entropy,
    outputs=("loss", "lse"),
    nondifferentiable=frozenset({"target"}),
    samples=(Sample(("f64[4,5]", "i64[4]"), {"ignore_index": 1}, low=0, high=4),),
)
"""The loss of each row: `logits[M, V], target[M] -> loss[M], lse[M]` in fp32 at least; 0 where ignored.

A target that is neither a class nor ignored, at which PyTorch stops, makes the row's loss and gradient NaN.
"""

cross_entropy_backward = _composite(
    "cross_entropy_backward",
    "logits target lse ct",
    _IGNORE,
    _cross_entropy_backward,
    nondifferentiable=frozenset({"target"}),
    samples=(Sample(("f64[4,5]", "i64[4]", "f64[4]", "f64[4]"), {"ignore_index": 1}, low=0, high=4),),
)


# ---- of probabilities ----
def _at_least(x: Node, bound: float) -> Node:
    limit = constant(bound, x)
    return where(lt(x, limit), limit, x)


def _binary_cross_entropy(x: Node, target: Node) -> Node:
    hit, miss = _at_least(log(x), -100.0), _at_least(log1p(neg(x)), -100.0)
    return sub(mul(sub(target, constant(1.0, x)), miss), mul(target, hit))


def _binary_cross_entropy_backward(x: Node, target: Node, ct: Node) -> Node:
    slope = _at_least(mul(sub(constant(1.0, x), x), x), 1e-12)
    return mul(ct, div(sub(x, target), slope))


binary_cross_entropy, binary_cross_entropy_backward = (
    register(
        OpDef(
            name,
            Kind.POINTWISE,
            operands,
            type_rule=same_type,
            definition=definition,
            samples=(Sample(("f64[3,4]",) * len(operands), low=0.1, high=0.9),),
        )
    )
    for name, operands, definition in (
        ("binary_cross_entropy", ("x", "target"), _binary_cross_entropy),
        ("binary_cross_entropy_backward", ("x", "target", "ct"), _binary_cross_entropy_backward),
    )
)
"""`-target log(x) - (1 - target) log(1 - x)`, each logarithm -100 at least, as ATen has it; its derivative
in `x`, which is bounded in another way."""
