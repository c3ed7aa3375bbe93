"""A small zoo of training models, and the calls that make them: `CASES` by name.

Each model's last output is a loss. Sizes are small and ragged, so that nothing holds by accident of a
power of two.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.resnet import bottleneck
from benchmarks.zoo import ResidualConv

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class LlamaConfig:
    vocab: int = 37
    dim: int = 24
    hidden: int = 40
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    length: int = 7
    eps: float = 1e-5
    hf_norm: bool = False
    repeat_kv: bool = False
    tied: bool = False


class HFRMSNorm(nn.Module):
    """RMSNorm as Hugging Face writes it: statistics in fp32, the weight after the cast."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.promote_types(input_dtype, torch.float32))
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def _norm(config: LlamaConfig) -> nn.Module:
    return (HFRMSNorm if config.hf_norm else nn.RMSNorm)(config.dim, config.eps)


def rotary_tables(length: int, width: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin, [length, width]; each frequency twice, for `rotate_half`."""
    inverse = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), inverse)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    """[B, H_kv, L, D] -> [B, H_kv * repeats, L, D], as Hugging Face writes it."""
    batch, heads, length, width = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, repeats, length, width)
    return x.reshape(batch, heads * repeats, length, width)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.width = config.dim // config.heads
        self.q_proj = nn.Linear(config.dim, config.heads * self.width, bias=False)
        self.k_proj = nn.Linear(config.dim, config.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(config.dim, config.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(config.heads * self.width, config.dim, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.width).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = map(self._heads, (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        if self.config.repeat_kv:
            repeats = self.config.heads // self.config.kv_heads
            k, v = repeat_kv(k, repeats), repeat_kv(v, repeats)
        grouped = k.shape[1] != q.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o_proj(out.transpose(1, 2).reshape(x.shape))


class SwiGLU(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_norm = _norm(config)
        self.attention = Attention(config)
        self.post_norm = _norm(config)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin)
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    """`forward(ids[B, T], target[B, T]) -> loss`; targets of -100 are left out of the mean."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        cos, sin = rotary_tables(config.length, config.dim // config.heads)
        self.register_buffer("cos", cos.to(torch.get_default_dtype()))
        self.register_buffer("sin", sin.to(torch.get_default_dtype()))

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1), ignore_index=-100)


class GPTBlock(nn.Module):
    """`x + attention(ln(x))`, then `x + mlp(ln(x))`; q, k and v are thirds of one projection."""

    causal = True

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        thirds = self.qkv(self.ln_1(x)).split(dim, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in thirds)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """`forward(ids[B, T], target[B, T]) -> loss`: GPT-2 in small, learned positions and all."""

    def __init__(self, vocab: int = 37, dim: int = 12, length: int = 7, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.layers = nn.ModuleList(GPTBlock(dim, heads=3) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1))


class MLP(nn.Module):
    """`forward(x[B, N], y[B, M]) -> loss`: three linear layers, an activation after all but the last."""

    def __init__(self, activation: str, dim: int = 12, hidden: int = 20, out: int = 5) -> None:
        super().__init__()
        self.activation = activation
        self.layers = nn.ModuleList(
            [nn.Linear(dim, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, out)]
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = ACTIVATIONS[self.activation](layer(x))
        return F.mse_loss(self.layers[-1](x), y)


class ResidualBlock(nn.Module):
    """`forward(x[B, T, N], r[B, T, N]) -> h, loss`: add -> rms_norm -> linear -> gelu -> add -> loss."""

    def __init__(self, dim: int = 12, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps)
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        h = h + F.gelu(self.linear(self.norm(h)))
        return h, h.square().mean()


class Regression(nn.Module):
    """`forward(x, y) -> loss`: the mean squared error of a body."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), y)


class ViT(nn.Module):
    """`forward(image[B, C, H, W], labels[B]) -> loss`: patches, a class token, one block, smoothed labels."""

    def __init__(
        self, channels: int = 2, size: int = 6, patch: int = 2, dim: int = 12, classes: int = 5
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, dim, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, dim))
        self.block = ViTBlock(dim, heads=3)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.positions
        scores = self.head(self.norm(self.block(x))[:, 0])
        return F.cross_entropy(scores, labels, label_smoothing=0.1)


class ViTBlock(GPTBlock):
    """A GPT block that looks both ways."""

    causal = False


class UnrolledLSTM(nn.Module):
    """`forward(x[T, B, N], y[B, 1]) -> loss`: an LSTM cell over T steps, read out at the last."""

    def __init__(self, width: int = 5, hidden: int = 6) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(width, hidden), nn.Linear(hidden, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], self.cell.hidden_size)
        for step in x:
            h, c = self.cell(step, (h, c))
        return F.mse_loss(self.head(h), y)


class GAN(nn.Module):
    """`forward(z[B, N], real[B, C, 8, 8]) -> images, loss`: both losses of a step, summed.

    The discriminator's does not reach the generator.
    """

    def __init__(self, noise: int = 6, channels: int = 2) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(noise, 32),
            nn.Unflatten(1, (2, 4, 4)),
            nn.BatchNorm2d(2),
            nn.ReLU(),
            nn.ConvTranspose2d(2, channels, 4, 2, 1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(channels, 4, 3, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(4, 4, 3, bias=False),
            nn.InstanceNorm2d(4, affine=True),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(16, 1),
        )

    def forward(self, z: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.generator(z)
        scores = self.discriminator(fake), self.discriminator(real), self.discriminator(fake.detach())
        wanted = (scores[0], 1.0), (scores[1], 0.9), (scores[2], 0.0)
        losses = [F.binary_cross_entropy_with_logits(s, torch.full_like(s, value)) for s, value in wanted]
        return fake, losses[0] + losses[1] + losses[2]


class VAE(nn.Module):
    """`forward(x[B, N], noise[B, D]) -> loss`: reparametrized by the noise; reconstruction and divergence."""

    def __init__(self, width: int = 8, hidden: int = 10, latent: int = 3) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.SiLU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        y = self.decoder(mean + torch.exp(0.5 * log_variance) * noise)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
        return F.mse_loss(y, x, reduction="sum") / len(x) + divergence.mean()


@dataclass(frozen=True)
class Case:
    """A model and a call of it. Equal cases make equal models and equal inputs."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator, torch.dtype], tuple[Tensor, ...]]

    def make(self, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The model, its parameters and buffers in `dtype`, and the inputs of one step."""
        seed = zlib.crc32(self.name.encode())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model().to(dtype)
            _randomize_ones(model)
        return model, self.inputs(torch.Generator().manual_seed(seed + 1), dtype)


def _randomize_ones(model: nn.Module) -> None:
    """Norm weights start at one, which would hide an error in them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 and bool((parameter == 1).all()):
                parameter.uniform_(0.5, 1.5)


def _tokens(config: LlamaConfig, generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    ids, target = torch.randint(config.vocab, (2, 2, config.length), generator=generator).unbind()
    target[0, :3] = -100
    return ids, target.contiguous()


def _llama(name: str, **options: bool) -> Case:
    config = replace(LlamaConfig(), **options)  # type: ignore[arg-type]
    return Case(
        name,
        lambda: Llama(config),
        lambda generator, dtype: _tokens(config, generator, dtype),
    )


def _floats(*shapes: tuple[int, ...]) -> Callable[[torch.Generator, torch.dtype], tuple[Tensor, ...]]:
    return lambda generator, dtype: tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )


def _images(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    image = torch.randn((3, 2, 6, 6), generator=generator, dtype=torch.float64)
    return image.to(dtype), torch.randint(5, (3,), generator=generator)


def _mlp(activation: str) -> Case:
    return Case(f"mlp_{activation}", lambda: MLP(activation), _floats((6, 12), (6, 5)))


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _llama("llama"),
        _llama("llama_hf", hf_norm=True, repeat_kv=True, tied=True),
        _llama("llama_tied", tied=True),
        Case("gpt", GPT, lambda generator, dtype: _tokens(LlamaConfig(), generator, dtype)),
        Case(
            "gpt_tied",
            lambda: GPT(tied=True),
            lambda generator, dtype: _tokens(LlamaConfig(), generator, dtype),
        ),
        *map(_mlp, ACTIVATIONS),
        Case("bottleneck", lambda: Regression(bottleneck(8, 2, 1)), _floats((3, 8, 4, 3), (3, 8, 4, 3))),
        Case("unet", lambda: Regression(ResidualConv(4, 2)), _floats((2, 4, 4, 3), (2, 4, 4, 3))),
        Case("vit", ViT, _images),
        Case("lstm", UnrolledLSTM, _floats((3, 2, 5), (2, 1))),
        Case("gan", GAN, _floats((3, 6), (3, 2, 8, 8))),
        Case("vae", VAE, _floats((4, 8), (4, 3))),
        Case("residual_block", ResidualBlock, _floats((2, 3, 12), (2, 3, 12))),
    )
}
