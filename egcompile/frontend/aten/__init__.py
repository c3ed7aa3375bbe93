"""What each ATen overload means in the IR: one row an overload.

A row is `row(out, *arguments) -> Node`, or a tuple of nodes for an op of several outputs. `out` is the
result's `TensorType` (a tuple of them for several outputs); the arguments stand in the order of the op's
schema, defaults filled in, tensors as nodes. The importer checks that the nodes have the types `out`.
"""

from typing import Any

import torch

from egcompile.frontend.aten.activation import ACTIVATION
from egcompile.frontend.aten.attention import ATTENTION
from egcompile.frontend.aten.channel_norm import CHANNEL_NORM
from egcompile.frontend.aten.convolution import CONVOLUTION
from egcompile.frontend.aten.loss import LOSS
from egcompile.frontend.aten.movement import MOVEMENT
from egcompile.frontend.aten.nn import NN
from egcompile.frontend.aten.pointwise import POINTWISE
from egcompile.frontend.aten.random import RANDOM
from egcompile.frontend.aten.reduction import CONTRACTION, REDUCTION

TABLE: dict[Any, Any] = {
    **POINTWISE,
    **ACTIVATION,
    **MOVEMENT,
    **REDUCTION,
    **CONTRACTION,
    **CONVOLUTION,
    **CHANNEL_NORM,
    **NN,
    **LOSS,
    **ATTENTION,
}
aten = torch.ops.aten

CHECKED = frozenset(
    {
        aten.inverse.default,
        aten.linalg_inv.default,
        aten.linalg_cholesky.default,
        aten.linalg_solve.default,
        aten.linalg_tensorinv.default,
        aten.linalg_lu_factor.default,
        aten.linalg_ldl_factor.default,
        aten.one_hot.default,
    }
)
"""Ops that raise for some values, in a decomposition as a call without a result; whole, they are opaque."""

OTHERWISE_DIFFERENTIATED = frozenset(
    {
        aten._euclidean_dist.default,
        aten.logaddexp.default,
        aten.logaddexp2.default,
        aten.sinc.default,
        aten.special_entr.default,
        aten.special_log_ndtr.default,
        aten.special_xlog1py.default,
        aten.special_xlog1py.other_scalar,
        aten.special_xlog1py.self_scalar,
        aten.xlogy.Tensor,
        aten.xlogy.Scalar_Self,
        aten.xlogy.Scalar_Other,
    }
)
"""Ops whose decomposition has their value, but at some points another gradient, mostly NaN: opaque too."""

KEPT = frozenset({*TABLE, *RANDOM, *CHECKED, *OTHERWISE_DIFFERENTIATED})
"""The overloads that are imported whole: what no decomposition may take apart."""

__all__ = ["KEPT", "RANDOM", "TABLE"]
