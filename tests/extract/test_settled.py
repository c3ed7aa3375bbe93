"""Which values comparisons must find again, and what may read them without memory between."""

from dataclasses import replace

import torch

import egcompile
from egcompile.extract.choices import choices
from egcompile.extract.fusible import Site, fusible
from egcompile.extract.settled import settled
from egcompile.ir.node import Node
from egcompile.ops import (
    abs,
    amax,
    cast,
    eq,
    exp,
    expand,
    full,
    ge,
    layer_norm,
    max_pool2d,
    maximum,
    minimum,
    mul,
    ne,
    neg,
    permute,
    relu,
    reshape,
    sub,
    sum,
    where,
)
from tests.extract.builder import egraph, forward, leaf

X, Y = leaf("x", 4, 8), leaf("y", 4, 8)
Z = mul(X, Y)
TOP = expand(amax(Z, (1,)), (4, 8))
ZERO = full(0.0, (4, 8), torch.float32)


def found(*outputs: Node) -> set[Node]:
    made = egraph(forward(*outputs))
    table = choices(made)
    number = {c: i for i, c in enumerate(table.ids)}
    classes = settled(table)
    return {node for node, c in made.class_of.items() if number.get(c) in classes}


def test_a_value_is_settled_where_it_is_compared_with_what_was_chosen_of_it() -> None:
    assert found(eq(Z, TOP)) == {Z}
    assert found(ge(permute(Z, (1, 0)), permute(TOP, (1, 0)))) == {Z}
    assert found(eq(abs(Z), expand(amax(abs(Z), (1,)), (4, 8)))) == {Z}
    assert found(ne(Z, maximum(Z, Y))) == {Z}
    assert found(eq(neg(Z), expand(amax(neg(Z), (1,)), (4, 8)))) == {Z}
    assert found(eq(Z, expand(amax(where(ge(Y, ZERO), Z, ZERO), (1,)), (4, 8)))) == {Z}


def test_a_difference_is_compared_as_its_terms_are() -> None:
    for below in (sub(Z, TOP), neg(sub(TOP, Z)), permute(sub(Z, TOP), (1, 0)), abs(sub(Z, TOP))):
        assert found(ge(below, full(0.0, below.shape, torch.float32))) == {Z}
        assert found(relu(below)) == {Z}
    assert found(exp(sub(Z, TOP)), ge(Z, ZERO)) == set()
    assert found(relu(sub(minimum(Z, Y), maximum(Z, X)))) == set()  # boxes that overlap


def test_a_call_of_aten_may_have_chosen() -> None:
    image = reshape(Z, (1, 1, 4, 8))
    pooled = max_pool2d(image, (3, 3), (1, 1), (1, 1), (1, 1), False)
    pooled = pooled[0] if pooled.op.outputs != ("y",) else pooled
    assert found(eq(image, pooled)) == {Z}


def test_an_output_of_a_named_kernel_is_settled_by_what_makes_it() -> None:
    normed = layer_norm(X, leaf("w", 8), leaf("b", 8), eps=1e-5)
    assert normed[0] in found(eq(normed[0], expand(amax(normed[0], (1,)), (4, 8))))


def test_what_is_rounded_is_another_value() -> None:
    narrow = cast(Z, torch.bfloat16)
    wide = cast(narrow, torch.float32)
    assert found(eq(wide, expand(amax(wide, (1,)), (4, 8)))) == {narrow}
    assert found(eq(Z, expand(amax(wide, (1,)), (4, 8)))) == set()


def test_nothing_is_settled_without_a_choice_of_it() -> None:
    assert found(eq(Z, expand(sum(Z, (1,)), (4, 8)))) == set()
    assert found(ge(Z, ZERO), TOP) == set()
    assert found(ne(Z, Z), TOP) == set()
    assert found(maximum(minimum(X, Z), neg(Z)), ge(minimum(X, Z), neg(Z))) == set()  # clipped at both
    assert found(ge(Z, mul(TOP, Y))) == set()
    assert found(eq(X, expand(amax(X, (1,)), (4, 8)))) == set()  # an input is in memory
    assert found(maximum(Z, permute(reshape(Z, (8, 4)), (1, 0))), relu(Z)) == set()


def test_settled_values_are_read_from_memory_by_what_hands_them_on() -> None:
    def why(reader: Node, position: int) -> str | None:
        site = Site.of(reader)
        return fusible(replace(Site.of(Z), settled=True), site, position, site)

    for reader in (amax(Z, (1,)), abs(Z), eq(Z, TOP), sub(Z, TOP), permute(Z, (1, 0)), maximum(Y, Z)):
        assert "compared, to the bit" in str(why(reader, reader.inputs.index(Z)))
    for reader in (mul(Z, Y), sum(Z, (1,)), cast(Z, torch.float16)):
        assert why(reader, 0) is None


def test_no_budget_has_a_settled_value_made_again() -> None:
    def peaks(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        z = torch.nn.functional.layer_norm(x, (256,), w)
        return torch.where(z == z.amax(1, keepdim=True), z, 0.0)

    inputs = [torch.randn(64, 256, requires_grad=True), torch.randn(256, requires_grad=True)]
    plan = egcompile.optimize(egcompile.trace(peaks, inputs), target="cuda:90", memory_budget=0.0)
    again = plan.explain().partition("computed again")[2]
    assert "layer_norm: " in again and "[64,256]" not in again, again


def test_a_plan_says_why() -> None:
    def peaks(x: torch.Tensor) -> torch.Tensor:
        z = x * x.sigmoid()
        return torch.where(z == z.amax(1, keepdim=True), z, 0.0)

    x = torch.randn(64, 256, requires_grad=True)
    plan = egcompile.optimize(egcompile.trace(peaks, [x]), target="cuda:90")
    assert "with some that were chosen of them" in plan.explain()
