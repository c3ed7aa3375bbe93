"""Looks inside the compiler: a residual block and its backward, before and after rewriting. Needs no GPU.

    python examples/inspect_rewrites.py
    python examples/inspect_rewrites.py --target cuda:80 --width 4096 --source plan.py

The plan is made for a GPU that need not be there: costs come from the target's description, and kernels are
text until they run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch
from llama import FeedForward, LlamaConfig
from torch import Tensor, nn

import egcompile
from egcompile.plan import PlanKernel


class ResidualBlock(nn.Module):
    """The second half of a Llama block: `h = x + branch; h + feed_forward(norm(h))`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, config.eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        h = x + branch
        return h + self.feed_forward(self.norm(h))


def heading(text: str) -> None:
    print(f"\n{'=' * len(text)}\n{text}\n{'=' * len(text)}")


def choose(kernels: Iterable[PlanKernel], word: str) -> PlanKernel:
    """The first kernel with `word` in its name; raises SystemExit that lists the names there are."""
    kernels = list(kernels)
    for kernel in kernels:
        if word in kernel.name:
            return kernel
    raise SystemExit(f"no kernel of the plan is named like {word!r}: {[k.name for k in kernels]}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="cuda:90")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=2048, help="tokens a sequence; there are 4 sequences")
    parser.add_argument(
        "--kernel", default="norm_backward", help="which kernel to print, by a part of its name"
    )
    parser.add_argument("--source", type=Path, help="where to write the whole plan as Python")
    options = parser.parse_args(arguments)

    width, hidden = options.width, options.width * 11 // 4
    config = LlamaConfig(256, 1, width, heads=16, kv_heads=8, hidden=hidden, context=options.rows)
    block = ResidualBlock(config).bfloat16()
    x, branch = (torch.randn(4, options.rows, width, dtype=torch.bfloat16) for _ in range(2))
    for tensor in (x, branch):
        tensor.requires_grad_()

    heading("The forward, as traced")
    graph = egcompile.trace(block, (x, branch))
    print(graph)

    plan = egcompile.optimize(graph, target=options.target)
    stats = plan.compiled().extraction.stats
    heading(f"Forward and backward on {options.target}, as predicted")
    for mode, kernels, cost in (
        ("unfused", stats.unfused_kernels, stats.unfused_cost),
        ("greedy", stats.greedy_kernels, stats.greedy_cost),
        ("exact", stats.kernels, stats.cost),
    ):
        print(f"{mode:8}{kernels:4} kernels{cost:10.1f} us")

    heading("The forward, optimized")
    print(plan.forward)
    heading("The backward, derived and optimized")
    print(plan.backward)
    heading("What was recognized and fused, and what was not")
    print(plan.explain())
    kernel = choose(plan.kernels, options.kernel)
    heading(f"The kernel {kernel.name}, for {', '.join(kernel.origin) or 'no place of the model'}")
    print(kernel.source)
    if options.source:
        options.source.write_text(plan.source)
        print(f"\nthe whole plan: {options.source}")


if __name__ == "__main__":
    main()
