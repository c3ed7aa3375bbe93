"""The derivative of each op: the cotangents of its operands, a row an op.

A row is `vjp(op, operands and attributes -> one cotangent an operand)`; `ct` is the output's cotangent and
`y` the output. None where nothing flows. Where a function has no derivative, a row chooses what PyTorch
chooses: relu and abs have 0 at 0, `maximum` halves a tie, `amax` shares it evenly.

An op without a row is differentiated through its definition; so is one whose row does not know a cotangent
that comes (`rms_norm` has a row for its output's, and none for that of `rstd`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from egcompile.ops import (
    ACTIVATIONS,
    TensorType,
    abs,
    add,
    add_complex,
    add_layer_norm,
    add_rms_norm,
    amax,
    amax_backward,
    amin,
    amin_backward,
    bmm,
    cast,
    cat,
    contract_rows,
    cos,
    cross_entropy,
    cross_entropy_backward,
    div,
    embedding,
    embedding_backward,
    eq,
    erf,
    exp,
    expand,
    expm1,
    full,
    ge,
    gt,
    layer_norm,
    layer_norm_backward,
    linear_add,
    log,
    log1p,
    log_softmax,
    log_softmax_backward,
    logical_and,
    lt,
    matmul,
    maximum,
    mean,
    minimum,
    mul,
    ne,
    neg,
    pad,
    permute,
    pow,
    reciprocal,
    reshape,
    rms_norm,
    rms_norm_backward,
    rsqrt,
    sdpa,
    sdpa_backward,
    sin,
    slice_,
    softmax,
    softmax_backward,
    sqrt,
    sub,
    sum,
    swiglu,
    swiglu_backward,
    transpose,
    where,
)
from egcompile.ops.term import Pattern, dtype, shape
from egcompile.rules.patterns import across, scalar
from egcompile.rules.rule import vjp

Types = tuple[TensorType, ...]
Attrs = Mapping[str, Any]

# ---- arithmetic ----
vjp(add, lambda a, b, ct: (ct, ct))
vjp(add_complex, lambda a, b, ct: (ct, ct))
vjp(sub, lambda a, b, ct: (ct, neg(ct)))
vjp(mul, lambda a, b, ct: (mul(ct, b), mul(ct, a)))
vjp(div, lambda a, b, y, ct: (div(ct, b), neg(mul(ct, div(y, b)))))
vjp(neg, lambda x, ct: neg(ct))
vjp(reciprocal, lambda x, y, ct: neg(mul(ct, mul(y, y))))
vjp(sqrt, lambda x, y, ct: div(ct, mul(scalar(2.0, y), y)))
vjp(rsqrt, lambda x, y, ct: mul(mul(scalar(-0.5, y), ct), mul(mul(y, y), y)))
vjp(exp, lambda x, y, ct: mul(ct, y))
vjp(log, lambda x, ct: div(ct, x))
vjp(log1p, lambda x, ct: div(ct, add(x, scalar(1.0, x))))
vjp(expm1, lambda x, y, ct: mul(ct, add(y, scalar(1.0, y))))
vjp(sin, lambda x, ct: mul(ct, cos(x)))
vjp(cos, lambda x, ct: neg(mul(ct, sin(x))))
vjp(erf, lambda x, ct: mul(ct, mul(scalar(2.0 / math.sqrt(math.pi), x), exp(neg(mul(x, x))))))
vjp(cast, lambda x, to, ct: cast(ct, dtype(x)))


def _pow(a: Pattern, b: Pattern, y: Pattern, ct: Pattern) -> tuple[Pattern, Pattern]:
    """b a^(b-1), and 0 for b = 0 whatever a; y log(a), and 0 for a = 0 with b >= 0."""
    zero = scalar(0.0, y)
    base = mul(ct, mul(b, pow(a, sub(b, scalar(1.0, y)))))
    exponent = mul(ct, mul(y, log(a)))
    at_zero = logical_and(eq(a, zero), ge(b, zero))
    return where(eq(b, zero), zero, base), where(at_zero, zero, exponent)


vjp(pow, _pow)


# ---- choice: PyTorch's derivatives at ties ----
def _half(ct: Pattern, y: Pattern) -> Pattern:
    return mul(ct, scalar(0.5, y))


def _larger(a: Pattern, b: Pattern, y: Pattern, ct: Pattern) -> Pattern:
    """All of `ct` where a > b, half of it where they are equal, none where a < b."""
    return where(lt(a, b), scalar(0.0, y), where(eq(a, b), _half(ct, y), ct))


def _sign_of(x: Pattern, ct: Pattern) -> Pattern:
    zero = scalar(0.0, x)
    sign = where(gt(x, zero), scalar(1.0, x), where(lt(x, zero), scalar(-1.0, x), zero))
    return mul(ct, sign)


vjp(maximum, lambda a, b, y, ct: (_larger(a, b, y, ct), _larger(b, a, y, ct)))
vjp(minimum, lambda a, b, y, ct: (_larger(b, a, y, ct), _larger(a, b, y, ct)))
vjp(abs, lambda x, ct: _sign_of(x, ct))
vjp(where, lambda c, a, b, y, ct: (None, where(c, ct, scalar(0.0, y)), where(c, scalar(0.0, y), ct)))


# ---- movement: each op's transpose ----
def _expanded_axes(types: Types, attrs: Attrs, index: int) -> tuple[int, ...]:
    sizes = zip(types[0].shape, attrs["shape"], strict=True)
    return tuple(i for i, (before, after) in enumerate(sizes) if before != after)


def _inverse(types: Types, attrs: Attrs, index: int) -> tuple[int, ...]:
    perm = attrs["perm"]
    return tuple(perm.index(i) for i in range(len(perm)))


def _after_slice(types: Types, attrs: Attrs, index: int) -> int:
    """How many elements a slice leaves out behind its last one."""
    taken = range(attrs["start"], attrs["stop"], attrs["step"])
    return types[0].shape[attrs["axis"]] - (taken[-1] + 1 if taken else attrs["start"])


def _pad_stop(types: Types, attrs: Attrs, index: int) -> int:
    padded = pad.infer(types, tuple(attrs[name] for name in pad.attr_names))
    assert isinstance(padded, TensorType)
    return padded.shape[attrs["axis"]] - attrs["after"]


def _cat_start(types: Types, attrs: Attrs, index: int) -> int:
    return int(math.fsum(t.shape[attrs["axis"]] for t in types[:index]))


def _cat_stop(types: Types, attrs: Attrs, index: int) -> int:
    return _cat_start(types, attrs, index + 1)


vjp(reshape, lambda x, to, ct: reshape(ct, shape(x)))
vjp(expand, lambda x, to, ct, dims: sum(ct, dims), derived={"dims": ("ints", _expanded_axes)})
vjp(permute, lambda x, perm, ct, inverse: permute(ct, inverse), derived={"inverse": ("ints", _inverse)})
vjp(transpose, lambda x, ct: transpose(ct))
vjp(
    slice_,
    lambda x, axis, start, stop, step, ct, after: pad(ct, axis, start, after, step),
    derived={"after": ("int", _after_slice)},
)
vjp(
    pad,
    lambda x, axis, before, after, step, ct, end: slice_(ct, axis, before, end, step),
    derived={"end": ("int", _pad_stop)},
)
vjp(
    cat,
    lambda xs, axis, ct, start, stop: slice_(ct, axis, start, stop, 1),
    derived={"start": ("int", _cat_start), "stop": ("int", _cat_stop)},
)


# ---- reductions ----
def _count(types: Types, attrs: Attrs, index: int) -> float:
    return float(math.prod(types[0].shape[d] for d in attrs["dims"]))


vjp(sum, lambda x, dims, ct: across(ct, x))
vjp(
    mean,
    lambda x, dims, y, ct, n: across(div(ct, scalar(n, y)), x),
    derived={"n": ("float", _count)},
)
vjp(amax, lambda x, dims, y, ct: amax_backward(x, ct, dims))
vjp(amin, lambda x, dims, y, ct: amin_backward(x, ct, dims))

# ---- contractions ----
vjp(matmul, lambda a, b, ct: (matmul(ct, transpose(b)), contract_rows(a, ct)))
vjp(bmm, lambda a, b, ct: (bmm(ct, transpose(b)), bmm(transpose(a), ct)))
vjp(contract_rows, lambda a, b, ct: (matmul(b, transpose(ct)), matmul(a, ct)))
vjp(linear_add, lambda x, w, skip, ct: (matmul(ct, transpose(w)), contract_rows(x, ct), ct))


# ---- indexing ----
def _picked(
    x: Pattern, ids: Pattern, rows: Any, padding_idx: Any, ct: Pattern, row: Any, mask: Any
) -> tuple[Pattern, None]:
    """The rows of `ct` that `ids` names, zero for the padding's."""
    kept = ne(ids, full(row, shape(ids), dtype(ids)))
    return where(expand(reshape(kept, mask), shape(x)), embedding(ct, ids, padding_idx), scalar(0.0, x)), None


vjp(
    embedding,
    lambda w, ids, padding_idx, ct: (embedding_backward(ct, ids, shape(w)[0], padding_idx), None),
)
vjp(
    embedding_backward,
    _picked,
    derived={
        "row": ("float", lambda types, attrs, index: float(attrs["padding_idx"])),
        "mask": ("ints", lambda types, attrs, index: (*types[1].shape, 1)),
    },
)

# ---- activations, and the norms and losses that have a kernel for their backward ----
for _act in ACTIVATIONS.values():
    if _act.saves_output:
        vjp(_act.forward, lambda x, y, ct: _act.backward(ct, y))
    else:
        vjp(_act.forward, lambda x, ct: _act.backward(ct, x))

vjp(softmax, lambda x, dim, y, ct: softmax_backward(y, ct, dim))
vjp(log_softmax, lambda x, dim, y, ct: log_softmax_backward(y, ct, dim))
vjp(
    cross_entropy,
    lambda x, target, ignore, ys, ct: (cross_entropy_backward(x, target, ys[1], ct, ignore), None),
)
vjp(swiglu, lambda gate, up, ct: tuple(swiglu_backward(gate, up, ct)))
vjp(
    rms_norm,
    lambda x, w, eps, first, ys, ct: tuple(rms_norm_backward(x, w, ys[1], ct, first)),
)
vjp(
    layer_norm,
    lambda x, w, b, eps, ys, ct: tuple(layer_norm_backward(x, w, ys[1], ys[2], ct))[:3],
)
vjp(
    sdpa,
    lambda q, k, v, scale, causal, ys, ct: tuple(sdpa_backward(q, k, v, *ys, ct, scale, causal)),
)


# ---- a skip connection's sum with the norm behind it: y0 is the sum, y1 the normalized ----
def _through(dx: Pattern, skip: Pattern | None) -> tuple[Pattern, Pattern]:
    total = dx if skip is None else add(dx, skip)
    return total, total


def _add_rms_norm(h: Pattern, w: Pattern, rstd: Pattern, first: Any, ct: Pattern, skip: Any = None) -> Any:
    dx, dw = rms_norm_backward(h, w, rstd, ct, first)
    return *_through(dx, skip), dw


def _add_layer_norm(
    h: Pattern, w: Pattern, mean: Pattern, rstd: Pattern, ct: Pattern, skip: Any = None
) -> Any:
    dx, dw, db, _ = layer_norm_backward(h, w, mean, rstd, ct)
    return *_through(dx, skip), dw, db


vjp(add_rms_norm, lambda x, r, w, eps, first, ct: (ct, ct, None), cts=(0,))
vjp(
    add_rms_norm,
    lambda x, r, w, eps, first, ys, ct: _add_rms_norm(ys[0], w, ys[2], first, ct),
    cts=(1,),
)
vjp(
    add_rms_norm,
    lambda x, r, w, eps, first, ys, cts: _add_rms_norm(ys[0], w, ys[2], first, cts[1], cts[0]),
    cts=(0, 1),
)
vjp(add_layer_norm, lambda x, r, w, b, eps, ct: (ct, ct, None, None), cts=(0,))
vjp(
    add_layer_norm,
    lambda x, r, w, b, eps, ys, ct: _add_layer_norm(ys[0], w, ys[2], ys[3], ct),
    cts=(1,),
)
vjp(
    add_layer_norm,
    lambda x, r, w, b, eps, ys, cts: _add_layer_norm(ys[0], w, ys[2], ys[3], cts[1], cts[0]),
    cts=(0, 1),
)
