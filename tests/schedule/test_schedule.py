"""Straight lines of steps: kernels shared by equal work, views, calls, and where values are dropped."""

from __future__ import annotations

import pytest
import torch

from egcompile.errors import ExtractionError
from egcompile.extract import extract
from egcompile.ir.node import Node
from egcompile.ops import (
    add,
    contract_rows,
    exp,
    expand,
    full,
    gelu,
    gelu_backward,
    input,
    matmul,
    mul,
    neg,
    relu,
    reshape,
    rms_norm,
    sdpa,
    sub,
    sum,
    transpose,
)
from egcompile.schedule import schedule
from egcompile.schedule.kernel import Call, Free, Launch, Program, Schedule, View
from egcompile.schedule.order import order
from egcompile.target import Target
from tests.codegen.harness import check
from tests.extract.builder import egraph, forward, joint, leaf

H200 = Target.parse("cuda:90")


def plan(*outputs: Node, target: Target = H200) -> Schedule:
    return schedule(extract(egraph(forward(*outputs)), target), target)


def launches(program: Program) -> list[Launch]:
    return [step for step in program.steps if isinstance(step, Launch)]


def _training(layers: int) -> Schedule:
    """Equal layers gelu(x w) and their backward."""
    x = leaf("x", 512, 256, dtype=torch.bfloat16)
    weights = [leaf(f"w{i}", 256, 256, dtype=torch.bfloat16) for i in range(layers)]
    values, pres = [x], []
    for w in weights:
        pres.append(matmul(values[-1], transpose(w)))
        values.append(gelu(pres[-1]))
    ct = seed = leaf("ct", 512, 256, dtype=torch.bfloat16)
    gradients = {}
    for w, pre, value in reversed([*zip(weights, pres, values)]):
        dpre = gelu_backward(ct, pre)
        gradients[w] = contract_rows(dpre, value)
        ct = matmul(dpre, w)
    made = joint([values[-1]], [seed], gradients)
    return schedule(extract(egraph(made), H200), H200)


def test_equal_layers_share_their_kernels() -> None:
    """The last layer's gelu stores no input for the next; all others are alike."""
    few, many = _training(3), _training(12)
    for made in (few, many):
        assert made.backward is not None
    names = [
        {launch.kernel.name for p in (s.forward, s.backward) if p is not None for launch in launches(p)}
        for s in (few, many)
    ]
    assert names[0] == names[1]
    kernels = {id(launch.kernel) for launch in launches(many.forward)}
    assert len(kernels) < 4
    assert len(launches(many.forward)) == 12


def test_a_kernel_is_its_body_and_its_layouts() -> None:
    x, y = leaf("x", 640, 320), leaf("y", 320, 640)
    same = plan(relu(x), relu(leaf("z", 640, 320)))
    other = plan(relu(x), relu(y))
    assert len({s.kernel.name for s in launches(same.forward)}) == 1
    assert len({s.kernel.name for s in launches(other.forward)}) == 2


def test_a_kernels_arguments_are_leaves_in_its_body() -> None:
    x, y = leaf("x", 64, 32), leaf("y", 64, 32)
    (launch,) = launches(plan(mul(exp(add(x, y)), x)).forward)
    body = launch.kernel.body
    assert [i.attr("name") for i in body.inputs] == ["x0", "x1"]
    assert launch.inputs == ("x", "y")
    assert body.outputs == (mul(exp(add(*body.inputs)), body.inputs[0]),)
    assert [b.type for b in launch.kernel.inputs] == [i.tensor for i in body.inputs]


def test_names_tell_what_a_kernel_does() -> None:
    x, w = leaf("x", 64, 32), leaf("w", 32)
    names = [s.kernel.name for s in launches(plan(rms_norm(add(x, x), w, 1e-5, False)[0], neg(x)).forward)]
    assert sorted(name.rsplit("_", 1)[0] for name in names) == ["add_rms_norm", "neg"]


def test_long_names_are_cut() -> None:
    x = leaf("x", 64, 32)
    (launch,) = launches(plan(neg(relu(exp(add(mul(x, x), x))))).forward)
    assert launch.kernel.name == "mul_add_exp_neg_0"


def test_calls_name_only_outputs_that_are_read() -> None:
    q = leaf("q", 1, 2, 8, 16, dtype=torch.bfloat16)
    (call,) = [s for s in plan(sdpa(q, q, q, 0.5, True)[0]).forward.steps if isinstance(s, Call)]
    assert call.op == "sdpa"
    assert call.inputs == ("q", "q", "q")
    assert call.attrs == (("scale", 0.5), ("causal", True))
    assert call.outputs == ("sdpa_out0", None)


def test_views_come_right_before_their_first_reader() -> None:
    x, w = leaf("x", 64, 32), leaf("w", 16, 32)
    steps = plan(matmul(x, transpose(w))).forward.steps
    assert [type(s) for s in steps] == [View, Call, Free]
    view = steps[0]
    assert isinstance(view, View)
    assert (view.source, view.output, view.buffer.strides) == ("w", "transpose0", (1, 32))


def test_a_view_of_a_view_is_a_view_of_the_base() -> None:
    x, w = leaf("x", 64, 4, 8), leaf("w", 64, 16)
    y = transpose(reshape(x, (64, 32)))
    steps = plan(matmul(y, w)).forward.steps
    (view,) = [s for s in steps if isinstance(s, View)]
    assert (view.source, view.buffer.strides) == ("x", (1, 32))


def test_an_output_that_is_a_view_of_another() -> None:
    x = leaf("x", 64, 32)
    program = plan(relu(x), reshape(relu(x), (2048,))).forward
    assert program.outputs == ("relu0", "reshape0")
    assert isinstance(program.steps[-1], View)


def test_inputs_may_be_outputs_and_outputs_may_repeat() -> None:
    x = leaf("x", 64, 32)
    program = plan(x, relu(x), relu(x)).forward
    assert program.outputs == ("x", "relu0", "relu0")


def test_values_are_dropped_after_their_last_use() -> None:
    made = _training(4)
    for program in (made.forward, made.backward):
        assert program is not None
        alive = set(program.inputs)
        for step in program.steps:
            match step:
                case Launch() | Call():
                    assert alive.issuperset(step.inputs)
                    alive.update(name for name in step.outputs if name is not None)
                case View():
                    assert step.source in alive
                    alive.add(step.output)
                case Free():
                    assert alive.issuperset(step.names)
                    alive.difference_update(step.names)
        returned = {name for name in program.outputs if name is not None}
        if program is made.forward:
            assert alive == returned | set(program.inputs), "the primals are the caller's"
        else:
            assert alive == returned, "saved values and cotangents go too"


def test_saved_values_are_passed_by_name() -> None:
    made = _training(2)
    assert made.backward is not None
    assert made.backward.inputs == (*made.saved, "ct")
    extra = [n for n in made.saved if n not in made.forward.inputs]
    assert set(extra) <= set(made.forward.outputs)
    assert len(made.backward.outputs) == 3
    assert made.backward.outputs.count(None) == 1, "x needs no gradient"


def test_buffers_are_known_for_every_name() -> None:
    made = _training(2)
    for program in (made.forward, made.backward):
        assert program is not None
        named = set(program.inputs) | {n for n in program.outputs if n is not None}
        assert named <= set(program.buffers)


def test_the_forward_alone_has_no_backward() -> None:
    made = plan(relu(leaf("x", 4)))
    assert made.backward is None
    assert made.saved == ()


def test_a_cpu_gets_the_same_steps() -> None:
    x, w = leaf("x", 64, 32), leaf("w", 32, 16)
    steps = plan(relu(matmul(x, w)), target=Target.parse("cpu")).forward.steps
    assert [type(s) for s in steps] == [Call, Launch, Free]


def test_a_constant_output_is_a_kernel_without_inputs() -> None:
    (launch,) = launches(plan(full(2.0, (4, 8), torch.float32)).forward)
    assert launch.inputs == ()


def test_a_view_that_is_off_the_alignment_has_a_kernel_of_its_own() -> None:
    from egcompile.ops import slice_

    x = leaf("x", 64, 32, dtype=torch.bfloat16)
    aligned, off = (slice_(x, 1, i, i + 16, 1) for i in (8, 3))
    program = plan(sum(exp(aligned), (0,)), sum(exp(off), (0,))).forward
    offsets = {launch.kernel.inputs[0].offset for launch in launches(program)}
    assert offsets == {0, 3}


def test_value_names_do_not_collide_with_inputs() -> None:
    x = input(name="relu0", shape=(4,), dtype=torch.float32)
    program = plan(relu(x)).forward
    assert program.inputs == ("relu0",)
    assert program.outputs == ("relu1",)


def test_order_frees_early() -> None:
    """Two big values that are each reduced at once: never both alive."""
    x = leaf("x", 1024, 1024)
    parts = [leaf(f"w{i}", 1024, 1024) for i in range(3)]
    totals = [sum(matmul(x, w), (0,)) for w in parts]
    program = plan(*totals).forward
    alive, most = 0, 0
    for step in program.steps:
        if isinstance(step, Call):
            alive += 1
            most = max(most, alive)
        elif isinstance(step, Free):
            alive -= len([n for n in step.names if n.startswith("matmul")])
    assert most == 1


def test_kernels_that_wait_for_each_other_are_refused() -> None:
    from egcompile.extract import KernelPlan

    a, b = leaf("a", 4), leaf("b", 4)
    first = KernelPlan(neg(a), (neg(a),), frozenset(), (b,), (a,))
    second = KernelPlan(neg(b), (neg(b),), frozenset(), (a,), (b,))
    with pytest.raises(ExtractionError, match="wait for each other"):
        order([first, second], lambda n: n, [], [], lambda k: 0)


def test_a_value_that_is_read_in_several_shapes_is_one_argument() -> None:
    """Else what is computed of each of them would be computed twice."""
    x, mean = leaf("x", 64, 4, 80), leaf("mean", 64)
    flat = reshape(x, shape=(64, 320))
    once = sub(x, expand(reshape(mean, shape=(64, 1, 1)), shape=x.shape))
    again = sub(flat, expand(reshape(mean, shape=(64, 1)), shape=flat.shape))
    program = plan(add(exp(once), reshape(neg(again), shape=x.shape))).forward
    (launch,) = launches(program)
    assert sorted(launch.inputs) == ["mean", "x"]
    assert not [step for step in program.steps if isinstance(step, View)]
    check(launch.kernel)
