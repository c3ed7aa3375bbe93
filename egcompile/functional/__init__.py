"""The fused operations themselves, as ordinary functions of tensors, differentiable to any order.

Each call is a small graph that goes through the whole pipeline once for each set of shapes, dtypes and
memory layouts, and through generated kernels from then on. On a CPU it runs as ATen calls. Functions that
PyTorch has too take its arguments.
"""

from egcompile.functional.channel_norm import batch_norm, group_norm
from egcompile.functional.linear import linear_act, swiglu
from egcompile.functional.loss import cross_entropy, softmax
from egcompile.functional.norm import add_rms_norm, layer_norm, rms_norm

__all__ = [
    "add_rms_norm",
    "batch_norm",
    "cross_entropy",
    "group_norm",
    "layer_norm",
    "linear_act",
    "rms_norm",
    "softmax",
    "swiglu",
]
