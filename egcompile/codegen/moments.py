"""Mean and variance of rows that no program holds: one pass over memory instead of two.

The usual two passes read everything again to subtract the mean. Where a first element k of each row stands in
for it, one pass gives both, and nothing large cancels:

    mean(x), mean((x - mean(x))^2)   -->   k + s, max(t - s^2, 0)   for s = mean(x - k), t = mean((x - k)^2)

(Chan, Golub and LeVeque, 1983, "Algorithms for computing the sample variance": shifted data. As k is one of
the n elements, s^2 is at most n times the variance.)
"""

from __future__ import annotations

from collections.abc import Callable

from egcompile.ir.node import Node, topological
from egcompile.ops.build import broadcast_to, constant
from egcompile.ops.movement import slice_
from egcompile.ops.pointwise import add, maximum, mul, sub
from egcompile.ops.reduction import mean
from egcompile.schedule.kernel import Kernel


def one_pass(kernel: Kernel, held: Callable[[Node], bool]) -> dict[Node, Node]:
    """What to replace in the kernel's body: each mean and variance of rows that are not `held` on chip."""
    new: dict[Node, Node] = {}
    for node in topological(kernel.body.outputs):
        center = _center(node)
        if center is None or held(center):
            continue
        x, dims = center.inputs[0], center.attr("dims")
        first = x
        for dim in dims:
            first = slice_(first, axis=dim, start=0, stop=1, step=1)
        shifted = sub(x, broadcast_to(first, x.shape))
        along, square = mean(shifted, dims=dims), mean(mul(shifted, shifted), dims=dims)
        new[center] = add(first, along)
        variance = sub(square, mul(along, along))
        new[node] = maximum(variance, constant(0.0, variance))
    return new


def _center(node: Node) -> Node | None:
    """For `mean((x - mean(x))^2)` over one set of axes: the inner mean."""
    if node.op.name != "mean" or node.inputs[0].op.name != "mul":
        return None
    left, right = node.inputs[0].inputs
    if left is not right or left.op.name != "sub":
        return None
    x, center = left.inputs
    if center.op.name == "expand":
        center = center.inputs[0]
    same = center.op.name == "mean" and center.inputs[0] is x and center.attr("dims") == node.attr("dims")
    return center if same else None
