"""Reductions. They keep the axes they reduce, with size 1; `reshape` drops them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from egcompile.errors import TypeMismatch
from egcompile.ir.types import TensorType
from egcompile.ops.opdef import Kind, OpDef, Sample, register


def _reduced(x: TensorType, dims: tuple[int, ...]) -> TensorType:
    if list(dims) != sorted(set(dims)) or not all(0 <= d < x.rank for d in dims) or not dims:
        raise TypeMismatch(f"reduction over {list(dims)} of {x}; dims are sorted, distinct and some")
    return TensorType(tuple(1 if i in dims else n for i, n in enumerate(x.shape)), x.dtype)


def _reduction(name: str, evaluate: Callable[..., torch.Tensor]) -> OpDef:
    samples = (Sample(("f64[3,4]",), {"dims": (1,)}), Sample(("f64[2,3,4]",), {"dims": (0, 2)}))
    return register(
        OpDef(
            name,
            Kind.REDUCTION,
            ("x",),
            {"dims": "ints"},
            type_rule=_reduced,
            evaluate=evaluate,
            samples=samples,
        )
    )


def _extreme(largest: bool) -> Callable[..., torch.Tensor]:
    """`torch.amax` or `torch.amin`; of no elements it is what a kernel starts from, where PyTorch raises."""

    def evaluate(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        if all(x.shape[d] for d in dims):
            return (torch.amax if largest else torch.amin)(x, dims, keepdim=True)
        shape = [1 if i in dims else n for i, n in enumerate(x.shape)]
        if x.dtype.is_floating_point:
            return x.new_full(shape, float("-inf") if largest else float("inf"))
        info = torch.iinfo(torch.uint8 if x.dtype == torch.bool else x.dtype)
        return x.new_full(shape, info.min if largest else info.max)

    return evaluate


sum = _reduction("sum", lambda x, dims: torch.sum(x, dims, keepdim=True))
mean = _reduction("mean", lambda x, dims: torch.mean(x, dims, keepdim=True))
amax = _reduction("amax", _extreme(largest=True))
amin = _reduction("amin", _extreme(largest=False))
