"""Attention through ATen's fused kernels. Each choice depends on the operands alone, so a backward makes
the same one as its forward.

    flash      16-bit on a GPU: grouped heads as they are; the same number of queries and keys if causal
    efficient  other floats on a GPU
    cpu        on a CPU
    math       what none of them takes: fp64 or empty tensors on a GPU, heads that are too wide or ragged
"""

from __future__ import annotations

import torch

from egcompile.ops.attention import sdpa, sdpa_backward
from egcompile.ops.evaluate import call

aten = torch.ops.aten

Tensor = torch.Tensor

_EFFICIENT_LSE = 32
"""The efficient kernel wants the log-sum-exp padded to this many queries."""


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """`q[B, H, L, D]`, `k, v[B, H_kv, S, D]` -> `out[B, H, L, D]` and log-sum-exp `[B, H, L]`.

    Causal masks line up at the first query and the first key, as PyTorch's `is_causal` does.
    """
    match _kernel(q, k, v, causal):
        case "flash":
            out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        case "efficient":
            k, v = _repeat_heads(k, q), _repeat_heads(v, q)
            out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, causal, scale=scale
            )
            lse = lse[..., : q.shape[2]]
        case "cpu":
            k, v = _repeat_heads(k, q), _repeat_heads(v, q)
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        case _:
            with q.device:
                out, lse = call(sdpa, (q, k, v), {"scale": scale, "causal": causal})
    return out, lse


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ct: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangents of `q`, `k` and `v`, in their shapes, from the cotangent `ct` of `out`."""
    match _kernel(q, k, v, causal):
        case "flash":
            none = torch.empty(0, dtype=torch.int64, device=q.device)  # no dropout, so no random state
            dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                ct,
                q,
                k,
                v,
                out,
                lse,
                None,
                None,
                q.shape[2],
                k.shape[2],
                0.0,
                causal,
                none,
                none,
                scale=scale,
            )
        case "efficient":
            keys, values = _repeat_heads(k, q), _repeat_heads(v, q)
            missing = -q.shape[2] % _EFFICIENT_LSE
            padded = torch.nn.functional.pad(lse, (0, missing), value=torch.inf)
            none = torch.empty((), dtype=torch.int64, device=q.device)
            dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
                ct, q, keys, values, None, out, padded, none, none, 0.0, [True, True, True, False], causal,
                scale=scale,
            )  # fmt: skip
            dk, dv = _sum_heads(dk, k), _sum_heads(dv, v)
        case "cpu":
            keys, values = _repeat_heads(k, q), _repeat_heads(v, q)
            dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                ct, q, keys, values, out, lse, 0.0, causal, scale=scale
            )
            dk, dv = _sum_heads(dk, k), _sum_heads(dv, v)
        case _:
            with q.device:
                dq, dk, dv = call(sdpa_backward, (q, k, v, out, lse, ct), {"scale": scale, "causal": causal})
    return dq, dk, dv


def _kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str:
    width = q.shape[3]
    if not (q.numel() and k.numel()) or v.shape[3] != width:
        return "math"
    if q.device.type == "cpu":
        return "cpu"
    if q.dtype in (torch.float16, torch.bfloat16) and width % 8 == 0 and width <= 256:
        # with other lengths flash lines causal masks up at the last query and key
        return "flash" if not causal or q.shape[2] == k.shape[2] else "efficient"
    if q.dtype == torch.float32 and width % 4 == 0:
        return "efficient"
    return "math"


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _sum_heads(x: Tensor, like: Tensor) -> Tensor:
    if x.shape == like.shape:
        return x
    batch, heads, length, width = like.shape
    return x.view(batch, heads, -1, length, width).sum(2)
