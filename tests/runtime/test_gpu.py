"""Whole models on a GPU: losses and gradients at most a few times as far from fp64 as eager's."""

import copy
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egcompile import functional as E
from egcompile.api import compile
from tests.models import CASES, Llama, LlamaConfig
from tests.runtime.test_interpreter import loss_of, rmse, wide

pytestmark = pytest.mark.gpu

TIMES = {torch.float32: 2.0, torch.bfloat16: 3.0, torch.float16: 3.0}
DRAWS = 3
FLOOR = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> None:
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _convolutions_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default cuDNN rounds to TF32: three digits, by which two right results differ."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def values(run: Callable[..., Any], parameters: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    loss = loss_of(run(*inputs))
    return [loss.detach(), *torch.autograd.grad(loss, parameters)]


def check(model: nn.Module, draws: Iterable[Sequence[Tensor]], dtype: torch.dtype) -> None:
    """Compares medians over draws of inputs: a parameter of two elements is far off by chance in one."""
    parameters = list(model.parameters())
    twin = copy.deepcopy(model).double()
    compiled = compile(model, fullgraph=True)
    ours: list[list[float]] = []
    eager: list[list[float]] = []
    for inputs in draws:
        truth = values(twin, list(twin.parameters()), wide(inputs))
        eager.append(rmse(values(model, parameters, inputs), truth))
        ours.append(rmse(values(compiled, parameters, inputs), truth))
    names = ["loss", *(n for n, _ in model.named_parameters())]
    for name, errors, others in zip(names, zip(*ours), zip(*eager), strict=True):
        error, theirs = statistics.median(errors), statistics.median(others)
        assert error <= TIMES[dtype] * theirs + FLOOR[dtype], f"{name}: {error:.2e}, eager {theirs:.2e}"


@pytest.mark.parametrize("dtype", TIMES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_as_right_as_eager(name: str, dtype: torch.dtype) -> None:
    model, first = CASES[name].make(dtype)
    others = (CASES[name].inputs(torch.Generator().manual_seed(seed), dtype) for seed in range(DRAWS - 1))
    check(model.cuda(), ([x.cuda() for x in inputs] for inputs in (first, *others)), dtype)


def test_a_llama_of_round_sizes() -> None:
    config = LlamaConfig(vocab=1000, dim=256, hidden=512, layers=2, heads=4, kv_heads=2, length=128)
    with torch.device("cuda"):
        model = Llama(config).to(torch.bfloat16)
        draws = torch.randint(config.vocab, (DRAWS, 2, 2, config.length))
    check(model, map(list, draws), torch.bfloat16)


def test_training_beside_eager() -> None:
    model, inputs = CASES["llama"].make(torch.float32)
    model, inputs = model.cuda(), tuple(x.cuda() for x in inputs)
    twin = copy.deepcopy(model)
    curves: list[list[float]] = []
    for owner, run in ((model, model), (twin, compile(twin, fullgraph=True))):
        optimizer = torch.optim.SGD(owner.parameters(), lr=0.02)
        curves.append([])
        for _ in range(50):
            loss = loss_of(run(*inputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curves[-1].append(loss.item())
    torch.testing.assert_close(curves[1], curves[0], rtol=2e-3, atol=1e-4)


def test_autocast() -> None:
    """Autocast's casts are part of the captured graph; the plan itself is not cast again."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).cuda()
    x = torch.randn(48, 64, device="cuda")

    def loss(run: Callable[..., Any]) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            y = run(x)
        assert y.dtype == torch.bfloat16
        return y.float().square().mean()

    ours = torch.autograd.grad(loss(compile(model, fullgraph=True)), list(model.parameters()))
    eager = torch.autograd.grad(loss(model), list(model.parameters()))
    for a, b in zip(ours, eager, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-4)


@pytest.mark.parametrize("rows", [1, 37, 512])
@pytest.mark.parametrize("dtype", TIMES, ids=str)
def test_functions(dtype: torch.dtype, rows: int) -> None:
    x, r = (torch.randn(rows, 320, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    w = torch.randn(320, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(192, 320, device="cuda") / 18).to(dtype).requires_grad_()
    target = torch.randint(192, (rows,), device="cuda")

    def ours(x: Tensor, r: Tensor, w: Tensor, weight: Tensor) -> Tensor:
        y, h = E.add_rms_norm(x, r, w, 1e-5)
        logits = E.linear_act(E.swiglu(y, h), weight, None, "gelu")
        return E.cross_entropy(logits, target) + E.softmax(logits).square().mean()

    def theirs(x: Tensor, r: Tensor, w: Tensor, weight: Tensor) -> Tensor:
        h = x + r
        logits = F.gelu(F.linear(F.silu(F.rms_norm(h, (320,), w, 1e-5)) * h, weight))
        loss = F.cross_entropy(logits.to(torch.promote_types(dtype, torch.float32)), target)
        return loss + torch.softmax(logits, -1).square().mean()

    operands = [x, r, w, weight]
    doubles = [v.detach().double().requires_grad_() for v in operands]
    truth = values(theirs, doubles, doubles)
    limits = [TIMES[dtype] * e + FLOOR[dtype] for e in rmse(values(theirs, operands, operands), truth)]
    assert all(
        e <= limit for e, limit in zip(rmse(values(ours, operands, operands), truth), limits, strict=True)
    )


def test_memory_that_is_not_aligned() -> None:
    """Launches are compiled for pointers that are multiples of 16 bytes, and again for those that are not."""
    for offset in (0, 1, 8, 1, 0):
        x = torch.randn(64 * 256 + offset, device="cuda", dtype=torch.bfloat16)[offset:].view(64, 256)
        torch.testing.assert_close(E.softmax(x), torch.softmax(x, -1), rtol=1e-2, atol=1e-4)
        y = E.linear_act(x, x, None, "relu")
        torch.testing.assert_close(y, torch.relu(x @ x.mT), rtol=2e-2, atol=0.2)


def test_the_same_inputs_give_the_same_bits() -> None:
    model, inputs = CASES["mlp_gelu"].make(torch.float32)
    model, inputs = model.cuda(), tuple(x.cuda() for x in inputs)
    compiled = compile(model, fullgraph=True)
    first, second = (values(compiled, list(model.parameters()), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_step_in_a_cuda_graph() -> None:
    model, inputs = CASES["residual_block"].make(torch.float32)
    model, inputs = model.cuda(), tuple(x.cuda() for x in inputs)
    compiled = compile(model, fullgraph=True)
    expected = values(compiled, list(model.parameters()), inputs)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            values(compiled, list(model.parameters()), inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = values(compiled, list(model.parameters()), inputs)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, expected)
