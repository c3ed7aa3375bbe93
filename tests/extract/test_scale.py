"""A deep network is extracted to the proven optimum in seconds, and its layers all alike."""

import time
from collections import Counter

import pytest
import torch

from egcompile.extract import extract
from egcompile.ir.node import Node
from egcompile.ops import (
    add,
    add_rms_norm,
    contract_rows,
    linear_add,
    matmul,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_add,
    swiglu,
    swiglu_backward,
    transpose,
)
from egcompile.schedule import schedule
from egcompile.schedule.kernel import Launch
from egcompile.target import Target
from tests.extract.builder import egraph, joint, leaf

H200 = Target.parse("cuda:90")
BF16 = torch.bfloat16


def _network(layers: int, rows: int, width: int):  # type: ignore[no-untyped-def]
    """h += swiglu(n wg, n wu) wd with n = rms_norm(h, g), its backward, and the fused forms beside."""
    h = leaf("x", rows, width, dtype=BF16)
    kept, equal, weights = [], [], []
    for i in range(layers):
        g, wg, wu, wd = (
            leaf(f"{name}{i}", *shape, dtype=BF16)
            for name, shape in (
                ("g", (width,)),
                ("wg", (width, width)),
                ("wu", (width, width)),
                ("wd", (width, width)),
            )
        )
        norm = rms_norm(h, g, 1e-5, False)
        if i:
            fused = add_rms_norm(h.inputs[0], h.inputs[1], g, 1e-5, False)
            equal += [(h, fused[0]), (norm[0], fused[1]), (norm[1], fused[2])]
        gate, up = matmul(norm[0], transpose(wg)), matmul(norm[0], transpose(wu))
        z = swiglu(gate, up)
        down = matmul(z, transpose(wd))
        kept.append((h, norm, gate, up, z))
        weights.append((g, wg, wu, wd))
        skip = h
        h = add(skip, down)
        equal.append((h, linear_add(z, transpose(wd), skip)))
    out = h
    ct = seed = leaf("ct", rows, width, dtype=BF16)
    gradients: dict[Node, Node] = {}
    for (h, norm, gate, up, z), (g, wg, wu, wd) in reversed([*zip(kept, weights)]):
        gradients[wd] = contract_rows(ct, z)
        dgate, dup = swiglu_backward(gate, up, matmul(ct, wd))
        gradients[wg], gradients[wu] = contract_rows(dgate, norm[0]), contract_rows(dup, norm[0])
        first, second = matmul(dgate, wg), matmul(dup, wu)
        dn = add(first, second)
        equal.append((dn, linear_add(dgate, wg, second)))
        dx, dw = rms_norm_backward(h, g, norm[1], dn, False)
        fused = rms_norm_backward_add(h, g, norm[1], dn, ct, False)
        total = add(dx, ct)
        equal += [(total, fused[0]), (dw, fused[1])]
        gradients[g], ct = dw, total
    return joint([out], [seed], gradients), equal


@pytest.mark.parametrize(("rows", "width"), [(8192, 4096), (64, 64)], ids=["bandwidth", "launches"])
def test_thirty_two_layers(rows: int, width: int) -> None:
    graph = egraph(*_network(32, rows, width))
    start = time.process_time()
    found = extract(graph, H200)
    assert time.process_time() - start < 20.0, "a second or two on an idle machine"
    stats = found.stats
    assert stats.gap < 1e-9
    assert stats.live >= 5 * 31
    assert stats.cost < min(stats.greedy_cost, stats.unfused_cost)
    assert stats.kernels < stats.unfused_kernels
    counts = Counter(k.root.op.name for k in found.kernels)
    assert counts["contract_rows"] == 3 * 32
    assert counts["matmul"] + counts["linear_add"] == 6 * 32, "no product twice"
    planned = schedule(found, H200)
    assert planned.backward is not None
    names = {
        step.kernel.name
        for program in (planned.forward, planned.backward)
        for step in program.steps
        if isinstance(step, Launch)
    }
    assert len(names) < 20, "equal layers share their kernels"
