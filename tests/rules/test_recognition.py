"""PyTorch code as people write it, traced: which named ops it is recognized as."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from egcompile import ops
from egcompile.frontend import trace
from egcompile.ir import Node
from egcompile.recognize import recognize


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def llama_norm(x: Tensor, w: Tensor) -> Tensor:
    return w * _normalized(x.to(torch.float32)).to(x.dtype)


def gemma_norm(x: Tensor, w: Tensor) -> Tensor:
    return (_normalized(x.float()) * (1.0 + w.float())).type_as(x)


def aten_norm(x: Tensor, w: Tensor) -> Tensor:
    return (_normalized(x.float()) * w).type_as(x)


def squared_norm(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt((x32 * x32).mean(dim=-1, keepdim=True) + 1e-5)).to(x.dtype) * w


def no_weight(x: Tensor, w: Tensor) -> Tensor:
    return _normalized(x.float()).to(x.dtype)


def flat_linear(x: Tensor, w: Tensor) -> Tensor:
    """Hugging Face's Conv1D: `w` stands for the bias too."""
    weight = torch.outer(w, w)
    return torch.addmm(w, x.view(-1, x.shape[-1]), weight).view(x.shape)


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def fast_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608028654 * (1.0 + 0.044715 * x * x)))


def erf_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def attention(x: Tensor, causal: bool) -> Tensor:
    q, k, v = x, x.sin(), x.cos()
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]))
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
    return F.softmax(scores, dim=-1) @ v


def softmax(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return e / e.sum(dim=-1, keepdim=True)


def upcast_loss(x: Tensor) -> Tensor:
    target = torch.zeros(x.shape[0] * x.shape[1], dtype=torch.int64)
    return F.cross_entropy(x.float().view(-1, x.shape[-1]), target)


NORMS = [llama_norm, gemma_norm, aten_norm, squared_norm, no_weight]

CALLS: dict[str, tuple[Callable[..., Tensor], torch.dtype, str]] = {
    **{
        f"{norm.__name__}-{str(dtype)[6:]}": (norm, dtype, "rms_norm")
        for norm in NORMS
        for dtype in (torch.float32, torch.bfloat16)
    },
    "flat_linear": (flat_linear, torch.float32, "matmul"),
    "new_gelu": (new_gelu, torch.float32, "gelu_tanh"),
    "fast_gelu": (fast_gelu, torch.float32, "gelu_tanh"),
    "erf_gelu": (erf_gelu, torch.float32, "gelu"),
    "silu": (lambda x: x * torch.sigmoid(x), torch.float32, "silu"),
    "silu by exp": (lambda x: x / (1 + torch.exp(-x)), torch.float32, "silu"),
    "silu by a sigmoid by exp": (lambda x: x * (1 / (1 + torch.exp(-x))), torch.float32, "silu"),
    "swiglu": (lambda x: F.silu(x) * x.sin(), torch.bfloat16, "swiglu"),
    "swiglu by hand": (lambda x: x.sin() * (x * torch.sigmoid(x)), torch.float32, "swiglu"),
    "softmax": (softmax, torch.float32, "softmax"),
    "softmax upcast": (
        lambda x: F.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype),
        torch.bfloat16,
        "softmax",
    ),
    "log_softmax of softmax by hand": (
        lambda x: x - x.amax(-1, True) - (x - x.amax(-1, True)).exp().sum(-1, True).log(),
        torch.float32,
        "log_softmax",
    ),
    "attention": (lambda x: attention(x, False), torch.float32, "sdpa"),
    "causal attention": (lambda x: attention(x, True), torch.float32, "sdpa"),
}

AROUND = {"input", "out", "full", "reshape", "expand", "transpose", "sin", "cos", "add", "mul", "cast"}
"""What may stand around the op: the operands that the tests make up, and a weight's own arithmetic."""


def _traced(name: str) -> tuple[list[Node], torch.dtype, str]:
    function, dtype, op = CALLS[name]
    x = torch.randn(2, 3, 4, 8).to(dtype) if op == "sdpa" else torch.randn(2, 3, 8).to(dtype)
    takes_weight = function.__code__.co_argcount == 2
    graph = trace(function, (x, torch.randn(8).to(dtype)) if takes_weight else (x,)).graph
    return recognize(graph).nodes, dtype, op


@pytest.mark.parametrize("name", CALLS)
def test_what_is_written_out_is_recognized(name: str) -> None:
    nodes, dtype, op = _traced(name)
    (found,) = [n for n in nodes if n.op.name == op]
    assert {n.op.name for n in nodes} - {op} <= AROUND
    if op == "rms_norm":
        assert found.inputs[0].op is ops.input and found.inputs[0].dtype == dtype
        first = name.split("-")[0] not in ("gemma_norm", "aten_norm") or dtype == torch.float32
        assert found.attr("cast_first") == first
        assert "mean" not in {n.op.name for n in nodes}


def test_the_upcast_before_a_loss_goes() -> None:
    graph = trace(upcast_loss, (torch.randn(2, 3, 8).bfloat16(),)).graph
    (loss,) = [n for n in recognize(graph).nodes if n.op is ops.cross_entropy]
    assert loss.inputs[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: torch.maximum(x, torch.zeros_like(x)), "relu"),
        (lambda x: torch.where(x > 0, x, 0.0), "relu"),
        (lambda x: x.clamp(min=0), "relu"),
        (lambda x: (lambda e: e / e.sum(-1, keepdim=True))(x.exp()), "softmax"),
        (lambda x: x - x.logsumexp(-1, keepdim=True), "log_softmax"),
        (lambda x: _normalized(x.bfloat16()), "rms_norm"),
        (lambda x: softmax(x.bfloat16()), "softmax"),
    ],
    ids=[
        *("maximum", "where", "clamp", "overflowing softmax"),
        *("logarithm whose inf is NaN", "norm in bf16", "softmax in bf16"),
    ],
)
def test_what_has_another_gradient_or_rounding_is_not(function: Callable[..., Tensor], op: str) -> None:
    nodes = recognize(trace(function, (torch.randn(2, 3, 8),)).graph).nodes
    assert op not in {n.op.name for n in nodes}
