"""Movement ops: fewer of them, and none where a view will do.

They cost nothing as views and index maps, so what counts is to let a producer and its reader meet.
"""

from __future__ import annotations

from egcompile.ops import (
    add,
    cast,
    cat,
    contract_rows,
    expand,
    matmul,
    pad,
    permute,
    reshape,
    shape,
    slice_,
    transpose,
)
from egcompile.ops.term import AttrTerm, Pattern
from egcompile.rules.attributes import row
from egcompile.rules.patterns import has_rank, is_vector, rows
from egcompile.rules.rule import Condition, DType, Equations, Int, Ints, Tensor, rule

# ---- identities, and two in a row ----


@rule("movement/reshape_same", {"x": "f64[3,4]"}, phase="both")
def _(x: Tensor) -> Equations:
    "reshape to its own shape  ==>  x"
    return {reshape(x, shape(x)): x}


@rule("movement/expand_same", {"x": "f64[3,4]"}, phase="both")
def _(x: Tensor) -> Equations:
    "expand to its own shape  ==>  x"
    return {expand(x, shape(x)): x}


@rule("movement/reshape_reshape", {"x": "f64[3,4]", "a": (2, 6), "b": (12,)}, phase="both")
def _(x: Tensor, a: Ints, b: Ints) -> Equations:
    "reshape(reshape(x, a), b)  ==>  reshape(x, b)"
    return {reshape(reshape(x, a), b): reshape(x, b)}


@rule("movement/expand_expand", {"x": "f64[1,4,1]", "a": (3, 4, 1), "b": (3, 4, 2)}, phase="both")
def _(x: Tensor, a: Ints, b: Ints) -> Equations:
    "expand(expand(x, a), b)  ==>  expand(x, b)"
    return {expand(expand(x, a), b): expand(x, b)}


@rule("movement/transpose_transpose", {"x": "f64[3,4]"}, phase="both")
def _(x: Tensor) -> Equations:
    "transpose(transpose(x))  ==>  x"
    return {transpose(transpose(x)): x}


_SIZES = (2, 3, 4, 5, 6)


def _example(rank: int, **attrs: object) -> dict[str, object]:
    return {"x": f"f64[{','.join(map(str, _SIZES[:rank]))}]", **attrs}


def _rotated(rank: int) -> tuple[int, ...]:
    return (*range(1, rank), 0)


def _swapped(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


for _rank in (2, 3, 4, 5):

    @rule(f"movement/permute_same_{_rank}d", _example(_rank), phase="both")
    def _(x: Tensor) -> Equations:
        "permute by the identity  ==>  x"
        return {permute(x, tuple(range(_rank))): x}

    @rule(f"movement/permute_is_transpose_{_rank}d", _example(_rank), phase="both")
    def _(x: Tensor) -> Equations:
        "permute that swaps the last two axes  ==>  transpose"
        return {permute(x, _swapped(_rank)): transpose(x)}

    @rule(
        f"movement/permute_permute_{_rank}d",
        _example(_rank, p=_rotated(_rank), q=_swapped(_rank)),
        _example(_rank, p=_rotated(_rank), q=(_rank - 1, *range(_rank - 1))),
        phase="both",
    )
    def _(x: Tensor, p: Ints, q: Ints) -> Equations:
        "permute(permute(x, p), q)  ==>  permute(x, p[q])"
        both = tuple(p[q[i]] for i in range(_rank))
        return {permute(permute(x, p), q): permute(x, both)}, [has_rank(x, _rank)]

    @rule(f"movement/transpose_permute_{_rank}d", _example(_rank, p=_rotated(_rank)), phase="both")
    def _(x: Tensor, p: Ints) -> Equations:
        "transpose(permute(x, p))  ==>  permute(x, p with its last two swapped)"
        both = tuple(p[i] for i in _swapped(_rank))
        return {transpose(permute(x, p)): permute(x, both)}, [has_rank(x, _rank)]

    @rule(f"movement/permute_transpose_{_rank}d", _example(_rank, p=_rotated(_rank)), phase="both")
    def _(x: Tensor, p: Ints) -> Equations:
        "permute(transpose(x), p)  ==>  permute(x, p with its last two axes renamed)"
        swap = AttrTerm.of(_swapped(_rank))
        both = tuple(swap[p[i]] for i in range(_rank))
        return {permute(transpose(x), p): permute(x, both)}, [has_rank(x, _rank)]


@rule("movement/transpose_contract_rows", {"a": "f64[2,5,3]", "b": "f64[2,5,4]"})
def _(a: Tensor, b: Tensor) -> Equations:
    "contract_rows(a, b)^T  ==>  contract_rows(b, a): a weight's gradient in the weight's own layout"
    return {transpose(contract_rows(a, b)): contract_rows(b, a)}


# ---- casts among movement: on fewer elements, or after views ----


@rule("movement/cast_expand", {"x": "f32[3,1]", "to": (3, 4), "d": "bf16"}, phase="both")
def _(x: Tensor, to: Ints, d: DType) -> Equations:
    "cast(expand(x))  ==>  expand(cast(x))"
    return {cast(expand(x, to), d): expand(cast(x, d), to)}


@rule("movement/cast_reshape", {"x": "f32[3,4]", "to": (12,), "d": "bf16"}, phase="both")
def _(x: Tensor, to: Ints, d: DType) -> Equations:
    "cast(reshape(x))  ==>  reshape(cast(x))"
    return {cast(reshape(x, to), d): reshape(cast(x, d), to)}


@rule("movement/reshape_cast", {"x": "f32[3,4]", "to": (12,), "d": "bf16"}, phase="both")
def _(x: Tensor, to: Ints, d: DType) -> Equations:
    "reshape(cast(x))  ==>  cast(reshape(x))"
    return {reshape(cast(x, d), to): cast(reshape(x, to), d)}


@rule(
    "movement/slice_cast",
    {"x": "f32[3,4]", "axis": 1, "start": 1, "stop": 4, "step": 2, "d": "bf16"},
    phase="both",
)
def _(x: Tensor, axis: Int, start: Int, stop: Int, step: Int, d: DType) -> Equations:
    "slice(cast(x))  ==>  cast(slice(x))"
    left = slice_(cast(x, d), axis, start, stop, step)
    return {left: cast(slice_(x, axis, start, stop, step), d)}


# ---- slice, pad and cat, as they stand in rotary embeddings and their gradients ----

_PARTS = {"a": "f64[3,2]", "b": "f64[3,4]", "axis": 1}


@rule("movement/slice_all", {"x": "f64[3,4]", "axis": 1}, phase="both")
def _(x: Tensor, axis: Int) -> Equations:
    "slice of the whole axis  ==>  x"
    return {slice_(x, axis, 0, shape(x)[axis], 1): x}


@rule("movement/pad_nothing", {"x": "f64[3,4]", "axis": 1}, phase="both")
def _(x: Tensor, axis: Int) -> Equations:
    "pad by nothing  ==>  x"
    return {pad(x, axis, 0, 0, 1): x}


@rule("movement/slice_cat_first", _PARTS)
def _(a: Tensor, b: Tensor, axis: Int) -> Equations:
    "the first part of cat(a, b)  ==>  a"
    return {slice_(cat(a, b, axis=axis), axis, 0, shape(a)[axis], 1): a}


@rule("movement/slice_cat_last", _PARTS)
def _(a: Tensor, b: Tensor, axis: Int) -> Equations:
    "the last part of cat(a, b)  ==>  b"
    whole = cat(a, b, axis=axis)
    return {slice_(whole, axis, shape(a)[axis], shape(whole)[axis], 1): b}


@rule(
    "movement/slice_pad",
    {"x": "f64[3,4]", "axis": 1, "before": 2, "after": 3},
)
def _(x: Tensor, axis: Int, before: Int, after: Int) -> Equations:
    "slice(pad(x)) of what was padded  ==>  x"
    left = slice_(pad(x, axis, before, after, 1), axis, before, before + shape(x)[axis], 1)
    return {left: x}


def _neighbours(a: Pattern, b: Pattern, axis: Int, before: Int, after: Int, swapped: bool) -> list[Pattern]:
    """pad(cat(a, b), before, after) as two terms of a sum: each part padded where the other stands."""
    terms = [
        pad(a, axis, before, after + shape(b)[axis], 1),
        pad(b, axis, before + shape(a)[axis], after, 1),
    ]
    return terms[::-1] if swapped else terms


_PADDED = {**_PARTS, "before": 0, "after": 2}

for _swap in (False, True):
    _suffix = "_swapped" if _swap else ""

    @rule(f"movement/add_pads{_suffix}", _PADDED)
    def _(a: Tensor, b: Tensor, axis: Int, before: Int, after: Int) -> Equations:
        "pad(a) + pad(b)  ==>  pad(cat(a, b)), for neighbours; three and more join one by one"
        left = add(*_neighbours(a, b, axis, before, after, _swap))
        return {left: pad(cat(a, b, axis=axis), axis, before, after, 1)}

    @rule(f"movement/add_pads_to{_suffix}", {**_PADDED, "x": "f64[3,8]"})
    def _(x: Tensor, a: Tensor, b: Tensor, axis: Int, before: Int, after: Int) -> Equations:
        "(x + pad(a)) + pad(b)  ==>  x + pad(cat(a, b)): one of the pads is 0 in each place"
        first, second = _neighbours(a, b, axis, before, after, _swap)
        return {add(add(x, first), second): add(x, pad(cat(a, b, axis=axis), axis, before, after, 1))}

    @rule(f"movement/add_pads_around{_suffix}", {**_PADDED, "x": "f64[3,8]"})
    def _(x: Tensor, a: Tensor, b: Tensor, axis: Int, before: Int, after: Int) -> Equations:
        "(pad(a) + x) + pad(b)  ==>  x + pad(cat(a, b))"
        first, second = _neighbours(a, b, axis, before, after, _swap)
        return {add(add(first, x), second): add(x, pad(cat(a, b, axis=axis), axis, before, after, 1))}


@rule("movement/cat_cat", {**_PARTS, "c": "f64[3,1]"}, phase="both")
def _(a: Tensor, b: Tensor, c: Tensor, axis: Int) -> Equations:
    "cat(cat(a, b), c)  ==>  cat(a, b, c)"
    return {cat(cat(a, b, axis=axis), c, axis=axis): cat(a, b, c, axis=axis)}


@rule("movement/cat_cat_last", {**_PARTS, "c": "f64[3,1]"}, phase="both")
def _(a: Tensor, b: Tensor, c: Tensor, axis: Int) -> Equations:
    "cat(a, cat(b, c))  ==>  cat(a, b, c)"
    return {cat(a, cat(b, c, axis=axis), axis=axis): cat(a, b, c, axis=axis)}


# ---- a linear layer on flattened rows, as Hugging Face's Conv1D: its leading axes come back ----


def _unflattened(w: Pattern, to: Ints, rank: int) -> tuple[tuple[AttrTerm, ...], list[Condition]]:
    """For a product with `w[K, N]` reshaped `to` [*, N]: the shape [*, K], and that `to` is such."""
    sizes = tuple(to[i] for i in range(rank))
    return (*sizes[:-1], shape(w)[0]), [(to, sizes), (sizes[-1], shape(w)[1])]


for _rank, _flat in (
    (3, {"x": "f64[2,3,4]", "w": "f64[4,5]", "flat": (6, 4), "to": (2, 3, 5)}),
    (4, {"x": "f64[2,3,2,2]", "w": "f64[4,5]", "flat": (6, 4), "to": (2, 1, 3, 5)}),
):

    @rule(f"movement/linear_of_rows_{_rank}d", _flat, phase="both")
    def _(x: Tensor, w: Tensor, flat: Ints, to: Ints) -> Equations:
        "reshape(reshape(x, [M, K]) w, [*, N])  ==>  reshape(x, [*, K]) w"
        left = reshape(matmul(reshape(x, flat), w), to)
        whole, where = _unflattened(w, to, _rank)
        return {left: matmul(reshape(x, whole), w)}, where

    @rule(f"movement/linear_bias_of_rows_{_rank}d", {**_flat, "b": "f64[5]"}, phase="both")
    def _(x: Tensor, w: Tensor, b: Tensor, flat: Ints, to: Ints) -> Equations:
        "reshape(reshape(x, [M, K]) w + b, [*, N])  ==>  reshape(x, [*, K]) w + b"
        y = matmul(reshape(x, flat), w)
        left = reshape(add(y, rows(b, y)), to)
        whole, where = _unflattened(w, to, _rank)
        bias = expand(reshape(b, row(to)), to)
        return {left: add(matmul(reshape(x, whole), w), bias)}, [*where, is_vector(b, y)]
