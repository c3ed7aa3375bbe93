"""Mean and variance of rows, relative to one of their elements: in one pass, and right to the last digits.

The usual two passes read everything again to subtract the mean. Where a first element k of each row stands in
for it, one pass gives both, and nothing large cancels:

    mean(x), mean((x - mean(x))^2)   -->   k + s, max(t - s^2, 0)   for s = mean(x - k), t = mean((x - k)^2)

(Chan, Golub and LeVeque, 1983, "Algorithms for computing the sample variance": shifted data. As k is one of
the n elements, s^2 is at most n times the variance.) Rows that are held on chip keep their two passes. Where
the first element is no larger than elements differ, nothing would cancel, and k is 0.

A mean far larger than the deviation has no digits left for it in fp32, so what subtracts it subtracts both
parts: `x - mean(x)  -->  (x - k) - s`, of which the first difference is exact. Of 16 bits, x has fewer digits
than its mean.
"""

from __future__ import annotations

from collections.abc import Callable

from egcompile.ir.node import Node, topological
from egcompile.ops import pointwise
from egcompile.ops.build import broadcast_to, constant
from egcompile.ops.movement import slice_
from egcompile.ops.pointwise import add, gt, maximum, mul, sub, where
from egcompile.ops.reduction import mean
from egcompile.schedule.kernel import Kernel


def shifted(kernel: Kernel, held: Callable[[Node], bool]) -> dict[Node, Node]:
    """What to replace in the kernel's body: means and variances, and what subtracts such a mean.

    held   whether the rows of a mean are held on chip; of 16 bits, these are left as they are
    """
    new: dict[Node, Node] = {}
    parts: dict[Node, tuple[Node, Node]] = {}
    for node in topological(kernel.body.outputs):
        center = _center(node)
        if center is None or _is_shifted(center.inputs[0]):
            continue
        x, dims, on_chip = center.inputs[0], center.attr("dims"), held(center)
        if on_chip and _is_narrow(x):
            continue
        first = _origin(x, dims)
        distance = sub(x, broadcast_to(first, x.shape))
        along = mean(distance, dims=dims)
        new[center] = add(first, along)
        if not _is_narrow(x):
            parts[center] = first, along
        if not on_chip:
            square = mean(mul(distance, distance), dims=dims)
            variance = sub(square, mul(along, along))
            new[node] = maximum(variance, constant(0.0, variance))
    for node in topological(kernel.body.outputs):
        if node.op.name != "sub":
            continue
        center = _moved(node.inputs[1])
        if center in parts:
            first, along = (_put(node.inputs[1], center, part) for part in parts[center])
            new[node] = sub(sub(node.inputs[0], first), along)
    return new


def _origin(x: Node, dims: tuple[int, ...]) -> Node:
    """Each row's first element, or 0 where it is less than four times its distance from the last."""
    first = last = x
    for dim in dims:
        size = x.shape[dim]
        first = slice_(first, axis=dim, start=0, stop=1, step=1)
        last = slice_(last, axis=dim, start=size - 1, stop=size, step=1)
    far = gt(pointwise.abs(first), mul(pointwise.abs(sub(first, last)), constant(4.0, first)))
    return where(far, first, constant(0.0, first))


def _moved(node: Node) -> Node:
    """What is reshaped and broadcast to `node`."""
    while node.op.name in ("expand", "reshape"):
        node = node.inputs[0]
    return node


def _put(node: Node, center: Node, part: Node) -> Node:
    """`part` where `center` is, under the same movements."""
    if node is center:
        return part
    return Node.make(node.op, (_put(node.inputs[0], center, part),), node.attrs)


def _is_narrow(x: Node) -> bool:
    x = _moved(x)
    return x.op.name == "cast" and x.inputs[0].dtype.itemsize <= 2


def _is_shifted(x: Node) -> bool:
    if x.op.name != "sub":
        return False
    origin = _moved(x.inputs[1])
    return origin.op.name == "where" and origin.inputs[1].op.name == "slice"


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
