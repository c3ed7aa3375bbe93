"""Kernel text: precedence, what is written where it is read, what is dropped, and names."""

from __future__ import annotations

import ast
import re

import pytest
import torch

from egcompile.codegen.scalar import literal
from egcompile.codegen.text import Block, Line, Loop, Names, Value, identifier, named, print_block
from egcompile.ops import REGISTRY

a, b, c = named("a"), named("b"), named("c")


def printed(*items: Value | Line | Loop | str) -> list[str]:
    return print_block(Block(list(items)), Names({"a", "b", "c"}), indent="")


def expression(template: str, *operands: Value) -> Value:
    return Value(template, operands)


@pytest.mark.parametrize(
    ("template", "first", "second", "text"),
    [
        ("{0} * {1}", "{0} + {1}", "{0} - {1}", "(a + b) * (a - b)"),
        ("{0} + {1}", "{0} * {1}", "{0} / {1}", "a * b + a / b"),
        ("{0} - {1}", "{0} - {1}", "{0} - {1}", "a - b - (a - b)"),
        ("{0} & {1}", "{0} < {1}", "{0} == {1}", "(a < b) & (a == b)"),
        ("{0} == {1}", "{0} < {1}", "{0} >= {1}", "(a < b) == (a >= b)"),
        ("f({0}, {1})", "{0} + {1}", "-{0} * {1}", "f(a + b, -a * b)"),
        ("{0} / {1}", "f({0})", "{0} * {1}", "f(a) / (a * b)"),
        ("{0}.to(t) + {1}", "{0} + {1}", "{0} // {1}", "(a + b).to(t) + a // b"),
    ],
)
def test_precedence(template: str, first: str, second: str, text: str) -> None:
    x, y = expression(first, a, b), expression(second, a, b)
    result = expression(template, x, y)
    assert printed(x, y, result, Line("store({0})", (result,))) == [f"store({text})"]
    values = {"a": 7.5, "b": 2.25, "f": lambda *v: 3.0 * v[0], "t": None}
    if ".to" not in text and "//" not in text and "&" not in text:
        whole = template.format(f"({first.format('a', 'b')})", f"({second.format('a', 'b')})")
        assert eval(text, dict(values)) == eval(whole, dict(values))


TEMPLATES = sorted({op.scalar for op in REGISTRY.values() if op.scalar})


@pytest.mark.parametrize("outer", TEMPLATES)
def test_operands_stay_operands(outer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op of the registry in each place of each other: as if all were in parentheses."""
    monkeypatch.setattr("egcompile.codegen.text.INLINE_LENGTH", 1000)
    places = len(set(re.findall(r"{(\d)}", outer)))
    if len(re.findall(r"{\d}", outer)) != places:
        pytest.skip("an operand that is read twice has a name")
    for inner in TEMPLATES:
        if outer == "-{0}" and not {"%", "//"} & set(inner):
            continue  # -(a * b) is (-a) * b
        for place in range(places):
            operand = expression(inner, a, b, c)
            operands = [operand if i == place else (a, b, c)[i] for i in range(places)]
            (line,) = printed(operand, Line(f"y = {outer}", tuple(operands)))
            texts = [x.template if x is not operand else f"({inner.format('a', 'b', 'c')})" for x in operands]
            assert ast.dump(ast.parse(line)) == ast.dump(ast.parse("y = " + outer.format(*texts))), line


def test_a_value_read_twice_has_a_name() -> None:
    x = Value("{0} + {1}", (a, b), hint="total")
    y = expression("{0} * {0}", x)
    assert printed(x, y, Line("store({0})", (y,))) == ["total = a + b", "store(total * total)"]


def test_what_nobody_reads_is_dropped() -> None:
    dead = Value("load({0})", (a,), inline=False)
    assert printed(dead, expression("{0} + {1}", dead, b), Line("store({0})", (c,))) == ["store(c)"]


def test_a_value_stays_in_its_block() -> None:
    x = Value("{0} + {1}", (a, b), hint="total")
    loop = Loop("for i in range(3):", (), Block([Line("store({0})", (x,))]))
    assert printed(x, loop) == ["total = a + b", "for i in range(3):", "    store(total)"]


def test_names_are_unique_and_free_again_after_a_loop() -> None:
    def loop() -> Loop:
        x = Value("load({0})", (a,), hint="x", inline=False)
        y = Value("load({0})", (b,), hint="x", inline=False)
        return Loop("for i in range(3):", (), Block([x, y, Line("store({0}, {1})", (x, y))]))

    lines = printed(loop(), loop())
    assert lines[1:4] == ["    x = load(a)", "    x_1 = load(b)", "    store(x, x_1)"]
    assert lines[5:8] == lines[1:4]


def test_identifiers() -> None:
    assert identifier("layers.0.weight") == "layers_0_weight"
    assert identifier("0") == "v0"
    assert identifier("lambda") == "lambda_"
    assert identifier("sum") == "sum_"
    assert identifier("") == "value"


def test_literals_keep_their_type() -> None:
    assert literal(0.1, torch.float32).template == "0.1"
    assert literal(float("inf"), torch.float32).template == 'float("inf")'
    assert literal(-100.0, torch.int64).template == "-100"
