"""Every norm in every form: native, eager's values, gradients of two orders, buffers, layouts, kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import egcompile
from tests.runs import run

LINE, IMAGE, VOLUME = (3, 4, 2), (2, 4, 3, 2), (2, 4, 2, 1, 2)
_BATCH = {LINE: nn.BatchNorm1d, IMAGE: nn.BatchNorm2d, VOLUME: nn.BatchNorm3d}
_INSTANCE = {LINE: nn.InstanceNorm1d, IMAGE: nn.InstanceNorm2d, VOLUME: nn.InstanceNorm3d}
Make = Callable[[], nn.Module]


def _cases() -> Iterator[tuple[str, Make, tuple[int, ...]]]:
    for shape, rank in ((LINE, "1d"), (IMAGE, "2d"), (VOLUME, "3d")):
        for affine in (True, False):
            for tracked in (True, False) if shape is IMAGE else (affine,):
                options = {"affine": affine, "track_running_stats": tracked}
                name = f"{rank}{' affine' * affine}{' tracked' * tracked}"
                for kind, classes in (("batch", _BATCH), ("instance", _INSTANCE)):
                    yield f"{kind} {name}", lambda c=classes[shape], o=options: c(4, **o), shape
        for groups in (1, 2, 4) if shape is IMAGE else (2,):
            yield f"group {rank} {groups}", lambda groups=groups: nn.GroupNorm(groups, 4), shape
    yield "batch rows", lambda: nn.BatchNorm1d(4), (5, 4)
    yield "batch momentum", lambda: nn.BatchNorm2d(4, eps=0.1, momentum=0.7), IMAGE
    yield "instance momentum", lambda: nn.InstanceNorm2d(4, 0.1, 0.7, track_running_stats=True), IMAGE
    yield "instance one sample", lambda: nn.InstanceNorm2d(4), IMAGE[1:]
    yield "group plain", lambda: nn.GroupNorm(2, 4, affine=False), IMAGE
    yield "layer", lambda: nn.LayerNorm(2), LINE
    yield "layer unbiased", lambda: nn.LayerNorm(2, bias=False), LINE
    yield "layer plain", lambda: nn.LayerNorm((4, 2), elementwise_affine=False), LINE
    yield "layer of two axes", lambda: nn.LayerNorm((3, 2)), IMAGE
    yield "rms", lambda: nn.RMSNorm(2, 1e-5), LINE
    yield "rms plain", lambda: nn.RMSNorm((3, 2), elementwise_affine=False), IMAGE


CASES = {name: (make, shape) for name, make, shape in _cases()}
MODES = [
    (name, training)
    for name in CASES
    for training in (True, False)
    if training or name.startswith("batch") or "tracked" in name
]
"""Norms without running statistics are in evaluation what they are in training."""

each = pytest.mark.parametrize(
    ("name", "training"), MODES, ids=[f"{n} {'train' if t else 'eval'}" for n, t in MODES]
)


def make(name: str, training: bool, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, shape = CASES[name]
    module = build().to(dtype).train(training)
    for tensor in (*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())):
        nn.init.uniform_(tensor, 0.5, 1.5)
    return module, torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def close(found: object, expected: object, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@each
def test_compiled_is_eager(name: str, training: bool) -> None:
    """Values, gradients and, after two steps, running statistics."""
    torch.compiler.reset()
    module, x = make(name, training)
    twin = copy.deepcopy(module)
    compiled = egcompile.compile(twin, fullgraph=True)
    for _ in range(2):
        y, expected = compiled(x), module(x)
        close(y, expected)
        ct = torch.randn_like(expected)
        close(
            torch.autograd.grad(y, [x, *twin.parameters()], ct),
            torch.autograd.grad(expected, [x, *module.parameters()], ct),
        )
    close(dict(twin.named_buffers()), dict(module.named_buffers()))


@each
def test_every_order_is_the_limit_of_differences(name: str, training: bool) -> None:
    """No op is opaque, the first two derivatives are right, and no gradient flows into a statistic."""
    module, x = make(name, training)
    traced = egcompile.trace(module, (x,), opaque=False)
    plan = egcompile.optimize(traced)
    weights = [t for t in traced.state if t.requires_grad]

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        given = iter(weights)
        y: Tensor = traced.restore(
            plan.run([*(next(given) if t.requires_grad else t for t in traced.state), x])
        )
        return y

    assert torch.autograd.gradcheck(call, [x, *weights])
    assert torch.autograd.gradgradcheck(call, [x, *weights])


@each
def test_kernels_are_eager(name: str, training: bool) -> None:
    """Whole plans for a GPU in Triton's interpreter, in fp32."""
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU that there is")
    module, x = make(name, training, torch.float32)
    twin, z = copy.deepcopy(module).double(), x.detach().double().requires_grad_()
    traced = egcompile.trace(module, (x,))
    plan = egcompile.optimize(traced, target="cuda:90")
    y, expected = run(plan, traced, x), twin(z)
    ct = torch.randn_like(expected)
    found = torch.autograd.grad(y, [x, *module.parameters()], ct.float())
    close(y.double(), expected, 1e-4)
    close([g.double() for g in found], list(torch.autograd.grad(expected, [z, *twin.parameters()], ct)), 1e-3)
    close([b.double() for b in module.buffers()], [b.double() for b in twin.buffers()], 1e-4)


PENALIZED = ("batch 2d affine", "instance 2d affine", "group 2d 2", "layer", "rms")


@pytest.mark.parametrize("name", PENALIZED)
def test_a_gradient_penalty_is_the_limit_of_differences(name: str) -> None:
    """`(|dD/dx| - 1)^2` of convolution, norm and activation: a gradient of it is one of the second order."""
    norm, x = make(name, training=True)
    torch.manual_seed(0)
    channels = x.shape[1]
    convolution = (nn.Conv1d if x.dim() == 3 else nn.Conv2d)(channels, channels, 1).double()
    model = nn.Sequential(convolution, norm, nn.SiLU()).requires_grad_()
    traced = egcompile.trace(model, (x,), opaque=False)
    plan = egcompile.optimize(traced)

    def penalty(x: Tensor, *state: Tensor) -> Tensor:
        y: Tensor = traced.restore(plan.run([*state, x]))
        (gradient,) = torch.autograd.grad((y * weights).sum(), x, create_graph=True)
        result: Tensor = (gradient.square().sum().sqrt() - 1).square()
        return result

    weights = torch.randn_like(x)
    assert not traced.mutated
    inputs = [x, *(t.detach().requires_grad_() for t in traced.state)]
    assert torch.autograd.gradcheck(penalty, inputs, fast_mode=True)
