"""A kernel's body taken apart around its one contraction: operands, what follows on the result tile, sums.

It is a `matmul`, of rows M (all its leading axes) and columns N, summed over K: what the named ops are made
of. Its operands are read from memory; batched products and weights' gradients are calls of ATen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from egcompile.codegen.index import (
    BIJECTIVE,
    Axis,
    Index,
    linear,
    offset,
    operand_index,
    result_index,
    unravel,
)
from egcompile.errors import CompileError
from egcompile.ir.node import Node, topological
from egcompile.ir.types import accumulate_dtype
from egcompile.ops.opdef import Kind
from egcompile.schedule.kernel import Buffer, Kernel

Indices = tuple[Index, ...]
Region = dict[Node, Indices]
"""The nodes that follow from one value, element for element, in order: where each has the root's element."""


@dataclass(frozen=True)
class ColumnSum:
    """`node`, a sum of `value` over all rows, and what follows from it at a column."""

    node: Node
    value: Node
    region: Region


@dataclass(frozen=True)
class Block:
    """A matrix as a tensor descriptor sees it: rows of contiguous elements from `offset` on.

    transposed   the rows in memory are the columns of the matrix that is asked for
    """

    shape: tuple[int, int]
    stride: int
    offset: int
    transposed: bool


@dataclass(frozen=True, eq=False)
class Contraction:
    """`a[M, K] @ b[K, N]`, the `tile` region after it, and the `sums` of its columns.

    operands   for each of `node.inputs`: the input that it is a view of, and the offset there of its element
               (rows, k) or (k, cols)
    """

    kernel: Kernel
    node: Node
    rows: Axis
    cols: Axis
    k: Axis
    operands: tuple[tuple[Node, Index], tuple[Node, Index]]
    tile: Region
    sums: tuple[ColumnSum, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.node.inputs[0].dtype

    @property
    def accumulator(self) -> torch.dtype:
        return accumulate_dtype(self.dtype)

    def outputs_in(self, region: Region) -> list[tuple[int, Node]]:
        """Positions and nodes of the outputs that are written from a region."""
        return [(i, o) for i, o in enumerate(self.kernel.body.outputs) if o in region]

    def buffer(self, leaf: Node) -> Buffer:
        return self.kernel.inputs[self.kernel.body.inputs.index(leaf)]

    def operand_block(self, side: int) -> Block | None:
        """Operand 0 or 1 as a descriptor's matrix, or None where its strides do not allow one."""
        leaf, where = self.operands[side]
        rows, cols = (self.rows, self.k) if side == 0 else (self.k, self.cols)
        return block(self.buffer(leaf), where, rows, cols)

    @property
    def allows_descriptors(self) -> bool:
        """Whether tiles of both operands can go through tensor descriptors."""
        blocks = (self.operand_block(0), self.operand_block(1))
        return self.dtype.itemsize == 2 and None not in blocks

    @staticmethod
    def of(kernel: Kernel) -> Contraction:
        """Takes apart a kernel whose body is lowered, so that no axis is empty.

        Raises CompileError, saying which node does not fit.
        """
        nodes = topological(kernel.body.outputs)
        roots = [n for n in nodes if n.op.kind is Kind.CONTRACTION]
        if len(roots) != 1:
            raise CompileError(f"{kernel.name} has {len(roots)} contractions; a kernel holds one")
        root = roots[0]
        if root.op.name != "matmul":
            raise CompileError(f"{kernel.name}: no kernel is known for the contraction {root.op.name}")
        if not root.dtype.is_floating_point:
            raise CompileError(f"{kernel.name}: a contraction of {root.dtype} has no kernel")
        left, right = (i.shape for i in root.inputs)
        rows, cols, k = Axis("rows", math.prod(left[:-1])), Axis("cols", right[-1]), Axis("k", left[-1])
        col, summed = Index.of(cols), Index.of(k)
        lead = unravel(Index.of(rows), left[:-1])
        places = (*lead, summed), (summed, col)
        first, second = (_read(kernel, i, where) for i, where in zip(root.inputs, places, strict=True))
        index = (*lead, col)
        tile = _follow(root, index, nodes)
        sums = tuple(_column_sum(n, tile, col, nodes) for n in nodes if _reduces(n, tile))
        covered = set(tile).union(*(s.region for s in sums))
        for node in kernel.body.outputs:
            if node not in covered:
                raise CompileError(
                    f"{kernel.name} writes what does not follow from its contraction: {node!r}"
                )
        return Contraction(kernel, root, rows, cols, k, (first, second), tile, sums)


def block(buffer: Buffer, where: Index, rows: Axis, cols: Axis) -> Block | None:
    """The matrix [rows, cols] at offsets `where` as a descriptor's, or None where it is none.

    It is one if one axis is contiguous and base and stride are multiples of 16 bytes.
    """
    strides = dict(where.terms)
    if strides.keys() != {rows, cols} or (buffer.offset + where.const) * buffer.type.dtype.itemsize % 16:
        return None
    for outer, inner in ((rows, cols), (cols, rows)):
        if strides[inner] == 1 and strides[outer] * buffer.type.dtype.itemsize % 16 == 0:
            return Block((outer.size, inner.size), strides[outer], where.const, outer is cols)
    return None


def _read(kernel: Kernel, node: Node, index: Indices) -> tuple[Node, Index]:
    """The input that an operand is a view of, and the offset of the operand's element `index` in it."""
    while node.op.name in (*BIJECTIVE, "expand", "slice"):
        node, index = node.inputs[0], operand_index(node, index)
    if node not in kernel.body.inputs:
        raise CompileError(f"{kernel.name} computes an operand of its contraction: {node!r}")
    return node, offset(index, kernel.inputs[kernel.body.inputs.index(node)].strides)


def _follow(root: Node, index: Indices, nodes: Sequence[Node]) -> Region:
    region: Region = {root: index}
    for node in nodes:
        sources = [i for i in node.inputs if i in region]
        if not sources or node in region:
            continue
        if node.op.kind is Kind.POINTWISE:
            if any(region[s] != region[sources[0]] for s in sources):
                raise CompileError(f"operands of {node.op.name} are different movements of one tile")
            region[node] = region[sources[0]]
        elif node.op.name in BIJECTIVE:
            region[node] = result_index(node, region[sources[0]])
    return region


def _reduces(node: Node, tile: Region) -> bool:
    return node.op.kind is Kind.REDUCTION and node.inputs[0] in tile


def _column_sum(node: Node, tile: Region, col: Index, nodes: Sequence[Node]) -> ColumnSum:
    """As many elements as columns, and the column at each: then what is summed is all of the rows."""
    value, dims = node.inputs[0], node.attr("dims")
    kept = tuple(Index(()) if i in dims else x for i, x in enumerate(tile[value]))
    if node.op.name != "sum" or linear(kept, node.shape) != col:
        raise CompileError(f"{node.op.name} over {list(dims)} of {value.tensor} is no sum over a tile's rows")
    return ColumnSum(node, value, _follow(node, unravel(col, node.shape), nodes))
