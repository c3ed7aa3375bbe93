"""Complex numbers: ATen computes them, in opaque nodes, and what is real around them is fused as ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import egcompile
from egcompile.frontend import trace
from egcompile.ir.parse import parse_graph
from egcompile.pipeline import launches


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def complex_(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.complex128)


def rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embeddings as Llama's reference code has them."""
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "rotary": (rotary, (real(2, 3, 4), real(3, 2))),
    "filter": (
        lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * torch.complex(w, w.sin()), n=6),
        (real(2, 6), real(4)),
    ),
    "spectrum": (lambda x: torch.fft.fft2(x).abs().log1p(), (real(3, 4),)),
    "several_readers": (lambda z: (z * z.conj()).real + z.imag * z.real + z.abs(), (complex_(3, 4),)),
    "complex_result": (lambda z, x: z.exp() * x, (complex_(3, 4), real(4))),
    "number": (lambda x: (x * (1 + 2j)).imag.sin(), (real(3),)),
    "eigenvectors": (lambda a: torch.linalg.eig(a).eigenvectors.abs(), (real(3, 3),)),
    "eigenvalues": (lambda a: torch.linalg.eig(a).eigenvalues.abs(), (real(3, 3),)),
    "c64": (lambda z: (z * z).real.sum(), (complex_(5).to(torch.complex64),)),
}


def results(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The value, the gradients, and the gradients of these."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    found: list[Tensor | None] = [y]
    roots: Sequence[Tensor | None] = [y]
    for order in (1, 2):
        torch.manual_seed(order)
        pairs = [(r, torch.randn(r.shape, dtype=r.dtype)) for r in roots if r is not None and r.requires_grad]
        if pairs:
            outputs, cotangents = zip(*pairs, strict=True)
            roots = torch.autograd.grad(outputs, leaves, cotangents, create_graph=True, allow_unused=True)
            found += roots
    return found


@pytest.mark.parametrize("name", CASES)
def test_values_and_two_derivatives_are_eagers(name: str) -> None:
    torch.manual_seed(0)
    function, inputs = CASES[name]
    compiled = egcompile.compile(function, fullgraph=True)
    for mine, theirs in zip(results(compiled, inputs), results(function, inputs), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", CASES)
def test_no_kernel_holds_a_complex_number(name: str) -> None:
    function, inputs = CASES[name]
    traced = trace(function, tuple(x.clone().requires_grad_() for x in inputs))
    assert str(parse_graph(str(traced.graph))) == str(traced.graph)
    kernels = launches(egcompile.optimize(traced, "cuda:90").compiled().schedule)
    assert kernels or name in ("complex_result", "c64")
    for kernel in kernels:
        assert not any(node.tensor.dtype.is_complex for node in kernel.body.nodes), kernel
