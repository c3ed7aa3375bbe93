"""What a rule is, and the two ways to declare one: `@rule` for equations, `vjp` for derivatives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from egcompile.ops.opdef import OpDef
from egcompile.ops.term import AttrTerm, Pattern, Term, Var

Exactness = Literal["exact", "reassociating", "approximate"]
Phase = Literal["recognition", "joint"]
When = Literal["recognition", "joint", "both"]

Condition = tuple[Any, Any]
"""Two attributes that must be equal."""

Equations = Mapping[Pattern, Pattern] | tuple[Mapping[Pattern, Pattern], Sequence[Condition]]
"""What a rule's function returns: left side -> right side, and the conditions if there are any."""

_KINDS = {"Tensor": "tensor", "Tuple": "tuple", "Int": "int", "Float": "float", "Str": "str"}
_KINDS |= {"Bool": "bool", "Ints": "ints", "DType": "dtype"}


@dataclass(frozen=True, eq=False)
class Rule:
    """When every left side is in the graph, each is equal to its right side.

    name        `family/what`, unique
    equations   (left, right) pairs over shared variables; a left side may be a bare `Var` only on the right
    where       pairs of attribute terms that must be equal
    exactness   exact: the same sums in the same order; reassociating: another order;
                approximate: other rounding, and only on request
    phase       recognition runs before the backward is derived, joint after. A rule that runs before has
                sides of one gradient, not only of one value
    examples    variable -> a type's or dtype's text, else the attribute: inputs on which the rule fires
    """

    name: str
    doc: str
    equations: tuple[tuple[Pattern, Pattern], ...]
    where: tuple[tuple[AttrTerm, AttrTerm], ...]
    exactness: Exactness
    phase: When
    variables: Mapping[str, Var | AttrTerm]
    examples: tuple[Mapping[str, Any], ...]

    def runs_in(self, phase: Phase) -> bool:
        return self.phase in (phase, "both")


@dataclass(frozen=True, eq=False)
class Vjp:
    """The cotangent of each operand of an op: one `backward` rule an operand that has one.

    operands    variables for the operands (one `Var` a variadic op), `attrs` for its attributes
    outputs     variables for the outputs, `cts` for the cotangents of those in `cts_of`
    derived     attributes that Python computes from (operand types, attributes, operand index)
    results     a pattern an operand; None where no cotangent flows
    """

    op: OpDef
    operands: tuple[Var, ...]
    attrs: tuple[AttrTerm, ...]
    outputs: tuple[Var, ...]
    cts: Mapping[int, Var]
    derived: Mapping[str, tuple[str, Callable[..., Any]]]
    derived_terms: Mapping[str, AttrTerm]
    results: tuple[Pattern | None, ...]


RULES: dict[str, Rule] = {}
VJPS: dict[tuple[str, tuple[int, ...]], Vjp] = {}
"""By op name and the outputs that have a cotangent."""


def rule(
    name: str,
    *examples: Mapping[str, Any],
    exactness: Exactness = "exact",
    phase: When = "joint",
    registry: dict[str, Rule] | None = None,
) -> Callable[[Callable[..., Equations]], Rule]:
    """Declares a rule by a function from its variables to its equations.

    Parameters are annotated `Tensor`, `Tuple`, `Int`, `Float`, `Str`, `Bool`, `Ints` or `DType`.
    The function returns `{left: right, ...}`, or that and a list of conditions: pairs of attributes that
    must be equal. Raises ValueError for a name that is taken or a variable that no left side binds.

        @rule("fusion/add_rms_norm", {"x": "f32[4,8]", "r": "f32[4,8]", "w": "f32[8]", "eps": 1e-6})
        def _(x: Tensor, r: Tensor, w: Tensor, eps: Float) -> Equations:
            "rms_norm(x + r, w)  ==>  add_rms_norm(x, r, w)[1];  x + r  ==>  its [0]"
            h = add(x, r)
            fused = add_rms_norm(x, r, w, eps)
            return {h: fused[0], rms_norm(h, w, eps)[0]: fused[1]}
    """

    def declare(function: Callable[..., Equations]) -> Rule:
        variables = _variables(function)
        result = function(**variables)
        equations, where = result if isinstance(result, tuple) else (result, ())
        pairs = tuple((AttrTerm.of(a), AttrTerm.of(b)) for a, b in where)
        declared = Rule(
            name,
            inspect.cleandoc(function.__doc__ or ""),
            tuple(equations.items()),
            pairs,
            exactness,
            phase,
            variables,
            examples,
        )
        table = RULES if registry is None else registry
        if name in table:
            raise ValueError(f"rule {name!r} is declared already")
        _check_bound(declared)
        table[name] = declared
        return declared

    return declare


def vjp(
    op: OpDef,
    function: Callable[..., Any],
    *,
    cts: Sequence[int] = (0,),
    derived: Mapping[str, tuple[str, Callable[..., Any]]] | None = None,
) -> Vjp:
    """Declares an op's derivative, as the cotangent of each operand.

    `function` takes the operands and attributes by position, then by name what it asks for among
    `y` (the output; `ys`, a tuple, for several), `ct` (its cotangent; `cts`, a tuple in the order of
    `cts`), and the names in `derived`: attribute kind and a Python function of (operand types, attributes
    by name, operand index), for what egglog cannot compute. It returns one pattern, or a tuple with one an
    operand, None where nothing flows. For a variadic op the pattern is that of operand `index`.

        vjp(mul, lambda a, b, ct: (mul(ct, b), mul(ct, a)))
    """
    variadic = op.variadic
    operands = tuple(Var(name.lstrip("*")) for name in op.operands)
    attrs = tuple(AttrTerm("var", (name,), kind) for name, kind in op.attrs.items())
    outputs = tuple(Var(f"y{i}") for i in range(len(op.outputs)))
    ct_vars = {i: Var(f"ct{i}") for i in cts}
    derived = dict(derived or {})
    terms = {name: AttrTerm("var", (name,), kind) for name, (kind, _) in derived.items()}
    offered: dict[str, Any] = {
        "y": outputs[0],
        "ys": outputs,
        "ct": next(iter(ct_vars.values())),
        "cts": tuple(ct_vars.values()),
        **terms,
    }
    positional = (*operands, *attrs)
    parameters = list(inspect.signature(function).parameters)[len(positional) :]
    result = function(*positional, **{name: offered[name] for name in parameters})
    results = result if isinstance(result, tuple) else (result,)
    if len(results) != len(operands):
        raise ValueError(f"the vjp of {op.name} gives {len(results)} cotangents for {len(operands)} operands")
    if variadic and len(operands) != 1:
        raise ValueError(f"{op.name}: a variadic op has no other operands")
    declared = Vjp(op, operands, attrs, outputs, ct_vars, derived, terms, results)
    key = (op.name, tuple(cts))
    if key in VJPS:
        raise ValueError(f"the vjp of {op.name} for outputs {tuple(cts)} is declared already")
    VJPS[key] = declared
    return declared


def _variables(function: Callable[..., Any]) -> dict[str, Var | AttrTerm]:
    variables: dict[str, Var | AttrTerm] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = parameter.annotation
        kind = _KINDS.get(annotation if isinstance(annotation, str) else annotation.__name__)
        if kind is None:
            raise ValueError(f"annotate {name!r} of the rule with one of {', '.join(_KINDS)}")
        variables[name] = Var(name, kind) if kind in ("tensor", "tuple") else AttrTerm("var", (name,), kind)
    return variables


def _check_bound(declared: Rule) -> None:
    bound: set[Any] = set()

    def visit(pattern: Any) -> None:
        match pattern:
            case Var():
                bound.add(pattern.name)
            case Term():
                for part in (*pattern.inputs, *pattern.attrs):
                    visit(part)
            case AttrTerm(head="var"):
                bound.add(pattern.args[0])
            case AttrTerm(head="vec"):
                for part in pattern.args:
                    visit(part)

    for left, _ in declared.equations:
        visit(left)
    for pair in declared.where:
        for side in pair:
            visit(side)
    if missing := declared.variables.keys() - bound:
        raise ValueError(f"rule {declared.name!r}: no left side binds {', '.join(sorted(missing))}")


class Tensor(Var):
    """Annotates a rule's variable that stands for a tensor."""


class Tuple(Var):
    """Annotates a variable that stands for a node of several outputs."""


class Int(AttrTerm):
    """Annotates an integer attribute."""


class Float(AttrTerm):
    """Annotates a floating attribute."""


class Str(AttrTerm):
    """Annotates a string attribute."""


class Bool(AttrTerm):
    """Annotates a boolean attribute."""


class Ints(AttrTerm):
    """Annotates a shape or another tuple of integers."""


class DType(AttrTerm):
    """Annotates a dtype."""
