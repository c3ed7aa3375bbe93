"""Rules as egglog text: every rule and derivative is a valid command; each feature of a pattern matches."""

from __future__ import annotations

import pytest
import torch

from egcompile import ops
from egcompile.ir import Node, topological
from egcompile.language import Session, rule_text, vjp_rules
from egcompile.language.render import vjp_declaration
from egcompile.ops.opdef import REGISTRY
from egcompile.ops.term import AttrFunction
from egcompile.rules import RULES, VJPS
from egcompile.rules.rule import DType, Equations, Float, Int, Ints, Rule, Tensor, Vjp, rule


def _input(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> Node:
    return ops.input(name=name, shape=shape, dtype=dtype)


def _equal(declared: Rule, left: Node, right: Node) -> bool:
    """Whether `declared`, run alone to rest, proves it."""
    session = Session(REGISTRY.values(), [declared])
    session.load(topological([left, right]))
    while session.run():
        pass
    contents = session.read()
    a, b = (contents.class_of[session.encoder.number[n]] for n in (left, right))
    return a == b


def test_all_rules_together_are_a_program() -> None:
    Session(REGISTRY.values(), list(RULES.values()))


@pytest.mark.parametrize("row", VJPS.values(), ids=[f"{name}{cts}" for name, cts in VJPS])
def test_every_derivative_is_a_rule_an_operand(row: Vjp) -> None:
    session = Session(REGISTRY.values())
    texts = vjp_rules(row, "rules")
    session.execute([vjp_declaration(row), *texts])
    assert len(texts) == sum(result is not None for result in row.results)


def test_one_rule_for_several_equations_shares_what_it_builds() -> None:
    text = rule_text(RULES["fusion/add_rms_norm"], "joint")
    assert text.count("(Add_rms_norm ") == 1
    assert text.count("(union ") == len(RULES["fusion/add_rms_norm"].equations)
    assert ':ruleset joint :name "fusion/add_rms_norm"' in text


def test_a_literal_has_the_kind_that_the_op_declares() -> None:
    @rule("test/two", {"x": "f64[4]"}, registry={})
    def two(x: Tensor) -> Equations:
        return {ops.mul(x, ops.full(2, ops.shape(x), ops.dtype(x))): ops.add(x, x)}

    assert "(Full 2.0 " in rule_text(two, "rules")
    x = _input("x", 4)
    assert _equal(two, ops.mul(x, ops.constant(2.0, x)), ops.add(x, x))
    assert not _equal(two, ops.mul(x, ops.constant(3.0, x)), ops.add(x, x))


def test_shapes_are_taken_apart_and_put_together() -> None:
    @rule("test/swap", {"x": "f64[3,4]"}, registry={})
    def swap(x: Tensor, perm: Ints) -> Equations:
        rank_two = (ops.shape(x), (ops.shape(x)[0], ops.shape(x)[1]))
        swapped = ops.reshape(ops.permute(x, perm), (ops.shape(x)[1], ops.shape(x)[0]))
        return {ops.permute(x, perm): swapped}, [rank_two, (perm, (1, 0))]

    x, deep = _input("x", 3, 4), _input("deep", 3, 4, 5)
    flipped = ops.permute(x, perm=(1, 0))
    assert _equal(swap, flipped, ops.reshape(flipped, shape=(4, 3)))
    same = ops.permute(x, perm=(0, 1))
    assert not _equal(swap, same, ops.reshape(same, shape=(4, 3)))
    batch = ops.permute(deep, perm=(1, 0, 2))
    assert not _equal(swap, batch, ops.reshape(batch, shape=(4, 3, 5)))


def test_a_vector_of_variables_binds_them() -> None:
    @rule("test/slice_reshape", {"x": "f64[12]", "a": 3, "b": 4}, registry={})
    def flatten(x: Tensor, a: Int, b: Int) -> Equations:
        return {ops.reshape(ops.reshape(x, (a, b)), (a * b,)): ops.reshape(x, (a * b,))}

    x = _input("x", 2, 6)
    assert _equal(
        flatten, ops.reshape(ops.reshape(x, shape=(3, 4)), shape=(12,)), ops.reshape(x, shape=(12,))
    )
    three = ops.reshape(ops.reshape(x, shape=(3, 2, 2)), shape=(12,))
    assert not _equal(flatten, three, ops.reshape(x, shape=(12,)))


def test_a_variadic_op_matches_by_its_count() -> None:
    @rule("test/cat_of_two", {"x": "f64[3]", "y": "f64[4]", "z": "f64[3]"}, registry={})
    def two(x: Tensor, y: Tensor, axis: Int) -> Equations:
        return {ops.neg(ops.cat(x, y, axis=axis)): ops.cat(ops.neg(x), ops.neg(y), axis=axis)}

    x, y, z = (_input(name, 3) for name in "xyz")
    assert _equal(two, ops.neg(ops.cat(x, y, axis=0)), ops.cat(ops.neg(x), ops.neg(y), axis=0))
    three = ops.cat(ops.neg(x), ops.neg(y), ops.neg(z), axis=0)
    assert not _equal(two, ops.neg(ops.cat(x, y, z, axis=0)), three)


def test_an_attribute_function_without_a_value_is_no_match() -> None:
    half = AttrFunction("test_half", ("float",), "float", lambda a: a / 2 if a > 0 else None)

    @rule("test/halve", {"x": "f64[4]", "a": 3.0, "d": torch.float64}, registry={})
    def halve(x: Tensor, a: Float, d: DType) -> Equations:
        twice = ops.add(x, x)
        shape = ops.shape(x)
        return {ops.mul(x, ops.full(a, shape, d)): ops.mul(twice, ops.full(half(a), shape, d))}

    x = _input("x", 4)
    for value, equal in ((3.0, True), (-3.0, False)):
        left = ops.mul(x, ops.constant(value, x))
        assert _equal(halve, left, ops.mul(ops.add(x, x), ops.constant(value / 2, x))) is equal


def test_a_rule_that_asks_for_the_type_of_what_it_builds_is_refused() -> None:
    @rule("test/built", {"x": "f64[4]"}, registry={})
    def built(x: Tensor) -> Equations:
        y = ops.exp(x)
        return {ops.sin(x): ops.mul(y, ops.full(1.0, ops.shape(y), ops.dtype(x)))}

    with pytest.raises(ValueError, match="no left side holds"):
        rule_text(built, "rules")
