"""The one autograd Function, on a plan made by hand: `y = exp(x) w` and `z = x + w`."""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from egcompile import ops
from egcompile.ir import Graph
from egcompile.ir.joint import Joint
from egcompile.runtime.bridge import Executable, Gradients, Mask, Vjp, run
from egcompile.runtime.loader import load
from egcompile.runtime.source import render
from egcompile.schedule.kernel import Buffer
from egcompile.target import Target
from tests.runtime.naive import naive_schedule

SHAPE = (3, 4)


def truth(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp() * w, x + w


class Recorder:
    """Makes the executable, and keeps what the bridge asks of it."""

    def __init__(self, foreseen: tuple[bool, bool] = (True, True), constant: tuple[int, ...] = ()) -> None:
        self.asked: list[tuple[Mask, Mask]] = []
        self.mispredicted: list[Mask] = []
        self.received: list[Tensor] = []
        schedule = naive_schedule(self._joint(foreseen))
        module = load(render(schedule, (), Target.parse("cpu")))
        names = [*schedule.forward.inputs, *schedule.forward.outputs]
        positions = dict.fromkeys([*map(names.index, schedule.saved), 0, 1])
        places = {position: i for i, position in enumerate(positions)}
        buffer = Buffer.contiguous(ops.input(name="x", shape=SHAPE, dtype=torch.float64).tensor)

        def backward(values: list[Tensor]) -> Gradients:
            self.received = list(values)
            return module.backward(values)

        self.executable = Executable(
            module.forward,
            backward,
            (buffer.type,) * 2,
            saved=tuple(places),
            taken=len(schedule.saved),
            kept={0: places[0], 1: places[1]},
            constant=constant,
            cotangents=tuple(buffer if f else None for f in foreseen),
            vjp=self._vjp,
            mispredicted=self.mispredicted.append,
        )

    def _joint(self, foreseen: tuple[bool, bool]) -> Joint:
        x, w, cy, cz = (ops.input(name=n, shape=SHAPE, dtype=torch.float64) for n in ("x", "w", "cy", "cz"))
        e = ops.exp(x)
        outputs = (ops.mul(e, w), ops.add(x, w))
        terms = [(ops.mul(ops.mul(cy, w), e), ops.mul(cy, e)), (cz, cz)]
        present = [t for t, f in zip(terms, foreseen, strict=True) if f]
        gradients = tuple(present[0][i] if len(present) == 1 else ops.add(present[0][i], cz) for i in (0, 1))
        cotangents = tuple(c if f else None for c, f in zip((cy, cz), foreseen, strict=True))
        inputs = (x, w, *(c for c in cotangents if c is not None))
        return Joint(Graph(inputs, (*outputs, *gradients)), (x, w), cotangents, outputs, gradients)

    def _vjp(self, cotangents: Mask, needed: Mask) -> Vjp:
        self.asked.append((cotangents, needed))

        def gradients(inputs: Sequence[Tensor | None], cts: Sequence[Tensor | None]) -> Gradients:
            x, w = inputs
            assert x is not None and w is not None
            cy, cz = (torch.zeros(SHAPE, dtype=torch.float64) if ct is None else ct for ct in cts)
            return cy * w * x.exp() + cz, cy * x.exp() + cz

        return gradients


def inputs() -> list[Tensor]:
    return [torch.randn(SHAPE, dtype=torch.float64, requires_grad=True) for _ in range(2)]


def test_gradients_of_every_order() -> None:
    recorder = Recorder()
    both = tuple(torch.ones(SHAPE, dtype=torch.float64) for _ in range(2))
    (x, w) = inputs()
    torch.autograd.grad(run(recorder.executable, (x, w)), (x, w), both)
    assert recorder.asked == []  # no second order was wanted
    assert torch.autograd.gradcheck(lambda *a: run(recorder.executable, a), inputs())
    assert torch.autograd.gradgradcheck(lambda *a: run(recorder.executable, a), inputs())
    assert ((True, True), (True, True)) in recorder.asked


def test_a_missing_cotangent_goes_by_vjp_and_is_reported() -> None:
    recorder, (x, w) = Recorder(), inputs()
    y, _ = run(recorder.executable, (x, w))
    y.sum().backward()
    expected = torch.autograd.grad(truth(x, w)[0].sum(), (x, w))
    torch.testing.assert_close((x.grad, w.grad), expected)
    assert recorder.mispredicted == [(True, False)]
    assert recorder.asked == [((True, False), (True, True))]


def test_an_unforeseen_cotangent_goes_by_vjp() -> None:
    recorder, (x, w) = Recorder(foreseen=(True, False)), inputs()
    y, z = run(recorder.executable, (x, w))
    (y * z).sum().backward()
    y, z = truth(x, w)
    torch.testing.assert_close((x.grad, w.grad), torch.autograd.grad((y * z).sum(), (x, w)))
    assert recorder.mispredicted == [(True, True)]
    assert recorder.asked == [((True, True), (True, True))]


@pytest.mark.parametrize(
    "cotangent",
    [
        torch.randn(4, 3, dtype=torch.float64).mT,
        torch.ones((), dtype=torch.float64).expand(SHAPE),
        torch.randn(3, 8, dtype=torch.float64)[:, ::2],
    ],
    ids=["transposed", "zero-stride", "strided"],
)
def test_cotangents_that_lie_otherwise(cotangent: Tensor) -> None:
    recorder, (x, w) = Recorder(), inputs()
    got = torch.autograd.grad(run(recorder.executable, (x, w)), (x, w), (cotangent, cotangent))
    torch.testing.assert_close(got, torch.autograd.grad(truth(x, w), (x, w), (cotangent, cotangent)))
    assert all(value.is_contiguous() for value in recorder.received)


def test_saved_values_are_freed() -> None:
    recorder, (x, w) = Recorder(), inputs()
    y, z = run(recorder.executable, (x, w))
    node = y.grad_fn
    assert node is not None
    extra = [weakref.ref(t.untyped_storage()) for t in node.saved_tensors if t is not x and t is not w]  # type: ignore[attr-defined]
    assert extra
    (y + z).sum().backward()
    recorder.received.clear()
    assert all(reference() is None for reference in extra)
    with pytest.raises(RuntimeError, match="second time"):
        (y + z).sum().backward()


def test_retain_graph_keeps_them() -> None:
    recorder, (x, w) = Recorder(), inputs()
    total = torch.stack(run(recorder.executable, (x, w))).sum()
    first = torch.autograd.grad(total, (x, w), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(total, (x, w)), first)


def test_a_saved_input_changed_in_place() -> None:
    recorder, (x, w) = Recorder(), inputs()
    y, _ = run(recorder.executable, (x, w))
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_copied_input_lies_as_it_did() -> None:
    """The plan was compiled for its strides, and a clone of a slice would be dense."""
    recorder = Recorder()
    seen: list[Tensor] = []

    def forward(*values: Tensor) -> tuple[Tensor, ...]:
        seen.extend(values)
        return recorder.executable.forward(*values)

    x, w = torch.randn(3, 8, dtype=torch.float64)[:, ::2].requires_grad_(), inputs()[1]
    executable = dataclasses.replace(recorder.executable, forward=forward, copied=(0,))
    run(executable, (x, w))
    assert seen[0].data_ptr() != x.data_ptr() and seen[0].stride() == x.stride() == (8, 2)
    assert seen[1].data_ptr() == w.data_ptr()


def test_a_constant_output_needs_no_gradient() -> None:
    recorder, (x, w) = Recorder(foreseen=(True, False), constant=(1,)), inputs()
    y, z = run(recorder.executable, (x, w))
    assert y.requires_grad and not z.requires_grad
    (y * z).sum().backward()
    assert recorder.mispredicted == [] and recorder.asked == []


def test_without_a_backward_nothing_is_recorded() -> None:
    recorder = Recorder()
    outputs = run(dataclasses.replace(recorder.executable, backward=None), inputs())
    assert not any(y.requires_grad for y in outputs)


def test_autocast_does_not_reach_a_plan() -> None:
    seen: list[bool] = []

    def forward(*values: Tensor) -> tuple[Tensor, ...]:
        seen.append(torch.is_autocast_enabled("cpu"))
        return (values[0] @ values[1].mT,)

    def backward(values: list[Any]) -> Gradients:
        seen.append(torch.is_autocast_enabled("cpu"))
        return values[-1] @ values[1], values[-1].mT @ values[0]

    kind = ops.input(name="y", shape=(3, 3), dtype=torch.float32).tensor
    executable = Executable(
        forward, backward, (kind,), saved=(0, 1), taken=2, cotangents=(Buffer.contiguous(kind),)
    )
    x, w = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        (y,) = run(executable, (x, w))
        assert y.dtype == torch.float32
        y.backward(torch.ones(3, 3))
    assert seen == [False, False]
    assert x.grad is not None and x.grad.dtype == torch.float32
