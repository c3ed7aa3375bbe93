"""Attention through ATen's fused kernels.

    cudnn      16-bit from Hopper on: grouped heads as they are, heads up to 128 wide
    flash      16-bit on any GPU: grouped heads as they are, heads up to 256 wide
    efficient  other floats on a GPU, and what flash masks otherwise
    cpu        on a CPU, but in fp64, where some of its versions are good to 1e-9 only
    math       what none of them takes: fp64, empty tensors, heads that are too wide or ragged

All of them give the same two values, so a forward and its backward may go through different ones.
On an H200, 4 x 16 heads (8 for keys) x 2048 x 128, causal, bf16, forward and backward: cudnn takes
0.16 and 0.50 ms, flash 0.28 and 0.84.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

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
        case "cudnn":
            out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, causal, False, scale=scale
            )
            lse = lse.squeeze(3)
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
    length, keys_length = q.shape[2], k.shape[2]
    match _kernel(q, k, v, causal):
        case "cudnn":
            none = _no_random_state(q)
            dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
                ct, q, k, v, out, lse.unsqueeze(3), none, none, None, None, None, length, keys_length,
                0.0, causal, scale=scale,
            )  # fmt: skip
        case "flash":
            none = _no_random_state(q)
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
            missing = -length % _EFFICIENT_LSE
            padded = torch.nn.functional.pad(lse, (0, missing), value=torch.inf)
            none = _no_random_state(q)
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
    length, width = q.shape[2:]
    if not (q.numel() and k.numel()) or v.shape[3] != width:
        return "math"
    if q.device.type == "cpu":
        return "cpu" if q.dtype != torch.float64 else "math"
    if q.dtype in (torch.float16, torch.bfloat16) and width % 8 == 0 and width <= 256:
        if width <= 128 and min(length, k.shape[2]) > 1 and _has_cudnn(q.device):
            return "cudnn"
        # with other lengths flash lines causal masks up at the last query and key
        return "flash" if not causal or length == k.shape[2] else "efficient"
    if q.dtype == torch.float32 and width % 4 == 0:
        return "efficient"
    return "math"


def _has_cudnn(device: torch.device) -> bool:
    """Whether cuDNN may take it: asked at each call, as a caller may switch it off for a while."""
    enabled: Callable[[], bool] = torch.backends.cuda.cudnn_sdp_enabled
    return enabled() and _is_hopper_with_cudnn(device)


@functools.cache
def _is_hopper_with_cudnn(device: torch.device) -> bool:
    available: Callable[[], bool] = torch.backends.cudnn.is_available
    return available() and torch.cuda.get_device_capability(device) >= (9, 0)


def _no_random_state(q: Tensor) -> Tensor:
    """What stands for the seed and offset of a dropout that there is not."""
    return torch.empty((), dtype=torch.int64, device=q.device)


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _sum_heads(x: Tensor, like: Tensor) -> Tensor:
    if x.shape == like.shape:
        return x
    batch, heads, length, width = like.shape
    return x.view(batch, heads, -1, length, width).sum(2)
