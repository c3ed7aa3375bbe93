"""A compact Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, and an untied head.

Nothing here knows of egcompile. The model is written as one would write it for eager PyTorch, and the
compiler recognises the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a model. `width` is that of the residual stream, `hidden` that of the SwiGLU."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    rope_base: float = 10000.0
    eps: float = 1e-5

    @property
    def head_width(self) -> int:
        return self.width // self.heads


SIZES: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(256, layers=3, width=96, heads=4, kv_heads=2, hidden=256, context=128),
    "small": LlamaConfig(256, layers=6, width=384, heads=6, kv_heads=2, hidden=1024, context=256),
    "base": LlamaConfig(256, layers=12, width=1024, heads=16, kv_heads=8, hidden=2816, context=1024),
}
"""0.4, 9.6 and 142 million parameters, over bytes."""


def rotary_tables(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, `[context, head_width]`, of the angle `position * base^(-2i / head_width)`."""
    frequency = config.rope_base ** (-torch.arange(0, config.head_width, 2).float() / config.head_width)
    angle = torch.outer(torch.arange(config.context).float(), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs `(x[..., i], x[..., i + D/2])` of `x[B, H, T, D]` by the angle of their position."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class Attention(nn.Module):
    """Causal attention in which `heads / kv_heads` query heads share a key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        kv_width = config.kv_heads * config.head_width
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_width)
        q = self.query(x).view(heads).transpose(1, 2)
        k = self.key(x).view(heads).transpose(1, 2)
        v = self.value(x).view(heads).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, config.eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """`model(tokens[B, T])` gives logits `[B, T, vocabulary]`; with `targets[B, T]`, the mean loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.eps)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for name, table in zip(("cos", "sin"), rotary_tables(config)):
            self.register_buffer(name, table, persistent=False)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        length = tokens.shape[1]
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
