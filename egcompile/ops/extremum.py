"""The gradients of `amax` and `amin`, by definition: the extremum is found again, among the very same values.

One that was computed elsewhere may differ in its last bit from all of them, and no element would have a part.
"""

from __future__ import annotations

from egcompile.ir.node import Node
from egcompile.ops.build import broadcast_to, constant
from egcompile.ops.opdef import Kind, OpDef, Sample, register
from egcompile.ops.pointwise import div, eq, mul, where
from egcompile.ops.reduction import amax, amin, sum


def _backward(extremum: OpDef) -> OpDef:
    """`x, ct -> dx`: `ct`, of size 1 along `dims`, in equal parts over the elements that attain the extremum.

    NaN in a slice with a NaN.
    """

    def definition(x: Node, ct: Node, dims: tuple[int, ...]) -> Node:
        top = extremum(x, dims=dims)
        hit = where(eq(x, broadcast_to(top, x.shape)), constant(1.0, x), constant(0.0, x))
        return mul(broadcast_to(div(ct, sum(hit, dims=dims)), x.shape), hit)

    samples = (
        Sample(("f64[3,4]", "f64[3,1]"), {"dims": (1,)}),
        Sample(("f64[2,3,4]", "f64[1,3,1]"), {"dims": (0, 2)}),
    )
    name = f"{extremum.name}_backward"
    return register(
        OpDef(name, Kind.COMPOSITE, ("x", "ct"), {"dims": "ints"}, definition=definition, samples=samples)
    )


amax_backward = _backward(amax)
amin_backward = _backward(amin)
