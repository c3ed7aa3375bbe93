"""Row norms, softmax, reductions and pointwise chains, in plans for a GPU: the kernels and passes of each.

A pass reads or writes as much as the first input. There are as many as must be: each input is read once, each
output written once, and what a backward reads is read once by one launch, sums over rows included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import egcompile
from benchmarks.works import Work, works
from egcompile.schedule.kernel import Call, Launch, Program
from tests.test_norm_fusion import distinct_bytes

ROWS, N = 2048, 1024
X, W, COLUMN, SQUARE = (ROWS, N), (N,), (ROWS, 1), (N, N)


@dataclass(frozen=True)
class Case:
    """A function, its operands' shapes, and the passes and launches of its forward and of its backward."""

    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    forward: float
    backward: float
    launches: tuple[int, int] = (1, 1)


def aten_norm(x: Tensor, w: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w, 1e-6)


def _normalized(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)


def cast_first(x: Tensor, w: Tensor) -> Tensor:
    return w * _normalized(x).to(x.dtype)


def cast_last(x: Tensor, w: Tensor) -> Tensor:
    return (w * _normalized(x)).to(x.dtype)


def gemma(x: Tensor, w: Tensor) -> Tensor:
    return (_normalized(x) * (1.0 + w.float())).type_as(x)


def layer_norm(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def before(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Pre-norm: the sum goes on beside its norm."""
    return lambda x, r, *more: (norm(x + r, *more), x + r)


def after(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Post-norm: the norm of the sum goes on."""
    return lambda x, r, *more: norm(x + r, *more)


def chain(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x * y + 0.5) * x


NORMS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "rms plain": (aten_norm, 0),
    "rms": (aten_norm, 1),
    "rms cast first": (cast_first, 1),
    "rms cast last": (cast_last, 1),
    "layer plain": (layer_norm, 0),
    "layer weight": (layer_norm, 1),
    "layer bias": (lambda x, b: layer_norm(x, None, b), 1),
    "layer": (layer_norm, 2),
}
CASES = {
    **{name: Case(norm, (X, *[W] * n), 2, 3) for name, (norm, n) in NORMS.items()},
    **{f"pre {name}": Case(before(norm), (X, X, *[W] * n), 4, 4) for name, (norm, n) in NORMS.items()},
    # the sum is saved for the backward; its gradient is one value for both operands
    **{f"post {name}": Case(after(norm), (X, X, *[W] * n), 4, 3) for name, (norm, n) in NORMS.items()},
    # the gradient of 1 + w is cast in a launch of its own, which in a model is shared
    "gemma": Case(gemma, (X, W), 2, 3, (1, 2)),
    "pre gemma": Case(before(gemma), (X, X, W), 4, 4, (1, 2)),
    "normalize": Case(lambda x: F.normalize(x, dim=-1), (X,), 2, 3),
    "softmax": Case(lambda x: x.softmax(-1), (X,), 2, 3),
    "softmax in fp32": Case(lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype), (X,), 2, 3),
    "softmax of columns": Case(lambda x: x.softmax(0), (X,), 2, 3),
    "log_softmax": Case(lambda x: x.log_softmax(-1), (X,), 2, 3),
    "less logsumexp": Case(lambda x: x - x.logsumexp(-1, keepdim=True), (X,), 2, 3),
    "logsumexp": Case(lambda x: x.logsumexp(-1), (X,), 1, 2),
    "norm": Case(lambda x: x.norm(dim=-1), (X,), 1, 2),
    "norm of all": Case(lambda x: x.float().pow(2).sum(), (X,), 1, 2),
    "sum of rows": Case(lambda x: x.sum(-1), (X,), 1, 1),
    "mean of columns": Case(lambda x: x.mean(0), (X,), 1, 1),
    "sum of all": Case(lambda x: x.sum(), (X,), 1, 1),
    "variance of rows": Case(lambda x: x.var(-1), (X,), 1, 2),
    "chain with a row": Case(chain, (X, W), 2, 3),
    "chain with a column": Case(chain, (X, COLUMN), 2, 3),
    "chain with a scalar": Case(chain, (X, ()), 2, 3),
    "chain transposed": Case(lambda x, y: chain(x, y.t()), (SQUARE, SQUARE), 3, 5),
    "chain permuted": Case(
        lambda x, y: chain(x.transpose(1, 2), y), ((8, 64, 16, 64), (8, 16, 64, 64)), 3, 5
    ),
    "chain cast": Case(lambda x, y: chain(x.float(), y.float()).to(x.dtype), (X, X), 3, 5),
    # between the elements of a slice its gradient is 0: a pass of another size, which reads again
    "chain strided": Case(lambda x, y: chain(x[:, ::2], y), ((ROWS, 2 * N), X), 1.5, 4.5, (1, 2)),
    # a named kernel writes both halves' gradients, another puts them side by side
    "halves": Case(lambda x: F.silu(x[:, :N]) * x[:, N:], ((ROWS, 2 * N),), 1.5, 4.5, (1, 2)),
}


def passes(program: Program, x: Tensor) -> float:
    launches = [step for step in program.steps if isinstance(step, Launch)]
    read = [program.buffers[name] for step in launches for name in (*step.inputs, *step.outputs)]
    return sum(map(distinct_bytes, read)) / x.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_each_pass_must_be(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    inputs = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in case.shapes]
    schedule = (
        egcompile.optimize(egcompile.trace(case.call, tuple(inputs)), target="cuda:90").compiled().schedule
    )
    assert schedule.backward is not None
    for program, floor, most in (
        (schedule.forward, case.forward, case.launches[0]),
        (schedule.backward, case.backward, case.launches[1]),
    ):
        assert not [step.op for step in program.steps if isinstance(step, Call)]
        assert passes(program, inputs[0]) == pytest.approx(floor, abs=0.05)
        assert sum(isinstance(step, Launch) for step in program.steps) <= most


def _leaves(work: Work) -> tuple[Tensor, ...]:
    dtype = torch.bfloat16
    tensors = [torch.empty(shape, dtype=dtype) for shape in work.shapes]
    if work.nhwc:
        tensors = [t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]
    return tuple(t.requires_grad_() for t in tensors)


@pytest.mark.parametrize("work", list(works()), ids=lambda work: work.title)
def test_what_benchmarks_measure_is_at_its_floor(work: Work) -> None:
    inputs = _leaves(work)
    schedule = egcompile.optimize(egcompile.trace(work.call, inputs), target="cuda:90").compiled().schedule
    assert schedule.backward is not None
    small = {"rel": 0.04, "abs": 0.1}  # what is of rows or planes
    assert passes(schedule.forward, inputs[0]) == pytest.approx(work.forward, **small)
    assert passes(schedule.backward, inputs[0]) == pytest.approx(work.backward, **small)
