"""The benchmarked models, each in its full size (a GPU's) and a small one (a CPU's), with data to learn from.

A `Case` makes a model whose forward returns the loss, and batches that have structure, so that a loss
curve says something. Everything is seeded, and drawn on the CPU in fp32: the same on every machine.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.resnet import ResNet
from examples.llama import SIZES, Llama, LlamaConfig


@dataclass(frozen=True)
class Case:
    """`model()` gives a fresh fp32 module; `model()(*batch(step))` its loss.

    tokens          positions a step (samples, for images), for throughput
    distinct        how many different batches to train on, in turn: what is costly to draw repeats
    learning_rate   AdamW's
    channels_last   whether the model and its images are to be laid out so
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    tokens: int
    distinct: int = 16
    learning_rate: float = 1e-3
    channels_last: bool = False


def _generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(k * p for k, p in zip(key, (1, 1_000_003, 7_919), strict=False)))


# ---- language models over a random language: each token has four likely successors ----
def token_batch(vocabulary: int, rows: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """`batch(step)` -> inputs and targets `[rows, length]`; an ideal model's loss is `log(4)`."""
    successors = torch.randint(vocabulary, (vocabulary, 4), generator=_generator(1))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = _generator(2, step)
        choice = torch.randint(4, (rows, length), generator=generator)
        tokens = torch.empty(rows, length + 1, dtype=torch.int64)
        tokens[:, 0] = torch.randint(vocabulary, (rows,), generator=generator)
        for i in range(length):
            tokens[:, i + 1] = successors[tokens[:, i], choice[:, i]]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


def source_batch(rows: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """`batch(step)` -> bytes of the standard library's source and the next ones, `[rows, length]`."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - length, (rows, 1), generator=_generator(3, step))
        window = text[starts + torch.arange(length + 1)].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    return batch


class Gpt2Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm_1(x)).split(width, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """GPT-2 without dropout, its head untied."""

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Gpt2Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


class HuggingFaceLlama(nn.Module):
    """transformers' LlamaForCausalLM behind `(tokens, targets) -> loss`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        from transformers import LlamaConfig as Config
        from transformers import LlamaForCausalLM

        self.model = LlamaForCausalLM(
            Config(
                vocab_size=config.vocabulary,
                num_hidden_layers=config.layers,
                hidden_size=config.width,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                intermediate_size=config.hidden,
                max_position_embeddings=config.context,
                tie_word_embeddings=False,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


# ---- regression on a fixed teacher ----
class Mlp(nn.Module):
    """`layers` x [Linear, activation], and the mean squared error."""

    def __init__(self, layers: int, width: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        body = [m for _ in range(layers) for m in (nn.Linear(width, width), activation())]
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), y)


def vector_batch(rows: int, width: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Gaussian rows, and the square of neighbouring differences of each."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, width, generator=_generator(3, step))
        return x, (x - x.roll(1, dims=1)).square() / 2

    return batch


# ---- images ----
class ResidualConv(nn.Module):
    """`x + conv(silu(norm(conv(silu(norm(x))))))`."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, channels)
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv_1(F.silu(self.norm_1(x)))
        return x + self.conv_2(F.silu(self.norm_2(h)))


class UNetBlocks(nn.Module):
    """The residual blocks of a diffusion U-Net at one resolution, and the mean squared error."""

    def __init__(self, blocks: int, channels: int, groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*(ResidualConv(channels, groups) for _ in range(blocks)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), y)


class ImageClassifier(nn.Module):
    """ResNet-50 or ResNet-18 and the cross-entropy."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = ResNet(depth)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x).float(), labels)


def denoise_batch(rows: int, channels: int, size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Noise, and the same noise blurred over 3 x 3 pixels."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, channels, size, size, generator=_generator(4, step))
        return x, F.avg_pool2d(x, 3, stride=1, padding=1) * 3

    return batch


def label_batch(rows: int, size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Images with a bright square; the label says in which of 16 cells it lies."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = _generator(5, step)
        x = torch.randn(rows, 3, size, size, generator=generator)
        labels = torch.randint(16, (rows,), generator=generator)
        cell = size // 4
        for i, label in enumerate(labels.tolist()):
            top, left = divmod(label, 4)
            x[i, :, top * cell : (top + 1) * cell, left * cell : (left + 1) * cell] += 1.0
        return x, labels

    return batch


def _language(name: str, make: Callable[..., nn.Module], config: LlamaConfig, rows: int) -> Case:
    batch = token_batch(config.vocabulary, rows, config.context)
    return Case(name, lambda: make(config), batch, rows * config.context, distinct=300)


def _example(size: str, rows: int) -> Case:
    config = SIZES[size]
    batch = source_batch(rows, config.context)
    return Case("example", lambda: Llama(config), batch, rows * config.context, distinct=300)


def _gpt2(config: LlamaConfig) -> Gpt2:
    return Gpt2(config.vocabulary, config.layers, config.width, config.heads, config.context)


def _mlp(name: str, layers: int, width: int, rows: int, activation: Callable[[], nn.Module]) -> Case:
    return Case(name, lambda: Mlp(layers, width, activation), vector_batch(rows, width), rows)


def _unet(blocks: int, channels: int, groups: int, rows: int, size: int, channels_last: bool) -> Case:
    batch = denoise_batch(rows, channels, size)
    return Case(
        "unet", lambda: UNetBlocks(blocks, channels, groups), batch, rows, channels_last=channels_last
    )


def _resnet(depth: int, rows: int, size: int) -> Case:
    return Case("resnet50", lambda: ImageClassifier(depth), label_batch(rows, size), rows, channels_last=True)


_SMALL = LlamaConfig(512, layers=2, width=64, heads=4, kv_heads=2, hidden=160, context=64)
_LLAMA = LlamaConfig(32000, layers=8, width=2048, heads=16, kv_heads=8, hidden=5632, context=2048)
_LLAMA128K = LlamaConfig(128256, layers=4, width=1024, heads=16, kv_heads=8, hidden=2816, context=2048)
_HF_LLAMA = LlamaConfig(128256, layers=8, width=2048, heads=16, kv_heads=8, hidden=5632, context=2048)
_GPT2 = LlamaConfig(50304, layers=12, width=768, heads=12, kv_heads=12, hidden=3072, context=1024)

CASES: dict[str, dict[str, Callable[[], Case]]] = {
    "llama": {
        "full": lambda: _language("llama", Llama, _LLAMA, 4),
        "small": lambda: _language("llama", Llama, _SMALL, 4),
    },
    "example": {
        "full": lambda: _example("small", 32),
        "small": lambda: _example("tiny", 4),
    },
    "llama128k": {
        "full": lambda: _language("llama128k", Llama, _LLAMA128K, 4),
        "small": lambda: _language("llama128k", Llama, LlamaConfig(4001, 1, 64, 4, 2, 160, 64), 4),
    },
    "gpt2": {
        "full": lambda: _language("gpt2", _gpt2, _GPT2, 16),
        "small": lambda: _language("gpt2", _gpt2, _SMALL, 4),
    },
    "mlp_gelu": {
        "full": lambda: _mlp("mlp_gelu", 8, 4096, 8192, nn.GELU),
        "small": lambda: _mlp("mlp_gelu", 4, 64, 128, nn.GELU),
    },
    "mlp_small": {
        "full": lambda: _mlp("mlp_small", 16, 256, 1024, nn.ReLU),
        "small": lambda: _mlp("mlp_small", 4, 32, 64, nn.ReLU),
    },
    "unet": {
        "full": lambda: _unet(8, 256, 32, 16, 64, channels_last=True),
        # a CPU's backward of a channels_last GroupNorm crashes (torch 2.13) if its input needs no gradient
        "small": lambda: _unet(2, 32, 8, 2, 16, channels_last=False),
    },
    "resnet50": {
        "full": lambda: _resnet(50, 128, 224),
        "small": lambda: _resnet(18, 2, 64),
    },
    "hf_llama": {
        "full": lambda: _language("hf_llama", HuggingFaceLlama, _HF_LLAMA, 4),
        "small": lambda: _language("hf_llama", HuggingFaceLlama, _SMALL, 4),
    },
}
"""Name -> size -> case.

`example` is what `examples/train_language_model.py` trains; `hf_llama` imports transformers when made.
"""
