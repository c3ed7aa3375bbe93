"""The ways to run a training step that benchmarks compare, and the batches they all see."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo import Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def wrap(variant: str, model: nn.Module) -> Callable[..., Tensor]:
    """`model` by `eager`, `torch.compile[:MODE]` or `egcompile[:MODE]`; raises ValueError for others."""
    name, _, mode = variant.partition(":")
    match name:
        case "eager":
            return model
        case "torch.compile":
            # every variant has a module of its own, and all share the code that Dynamo keys its cache by
            torch._dynamo.config.recompile_limit = 64
            return torch.compile(model, mode=mode or None)
        case "egcompile":
            import egcompile

            torch._dynamo.config.recompile_limit = 64
            return egcompile.compile(model, mode=mode or None)
    raise ValueError(f"unknown variant {variant!r}: eager, torch.compile[:MODE] or egcompile[:MODE]")


def make_model(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """The case's model with its seed's weights, which are drawn on the CPU in fp32."""
    torch.manual_seed(seed)
    model = case.model().to(device, dtype)
    return model.to(memory_format=torch.channels_last) if case.channels_last else model


def place(case: Case, batch: tuple[Tensor, ...], device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """A batch on the device, floating tensors in `dtype`, images in the case's layout."""

    def move(t: Tensor) -> Tensor:
        t = t.to(device, dtype if t.is_floating_point() else t.dtype)
        return t.contiguous(memory_format=torch.channels_last) if case.channels_last and t.dim() == 4 else t

    return tuple(map(move, batch))


class Batches:
    """`batches(step)`: the case's batches, `distinct` of them in turn, kept on the device."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype, distinct: int) -> None:
        self.distinct = min(distinct, case.distinct)
        self._draw = functools.cache(lambda i: place(case, case.batch(i), device, dtype))

    def __call__(self, step: int) -> tuple[Any, ...]:
        return self._draw(step % self.distinct)  # type: ignore[no-any-return]

    def load(self) -> None:
        """Draws them all now, so that no step has to wait for one."""
        for i in range(self.distinct):
            self(i)


class Training:
    """A model under one variant, and its optimizer. `step(batch)` is forward, backward, AdamW, zero_grad."""

    def __init__(self, variant: str, model: nn.Module, learning_rate: float) -> None:
        self.model = model
        self.loss = wrap(variant, model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
        self.replays = "torch.compile:" in variant

    def step(self, batch: tuple[Any, ...]) -> Tensor:
        """One training step; returns the loss, still on the device, valid until the next step."""
        if self.replays:
            torch.compiler.cudagraph_mark_step_begin()
        loss = self.loss(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def gradients(variant: str, model: nn.Module, batch: tuple[Any, ...]) -> dict[str, Tensor]:
    """The gradient of every parameter at one batch, in fp64. `model` itself is left as it is."""
    model = copy.deepcopy(model)
    wrap(variant, model)(*batch).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
