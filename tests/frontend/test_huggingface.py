"""Hugging Face's Llama, as its users call it, through both routes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from egcompile import ops
from egcompile.frontend import trace
from tests.frontend.test_dynamo import Backend

transformers = pytest.importorskip("transformers")


def make(attention: str, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
        attn_implementation=attention,
    )
    ids = torch.randint(0, 61, (2, 9))
    labels = ids.clone()
    labels[0, :3] = -100
    return transformers.LlamaForCausalLM(config).to(dtype), {"input_ids": ids, "labels": labels}


def check(found: Any, expected: Any, tolerance: float) -> None:
    assert type(found) is type(expected)
    for name in ("loss", "logits"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert mine.dtype == theirs.dtype
        limit = max(tolerance, 1e-6) if name == "loss" else tolerance  # it is in fp32 whatever the dtype
        torch.testing.assert_close(mine, theirs, rtol=limit, atol=limit)


@pytest.mark.parametrize(
    ("attention", "dtype", "tolerance"),
    [
        ("sdpa", torch.float64, 1e-12),
        ("sdpa", torch.bfloat16, 2e-2),
        ("eager", torch.float32, 1e-5),
    ],
)
def test_traced(attention: str, dtype: torch.dtype, tolerance: float) -> None:
    model, kwargs = make(attention, dtype)
    traced = trace(model, (), kwargs)
    found = traced.restore(ops.evaluate(traced.graph, [*traced.state, *traced.inputs((), kwargs)]))
    check(found, model(**kwargs), tolerance)
    used = [node.op.name for node in traced.graph.nodes]
    assert used.count("sdpa") == (2 if attention == "sdpa" else 0)
    assert used.count("cross_entropy") == 1
    assert "model.layers.1.self_attn.q_proj (modeling_llama.py:" in str(traced)
    mine, theirs = (
        torch.autograd.grad(loss, list(model.parameters())) for loss in (found.loss, model(**kwargs).loss)
    )
    tolerance = max(10 * tolerance, 1e-6)  # its norms and softmax compute in fp32 whatever the dtype
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_captured_by_dynamo() -> None:
    torch._dynamo.reset()
    model, kwargs = make("sdpa", torch.float64)
    backend = Backend()
    check(torch.compile(model, backend=backend)(**kwargs), model(**kwargs), 1e-12)
    assert len(backend.imported) == 1
    assert backend.text.count("= sdpa(") == 2
