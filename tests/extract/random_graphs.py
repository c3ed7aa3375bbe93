"""Random joint graphs over small float64 tensors, with equalities that hold, and costs that mean nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from egcompile.extract.cost import Costs
from egcompile.extract.fusible import Site
from egcompile.ir.buffer import Buffer
from egcompile.ir.joint import Joint
from egcompile.ir.node import Node, topological
from egcompile.ir.types import ValueType
from egcompile.ops import (
    add,
    add_rms_norm,
    amax,
    cat,
    contract_rows,
    exp,
    expand,
    full,
    input,
    linear_act,
    linear_add,
    matmul,
    mean,
    mul,
    neg,
    pad,
    permute,
    reshape,
    rms_norm,
    sigmoid,
    slice_,
    softmax,
    sub,
    sum,
    swiglu_backward,
    tanh,
    transpose,
)
from egcompile.target import Target
from tests.extract.builder import joint, leaf

F64 = torch.float64
SHAPES = ((4, 6), (6, 4), (4, 1), (24,), (2, 2, 6), (6, 6), (4, 4), (6,))
Equal = list[tuple[Node, Node]]


class Maker:
    """Grows a pool of values; `equal` collects pairs that the mathematics makes equal."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.equal: Equal = []
        self.values = [leaf(f"p{i}", *shape, dtype=F64) for i, shape in enumerate(SHAPES)]

    def any(self, *shapes: tuple[int, ...]) -> Node:
        """A value of one of the shapes, late ones more often, so that chains grow."""
        fitting = [v for v in self.values if not shapes or v.shape in shapes]
        return fitting[max(self.pick.randrange(len(fitting)) for _ in range(2))]

    def grow(self) -> None:
        made = self.pick.choice(MAKERS)(self)
        self.values.extend(n for n in made if n.shape in SHAPES)


def _unary(m: Maker) -> list[Node]:
    x = m.any()
    op = m.pick.choice((neg, tanh, sigmoid))
    if op is neg:
        m.equal.append((neg(neg(x)), x))
    return [op(x)]


def _binary(m: Maker) -> list[Node]:
    a = m.any()
    b = m.any(a.shape)
    op = m.pick.choice((add, mul, sub))
    y = op(a, b)
    if op is sub:
        m.equal.append((y, add(a, neg(b))))
    elif m.pick.random() < 0.5:
        m.equal.append((y, op(b, a)))
    return [y]


def _constant(m: Maker) -> list[Node]:
    x = m.any()
    one = full(1.0, x.shape, F64)
    if m.pick.random() < 0.5:
        m.equal.append((mul(x, one), x))
        return [mul(x, one)]
    return [add(x, full(0.25, x.shape, F64))]


def _move(m: Maker) -> list[Node]:
    x = m.any()
    if len(x.shape) >= 2 and m.pick.random() < 0.5:
        y = transpose(x)
        m.equal.append((transpose(y), x))
        return [y]
    if x.shape == (2, 2, 6) and m.pick.random() < 0.3:
        return [permute(x, (1, 0, 2))]
    return [reshape(x, s) for s in SHAPES if s != x.shape and torch.Size(s).numel() == x.tensor.numel]


def _pieces(m: Maker) -> list[Node]:
    x = m.any((4, 6), (6, 4), (6, 6))
    half = x.shape[1] // 2
    left, right = slice_(x, 1, 0, half, 1), slice_(x, 1, half, x.shape[1], 1)
    joined = cat(neg(right), left, axis=1)
    return [joined, pad(left, 1, 0, half, 1), reshape(left, (left.tensor.numel,)), joined]


def _rows(m: Maker) -> list[Node]:
    x = m.any((4, 6), (6, 6), (4, 4))
    row = m.pick.choice((sum, mean, amax))(x, (1,))
    wide = expand(row, x.shape)
    return [row, wide, sub(x, wide), exp(sub(x, expand(amax(x, (1,)), x.shape)))]


def _columns(m: Maker) -> list[Node]:
    x = m.any((4, 6), (6, 6), (6, 4))
    total = sum(x, (0,))
    return [reshape(total, (x.shape[1],)), sum(x, (0, 1))]


def _product(m: Maker) -> list[Node]:
    a, b = m.any((4, 6), (6, 6), (4, 4)), m.any((6, 4), (6, 6), (4, 6))
    if a.shape[1] != b.shape[0]:
        return []
    y = matmul(a, b)
    m.equal.append((y, transpose(matmul(transpose(b), transpose(a)))))
    if m.pick.random() < 0.5:
        skip = [v for v in m.values if v.shape == y.shape]
        if skip:
            total = add(y, m.pick.choice(skip))
            m.equal.append((total, linear_add(a, b, total.inputs[1])))
            return [y, total]
    return [y]


def _weight_gradient(m: Maker) -> list[Node]:
    a = m.any((4, 6), (6, 6), (6, 4))
    b = m.any(a.shape)
    y = contract_rows(a, b)
    m.equal.append((y, transpose(contract_rows(b, a))))
    return [y]


def _layer(m: Maker) -> list[Node]:
    x, w, bias = m.any((4, 6), (6, 6)), m.any((6, 6)), m.any((6,))
    pre = add(matmul(x, w), expand(reshape(bias, (1, 6)), x.shape))
    fused = linear_act(x, w, bias, "tanh")
    m.equal.extend([(pre, fused[1]), (tanh(pre), fused[0])])
    return [tanh(pre), *([pre] if m.pick.random() < 0.5 else [])]


def _norm(m: Maker) -> list[Node]:
    x, weight = m.any((4, 6), (6, 6)), m.any((6,))
    h = add(x, m.any(x.shape))
    y, rstd = rms_norm(h, weight, 1e-5, False)
    fused = add_rms_norm(h.inputs[0], h.inputs[1], weight, 1e-5, False)
    m.equal.extend([(h, fused[0]), (y, fused[1]), (rstd, fused[2])])
    return [h, y, mul(y, expand(rstd, y.shape))]


def _gate(m: Maker) -> list[Node]:
    a = m.any((4, 6), (6, 6), (2, 2, 6))
    return list(swiglu_backward(a, m.any(a.shape), m.any(a.shape)))


def _softmax(m: Maker) -> list[Node]:
    return [softmax(m.any((4, 6), (6, 6)), 1)]


MAKERS: tuple[Callable[[Maker], list[Node]], ...] = (
    *(_unary, _unary, _binary, _binary, _binary, _constant, _move, _move, _pieces, _rows, _rows),
    *(_columns, _product, _product, _weight_gradient, _layer, _norm, _norm, _gate, _softmax),
)


def random_joint(seed: int, steps: int = 25) -> tuple[Joint, Equal]:
    """Some values depend on a cotangent; gradients are values of their primal's type."""
    made = Maker(seed)
    cotangents = [leaf("ct0", 4, 6, dtype=F64), leaf("ct1", 6, 6, dtype=F64)]
    for _ in range(steps // 2):
        made.grow()
    outputs = [made.values[-1], *made.pick.sample(made.values, 3)]
    made.values.extend(cotangents)
    for _ in range(steps - steps // 2):
        made.grow()
    gradients = {}
    for primal in made.values[: len(SHAPES)]:
        choices = [v for v in made.values[len(SHAPES) :] if v.type == primal.type]
        if choices and made.pick.random() < 0.7:
            gradients[primal] = made.pick.choice(choices[-6:])
    known = {n for n in topological([*outputs, *gradients.values()]) if n.op is input}
    return joint(outputs, [c for c in cotangents if c in known], gradients), made.equal


class RandomCosts(Costs):
    """Costs without meaning, so that any legal plan may be the cheapest."""

    def __init__(self, target: Target, seed: int) -> None:
        super().__init__(target)
        self.seed = seed
        self.launch = random.Random(f"{seed} launch").choice((0.01, 1.0, 3.0))
        self.write_weight = random.Random(f"{seed} write").choice((0.05, 1.0, 5.0))

    def _cost(self, *key: object) -> float:
        return random.Random(f"{self.seed} {key}").random() + 1e-3

    def read(self, site: Site, position: int, operand: Buffer) -> float:
        return self._cost("read", operand)

    def write(self, type: ValueType) -> float:
        return self.write_weight * self._cost("write", type)

    def work(self, site: Site, evaluations: int) -> float:
        return self._cost("work", site.op, site.type)

    def kernel(self, site: Site) -> float:
        return self.launch + 2 * self._cost("kernel", site.op, site.type)
