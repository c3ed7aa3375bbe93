"""Which e-nodes survive: what nothing can compute, and what only leads back to its own class, is dropped."""

import pytest

from egcompile.errors import ExtractionError
from egcompile.extract.choices import choices, strong_components
from egcompile.language.egraph import EClass, EGraph, ENode
from egcompile.ops import add, matmul, neg, relu, transpose
from tests.extract.builder import egraph, forward, leaf


def test_an_output_that_nothing_computes_is_named() -> None:
    x = leaf("x", 4, 4)
    graph = egraph(forward(relu(x)))
    (root,) = graph.roots
    broken = EGraph(
        {root: EClass(root, x.type, [ENode(relu, (root + 1,), ())]), root + 1: EClass(root + 1, x.type)},
        graph.joint,
        graph.class_of,
    )
    with pytest.raises(ExtractionError, match="'out0'"):
        choices(broken)


def test_a_round_trip_is_dropped_where_it_is_the_only_way_back() -> None:
    """y = transpose(transpose(x)) is x; transpose(y), as a way to compute transpose(x), is no choice."""
    a, b = leaf("a", 4, 5), leaf("b", 5, 6)
    x = matmul(a, b)
    y = transpose(transpose(x))
    table = choices(egraph(forward(relu(x), relu(transpose(x))), [(x, y)]))
    assert table.live == 0
    assert {e.op.name for e in table.enodes} == {"input", "matmul", "transpose", "relu"}


def test_a_round_trip_between_two_ways_to_compute_stays() -> None:
    a, b = leaf("a", 4, 5), leaf("b", 5, 6)
    x, y = matmul(a, b), matmul(transpose(b), transpose(a))
    table = choices(egraph(forward(relu(x), relu(y)), [(transpose(x), y), (transpose(y), x)]))
    assert table.live == 2


def test_operands_come_before_their_readers() -> None:
    x, y = leaf("x", 4), leaf("y", 4)
    table = choices(egraph(forward(neg(add(relu(x), y)), add(relu(x), y))))
    assert all(k < c for n, c in enumerate(table.owner) for k in table.operands[n])


def test_strong_components() -> None:
    found = strong_components({0: [1], 1: [2], 2: [0, 3], 3: [4], 4: []})
    assert [sorted(c) for c in found] == [[4], [3], [0, 1, 2]]
