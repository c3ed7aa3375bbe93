"""What each ATen overload means in the IR: one row an overload.

A row is `row(out, *arguments) -> Node`, or a tuple of nodes for an op of several outputs. `out` is the
result's `TensorType` (a tuple of them for several outputs); the arguments stand in the order of the op's
schema, defaults filled in, tensors as nodes. The importer checks that the nodes have the types `out`.
"""

from typing import Any

import torch

from egcompile.frontend.aten.attention import ATTENTION
from egcompile.frontend.aten.channel_norm import CHANNEL_NORM
from egcompile.frontend.aten.convolution import CONVOLUTION
from egcompile.frontend.aten.movement import MOVEMENT
from egcompile.frontend.aten.nn import NN
from egcompile.frontend.aten.pointwise import POINTWISE
from egcompile.frontend.aten.random import RANDOM
from egcompile.frontend.aten.reduction import CONTRACTION, REDUCTION

TABLE: dict[Any, Any] = {
    **POINTWISE,
    **MOVEMENT,
    **REDUCTION,
    **CONTRACTION,
    **CONVOLUTION,
    **CHANNEL_NORM,
    **NN,
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
    }
)
"""Ops that raise for some values, in a decomposition as a call without a result; whole, they are opaque."""

KEPT = frozenset({*TABLE, *RANDOM, *CHECKED})
"""The overloads that are imported whole: what no decomposition may take apart."""

__all__ = ["KEPT", "RANDOM", "TABLE"]
