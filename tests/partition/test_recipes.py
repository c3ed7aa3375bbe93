"""Parts of kernels, and what can be computed inside the kernels that read it."""

from __future__ import annotations

import torch

from egcompile.extract import KernelPlan
from egcompile.extract.cost import Costs
from egcompile.extract.fusible import Site
from egcompile.ir.buffer import Buffer
from egcompile.ir.node import Node
from egcompile.ops import add_rms_norm, contract_rows, exp, expand, linear_act, mul, neg, sum
from egcompile.partition.recipes import kernel_cost, part_of, restricted, within
from egcompile.target import Target
from tests.extract.builder import leaf

COSTS = Costs(Target.parse("cuda:90"))


def loops(root: Node, *inside: Node, reads: tuple[Node, ...]) -> KernelPlan:
    nodes = (*inside, root)
    edges = {(n, i) for n in nodes for i, x in enumerate(n.inputs) if x in inside}
    return KernelPlan(root, nodes, frozenset(edges), reads, (root,))


def test_two_row_spaces_never_meet_in_a_kernel() -> None:
    z, ct = leaf("z", 64, 32), leaf("ct", 64, 1)
    total = sum(z, (1,))
    for width, fits in ((32, True), (128, False)):
        y = leaf("y", 64, width)
        value = sum(y, (1,))
        reader = loops(mul(total, value), total, reads=(z, value))
        wider = within(reader, loops(value, reads=(y,)), value)
        assert (wider is not None) == fits
        if wider is not None:
            assert set(wider.reads) == {z, y} and wider.writes == reader.writes
    pointwise = loops(mul(ct, value), reads=(ct, value))
    assert within(pointwise, loops(value, reads=(y,)), value) is not None


def test_calls_read_from_memory() -> None:
    x, ct = leaf("x", 64, 32), leaf("ct", 64, 16)
    value = exp(x)
    call = KernelPlan(contract_rows(value, ct), (), frozenset(), (value, ct), (contract_rows(value, ct),))
    assert within(call, loops(value, reads=(x,)), value) is None


def test_what_an_expand_repeats_is_counted_as_often() -> None:
    row, x = leaf("row", 1, 4096), leaf("x", 4096, 4096)
    value = exp(row)
    wide = expand(value, (4096, 4096))
    buffers = {n: Buffer.contiguous(n.tensor) for n in (row, x, value)}
    outside = loops(mul(x, wide), wide, reads=(x, value))
    inside = within(outside, loops(value, reads=(row,)), value)
    assert inside is not None
    more = kernel_cost(inside, buffers, COSTS) - kernel_cost(outside, buffers, COSTS)
    assert abs(more - COSTS.work(Site.of(value), 4096 * 4096)) < 0.01


def test_parts_of_named_kernels() -> None:
    x, r, w = leaf("x", 8, 32), leaf("r", 8, 32), leaf("w", 32)
    h, y, rstd = add_rms_norm(x, r, w, eps=1e-5, cast_first=False)
    kernel = KernelPlan(h.inputs[0], (), frozenset(), (x, r, w), (h, y, rstd))
    part = part_of(kernel, y, {h, rstd})
    assert part is not None and set(part.reads) == {h, rstd, w} and part.writes == (y,)
    part = part_of(kernel, rstd, {h, y})
    assert part is not None and part.reads == (h,)
    assert part_of(kernel, h, {y, rstd}) is None, "the sum reads nothing of the rest"
    assert part_of(kernel, y, set()) is None, "that would be the whole kernel"


def test_an_activation_comes_from_what_was_before_it_and_a_product_from_nothing() -> None:
    x, w, bias = leaf("x", 8, 32), leaf("w", 32, 16), leaf("bias", 16)
    y, pre = linear_act(x, w, bias, act="gelu")
    kernel = KernelPlan(y.inputs[0], (), frozenset(), (x, w, bias), (y, pre))
    part = part_of(kernel, y, {pre})
    assert part is not None and part.reads == (pre,) and part.root.op.name == "gelu"
    assert part_of(kernel, pre, {y}) is None
    assert restricted(kernel, {pre}).writes == (pre,)
    assert restricted(kernel, set()).writes == (y,), "a kernel writes something"


def test_a_loop_writes_what_it_is_made_around() -> None:
    x = leaf("x", 8, 32, dtype=torch.float32)
    below, root = exp(x), neg(exp(x))
    kernel = KernelPlan(root, (below, root), frozenset({(root, 0)}), (x,), (root, below))
    assert restricted(kernel, {root}).writes == (root,)
    assert restricted(kernel, {below}).writes == (root, below)
    part = part_of(kernel, root, {below})
    assert part is not None and part.reads == (below,) and part.nodes == (root,)
