"""Random bodies in random memory, under random tiles: whatever a kernel may hold is computed right."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from egcompile.codegen import Config, source
from egcompile.codegen.heuristics import BACKWARDS
from egcompile.ir import Graph, Node
from egcompile.ops import (
    add,
    amax,
    cat,
    exp,
    expand,
    mean,
    mul,
    neg,
    pad,
    permute,
    relu,
    reshape,
    sigmoid,
    slice_,
    sub,
    sum,
    tanh,
)
from egcompile.ops import input as input_op
from egcompile.schedule.kernel import Buffer, Kernel, contiguous_strides
from tests.codegen.harness import check

SIZES = [1, 2, 3, 4, 6, 8, 12, 33]
CONFIGS = [
    None,
    Config(block_rows=4, block_cols=4, programs=3),
    Config(block_rows=1, block_cols=8, programs=2),
    Config(block_rows=8, block_cols=1, programs=3),
]


class Body:
    """A body that grows by one random op at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.inputs: list[Node] = []
        shape = [self.random.choice(SIZES) for _ in range(self.random.choice([1, 2, 2, 3, 3, 4]))]
        while math.prod(shape) > 2000:
            shape = [max(1, n // 2) for n in shape]
        self.values = [self.leaf(tuple(shape))]
        self.results: list[Node] = []
        for _ in range(self.random.randint(1, 8)):
            self.grow(self.random.choice(self.values))

    def leaf(self, shape: tuple[int, ...]) -> Node:
        node = input_op(name=f"x{len(self.inputs)}", shape=shape, dtype=torch.float64)
        self.inputs.append(node)
        return node

    def grow(self, x: Node) -> None:
        steps: list[tuple[float, Callable[[Node], None]]] = [
            (0.25, self.combine),
            (0.1, self.broadcast),
            (0.1, self.map),
            (0.3, self.reduce),
            (0.08, self.permute),
            (0.07, self.reshape),
            (0.05, self.slice),
            (0.05, self.extend),
        ]
        weights, functions = zip(*steps, strict=True)
        self.random.choices(functions, weights)[0](x)

    def combine(self, x: Node) -> None:
        other = self.random.choice([v for v in self.values if v.shape == x.shape])
        self.values.append(self.random.choice([add, mul, sub])(x, other))

    def broadcast(self, x: Node) -> None:
        leaf = self.leaf(tuple(n if self.random.random() < 0.5 else 1 for n in x.shape))
        self.values.append(mul(x, leaf if leaf.shape == x.shape else expand(leaf, shape=x.shape)))

    def map(self, x: Node) -> None:
        self.values.append(self.random.choice([tanh, sigmoid, relu, lambda v: exp(neg(mul(v, v)))])(x))

    def reduce(self, x: Node) -> None:
        if not x.shape:
            return
        dims = sorted(self.random.sample(range(len(x.shape)), self.random.randint(1, len(x.shape))))
        reduced = self.random.choice([sum, mean, amax])(x, dims=tuple(dims))
        self.results.append(reduced)
        if self.random.random() < 0.7:
            wide = reduced if reduced.shape == x.shape else expand(reduced, shape=x.shape)
            self.values.append(self.random.choice([sub, mul])(x, wide))

    def permute(self, x: Node) -> None:
        self.values.append(permute(x, perm=tuple(self.random.sample(range(len(x.shape)), len(x.shape)))))

    def reshape(self, x: Node) -> None:
        size, shape = math.prod(x.shape), []
        while size > 1:
            shape.append(self.random.choice([n for n in range(2, size + 1) if size % n == 0]))
            size //= shape[-1]
        self.values.append(reshape(x, shape=tuple(shape)))

    def slice(self, x: Node) -> None:
        axis = self.random.randrange(max(len(x.shape), 1))
        if x.shape and x.shape[axis] > 1:
            start = self.random.randint(0, x.shape[axis] - 1)
            stop = self.random.randint(start + 1, x.shape[axis])
            self.values.append(slice_(x, axis, start, stop, self.random.choice([1, 2])))

    def extend(self, x: Node) -> None:
        if x.shape:
            axis = self.random.randrange(len(x.shape))
            longer = pad(x, axis, 1, 2, 1) if self.random.random() < 0.5 else cat(x, neg(x), axis=axis)
            self.values.append(longer)

    def buffer(self, node: Node, distinct: bool) -> Buffer:
        """Contiguous, permuted or, unless elements must be distinct, broadcast memory."""
        kind = self.random.random()
        if kind < 0.5:
            return Buffer.contiguous(node.tensor)
        order = self.random.sample(range(len(node.shape)), len(node.shape))
        strides = [0] * len(node.shape)
        for axis, stride in zip(order, contiguous_strides(tuple(node.shape[i] for i in order)), strict=True):
            strides[axis] = 0 if kind > 0.9 and not distinct and self.random.random() < 0.4 else stride
        return Buffer(node.tensor, tuple(strides))

    def kernel(self) -> Kernel:
        candidates = [v for v in (*self.values[1:], *self.results) if v not in self.inputs]
        candidates = candidates or [neg(self.values[0])]
        chosen = self.random.choices(candidates, k=self.random.randint(1, 3))
        outputs = tuple(dict.fromkeys(chosen))
        return Kernel(
            "kernel",
            Graph(tuple(self.inputs), outputs),
            tuple(self.buffer(node, False) for node in self.inputs),
            tuple(self.buffer(node, True) for node in outputs),
        )


@pytest.mark.parametrize("seed", range(60))
def test_random_body(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other one goes through memory from its end, as kernels that move much do."""
    monkeypatch.setattr(source, "BACKWARDS", 0 if seed % 2 else BACKWARDS)
    body = Body(seed)
    check(body.kernel(), body.random.choice(CONFIGS), low=-1.0, high=1.0, rtol=1e-8, atol=1e-8)
