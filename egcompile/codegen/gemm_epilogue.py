"""What follows a contraction in its kernel: reads, computes and writes the elements of one region.

The same code serves the result tile and the finished column sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from egcompile.codegen.contraction import Block, Contraction, Indices, Region, block
from egcompile.codegen.index import Axis, Index, offset
from egcompile.codegen.scalar import TL_DTYPES, literal
from egcompile.codegen.text import Line, Names, Value, named, print_block
from egcompile.codegen.tile import AxisTile, Scope, Tile
from egcompile.errors import CompileError
from egcompile.ir.node import Node
from egcompile.ir.types import accumulate_dtype
from egcompile.schedule.kernel import Buffer

DESCRIPTOR_HELPERS = {
    "TensorDescriptor": "from triton.tools.tensor_descriptor import TensorDescriptor",
    "_aligned": """
def _aligned(x, size, offset=0):
    # A descriptor begins at a multiple of 16 bytes, which is not so of every slice of a tensor.
    if x.data_ptr() % 16:
        return x.as_strided((size,), (1,), x.storage_offset() + offset).clone()
    return x.as_strided((1,), (1,), x.storage_offset() + offset) if offset else x
""",
}
"""What launchers that pass descriptors call, by name."""


@dataclass
class Arguments:
    """A jit function's parameters in order of first use, each with what the launcher passes for it."""

    names: dict[Node | int, str]
    passed: dict[str, str] = field(default_factory=dict)

    def pointer(self, tensor: Node | int) -> str:
        """The pointer parameter of an input node or of an output's position."""
        name = self.names[tensor]
        self.passed[f"{name}_ptr"] = name
        return f"{name}_ptr"

    def descriptor(self, tensor: Node | int, suffix: str, seen: Block, tile: tuple[int, ...]) -> str:
        """A descriptor parameter: `seen` in memory order, read or written by `tile`."""
        name = base = self.names[tensor]
        if isinstance(tensor, Node):
            size = (seen.shape[0] - 1) * seen.stride + seen.shape[1]
            base = f"_aligned({name}, {size}, {seen.offset})" if seen.offset else f"_aligned({name}, {size})"
        shape, strides = list(seen.shape), [seen.stride, 1]
        self.passed[f"{name}_{suffix}"] = f"TensorDescriptor({base}, {shape}, {strides}, {list(tile)})"
        return f"{name}_{suffix}"


@dataclass(eq=False)
class RegionTile(Tile):
    """Evaluates a region, whose root value is there under a name.

    region     the root first
    root       the root's name in the text
    shape      of the tile
    place      its coordinates in a descriptor; None for pointers only
    """

    contraction: Contraction = field(kw_only=True)
    region: Region = field(kw_only=True)
    root: str = field(kw_only=True)
    arguments: Arguments = field(kw_only=True)
    shape: tuple[int, ...] = field(kw_only=True)
    place: str | None = field(kw_only=True, default=None)

    def __post_init__(self) -> None:
        self.other = self._root

    def write(self, after: Callable[[Node, Value], None] | None = None) -> None:
        """The statements of the whole region: each output is stored as soon as it is known."""
        outputs = self.contraction.outputs_in(self.region)
        for node, index in self.region.items():
            value = self.value(node, index)
            for position, output in outputs:
                if output is node:
                    self.store_output(position, index, value)
            if after is not None:
                after(node, value)

    def line(self, template: str, *operands: Value) -> None:
        self.scopes[0].block.items.append(Line(template, operands))

    def lines(self, parameters: set[str]) -> list[str]:
        return print_block(self.scopes[0].block, Names(parameters), "")

    def load(self, node: Node, index: Indices, guard: Value | None = None) -> Value:
        buffer = self.contraction.buffer(node)
        seen = self._block(buffer, index)
        if seen is None or guard is not None:
            self.pointers[node] = (self.arguments.pointer(node), buffer)
            return super().load(node, index, guard)
        acc = accumulate_dtype(node.dtype)
        text = f"{self.arguments.descriptor(node, 'tile', seen, self.shape)}.load([{self.place}])"
        text += "" if acc == node.dtype else f".to({TL_DTYPES[acc]})"
        return self.emit(Value(text, (), acc, frozenset(self.axes), node.attr("name"), inline=False))

    def store_output(self, position: int, index: Indices, value: Value) -> None:
        buffer = self.contraction.kernel.outputs[position]
        dtype = TL_DTYPES[buffer.type.dtype]
        if (seen := self._block(buffer, index)) is not None:
            name = self.arguments.descriptor(position, "tile", seen, self.shape)
            self.line(f"{name}.store([{self.place}], {{0}}.to({dtype}))", value)
            return
        where = offset(index, buffer.strides)
        pointer = f"{self.arguments.pointer(position)} + {{1}}"
        if len(where.axes) < len(self.shape):  # an axis of one element, which the tile overhangs
            pointer = f"tl.broadcast_to({pointer}, {self.shape})"
        mask = self.mask(frozenset(self.axes))
        tail = ")" if mask is None else ", mask={2})"
        operands = (value, self.index(where), *([mask] if mask is not None else []))
        self.line(f"tl.store({pointer}, {{0}}.to({dtype}){tail}", *operands)

    def _block(self, buffer: Buffer, index: Indices) -> Block | None:
        """The buffer as a descriptor takes it by this tile, if it can be and is to be one."""
        c = self.contraction
        if self.place is None or self.shape[1] * buffer.type.dtype.itemsize < 16:
            return None
        seen = block(buffer, offset(index, buffer.strides), c.rows, c.cols)
        return seen if seen is not None and not seen.transposed else None

    def _root(self, tile: Tile, node: Node, index: Indices) -> Value:
        root, where = next(iter(self.region.items()))
        if node is not root or index != where:
            raise CompileError(f"{node.op.name} cannot be computed on a tile of {root.op.name}: {node!r}")
        return named(self.root, self.contraction.accumulator, frozenset(self.axes))


def blocked(axis: Axis, index: str, size: int, scope: Scope, *, large: bool = False) -> AxisTile:
    """An axis taken in blocks of `size`: its `index` in the text, and a mask where blocks overhang it.

    large   whether offsets along it need 64 bits
    """
    axes = frozenset({axis})
    position = Value(f"{index}.to(tl.int64)" if large else index, axes=axes, hint=axis.name, inline=False)
    scope.block.items.append(position)
    if axis.size % size == 0:
        return AxisTile(position)
    mask = Value(f"{{0}} < {axis.size}", (position,), torch.bool, axes, f"{axis.name}_mask", inline=False)
    scope.block.items.append(mask)
    return AxisTile(position, mask)


@dataclass(eq=False)
class OperandTile(Tile):
    """Reads an operand's tile for the product."""

    contraction: Contraction = field(kw_only=True)
    arguments: Arguments = field(kw_only=True)
    shape: tuple[int, int] = field(kw_only=True)

    def operand(self, side: int) -> Value:
        """The tile of operand 0 or 1 in its own dtype, not widened; 0 past the end of K."""
        c = self.contraction
        value = self._read(*c.operands[side])
        summed = self.axes[c.k]
        if summed.mask is not None and c.k not in value.zero:
            value = self.select(summed.mask, value, literal(0.0, c.accumulator))
        if len(value.axes) < 2:  # it is the same along an axis, or the axis has one element
            value = Value(f"tl.broadcast_to({{0}}, {self.shape})", (value,), c.dtype, value.axes, value.hint)
            value = self.emit(value)
        return value

    def _read(self, node: Node, where: Index) -> Value:
        pointer, operands = self._pointer(self.arguments.pointer(node), where)
        mask = self.mask(where.axes)
        tail = ")"
        if mask is not None:
            tail, operands = f", mask={{{len(operands)}}}, other=0.0)", (*operands, mask)
        zero = frozenset(axis for axis in where.axes if self.axes[axis].mask is not None)
        text = f"tl.load({pointer}{tail}"
        return self.emit(Value(text, operands, node.dtype, where.axes, node.attr("name"), zero, inline=False))
