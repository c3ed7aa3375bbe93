"""Each row of the import table, alone: one call's value and gradients against ATen's own."""

from __future__ import annotations

import math
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from egcompile import ops
from egcompile.errors import TraceError, UnsupportedOp
from egcompile.frontend import import_fx
from egcompile.frontend.aten import TABLE
from egcompile.frontend.importer import FxGraph
from egcompile.ir import TensorType

aten = torch.ops.aten
prims = torch.ops.prims


def t(text: str, low: float = -2.0, high: float = 2.0) -> Tensor:
    """A random tensor of a type; integers lie in [low, high)."""
    kind = TensorType.parse(text)
    if kind.dtype == torch.bool:
        return torch.rand(kind.shape) > 0.5
    if not kind.dtype.is_floating_point:
        return torch.randint(int(low), int(high), kind.shape, dtype=kind.dtype)
    return (torch.rand(kind.shape, dtype=torch.float64) * (high - low) + low).to(kind.dtype)


def positive(text: str) -> Tensor:
    return t(text, 0.5, 2.0)


X, Y = "f64[3,4]", "f64[4]"
IDS = "i64[2,3]"
IMAGE = "f64[2,4,5,6]"


def unary(*more: Any) -> list[tuple[Any, ...]]:
    return [(t(X), *more), (t("f64[]"), *more)]


def binary() -> list[tuple[Any, ...]]:
    """Broadcasts, a 0-d operand, and promotion."""
    return [(t(X), t(Y)), (t("f64[]"), t(X)), (t("bf16[3,1]"), t("f32[2,1,4]")), (t("i64[3]"), t("f32[]"))]


def comparison() -> list[tuple[Any, ...]]:
    return [(t("i64[3,4]"), t("i64[4]")), (t(X), t("f32[3,1]")), (t("f32[3]"), t("f64[]"))]


def scalar(value: float = 1.5) -> list[tuple[Any, ...]]:
    return [(t(X), value), (t("f32[3]"), value), (t("i64[3]"), value)]


def logical() -> list[tuple[Any, ...]]:
    return [(t("bool[3,4]"), t("bool[4]")), (t("i64[3]"), t("f32[3]"))]


def pair_of_bool() -> list[tuple[Any, ...]]:
    return [(t("bool[3,4]"), t("bool[4]"))]


def targets(shape: str = "i64[6]") -> Tensor:
    target = t(shape, 0, 5)
    target.view(-1)[1] = -100
    return target


def distances() -> Tensor:
    """Where a loss bends, and beyond."""
    return torch.tensor([0.0, -0.0, 0.5, 1, -1, 2, -2, 3, 1e20, -1e30, math.inf, -math.inf])


CASES: dict[Any, list[tuple[Any, ...]]] = {
    aten.add.Tensor: [*binary(), (t(X), t(X), {"alpha": 2.5}), (t("bool[3]"), t("bool[3]"))],
    aten.add.Scalar: scalar(),
    aten.sub.Tensor: [*binary(), (t(X), t(X), {"alpha": 2})],
    aten.sub.Scalar: scalar(),
    aten.rsub.Tensor: binary(),
    aten.rsub.Scalar: [*scalar(), (t(X), 2, 3)],
    aten.mul.Tensor: [*binary(), (t("bool[3]"), t("bool[3]"))],
    aten.mul.Scalar: scalar(),
    aten.div.Tensor: [(t(X), positive(Y)), (t("i64[3]"), t("i64[3]", 1, 4))],
    aten.div.Scalar: scalar(),
    aten.div.Tensor_mode: [(t(X), positive(Y), {"rounding_mode": None})],
    aten.pow.Tensor_Scalar: [(positive(X), p) for p in (0, 1, 2, 3, 0.5, -0.5, -1, -2, 2.5)]
    + [(t("i64[3]"), 2), (t("f32[3]"), 2)],
    aten.pow.Tensor_Tensor: [(positive(X), t(Y))],
    aten.pow.Scalar: [(2.0, t(X)), (3, t("f32[3]"))],
    aten.addcmul.default: [(t(X), t(Y), t(X)), (t(X), t(X), t(X), {"value": 0.5})],
    aten.lerp.Scalar: [(t(X), t(X), 0.3)],
    aten.lerp.Tensor: [(t(X), t(X), t(Y))],
    aten.maximum.default: [(t(X), t(Y))],
    aten.minimum.default: [(t(X), t(Y))],
    aten.neg.default: [*unary(), (t("i64[3]"),)],
    aten.abs.default: unary(),
    aten.reciprocal.default: [(positive(X),), (t("i64[3]", 1, 4),)],
    aten.sqrt.default: [(positive(X),)],
    aten.rsqrt.default: [(positive(X),)],
    aten.exp.default: [*unary(), (t("i64[3]"),)],
    aten.log.default: [(positive(X),)],
    aten.log1p.default: [(positive(X),), (t("i64[3]", 0, 4),)],
    aten.expm1.default: unary(),
    aten.sin.default: unary(),
    aten.cos.default: unary(),
    aten.erf.default: unary(),
    aten.relu.default: [*unary(), (torch.zeros(3, dtype=torch.float64),)],
    aten.sigmoid.default: unary(),
    aten.tanh.default: unary(),
    aten.silu.default: unary(),
    aten.gelu.default: [(t(X),), (t(X), {"approximate": "tanh"})],
    aten.hardsigmoid.default: unary(),
    aten.hardswish.default: unary(),
    aten.logit.default: [
        (t(X, 0.1, 0.9),),
        (t(X, -0.5, 1.5), 0.1),
        (torch.tensor([0.0, 1, -0.1, 1.1, 0.5, math.inf, -math.inf, math.nan, 1e-30]),),
    ],
    aten.hardtanh.default: [*unary(), (t(X), 0.0, 6.0)],
    aten.elu.default: [*unary(), (t(X), 0.5, 2.0, 3.0)],
    aten.celu.default: [*unary(), (t(X), 0.5)],
    aten.mish.default: unary(),
    aten.log_sigmoid.default: unary(),
    aten.softplus.default: [*unary(), (t(X), 2.0, 1.0), (t("f32[3]"), 3)],
    aten.softshrink.default: [*unary(), (t(X), 1.0)],
    aten.leaky_relu.default: [(t(X),), (t(X), 0.2), (torch.zeros(3, dtype=torch.float64),)],
    **{getattr(aten, name).Tensor: comparison() for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{getattr(aten, name).Scalar: scalar(1) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    aten.isnan.default: [(torch.tensor([1.0, float("nan")]),)],
    aten.isinf.default: [(torch.tensor([1.0, float("-inf"), float("nan")]),)],
    aten.logical_and.default: logical(),
    aten.logical_or.default: logical(),
    aten.logical_not.default: [(t("bool[3]"),), (t("i64[3]"),)],
    aten.bitwise_and.Tensor: pair_of_bool(),
    aten.bitwise_or.Tensor: pair_of_bool(),
    aten.bitwise_not.default: [(t("bool[3]"),)],
    aten.where.self: [(t("bool[4]"), t(X), t(X)), (t("bool[3,1]"), t("f32[]"), t(X))],
    aten.where.ScalarSelf: [(t("bool[3,4]"), 1.0, t(X))],
    aten.where.ScalarOther: [(t("bool[3,4]"), t(X), -float("inf"))],
    aten.where.Scalar: [(t("bool[3,4]"), 1.0, 0.0)],
    aten.masked_fill.Scalar: [(t(X), t("bool[4]"), -1e9)],
    aten.masked_fill.Tensor: [(t(X), t("bool[3,1]"), t("f64[]"))],
    aten.clamp.default: [(t(X), -1, 1), (t(X), None, 0.5), (torch.tensor([-1.0, 1.0, 0.0]), -1, 1)],
    aten.clamp.Tensor: [
        *((t(X), t(Y, -2, 0), t(Y, 0, 2)), (t(X), t("f64[3,1]"))),
        (torch.tensor([1.0, -1.0, math.nan]), torch.tensor([math.nan, 0.0, 0.0])),
    ],
    aten.clamp_min.default: [(t(X), 0), (torch.zeros(3, dtype=torch.float64), 0)],
    aten.clamp_min.Tensor: [(t(X), t(Y))],
    aten.clamp_max.default: [(t(X), 0)],
    aten.clamp_max.Tensor: [(t(X), t(Y))],
    aten.clone.default: unary(),
    aten.alias.default: unary(),
    aten.contiguous.default: unary(),
    aten.lift_fresh_copy.default: unary(),
    aten.lift_fresh.default: unary(),
    aten.copy.default: [(t(X), t("f32[4]"))],
    aten.detach.default: [*unary(), (t("i64[3]"),)],
    aten._to_copy.default: [(t(X), {"dtype": torch.float32}), (t(X), {"dtype": torch.bool}), (t(X),)],
    aten.to.dtype: [(t(X), torch.bfloat16)],
    aten.to.dtype_layout: [(t(X), {"dtype": torch.float32})],
    aten.to.device: [(t(X), "cpu", torch.float32)],
    aten.type_as.default: [(t(X), t("f32[1]"))],
    prims.convert_element_type.default: [(t(X), torch.float32)],
    # ---- movement ----
    aten.view.default: [(t(X), [2, -1]), (t(X), [12])],
    aten._unsafe_view.default: [(t(X), [6, 2])],
    aten.reshape.default: [(t(X), [-1]), (t("f64[1]"), [])],
    aten.flatten.using_ints: [(t("f64[2,3,4]"), 1)],
    aten.unflatten.int: [(t(X), 1, [2, 2])],
    aten.unsqueeze.default: [(t(X), -1), (t(X), 0)],
    aten.squeeze.default: [(t("f64[1,3,1]"),)],
    aten.squeeze.dim: [(t("f64[1,3,1]"), -1), (t(X), 0)],
    aten.squeeze.dims: [(t("f64[1,3,1]"), [0, 2])],
    aten.expand.default: [(t(Y), [3, -1]), (t("f64[3,1]"), [2, 3, 4])],
    aten.broadcast_to.default: [(t(Y), [3, 4])],
    aten.permute.default: [(t("f64[2,3,4]"), [2, 0, 1]), (t("f64[2,3,4]"), [0, -1, 1]), (t(X), [0, 1])],
    aten.transpose.int: [(t("f64[2,3,4]"), 0, -1), (t("f64[2,3,4]"), 1, 2), (t("f64[2,3,4]"), 1, 1)],
    aten.t.default: [(t(X),), (t(Y),)],
    aten.slice.Tensor: [
        (t(X), 1, 1, 2**63 - 1),
        (t(X), -1, -3, -1),
        (t(X), 0, 0, 3, 2),
        (t(X), 0, 2, 1),
        (t(X), 1, None, None),
    ],
    aten.narrow.default: [(t(X), 1, 1, 2)],
    aten.select.int: [(t(X), 0, -1), (t(X), 1, 2)],
    aten.split.Tensor: [(t(X), 3, 1)],
    aten.split_with_sizes.default: [(t(X), [1, 3], -1)],
    aten.chunk.default: [(t(X), 2, -1)],
    aten.unbind.int: [(t(X), 0), (t(X), -1)],
    aten.cat.default: [
        ([t(X), t(X)], -1),
        ([t(X)], 0),
        ([torch.empty(0, dtype=torch.float64), t(X)], 1),
        ([t("f32[2]"), t("f64[3]")],),
    ],
    aten.stack.default: [([t(X), t(X)], -1), ([t("f64[]"), t("f64[]")],)],
    aten.slice_scatter.default: [
        (t(X), t("f64[3,2]"), 1, 1, 3),
        (t(X), t(X), 0, 0, 2**63 - 1),
        (t(X), t("f64[0,4]"), 0, 2, 1),
        (t(X), t("f64[1,4]"), 0, -1),
    ],
    aten.select_scatter.default: [(t(X), t(Y), 0, -1), (t(X), t("f64[3]"), 1, 0)],
    aten.repeat.default: [(t(X), [2, 1, 3]), (t("f64[]"), [2])],
    aten.constant_pad_nd.default: [(t(X), [1, 2], -1.0), (t(X), [0, 1, -1, 2]), (t("i64[3]"), [0, 1], -100)],
    aten.tril.default: [(t(X),), (t("f64[2,3,3]"), -1)],
    aten.triu.default: [(t(X), 1), (t("f64[2,3,3]"),)],
    aten.full.default: [([2, 3], 1.5), ([2], True)],
    aten.full_like.default: [(t(X), 2)],
    aten.new_full.default: [(t(X), [2], 3)],
    aten.zeros.default: [([2, 3],), ([2], {"dtype": torch.bool})],
    aten.zeros_like.default: [(t(X),)],
    aten.new_zeros.default: [(t(X), [2])],
    aten.ones.default: [([2, 3],)],
    aten.ones_like.default: [(t(X),)],
    aten.new_ones.default: [(t(X), [2], {"dtype": torch.int64})],
    aten.fill.Scalar: [(t(X), 3)],
    aten.fill.Tensor: [(t(X), t("f64[]"))],
    aten.scalar_tensor.default: [(2.5,), (3, {"dtype": torch.int64})],
    aten.arange.default: [(5,), (3.5,), (4, {"dtype": torch.float32})],
    aten.arange.start: [(2, 7)],
    aten.arange.start_step: [(1, 8, 3), (0.0, 1.0, 0.25), (5, 0, -2)],
    # ---- reductions and contractions ----
    aten.sum.default: [(t(X),), (t("bool[3,4]"),), (t(X), {"dtype": torch.float32}), (t("f64[]"),)],
    aten.sum.dim_IntList: [(t(X), [0]), (t(X), [-1], True), (t(X), [1, 0]), (t(X), None), (t(X), [])],
    aten.mean.default: [(t(X),)],
    aten.mean.dim: [(t(X), [-1], True), (t(X), [0, 1]), (t(X), [0], False, {"dtype": torch.float32})],
    aten.amax.default: [(t(X), [1]), (t(X), [0, 1], True), (t(X),)],
    aten.amin.default: [(t(X), [-1])],
    aten.var.correction: [(t(X), [1]), (t(X), [0], {"correction": 0, "keepdim": True}), (t(X),)],
    aten.var_mean.correction: [(t(X), [1], {"keepdim": True})],
    aten.std.correction: [(t(X),), (t(X), [1], {"correction": 0, "keepdim": True})],
    aten.std_mean.correction: [(t(X),), (t(X), [1], {"correction": 0, "keepdim": True})],
    aten.logsumexp.default: [
        *((t(X), [1]), (t(X), [0], True)),
        *((torch.full((2, 3), value), [1]) for value in (-math.inf, math.inf)),
        *((torch.zeros(3, 0), [1]), (torch.zeros(0, 3), [1], True), (torch.zeros(3, 0), [0])),
    ],
    aten.linalg_vector_norm.default: [
        *((t(X),), (t(X), 1.0, [1], True), (t(X), 2, [0, 1]), (t("f64[]"),)),
        (t("f32[3,4]"), 2, [1], False),
    ],
    aten.mm.default: [(t(X), t("f64[4,2]"))],
    aten.bmm.default: [(t("f64[2,3,4]"), t("f64[2,4,5]"))],
    aten.mv.default: [(t(X), t(Y))],
    aten.dot.default: [(t(Y), t(Y))],
    aten.matmul.default: [
        (t(a), t(b))
        for a, b in (
            (X, "f64[4,2]"),
            ("f64[2,3,4]", "f64[4,5]"),
            (Y, "f64[4,2]"),
            (X, Y),
            (Y, Y),
            ("f64[2,1,3,4]", "f64[5,4,2]"),
            (X, "f64[5,4,2]"),
            (Y, "f64[2,4,3]"),
        )
    ],
    aten.linear.default: [
        (t("f64[2,3,4]"), t("f64[5,4]"), t("f64[5]")),
        (t(Y), t("f64[5,4]")),
        (t(X), t("f64[1,4]"), t("f64[1]")),
    ],
    aten.addmm.default: [
        (t("f64[2]"), t(X), t("f64[4,2]")),
        (t("f64[3,2]"), t(X), t("f64[4,2]"), {"beta": 0.5, "alpha": 2}),
        (torch.full((2,), float("nan"), dtype=torch.float64), t(X), t("f64[4,2]"), {"beta": 0}),
    ],
    aten.baddbmm.default: [(t("f64[3,5]"), t("f64[2,3,4]"), t("f64[2,4,5]"), {"beta": 2})],
    # ---- networks ----
    aten.embedding.default: [(t(X), t(IDS, 0, 3)), (t(X), t(IDS, 0, 3), 1)],
    aten.rms_norm.default: [
        (t(X), [4], t(Y), 1e-5),
        (t(X), [4]),
        (t("f64[2,3,4]"), [3, 4], t("f64[3,4]"), 0.1),
        (t("f32[3,8]"), [8], t("f32[8]")),
    ],
    aten._fused_rms_norm.default: [(t(X), [4], t(Y), 1e-5), (t("f64[2,3,4]"), [3, 4], None, 0.1)],
    aten.layer_norm.default: [(t(X), [4], t(Y), t(Y)), (t("f64[2,3,4]"), [3, 4], None, None, 0.1)],
    aten.native_layer_norm.default: [(t("f64[2,3,4]"), [4], t(Y), t(Y), 1e-5)],
    aten.softmax.int: [(t(X), -1), (t(X), 0, torch.float32)],
    aten._softmax.default: [(t("f64[2,3,4]"), 1, False)],
    aten._safe_softmax.default: [
        (torch.tensor([[1.0, -float("inf")], [-float("inf")] * 2], dtype=torch.float64), -1)
    ],
    aten.log_softmax.int: [(t(X), -1)],
    aten._log_softmax.default: [(t(X), 0, False), (t("f64[]"), -1, False)],
    aten.cross_entropy_loss.default: [
        (t("f64[6,5]"), targets(), positive("f64[5]")),
        (t("f64[6,5]"), t("i64[6]", 0, 5), positive("f64[5]"), 0, 2),
        (t("f64[6,5]"), t("i64[6]", 0, 5), None, 1, 2, 0.1),
        (t("f64[6,5]"), t("i64[6]", 0, 5), positive("f64[5]"), 1, 2, 0.1),
        (t("f64[6,5]"), t("i64[6]", 0, 5), positive("f64[5]"), 0, 2, 0.3),
        (t("f64[6,5]"), positive("f64[6,5]")),
        (t("f64[6,5]"), positive("f64[6,5]"), positive("f64[5]"), 2, -100, 0.2),
        (t("f64[3,5,2]"), positive("f64[3,5,2]"), None, 0, -100, 0.2),
        (t("f64[5]"), positive("f64[5]"), None, 1),
        (t("f64[6,5]"), targets()),
        (t("f64[6,5]"), targets(), None, 0),
        (t("f64[6,5]"), t("i64[6]", 0, 5), None, 2, 3),
        (t("f64[2,5,3]"), targets("i64[2,3]")),
        (t("f64[2,5,3]"), targets("i64[2,3]"), None, 0),
        (t("f64[5]"), torch.tensor(2)),
    ],
    aten.nll_loss_forward.default: [
        (t("f64[6,5]"), targets(), positive("f64[5]"), 1, -100),
        (t("f64[6,5]"), t("i64[6]", 0, 5), positive("f64[5]"), 2, 2),
        *((t("f64[6,5]"), targets(), None, reduction, -100) for reduction in (0, 1, 2)),
    ],
    aten.nll_loss2d_forward.default: [
        (t("f64[2,5,3,4]"), targets("i64[2,3,4]"), weight, reduction, -100)
        for weight in (None, positive("f64[5]"))
        for reduction in (0, 1, 2)
    ],
    aten.smooth_l1_loss.default: [
        *((t(X), t(X), reduction, 0.7) for reduction in (0, 1, 2)),
        *((t(X), t("f64[4]"), 0), (distances(), torch.zeros(12), 0), (distances(), torch.zeros(12), 0, 2.0)),
    ],
    aten.huber_loss.default: [
        *((t(X), t(X), reduction, 0.7) for reduction in (0, 1, 2)),
        *((t(X), t("f64[4]"), 0), (distances(), torch.zeros(12), 0), (distances(), torch.zeros(12), 0, 2.0)),
    ],
    aten.binary_cross_entropy.default: [
        (t(X, 0.1, 0.9), t(X, 0.0, 1.0)),
        (t(X, 0.1, 0.9), t(X, 0.0, 1.0), t(Y), 0),
    ],
    aten.binary_cross_entropy_with_logits.default: [
        (t(X), t(X, 0.0, 1.0)),
        (t(X), t(X, 0.0, 1.0), t(Y), positive(X), 0),
        (t(X), t(X, 0.0, 1.0), None, positive("f64[]"), 2),
    ],
    aten.convolution.default: [
        (t(IMAGE), t("f64[6,2,3,2]"), t("f64[6]"), [2, 1], [1, 0], [1, 2], False, [0, 0], 2),
        (t(IMAGE), t("f64[4,1,3,3]"), None, [1], [1], [1], False, [0], 4),
        (t(IMAGE), t("f64[4,3,3,2]"), t("f64[6]"), [2, 2], [1, 0], [1, 2], True, [1, 0], 2),
        (t("f64[2,3,7]"), t("f64[5,3,3]"), t("f64[5]"), [2], [0], [1], False, [0], 1),
        (t("f64[2,3,7]"), t("f64[3,5,3]"), t("f64[5]"), [2], [0], [1], True, [0], 1),
        (t("f64[2,2,4,5,3]"), t("f64[3,2,2,3,1]"), None, [1] * 3, [0, 1, 2], [1] * 3, False, [0] * 3, 1),
    ],
    aten.max_pool2d_with_indices.default: [
        (t(IMAGE), [3, 2], [2, 2], [1, 1]),
        (t("f64[4,5,6]"), [2], [], [0], [2], True),
    ],
    aten.avg_pool2d.default: [(t("f64[2,3,4,6]"), [2, 3]), (t("f64[3,4,6]"), [2], [2])],
    aten.adaptive_avg_pool2d.default: [(t(IMAGE), [1, 1])],
    aten._adaptive_avg_pool2d.default: [(t(IMAGE), [1, 1]), (t("f64[3,4,6]"), [2, 6])],
    aten.upsample_nearest2d.vec: [(t(IMAGE), None, [2.0, 3.0]), (t(IMAGE), [10, 12], None)],
    aten.group_norm.default: [(t(IMAGE), 2, t(Y), t(Y)), (t("f64[3,4]"), 4, None, None, 0.1)],
    aten.native_group_norm.default: [
        (t(IMAGE), t(Y), t(Y), 2, 4, 30, 2, 1e-5),
        (t("f32[2,4,30]"), None, None, 2, 4, 30, 1, 1e-5),
    ],
    aten._native_batch_norm_legit_functional.default: [
        (t(image), t(Y), t(Y), t(Y), positive(Y), training, 0.1, 1e-5)
        for image in (IMAGE, "f64[3,4]")
        for training in (True, False)
    ],
    aten._native_batch_norm_legit.no_stats: [(t(IMAGE), None, t(Y), True, 0.1, 1e-5)],
    aten._native_batch_norm_legit_no_training.default: [
        (t("f32[2,4,3]"), t("f32[4]"), None, t("f32[4]"), positive("f32[4]"), 0.1, 1e-5)
    ],
    aten.mse_loss.default: [(t(X), t(X)), (t(X), t(Y), 0), (t(X), t(X), 2)],
    aten.scaled_dot_product_attention.default: [
        (t("f64[2,4,6,8]"), t("f64[2,4,5,8]"), t("f64[2,4,5,8]")),
        (t("f64[2,4,5,8]"), t("f64[2,2,5,8]"), t("f64[2,2,5,8]"), None, 0.0, True, {"enable_gqa": True}),
        (t("f64[4,6,8]"), t("f64[4,5,8]"), t("f64[4,5,8]"), None, 0.0, False, {"scale": 0.3}),
        (t("f64[2,1,4,6,8]"), t("f64[3,4,5,8]"), t("f64[3,4,5,8]")),
        (t("f64[2,4,6,8]"), t("f64[2,4,5,8]"), t("f64[2,4,5,8]"), torch.ones(6, 5).tril(-1).bool()),
        (t("f64[2,4,6,8]"), t("f64[2,4,5,8]"), t("f64[2,4,5,8]"), t("f64[2,1,6,5]")),
        (
            t("f64[2,4,6,8]"),
            t("f64[2,2,6,8]"),
            t("f64[2,2,6,8]"),
            t("f64[6,6]"),
            {"enable_gqa": True},
        ),
    ],
}


NO_DERIVATIVE = {prims.convert_element_type.default, aten.copy.default}
"""In PyTorch itself, where they stand below autograd."""


RUNNING = {
    aten._native_batch_norm_legit_functional.default: (3, 4),
    aten._native_batch_norm_legit_no_training.default: (3, 4),
    aten.cross_entropy_loss.default: (2,),
    aten.nll_loss_forward.default: (2,),
    aten.nll_loss2d_forward.default: (2,),
    aten.binary_cross_entropy.default: (2,),
    aten.binary_cross_entropy_with_logits.default: (2, 3),
}
"""Arguments that may not require a gradient."""


def test_every_row_has_a_case() -> None:
    assert set(TABLE) == set(CASES)


def import_call(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, opaque: bool = True
) -> tuple[FxGraph, list[Tensor]]:
    """One call as a graph, and the values of its inputs."""
    graph = fx.Graph()
    tensors: list[Tensor] = []

    def placeholder(value: Any) -> Any:
        if isinstance(value, list):
            return [placeholder(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x{len(tensors)}")
        node.meta["val"] = value
        tensors.append(value)
        return node

    node = graph.call_function(op, tuple(map(placeholder, args)), kwargs)
    node.meta["val"] = result
    outputs = [node]
    if isinstance(result, (tuple, list)):
        outputs = [graph.call_function(getitem, (node, i)) for i in range(len(result))]
    graph.output(tuple(outputs))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    return import_fx(gm, [f"x{i}" for i in range(len(tensors))], opaque=opaque), tensors


def flat(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values if isinstance(value, (Tensor, list)) for tensor in flat(value)]


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Of a fixed weighting of the outputs; zeros where no gradient flows."""
    wanted = [x for x in inputs if x.requires_grad]
    roots = [y for y in outputs if y.requires_grad]
    if not roots or not wanted:
        return [torch.zeros_like(x) for x in wanted]
    torch.manual_seed(1)
    weights = [torch.rand(y.shape, dtype=torch.float64).to(y.dtype) for y in roots]
    return list(torch.autograd.grad(roots, wanted, weights, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize(
    ("op", "case"),
    [pytest.param(op, case, id=f"{op}-{i}") for op, cases in CASES.items() for i, case in enumerate(cases)],
)
def test_row(op: Any, case: tuple[Any, ...]) -> None:
    args, kwargs = (case[:-1], case[-1]) if case and isinstance(case[-1], dict) else (case, {})
    for tensor in flat([x for i, x in enumerate(args) if i not in RUNNING.get(op, ())]):
        tensor.requires_grad_(tensor.dtype.is_floating_point)
    expected = op(*args, **kwargs)
    imported, inputs = import_call(op, args, kwargs, expected)
    found = ops.evaluate(imported.graph, inputs)
    for mine, theirs in zip(found, flat(expected), strict=True):
        assert mine.dtype == theirs.dtype
        tolerance = (
            1e-12 if theirs.dtype == torch.float64 else 1e-6 if theirs.dtype == torch.float32 else 2e-2
        )
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
    if op in NO_DERIVATIVE:
        return
    for mine, theirs in zip(gradients(found, inputs), gradients(flat(expected), inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)


REFUSED = [
    (aten.div.Tensor_mode, (t(X), positive(X), {"rounding_mode": "floor"}), "rounding_mode='floor'"),
    (aten.bitwise_and.Tensor, (t("i64[3]"), t("i64[3]")), "only bool"),
    (aten.slice_scatter.default, (t(X), t("f64[2,4]"), 0, 0, 3, 2), "step 2"),
    (aten.cumsum.default, (t(X), 0), "aten.cumsum.default has no row"),
]


@pytest.mark.parametrize(("op", "case", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refused(op: Any, case: tuple[Any, ...], message: str) -> None:
    args, kwargs = (case[:-1], case[-1]) if isinstance(case[-1], dict) else (case, {})
    with pytest.raises(UnsupportedOp, match=message):
        import_call(op, args, kwargs, op(*args, **kwargs), opaque=False)


def test_a_wrong_type_is_an_error() -> None:
    with pytest.raises(TraceError, match=r"aten.t.default.*f64\[4,3\] where PyTorch has f64\[3,4\]"):
        import_call(aten.t.default, (t(X),), {}, t(X))
