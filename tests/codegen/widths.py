"""Widths of the integers in a kernel's text: a small abstract interpreter, since no test has 2^33 elements.

An integer has a range and a width in bits, as Triton types it: 32 for program ids, `arange` and loop
variables, 64 after `.to(tl.int64)` and next to anything of 64. Values that are loaded are none. An expression
whose range does not fit its width overflows, masked or not: a mask is computed from such numbers too.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Int:
    low: int
    high: int
    bits: int

    @staticmethod
    def literal(value: int) -> Int:
        return Int(value, value, 32 if -(2**31) <= value < 2**31 else 64)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def overflows(text: str, launcher: str) -> tuple[list[str], int]:
    """The integer expressions of the launched functions that do not fit, and the widest offset met."""
    functions = {f.name: f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef)}
    found: list[str] = []
    widest = 0
    for node in ast.walk(functions[launcher]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            assert isinstance(node.func.value, ast.Name)
            grid = [
                int(ast.literal_eval(g)) for g in ast.walk(node.func.slice) if isinstance(g, ast.Constant)
            ]
            constants = {
                k.arg: Int.literal(k.value.value)
                for k in node.keywords
                if k.arg and isinstance(k.value, ast.Constant) and isinstance(k.value.value, int)
            }
            run = _Run(functions, grid)
            run.call(functions[node.func.value.id], constants)
            found += run.found
            widest = max(widest, run.widest)
    return found, widest


class _Run:
    def __init__(self, functions: Mapping[str, ast.FunctionDef], grid: list[int]) -> None:
        self.functions, self.grid = functions, grid
        self.found: list[str] = []
        self.stops: list[int] = []
        self.widest = 0

    def call(self, function: ast.FunctionDef, known: Mapping[str, Int | None]) -> object:
        names: dict[str, Int | None] = dict(known)
        return self.block(function.body, names)

    def block(self, body: list[ast.stmt], names: dict[str, Int | None]) -> object:
        for item in body:
            match item:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    names[name] = self.value(value, names)
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
                    values = self.several(value, names)
                    for target, each in zip(targets, values or [None] * len(targets)):
                        assert isinstance(target, ast.Name)
                        names[target.id] = each
                case ast.AugAssign(target=ast.Name(id=name), value=value):
                    step = self.value(value, names)
                    before = names.get(name)
                    if step is not None and before is not None:  # counts along with the loop
                        names[name] = Int(before.low, self.stops[-1] - 1, before.bits)
                case ast.For(target=ast.Name(id=name), iter=ast.Call(args=args)):
                    bounds = [self.value(a, names) for a in args]
                    stop = bounds[min(1, len(bounds) - 1)]
                    assert stop is not None
                    names[name] = Int(0, stop.high - 1, 32)
                    self.stops.append(stop.high)
                    self.block(item.body, names)
                    self.stops.pop()
                case ast.If():
                    self.block(item.body, names)
                case ast.Return(value=ast.Tuple(elts=parts)):
                    return [self.value(p, names) for p in parts]
                case ast.Expr(value=value):
                    self.value(value, names)
        return None

    def several(self, value: ast.expr, names: dict[str, Int | None]) -> list[Int | None] | None:
        if (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Name)
            and value.func.id in self.functions
        ):
            function = self.functions[value.func.id]
            passed = [self.value(a, names) for a in value.args]
            known = dict(zip([a.arg for a in function.args.args], passed))
            result = self.call(function, known)
            return result if isinstance(result, list) else None
        self.value(value, names)
        return None

    def value(self, node: ast.expr, names: dict[str, Int | None]) -> Int | None:
        match node:
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                return Int.literal(number)
            case ast.Name(id=name):
                return Int(0, 0, 64) if name.endswith("_ptr") else names.get(name)
            case ast.Subscript(value=inner):
                return self.value(inner, names)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self.value(left, names), self.value(right, names)
                if a is None or b is None:
                    return None
                result = self.combine(node, a, op, b)
                if ast.unparse(node).split(" ")[0].endswith("_ptr"):
                    self.widest = max(self.widest, result.high)
                return result
            case ast.Call(func=ast.Attribute(value=inner, attr="to"), args=[kind]):
                x = self.value(inner, names)
                return Int(x.low, x.high, 64) if x is not None and ast.unparse(kind) == "tl.int64" else None
            case ast.Call(func=func, args=args):
                return self.builtin(ast.unparse(func), node, [self.value(a, names) for a in args], names)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, names)
        return None

    def builtin(
        self, name: str, node: ast.Call, args: list[Int | None], names: dict[str, Int | None]
    ) -> Int | None:
        for keyword in node.keywords:
            self.value(keyword.value, names)
        if name == "tl.program_id" and args[0] is not None:
            return Int(0, self.grid[args[0].low] - 1, 32)
        if name == "tl.arange" and args[1] is not None:
            return Int(0, args[1].high - 1, 32)
        if name == "min" and args[0] is not None and args[1] is not None:
            return Int(min(args[0].low, args[1].low), min(args[0].high, args[1].high), args[0].bits)
        if name in self.functions:
            function = self.functions[name]
            known = dict(zip([a.arg for a in function.args.args], args))
            known |= {k.arg: self.value(k.value, names) for k in node.keywords if k.arg}
            self.call(function, known)
        return None

    def combine(self, node: ast.expr, a: Int, op: ast.operator, b: Int) -> Int:
        bits = max(a.bits, b.bits)
        if isinstance(op, ast.Mod):
            return Int(0, min(a.high, b.high - 1) if a.low >= 0 else b.high - 1, bits)
        corners = [_OPERATORS[type(op)](x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
        result = Int(min(corners), max(corners), bits)
        if not -(2 ** (bits - 1)) <= result.low <= result.high < 2 ** (bits - 1):
            self.found.append(f"{ast.unparse(node)}: up to {result.high} in {bits} bits")
        return result
