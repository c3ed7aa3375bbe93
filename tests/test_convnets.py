"""Convolutional networks: gradients, buffers and layouts are eager's, and the generated kernels are right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import egcompile
from benchmarks.resnet import bottleneck
from benchmarks.zoo import ResidualConv
from egcompile.runtime import aten as runtime_aten
from egcompile.schedule.kernel import Call
from tests.runs import run

IMAGE = (3, 8, 6, 5)


def layers(*modules: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*map(copy.deepcopy, modules))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unet": lambda: ResidualConv(8, 2),
    "bottleneck": lambda: bottleneck(8, 2, 1),
    "downsampling": lambda: bottleneck(8, 4, 2),
    "depthwise": layers(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.GELU()),
    "grouped": layers(nn.Conv2d(8, 6, 3, 2, 1, dilation=(1, 2), groups=2), nn.GroupNorm(3, 6), nn.ReLU()),
    "transposed": layers(
        nn.ConvTranspose2d(8, 6, 3, 2, 1, output_padding=1, groups=2), nn.BatchNorm2d(6), nn.SiLU()
    ),
    "decoder": layers(nn.Upsample(scale_factor=2), nn.Conv2d(8, 4, 3), nn.InstanceNorm2d(4, affine=True)),
    "encoder": layers(nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "no statistics": layers(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4, track_running_stats=False, affine=False)),
}


def make(name: str, dtype: torch.dtype = torch.float64, **to: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(IMAGE)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.5)
    return model.to(dtype).to(**to), x.to(dtype).to(**to).requires_grad_()


def close(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def gradients(y: Tensor, model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    ct = torch.randn(y.shape, dtype=torch.float64).to(y.dtype)
    return torch.autograd.grad(y, [x, *model.parameters()], torch.empty_like(y).copy_(ct))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_is_eager(name: str, training: bool) -> None:
    """Values, gradients and, after three steps, running statistics."""
    torch._dynamo.reset()
    model, x = make(name)
    twin = copy.deepcopy(model.train(training))
    compiled = egcompile.compile(twin, fullgraph=True)
    for _ in range(3):
        y, expected = compiled(x), model(x)
        close(y, expected)
        close(gradients(y, twin, x), gradients(expected, model, x))
    close(dict(twin.named_buffers()), dict(model.named_buffers()))


@pytest.mark.parametrize("name", MODELS)
def test_traced_is_eager(name: str) -> None:
    model, x = make(name)
    twin = copy.deepcopy(model)
    traced = egcompile.trace(twin, (x,))
    plan = egcompile.optimize(traced)
    for _ in range(2):
        y, expected = run(plan, traced, x), model(x)
        close(y, expected)
        close(gradients(y, twin, x), gradients(expected, model, x))
    close(dict(twin.named_buffers()), dict(model.named_buffers()))


def test_a_cumulative_average_of_statistics() -> None:
    """`momentum=None` reads how many batches there were: a graph break, and the same numbers."""
    torch._dynamo.reset()
    model = nn.BatchNorm2d(8, momentum=None).double()
    twin = copy.deepcopy(model)
    compiled = egcompile.compile(twin)
    for _ in range(3):
        x = torch.randn(IMAGE, dtype=torch.float64)
        close(compiled(x), model(x))
    close(dict(twin.named_buffers()), dict(model.named_buffers()))


class Clones(TorchDispatchMode):
    """Counts copies of whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def test_statistics_that_the_backward_does_not_read_are_not_copied() -> None:
    """Those of training are changed after the call, those of evaluation are not."""
    for training in (True, False):
        model, x = make("bottleneck")
        traced = egcompile.trace(model.train(training), (x,))
        plan = egcompile.optimize(traced)
        plan(*traced.state, x)
        with Clones() as clones:
            plan(*traced.state, x)
        assert clones.count == 0


SMALL: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "group_norm": lambda x, w, b: F.group_norm(x, 2, b[:4], b[4:8]),
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, b[:4], b[4:8], training=True),
    "convolution": lambda x, w, b: F.conv2d(x, w, b[:6], stride=(2, 1), padding=1, groups=2),
    "transposed": lambda x, w, b: F.conv_transpose2d(
        x, w.transpose(0, 1).reshape(4, 3, 2, 2), None, 2, 1, 1, 2
    ),
    "max_pool2d": lambda x, w, b: F.max_pool2d(x, 2, 1),
}


@pytest.mark.parametrize("name", SMALL)
def test_double_backward_is_the_limit_of_differences(name: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((2, 4, 3, 2), (6, 2, 2, 2), (8,))]
    plan = egcompile.optimize(egcompile.trace(SMALL[name], inputs), needed=[True] * 3)
    for x in inputs:
        x.requires_grad_()

    def call(*values: Tensor) -> Tensor:
        y = plan(*values)
        assert isinstance(y, Tensor)
        return y + 0 * sum(v.sum() for v in values)  # type: ignore[no-any-return]  # each is used

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_a_gradient_penalty() -> None:
    """Through convolution, norm and activation: the gradient of the norm of a gradient."""
    torch._dynamo.reset()
    model = nn.Sequential(
        nn.Conv2d(8, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    )
    model = model.double()
    compiled = egcompile.compile(copy.deepcopy(model), fullgraph=True)

    def penalty(run: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        x = torch.randn(IMAGE, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(run(x).square().mean(), x, create_graph=True)
        loss = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        return loss, *torch.autograd.grad(
            loss, list(run.parameters()), allow_unused=True, materialize_grads=True
        )

    close(penalty(compiled), penalty(model), 1e-9)


# ---- layouts ----
@pytest.mark.parametrize("name", ["unet", "bottleneck", "downsampling", "grouped", "transposed"])
def test_channels_last_stays_so_without_a_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ATen returns lies as planned, outputs and gradients lie as eager's, and nothing is copied."""
    copied: list[tuple[int, ...]] = []
    seen: list[tuple[int, ...]] = []

    def laid_out(value: Tensor, strides: Sequence[int], *, copy: bool = False) -> Tensor:
        same = all(n <= 1 or a == b for n, a, b in zip(value.shape, value.stride(), strides))
        if value.dim() == 4:
            (seen if same else copied).append(tuple(value.shape))
        return original(value, tuple(strides), copy=copy)

    original = runtime_aten.laid_out
    monkeypatch.setattr(runtime_aten, "laid_out", laid_out)
    model, x = make(name, memory_format=torch.channels_last)
    traced = egcompile.trace(model, (x,))
    plan = egcompile.optimize(traced)
    y, expected = run(plan, traced, x), copy.deepcopy(model)(x)
    assert y.stride() == expected.stride()
    found = gradients(y, model, x)
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert seen and not copied


@pytest.mark.parametrize("name", ["unet", "bottleneck"])
def test_a_gpu_plan_is_convolutions_and_kernels(name: str) -> None:
    """No opaque op, and each value of an image's size lies channels_last."""
    model, x = make(name, torch.bfloat16, memory_format=torch.channels_last)
    plan = egcompile.optimize(egcompile.trace(model, (x,)), target="cuda:90")
    schedule = plan.compiled().schedule
    for program in (schedule.forward, schedule.backward):
        assert program is not None
        called = {step.op for step in program.steps if isinstance(step, Call)}
        assert called <= {"convolution", "convolution_transpose", "convolution_weight_grad"}
        for buffer in program.buffers.values():
            if buffer.type.shape == x.shape and 0 not in buffer.strides:
                assert buffer.strides == x.stride()


# ---- kernels ----
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU that there is")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_are_eager(name: str, layout: torch.memory_format) -> None:
    """Whole plans for a GPU in Triton's interpreter, in fp32."""
    model, x = make(name, torch.float32, memory_format=layout)
    traced = egcompile.trace(model, (x,))
    plan = egcompile.optimize(traced, target="cuda:90")
    twin, z = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    expected = twin(z)
    y = run(plan, traced, x)
    close(y.double(), expected, 1e-4)
    close([g.double() for g in gradients(y, model, x)], list(gradients(expected, twin, z)), 1e-3)
    close(
        {n: b.double() for n, b in model.named_buffers()},
        {n: b.double() for n, b in twin.named_buffers()},
        1e-4,
    )
