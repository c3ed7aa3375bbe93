"""Each rule, alone in an e-graph, proves its equations there; and near misses it leaves apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from egcompile import ops
from egcompile.ir import Node, topological
from egcompile.language.session import Session
from egcompile.language.types import infer_types
from egcompile.ops.opdef import REGISTRY
from egcompile.rules import RULES, Rule

from .cases import case, examples

ALL = list(examples())


class Proof:
    """An e-graph of `nodes` in which some rules have run, `rounds` times."""

    def __init__(self, rules: Sequence[Rule], nodes: Sequence[Node], rounds: int = 1) -> None:
        self._session = Session(REGISTRY.values(), rules)
        self._session.load(topological(nodes))
        for _ in range(rounds):
            self._session.run()
            contents = self._session.read()
            self._session.add_types(contents, *infer_types(contents.classes, self._session.blame))
        self.matches = sum(self._session.matches.values())

    def equal(self, a: Node, b: Node) -> bool:
        number = self._session.encoder.number
        self._session.load(n for n in topological([a, b]) if n not in number)
        class_of = self._session.read().class_of
        return class_of[number[a]] == class_of[number[b]]


def proves(names: Sequence[str], left: Node, right: Node, rounds: int = 6) -> bool:
    return Proof([RULES[name] for name in names], [left], rounds).equal(left, right)


@pytest.mark.parametrize(("rule", "example"), ALL, ids=[f"{r.name}-{i}" for i, (r, _) in enumerate(ALL)])
def test_a_rule_proves_its_equations(rule: Rule, example: Mapping[str, Any]) -> None:
    found = case(rule, example)
    assert found is not None
    proof = Proof([rule], found.lefts)
    assert proof.matches
    for left, right in zip(found.lefts, found.rights, strict=True):
        assert proof.equal(left, right)


def _input(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
    return ops.input(name=name, shape=shape, dtype=dtype)


def _constant(value: float, like: Node) -> Node:
    return ops.full(value=value, shape=like.shape, dtype=like.dtype)


def _rms_rstd(x: Node, axis: int, eps: Node | None = None, exponent: int = 2) -> Node:
    power = ops.mul(x, x) if exponent == 2 else ops.mul(ops.mul(x, x), x)
    square = ops.mean(power, dims=(axis,))
    return ops.rsqrt(ops.add(square, _constant(1e-5, square) if eps is None else eps))


X, Y = _input("x", 2, 8, 8), _input("y", 2, 8, 8)
NARROW = _input("n", 2, 8, 8, dtype=torch.bfloat16)
PRE = ops.matmul(X, _input("w", 8, 8))
BIAS = ops.expand(ops.reshape(_input("b", 8), shape=(1, 8, 1)), shape=(2, 8, 8))
COLUMN = ops.expand(ops.reshape(_input("c", 8, 1), shape=(1, 1, 8)), shape=(2, 8, 8))

NEAR_MISSES: dict[str, tuple[str, Node]] = {
    "norm of another axis": ("recognition/rms_norm_rstd", _rms_rstd(X, 1)),
    "eps that is data": ("recognition/rms_norm_rstd", _rms_rstd(X, 2, _input("eps", 2, 8, 1))),
    "mean of cubes": ("recognition/rms_norm_rstd", _rms_rstd(X, 2, exponent=3)),
    "statistics rounded to bf16": ("recognition/rms_norm_rstd", _rms_rstd(NARROW, 2)),
    "fp64 input, statistics in fp32": (
        "recognition/rms_norm_rstd_cast",
        _rms_rstd(ops.cast(_input("d", 2, 8, 8, dtype=torch.float64), dtype=torch.float32), 2),
    ),
    "softmax in bf16": (
        "recognition/softmax",
        ops.div(
            e := ops.exp(ops.sub(NARROW, ops.expand(ops.amax(NARROW, dims=(2,)), shape=NARROW.shape))),
            ops.expand(ops.sum(e, dims=(2,)), shape=NARROW.shape),
        ),
    ),
    "gate and value of two tensors": ("recognition/silu", ops.mul(X, ops.sigmoid(Y))),
    "times zero": ("algebra/mul_one", ops.mul(X, _constant(0.0, X))),
    "plus one": ("algebra/zero_add", ops.add(_constant(1.0, X), X)),
    "a cast that rounds": (
        "algebra/cast_cast",
        ops.cast(ops.cast(X, dtype=torch.bfloat16), dtype=torch.float32),
    ),
    "a cast of integers that rounds": (
        "algebra/cast_cast",
        ops.cast(ops.cast(_input("i", 3, dtype=torch.int64), dtype=torch.float32), dtype=torch.int64),
    ),
    "a product of constants beyond fp16": (
        "algebra/mul_mul",
        ops.mul(ops.mul(h := _input("h", 3, dtype=torch.float16), _constant(300.0, h)), _constant(300.0, h)),
    ),
    "a product of constants that no float holds": (
        "algebra/mul_constants",
        ops.mul(_constant(2.0**40 + 1, i := _input("i", 3, dtype=torch.int64)), _constant(2.0**20 + 1, i)),
    ),
    "reshape to another shape": ("movement/reshape_same", ops.reshape(X, shape=(8, 2, 8))),
    "permute of rank 3 is none of rank 4": (
        "movement/permute_permute_4d",
        ops.permute(ops.permute(X, perm=(1, 2, 0)), perm=(1, 2, 0)),
    ),
    "half of the first part": (
        "movement/slice_cat_first",
        ops.slice_(ops.cat(X, Y, axis=2), axis=2, start=0, stop=4, step=1),
    ),
    "pads that overlap": (
        "movement/add_pads",
        ops.add(ops.pad(X, axis=2, before=0, after=4, step=1), ops.pad(Y, axis=2, before=4, after=0, step=1)),
    ),
    "a bias down the columns": ("fusion/linear_bias", ops.add(PRE, BIAS)),
    "a bias that was a column": ("fusion/linear_bias", ops.add(PRE, COLUMN)),
    "an activation's bias that was a column": ("fusion/linear_bias_relu", ops.relu(ops.add(PRE, COLUMN))),
    "a bias that was a column, and a skip": ("fusion/linear_bias_add", ops.add(ops.add(PRE, COLUMN), Y)),
    "the gradient of another dimension": (
        "fusion/linear_relu_backward_dbias",
        ops.reshape(ops.sum(ops.relu_backward(PRE, Y), dims=(0, 2)), shape=(8,)),
    ),
    "norm of another sum": (
        "fusion/add_rms_norm",
        ops.rms_norm(ops.sub(X, Y), _input("b", 8), eps=1e-5, cast_first=True)[0],
    ),
}


@pytest.mark.parametrize("what", NEAR_MISSES)
def test_a_rule_leaves_near_misses_alone(what: str) -> None:
    name, node = NEAR_MISSES[what]
    assert Proof([RULES[name]], [node]).matches == 0


NORM = [name for name in RULES if name.startswith("recognition/rms_norm")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cast_first", [True, False])
def test_written_out_rms_norms_are_proved(dtype: torch.dtype, cast_first: bool) -> None:
    x, w = _input("x", 2, 3, 8, dtype=dtype), _input("w", 8, dtype=dtype)
    _, (written, _) = ops.rms_norm.define((x.tensor, w.tensor), (1e-5, cast_first))
    leaves = {n.attr("name"): n for n in topological([written]) if n.op is ops.input}
    goal = ops.rms_norm(leaves["%0"], leaves["%1"], eps=1e-5, cast_first=cast_first or dtype.itemsize == 4)
    assert proves(NORM, written, goal[0])


def test_a_norm_without_a_weight_has_one_of_ones() -> None:
    x = _input("x", 2, 8, dtype=torch.bfloat16)
    wide = ops.cast(x, dtype=torch.float32)
    written = ops.cast(ops.mul(wide, ops.expand(_rms_rstd(wide, 1), shape=(2, 8))), dtype=x.dtype)
    ones = ops.full(value=1.0, shape=(8,), dtype=x.dtype)
    assert proves(NORM, written, ops.rms_norm(x, ones, eps=1e-5, cast_first=True)[0])


def test_the_gradient_of_a_rotation_is_a_rotation() -> None:
    """(ct cos) + pad(a) + pad(b), as slices and cat come back, is one sum with a cat."""
    ct, a, b = _input("ct", 2, 6), _input("a", 2, 3), _input("b", 2, 3)
    halves = [ops.pad(a, axis=1, before=3, after=0, step=1), ops.pad(b, axis=1, before=0, after=3, step=1)]
    left = ops.add(ops.add(ct, halves[0]), halves[1])
    rules = ["movement/pad_nothing", *(name for name in RULES if name.startswith("movement/add_pads"))]
    assert proves(rules, left, ops.add(ct, ops.cat(b, a, axis=1)))


def test_the_gradient_of_a_split_is_a_cat() -> None:
    """pad(q) + pad(k) + pad(v), as the thirds of one projection come back."""
    q, k, v = (_input(name, 2, n) for name, n in (("q", 2), ("k", 3), ("v", 4)))
    pads = [
        ops.pad(x, axis=1, before=before, after=9 - before - x.shape[1], step=1)
        for x, before in ((q, 0), (k, 2), (v, 5))
    ]
    left = ops.add(ops.add(pads[0], pads[1]), pads[2])
    rules = ["movement/pad_nothing", "movement/add_pads", "movement/cat_cat"]
    assert proves(rules, left, ops.cat(q, k, v, axis=1))
