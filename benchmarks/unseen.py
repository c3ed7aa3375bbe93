"""Shapes on which no heuristic was fitted: those that benchmarks.tune compares with the best of a grid.

None is in `benchmarks.works`, on which tiles were measured. They were written down before any was timed, and
one that turns out badly stays; what was done about it was fitted on others.
"""

from __future__ import annotations

from torch import Tensor

from benchmarks import works
from benchmarks.works import Work


def column_sum(x: Tensor) -> Tensor:
    return x.sum(0)


def layer_scale(x: Tensor, branch: Tensor, scale: Tensor) -> Tensor:
    """A residual block's end in ConvNeXt: [N, C, H, W] with a factor a channel."""
    return x + scale[:, None, None] * branch


def _rows(name: str, rows: int, cols: int, operands: str, forward: float, backward: float) -> Work:
    """`operands` has an x for each activation [rows, cols] and a w for each parameter [cols]."""
    shapes = tuple((rows, cols) if kind == "x" else (cols,) for kind in operands)
    call = column_sum if name == "column_sum" else getattr(works, name)
    return Work(name, call, shapes, forward, backward)


def _images(name: str, image: tuple[int, ...], operands: str, least: tuple[float, float], nhwc: bool) -> Work:
    """Likewise with activations [N, C, H, W] and parameters [C]."""
    shapes = tuple(image if kind == "x" else (image[1],) for kind in operands)
    call = layer_scale if name == "layer_scale" else getattr(works, name)
    return Work(name, call, shapes, *least, nhwc)


UNSEEN = (
    _rows("rms_norm", 8192, 5120, "xw", 2, 3),
    _rows("rms_norm", 4096, 12288, "xw", 2, 3),
    _rows("rms_norm", 524288, 128, "xw", 2, 3),
    _rows("layer_norm", 16384, 3072, "xww", 2, 3),
    _rows("layer_norm", 401408, 96, "xww", 2, 3),
    _rows("layer_norm", 50432, 768, "xww", 2, 3),
    _rows("add_rms_norm", 8192, 6144, "xxw", 4, 4),
    _rows("add_layer_norm", 12544, 1536, "xxww", 4, 4),
    _rows("softmax", 4096, 50304, "x", 2, 3),
    _rows("softmax", 24000, 1500, "x", 2, 3),
    _rows("softmax", 151296, 197, "x", 2, 3),
    _rows("column_sum", 16384, 5120, "x", 1, 1),
    _rows("column_sum", 200704, 96, "x", 1, 1),
    _images("batch_norm_relu", (64, 96, 56, 56), "xww", (3, 5), False),
    _images("batch_norm_relu", (64, 96, 56, 56), "xww", (3, 5), True),
    _images("group_norm_silu", (16, 320, 64, 64), "xww", (2, 5), False),
    _images("group_norm_silu", (16, 640, 32, 32), "xww", (3, 5), True),
    _images("layer_scale", (64, 384, 28, 28), "xxw", (3, 4), False),
    _rows("broadcast_chain", 6144, 12288, "xw", 2, 3),
    _rows("transposed_chain", 6144, 6144, "xx", 3, 5),
)
