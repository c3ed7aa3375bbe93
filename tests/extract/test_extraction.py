"""Small theorems: what the cheapest plan of a small e-graph is."""

from __future__ import annotations

import pytest
import torch

from egcompile.errors import ExtractionError
from egcompile.extract import Extraction, extract
from egcompile.extract.cost import Costs
from egcompile.ir.node import Node
from egcompile.ops import (
    add,
    add_rms_norm,
    broadcast_to,
    cast,
    contract_rows,
    cos,
    exp,
    expand,
    full,
    input,
    linear_act,
    matmul,
    mean,
    mul,
    neg,
    permute,
    relu,
    reshape,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_add,
    sdpa,
    sin,
    slice_,
    sub,
    sum,
    transpose,
)
from egcompile.target import Target
from tests.extract.builder import egraph, forward, joint, leaf

H200 = Target.parse("cuda:90")
BF16 = torch.bfloat16


def wide(name: str, *shape: int) -> Node:
    return leaf(name, *(shape or (8192, 4096)), dtype=BF16)


def kernels(extraction: Extraction) -> list[str]:
    """`root(what is computed inside)` of each kernel, sorted."""
    return sorted(
        f"{k.root.op.name}({', '.join(n.op.name for n in k.nodes if n is not k.root)})"
        for k in extraction.kernels
    )


def best(*outputs: Node, equal: list[tuple[Node, Node]] | None = None) -> Extraction:
    return extract(egraph(forward(*outputs), equal or []), H200)


def test_pointwise_work_is_one_kernel_and_reads_each_input_once() -> None:
    x, y = wide("x"), wide("y")
    z = mul(add(x, y), exp(sub(x, y)))
    found = best(z)
    assert kernels(found) == ["mul(add, sub, exp)"]
    assert set(found.kernels[0].reads) == {x, y}
    assert found.written == {z}
    assert found.stats.unfused_kernels == 4


def test_cost_counts_what_moves() -> None:
    x, y = wide("x"), wide("y")
    moved = 3 * 8192 * 4096 * 2 / H200.bandwidth * 1e6
    assert best(add(x, y)).stats.cost == pytest.approx(H200.launch * 1e6 + moved, rel=0.05)


def test_a_constant_is_part_of_each_kernel() -> None:
    x = wide("x")
    found = best(mul(x, full(3.0, x.shape, BF16)), rms_norm(x, full(1.0, (4096,), BF16), 1e-5, False)[0])
    assert kernels(found) == ["mul(full)", "rms_norm(full)"]
    assert all(k.reads == (x,) for k in found.kernels)


def test_a_constant_is_written_for_a_call_and_for_a_caller() -> None:
    x, ones = wide("x"), full(1.0, (4096, 64), BF16)
    assert kernels(best(matmul(x, ones), ones)) == ["full()", "matmul()"]


def test_two_readers_of_a_sum_and_its_norm_take_the_fused_kernel() -> None:
    x, r, w = wide("x"), wide("r"), wide("w", 4096)
    h = add(x, r)
    y = rms_norm(h, w, 1e-5, False)[0]
    fused = add_rms_norm(x, r, w, 1e-5, False)
    found = best(h, y, equal=[(h, fused[0]), (y, fused[1])])
    assert kernels(found) == ["add_rms_norm()"]
    assert {n.attr("index") for n in found.written} == {0, 1}, "rstd is read by nobody"


def test_greedy_keeps_the_add_that_the_fused_kernel_gives_anyway() -> None:
    x, r, w = wide("x"), wide("r"), wide("w", 4096)
    h = add(x, r)
    y = rms_norm(h, w, 1e-5, False)[0]
    fused = add_rms_norm(x, r, w, 1e-5, False)
    graph = egraph(forward(h, y), [(h, fused[0]), (y, fused[1])])
    exact, greedy, unfused = (extract(graph, H200, mode=m) for m in ("exact", "greedy", "unfused"))
    assert exact.stats.cost <= greedy.stats.cost <= unfused.stats.cost
    assert exact.stats.greedy_cost == pytest.approx(greedy.stats.cost)
    assert exact.stats.unfused_cost == pytest.approx(unfused.stats.cost)
    assert exact.stats.gap == 0.0


def test_a_norm_computes_the_sum_before_it_and_writes_it_too() -> None:
    """Without the named op, inlining does the same: the sum is a side output of the norm's kernel."""
    x, r, w = wide("x"), wide("r"), wide("w", 4096)
    h = add(x, r)
    y = rms_norm(h, w, 1e-5, False)[0]
    found = best(h, y)
    assert kernels(found) == ["rms_norm(add)"]
    assert found.kernels[0].writes == (h, y) or set(found.kernels[0].writes) == {h, y}
    assert set(found.kernels[0].reads) == {x, r, w}


def _mlp(backward_reads_pre: bool) -> Extraction:
    """One layer, relu(x w + b), and a backward that reads its pre-activation or its output."""
    x, w, b, ct = wide("x", 8192, 512), wide("w", 512, 4096), wide("b", 4096), wide("ct")
    pre = add(matmul(x, w), broadcast_to(b, (8192, 4096)))
    y = relu(pre)
    fused = linear_act(x, w, b, "relu")
    gradients = {b: reshape(sum(mul(ct, pre if backward_reads_pre else y), (0,)), (4096,))}
    made = joint([y], [ct], gradients)
    return extract(egraph(made, [(y, fused[0]), (pre, fused[1])]), H200)


def test_the_pre_activation_is_stored_when_the_backward_reads_it() -> None:
    found = _mlp(True)
    assert kernels(found) == ["linear_act()", "sum(mul)"]
    assert {n.attr("index") for n in found.written if n.op.name == "out"} == {0, 1}


def test_the_pre_activation_is_not_stored_when_nobody_reads_it() -> None:
    found = _mlp(False)
    assert {n.attr("index") for n in found.written if n.op.name == "out"} == {0}


def test_a_contraction_is_never_computed_twice() -> None:
    x, w = wide("x"), wide("w", 4096, 4096)
    y = matmul(x, w)
    found = best(relu(y), matmul(relu(y), w), neg(y))
    assert sorted(k.root.op.name for k in found.kernels).count("matmul") == 2


def test_cheap_work_is_computed_again_rather_than_stored() -> None:
    """relu(x) for two reductions: a read of x each, against a write and two reads."""
    x, y = wide("x"), wide("y")
    found = best(sum(relu(x), (0,)), sum(mul(relu(x), y), (0,)))
    assert sorted(kernels(found)) == ["sum(relu)", "sum(relu, mul)"]


def test_what_many_read_is_stored_when_it_takes_much_to_compute() -> None:
    """A sum of four wide values in four kernels would be sixteen reads."""
    parts = [wide(f"p{i}") for i in range(4)]
    total = add(add(parts[0], parts[1]), add(parts[2], parts[3]))
    others = [wide(f"o{i}") for i in range(4)]
    found = best(*(sum(mul(total, o), (0,)) for o in others))
    assert total in found.written
    assert sum_of_reads(found, set(parts)) == 4


def sum_of_reads(extraction: Extraction, values: set[Node]) -> int:
    return len([n for k in extraction.kernels for n in k.reads if n in values])


def test_an_expensive_table_is_computed_once_and_read() -> None:
    """Rotary angles are small; sin and cos of them, for each head of each layer, are not free."""
    angle = leaf("angle", 2048, 128)
    xs = [leaf(f"x{i}", 4, 16, 2048, 128) for i in range(8)]
    shape = xs[0].shape

    def table(f: object) -> Node:
        return expand(reshape(f(mul(angle, angle)), (1, 1, 2048, 128)), shape)  # type: ignore[operator]

    found = best(*(add(mul(x, table(cos)), mul(x, table(sin))) for x in xs))
    written = {n.op.name for n in found.written}
    assert {"cos", "sin"} <= written
    assert len(found.kernels) == len(xs) + 2


def test_rope_between_a_linear_layer_and_attention_copies_nothing() -> None:
    """[B,T,H*D] -> heads -> rotate (a kernel, in [B,T,H,D] order) -> attention -> [B,T,H*D], else views."""
    b, t, h, d = 4, 2048, 16, 128
    x, out_weight = wide("x", b, t, h * d), wide("wo", h * d, h * d)
    table = [expand(reshape(wide(n, t, d), (1, 1, t, d)), (b, h, t, d)) for n in ("cos", "sin")]

    def heads(name: str) -> Node:
        y = matmul(x, transpose(wide(name, h * d, h * d)))
        return permute(reshape(y, (b, t, h, d)), (0, 2, 1, 3))

    def rotate(q: Node) -> Node:
        from egcompile.ops import cat

        half = cat(neg(slice_(q, 3, d // 2, d, 1)), slice_(q, 3, 0, d // 2, 1), axis=3)
        return add(mul(q, table[0]), mul(half, table[1]))

    q, k = rotate(heads("wq")), rotate(heads("wk"))
    attended = sdpa(q, k, heads("wv"), 0.1, True)[0]
    merged = reshape(permute(attended, (0, 2, 1, 3)), (b, t, h * d))
    found = best(matmul(merged, transpose(out_weight)))
    assert sorted(k.root.op.name for k in found.kernels) == ["add", "add"] + ["matmul"] * 4 + ["sdpa"]
    inside = (t * h * d, d, h * d, 1)
    assert found.buffers[q].strides == found.buffers[k].strides == inside
    assert found.buffers[attended].strides == inside
    assert merged in found.views
    assert found.buffers[merged].is_contiguous


def test_a_reshape_that_strides_do_not_allow_is_copied() -> None:
    x, w = wide("x", 4, 8, 32), wide("w", 32, 16)
    y = reshape(permute(x, (1, 0, 2)), (32, 32))
    found = best(matmul(y, w))
    assert kernels(found) == ["matmul()", "reshape()"]
    assert y in found.written


def test_and_is_an_index_map_where_pointwise_work_reads_it() -> None:
    x, z = wide("x", 4, 8, 32), wide("z", 32, 32)
    found = best(mul(reshape(permute(x, (1, 0, 2)), (32, 32)), z))
    assert kernels(found) == ["mul(reshape)"]


def test_strides_of_inputs_decide_what_is_a_view() -> None:
    x, w = wide("x", 4, 8, 32), wide("w", 32, 16)
    y = reshape(permute(x, (1, 0, 2)), (32, 32))
    graph = egraph(forward(matmul(y, w)))
    assert kernels(extract(graph, H200, strides={"x": (32, 128, 1)})) == ["matmul()"]


def test_a_smaller_value_is_written_rather_than_what_it_is_a_slice_of() -> None:
    x, y, w = wide("x", 64, 8192), wide("y", 64, 8192), wide("w", 32, 16)
    part = slice_(add(x, y), 1, 0, 32, 1)
    found = best(matmul(part, w))
    assert found.written >= {part}
    assert add(x, y) not in found.written


def test_outputs_are_row_major_and_no_views_of_inputs() -> None:
    x = wide("x", 64, 32)
    swapped, flat, exact = transpose(x), reshape(x, (2048,)), relu(x)
    found = best(swapped, flat, exact, reshape(exact, (2048,)))
    assert found.written == {swapped, flat, exact}
    assert list(found.views) == [reshape(exact, (2048,))]
    assert all(found.buffers[n].is_contiguous for n in found.joint.outputs)


def test_no_gradient_is_a_view_of_a_forward_value() -> None:
    x, z, ct = wide("x", 64, 32), wide("z", 2048), wide("ct", 64, 32)
    y = exp(x)
    made = joint([y], [ct], {x: mul(ct, y), z: reshape(y, (2048,))})
    found = extract(egraph(made), H200)
    assert reshape(y, (2048,)) in found.written


def test_an_output_that_is_an_input_is_left_alone() -> None:
    x = wide("x", 64, 32)
    found = best(x, relu(x))
    assert kernels(found) == ["relu()"]
    assert found.joint.outputs[0] is x


def test_softmax_by_hand_is_one_kernel() -> None:
    x = leaf("x", 512, 1000)
    from egcompile.ops import amax, div

    e = exp(sub(x, expand(amax(x, (1,)), x.shape)))
    found = best(div(e, expand(sum(e, (1,)), x.shape)))
    assert len(found.kernels) == 1
    assert found.kernels[0].reads == (x,)


def test_a_norms_statistics_are_a_side_output_of_its_kernel() -> None:
    x = leaf("x", 512, 1000)
    from egcompile.ops import rsqrt

    rstd = rsqrt(mean(mul(x, x), (1,)))
    y = mul(x, expand(rstd, x.shape))
    found = best(y, rstd)
    assert len(found.kernels) == 1
    assert set(found.kernels[0].writes) == {y, rstd}


def test_two_row_spaces_are_two_kernels() -> None:
    x = leaf("x", 64, 64, 32)
    first = sub(x, expand(mean(x, (2,)), x.shape))
    turned = permute(first, (0, 2, 1))
    found = best(sub(turned, expand(mean(turned, (2,)), turned.shape)))
    assert len(found.kernels) == 2
    assert first in found.written


def test_a_sum_across_rows_ends_its_kernel_and_its_operand_may_be_an_output_of_it() -> None:
    x, y = wide("x"), wide("y")
    product = mul(x, y)
    found = best(neg(sum(product, (0,))), product)
    assert kernels(found) == ["neg()", "sum(mul)"]
    assert product in found.written


def test_a_side_output_never_feeds_what_its_own_kernel_reads() -> None:
    """h = x + r goes into mlp(h), and into h + mlp(h): the last kernel cannot be where h is written."""
    x, r, w = wide("x"), wide("r"), wide("w", 4096, 4096)
    h = add(x, r)
    found = best(add(h, matmul(h, w)))
    assert kernels(found) == ["add()", "add()", "matmul()"] or kernels(found) == [
        "add()",
        "add(add)",
        "matmul()",
    ]
    writer = next(k for k in found.kernels if h in k.writes)
    assert matmul(h, w) not in writer.reads


def test_a_forward_value_is_no_output_of_a_backward_kernel() -> None:
    x, y, ct = wide("x"), wide("y"), wide("ct")
    h = mul(x, y)
    made = joint([h], [ct], {x: mul(ct, exp(h))})
    found = extract(egraph(made), H200)
    writer = next(k for k in found.kernels if h in k.writes)
    assert ct not in writer.reads
    assert len(found.kernels) == 2


def test_a_ring_of_kernels_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp is made so dear that it is computed once: where it is read, its operand must not be written."""

    class Dear(Costs):
        def work(self, site: object, evaluations: int) -> float:
            return 1000.0 if site.op is exp else 0.01  # type: ignore[attr-defined]

    monkeypatch.setattr("egcompile.extract.extraction.Costs", Dear)
    a, b = leaf("a", 64, 64), leaf("b", 64, 64)
    h = add(a, b)
    e = exp(h)
    found = best(h, e, mul(h, e), sum(mul(h, neg(e)), (0,)), transpose(add(h, e)))
    computing = [k for k in found.kernels if e in k.nodes]
    assert len(computing) == 1
    _assert_runs(found)


def _assert_runs(found: Extraction) -> None:
    """Kernels can be put in an order in which each reads only what is there."""
    there = set(found.joint.graph.inputs)
    waiting = list(found.kernels)

    def base(node: Node) -> Node:
        while node in found.views:
            node = found.views[node]
        return node

    while waiting:
        ready = [k for k in waiting if all(base(n) in there for n in k.reads)]
        assert ready, f"{len(waiting)} kernels wait for each other"
        for kernel in ready:
            there.update(kernel.writes)
            waiting.remove(kernel)


def test_a_ring_of_views_is_no_way_to_compute() -> None:
    """transpose(x) and transpose(y) are free views of each other; one of the products must be computed."""
    a, b = wide("a", 512, 256), wide("b", 256, 128)
    x, y = matmul(a, b), matmul(transpose(b), transpose(a))
    w, v = wide("w", 128, 16), wide("v", 512, 16)
    found = best(matmul(x, w), matmul(y, v), equal=[(transpose(x), y), (transpose(y), x)])
    assert [k.root.op.name for k in found.kernels].count("matmul") == 3
    _assert_runs(found)


def test_weight_gradients_are_written_as_their_parameter_lies() -> None:
    """transpose(contract_rows(x, ct)) would be a view; as a gradient it takes the row-major form."""
    x, w, ct = wide("x"), wide("w", 1024, 4096), wide("ct", 8192, 1024)
    gradient = transpose(contract_rows(x, ct))
    made = joint([matmul(x, transpose(w))], [ct], {w: gradient})
    found = extract(egraph(made, [(gradient, contract_rows(ct, x))]), H200)
    assert kernels(found) == ["contract_rows()", "matmul()"]
    assert found.buffers[found.joint.gradients[1]].is_contiguous  # type: ignore[index]


def test_the_skip_cotangent_is_added_in_the_norms_backward() -> None:
    x, w, ct, skip = wide("x"), wide("w", 4096), wide("ct"), wide("skip")
    rstd = leaf("rstd", 8192, 1)
    dx, dw = rms_norm_backward(x, w, rstd, ct, False)
    total = add(dx, skip)
    fused = rms_norm_backward_add(x, w, rstd, ct, skip, False)
    found = best(total, dw, equal=[(total, fused[0]), (dw, fused[1])])
    assert kernels(found) == ["rms_norm_backward_add()"]


def test_a_cast_bias_enters_the_epilogue_and_a_cast_weight_does_not() -> None:
    x, w, b = wide("x", 512, 256), leaf("w", 256, 128), leaf("b", 128)
    found = best(linear_act(x, cast(w, BF16), cast(b, BF16), "relu")[0])
    assert kernels(found) == ["cast()", "linear_act(cast)"]


def test_extraction_keeps_where_values_come_from() -> None:
    x, y = wide("x"), wide("y")
    graph = egraph(forward(relu(add(x, y))))
    for c in graph.classes.values():
        if c.nodes[0].op is not input:
            c.origins = frozenset({c.nodes[0].op.name})
    found = extract(graph, H200)
    assert found.joint.graph.origins[add(x, y)] == {"add"}


def test_an_impossible_output_is_named() -> None:
    graph = egraph(forward(relu(wide("x"))))
    graph.classes[graph.roots[0]].nodes.clear()
    with pytest.raises(ExtractionError, match="out0"):
        extract(graph, H200)
