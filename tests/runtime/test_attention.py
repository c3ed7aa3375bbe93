"""Attention by ATen's kernels against its definition in fp64, memory order included."""

import pytest
import torch
from torch import Tensor

from egcompile import ops
from egcompile.ops.attention import sdpa, sdpa_backward
from egcompile.runtime import attention as kernels
from egcompile.runtime.attention import attention, attention_backward

SCALE = 0.3

SHAPES = {
    "plain": ((2, 4, 37, 16), (2, 4, 37, 16)),
    "grouped": ((2, 6, 37, 16), (2, 2, 37, 16)),
    "cross": ((1, 4, 5, 16), (1, 4, 70, 16)),
    "one query": ((2, 4, 1, 16), (2, 2, 33, 16)),
    "odd width": ((1, 2, 9, 5), (1, 2, 9, 5)),
    "empty": ((0, 2, 9, 8), (0, 2, 9, 8)),
}
CPU = [("cpu", torch.float64), ("cpu", torch.float32)]
GPU = [("cuda", dtype) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("device", "dtype"), [*CPU, *(pytest.param(*case, marks=pytest.mark.gpu) for case in GPU)], ids=str
)
def test_forward_and_backward(
    device: str, dtype: torch.dtype, shape: str, transposed: bool, causal: bool
) -> None:
    """`transposed`: heads lie inside positions, as projections leave them."""
    q_shape, k_shape = SHAPES[shape]
    q, k, v, ct = (_random(s, dtype, device, transposed) for s in (q_shape, k_shape, k_shape, q_shape))
    attrs = {"scale": SCALE, "causal": causal}
    out, lse = attention(q, k, v, SCALE, causal)
    wide = [x.double().cpu() for x in (q, k, v)]
    expected_out, expected_lse = ops.call(sdpa, wide, attrs)
    _close(out, expected_out, dtype)
    assert lse.shape == expected_lse.shape and lse.dtype in (torch.float32, torch.float64)
    _close(lse, expected_lse, dtype)
    gradients = attention_backward(q, k, v, out, lse, ct, SCALE, causal)
    expected = ops.call(sdpa_backward, [*wide, expected_out, expected_lse, ct.double().cpu()], attrs)
    for got, truth in zip(gradients, expected, strict=True):
        _close(got, truth, dtype)
    if device == "cuda" and dtype in (torch.float16, torch.bfloat16) and shape in ("plain", "grouped"):
        assert (out.stride(), gradients[0].stride()) == (q.stride(), q.stride())


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: str, transposed: bool) -> Tensor:
    batch, heads, length, width = shape
    if transposed:
        return torch.randn(batch, length, heads, width, device=device).to(dtype).transpose(1, 2)
    return torch.randn(shape, device=device).to(dtype)


def _close(got: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == truth.shape
    error = (got.double().cpu() - truth).abs()
    assert not error.numel() or error.max() <= TOLERANCE[dtype] * max(1.0, truth.abs().max().item())


def test_cudnn_is_asked_for_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As within `torch.nn.attention.sdpa_kernel`, which switches it for a while."""
    monkeypatch.setattr(kernels, "_is_hopper_with_cudnn", lambda device: True)
    device, before = torch.device("cuda:0"), torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for enabled in (True, False, True):
            torch.backends.cuda.enable_cudnn_sdp(enabled)
            assert kernels._has_cudnn(device) is enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
