"""Views against PyTorch's: a movement is a view where PyTorch has one, with its strides and offset."""

import pytest
import torch

from egcompile.extract.layout import results, view
from egcompile.ir.buffer import Buffer, normal_strides
from egcompile.ir.node import Node
from egcompile.ir.types import TensorType
from egcompile.ops import (
    Kind,
    add,
    call,
    cat,
    contract_rows,
    expand,
    full,
    mean,
    ops_of,
    pad,
    permute,
    reshape,
    sdpa,
    slice_,
    transpose,
)
from tests.extract.builder import leaf

SOURCES = {
    "row-major": torch.arange(24.0).view(2, 3, 4),
    "column-major": torch.arange(24.0).view(4, 3, 2).permute(2, 1, 0),
    "sliced": torch.arange(48.0).view(2, 3, 8)[:, :, 1:8:2],
    "expanded": torch.arange(8.0).view(2, 1, 4).expand(2, 3, 4),
}
MOVEMENTS = {
    "reshape": lambda x: reshape(x, (6, 4)),
    "reshape_last": lambda x: reshape(x, (2, 12)),
    "reshape_ones": lambda x: reshape(x, (2, 1, 3, 4, 1)),
    "permute": lambda x: permute(x, (1, 0, 2)),
    "transpose": transpose,
    "slice": lambda x: slice_(x, 1, 1, 3, 1),
    "slice_step": lambda x: slice_(x, 2, 1, 4, 2),
    "slice_nothing": lambda x: slice_(x, 2, 1, 1, 1),
    "expand": lambda x: expand(reshape(x, (2, 3, 4, 1)), (2, 3, 4, 5)),
    "pad": lambda x: pad(x, 1, 1, 0, 1),
}


def test_every_movement_is_tried() -> None:
    x = leaf("x", 2, 3, 4)
    tried = {make(x).op.name for make in MOVEMENTS.values()} | {"cat"}
    assert tried == {op.name for op in ops_of(Kind.MOVEMENT)}


def _chain(node: Node) -> list[Node]:
    return [*(_chain(node.inputs[0]) if node.inputs else []), node]


@pytest.mark.parametrize("movement", MOVEMENTS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_view_is_pytorchs(source: str, movement: str) -> None:
    x = SOURCES[source]
    buffer = Buffer(TensorType.of(x), x.stride(), x.storage_offset())
    _, *nodes = _chain(MOVEMENTS[movement](leaf("x", *x.shape)))
    seen: Buffer | None = buffer
    for node in nodes:
        attrs = dict(zip(node.op.attr_names, node.attrs))
        moved = call(node.op, [x], attrs)
        seen = view(node.op, node.attrs, node.tensor, seen)
        aliases = moved.numel() == 0 or moved.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert (seen is not None) == (aliases and node.op.name not in ("pad", "cat"))
        if seen is None:
            return
        x = moved
        if x.numel():
            assert seen.strides == normal_strides(x.shape, x.stride())
            assert seen.offset == x.storage_offset()


def test_written_values_keep_the_order_of_their_widest_operand() -> None:
    type = TensorType((2, 3, 4), torch.float32)
    swapped, repeated = Buffer(type, (12, 1, 3)), Buffer(type, (0, 0, 1))
    assert results(add, [type], [repeated, swapped])[0].strides == (12, 1, 3)
    assert results(mean, [TensorType((2, 3, 1), torch.float32)], [swapped])[0].strides == (3, 1, 1)
    wide = TensorType((2, 3, 8), torch.float32)
    assert results(cat, [wide], [swapped, swapped])[0].strides == (24, 1, 3)
    constant = results(full, [type], [])
    assert results(add, [type], [*constant, swapped])[0].strides == (12, 1, 3)


def test_attention_keeps_the_order_of_its_query_and_contractions_are_row_major() -> None:
    q = TensorType((2, 4, 6, 8), torch.bfloat16)
    heads_inside = Buffer(q, (192, 8, 32, 1))
    lse = TensorType((2, 4, 6), torch.float32)
    out, rows = results(sdpa, [q, lse], [heads_inside] * 3)
    assert out.strides == heads_inside.strides
    assert rows.is_contiguous
    weight = TensorType((8, 8), torch.bfloat16)
    assert results(contract_rows, [weight], [heads_inside] * 2)[0].is_contiguous


def test_a_reshape_that_merges_axes_keeps_the_order_of_the_nearest() -> None:
    def merged(shape: tuple[int, ...], strides: tuple[int, ...], to: tuple[int, ...]) -> tuple[int, ...]:
        node = reshape(leaf("x", *shape), to)
        (buffer,) = results(node.op, (node.tensor,), (Buffer(TensorType(shape, torch.float32), strides),))
        return buffer.strides

    upsampled = (2, 8, 3, 2, 3, 2), (72, 1, 24, 0, 8, 0)
    assert merged(*upsampled, (2, 8, 6, 6)) == (288, 1, 48, 8)
    heads = (2, 5, 3, 4), (60, 4, 20, 1)
    assert merged(*heads, (2, 5, 12)) == (60, 12, 1)
    assert merged((3, 4), (1, 3), (2, 6)) == (6, 1)
