"""Rules as egglog text: one `(rule ...)` each, whatever the number of its equations.

A rule's variables get a `?`, and its terms become `%0`, `%1`, ...; computed attributes are all bound in the
body, so that a rule whose attribute has no value does not match, instead of failing half done.

    (rule ((= %0 (Add ?x ?r)) (= %1 (Rms_norm %0 ?w ?eps ?first)) (= %2 (Out %1 0)))
          ((let %3 (Add_rms_norm ?x ?r ?w ?eps ?first)) (let %4 (Out %3 0)) (union %0 %4)
           (let %5 (Out %3 1)) (union %2 %5))
          :ruleset joint :name "fusion/add_rms_norm")
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from egcompile.language.encode import SORTS, application, constructor, literal
from egcompile.ops.opdef import OpDef
from egcompile.ops.term import AttrFunction, AttrTerm, Pattern, Term, Var
from egcompile.rules.rule import Rule, Vjp


def rule_text(rule: Rule, ruleset: str) -> str:
    """A rule as one egglog command; raises ValueError for a right side that nothing binds."""
    writer = _Writer(rule.name)
    for left, _ in rule.equations:
        writer.match(left)
    writer.settle()
    for a, b in rule.where:
        writer.require(a, b)
    for left, right in rule.equations:
        writer.union(left, right)
    return writer.text(ruleset)


def vjp_constructor(vjp: Vjp) -> str:
    """The name of the terms that stand for an op's cotangents: `Rms_norm_vjp_0` has that of output 0."""
    return "_".join((constructor(vjp.op), "vjp", *map(str, vjp.cts)))


def vjp_declaration(vjp: Vjp) -> str:
    """`(Op_vjp_0 operand-index operands attributes outputs cotangents derived)`."""
    operands = ["TVec"] if vjp.op.variadic else ["Tensor"] * len(vjp.operands)
    attrs = [SORTS[kind] for kind in vjp.op.attrs.values()]
    values = ["Tensor"] * (len(vjp.outputs) + len(vjp.cts))
    derived = [SORTS[kind] for kind, _ in vjp.derived.values()]
    sorts = " ".join(("i64", *operands, *attrs, *values, *derived))
    return f"(constructor {vjp_constructor(vjp)} ({sorts}) Tensor)"


def vjp_rules(vjp: Vjp, ruleset: str) -> list[str]:
    """One rule an operand that has a cotangent: the term is equal to what the row says."""
    texts = []
    for index, result in enumerate(vjp.results):
        if result is None:
            continue
        which = "" if tuple(vjp.cts) == (0,) else f"({', '.join(map(str, vjp.cts))})"
        writer = _Writer(f"backward/{vjp.op.name}{which}.{vjp.op.operands[index].lstrip('*')}")
        tensors = (*vjp.outputs, *vjp.cts.values())
        names = [v.name for v in vjp.operands] + [a.args[0] for a in vjp.attrs]
        names += [v.name for v in tensors] + [a.args[0] for a in vjp.derived_terms.values()]
        position = "?index" if vjp.op.variadic else str(index)
        writer.bound.update(names)
        term = f"({' '.join((vjp_constructor(vjp), position, *map(_variable, names)))})"
        writer.actions.append(f"(union {writer.atom(term)} {writer.build(result)})")
        texts.append(writer.text(ruleset))
    return texts


def table_declaration(function: AttrFunction) -> str:
    """An `AttrFunction` as an egglog function, whose rows are facts."""
    sorts = " ".join(SORTS[kind] for kind in function.params)
    return f"(function {table_name(function)} ({sorts}) {SORTS[function.result]} :no-merge)"


def table_name(function: AttrFunction) -> str:
    return f"table.{function.name}"


def called(rules: Iterable[Rule | Vjp]) -> list[AttrFunction]:
    """The attribute functions that rules call, each once."""
    found: dict[AttrFunction, None] = {}

    def visit(part: object) -> None:
        match part:
            case Term():
                for inner in (*part.inputs, *part.attrs):
                    visit(inner)
            case AttrTerm():
                for inner in part.args:
                    visit(inner)
            case AttrFunction():
                found[part] = None

    for rule in rules:
        sides = rule.results if isinstance(rule, Vjp) else (*_flat(rule.equations), *_flat(rule.where))
        for side in sides:
            visit(side)
    return list(found)


def left_ops(rule: Rule) -> set[OpDef]:
    """The ops that a rule looks for."""
    return _ops(left for left, _ in rule.equations)


def right_ops(rule: Rule) -> set[OpDef]:
    """The ops that a rule builds."""
    return _ops(right for _, right in rule.equations)


def _flat(pairs: Sequence[tuple[object, object]]) -> list[object]:
    return [side for pair in pairs for side in pair]


def vjp_ops(vjp: Vjp) -> set[OpDef]:
    """The ops that a derivative is written in."""
    return _ops(result for result in vjp.results if result is not None)


def _ops(patterns: Iterable[Pattern]) -> set[OpDef]:
    ops: set[OpDef] = set()
    stack = list(patterns)
    while stack:
        pattern = stack.pop()
        if isinstance(pattern, Term):
            ops.add(pattern.op)
            stack.extend(pattern.inputs)
    return ops


class _Writer:
    """The body and the actions of one rule, as they are written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.atoms: list[str] = []
        self.actions: list[str] = []
        self.bound: set[str] = set()
        self._matched: dict[Term, str] = {}
        self._deferred: dict[tuple[str, str], tuple[str, AttrTerm]] = {}
        self._named: dict[str, str] = {}  # an expression of the body -> the variable that stands for it
        self._built: dict[str, str] = {}  # the same for the actions
        self._count = 0

    def text(self, ruleset: str) -> str:
        body, actions = " ".join(self.atoms), " ".join(self.actions)
        return f'(rule ({body}) ({actions}) :ruleset {ruleset} :name "{self.name}")'

    # ---- the left side ----
    def match(self, pattern: Pattern) -> str:
        """The variable for a pattern of the left side, whose atoms are added to the body."""
        if isinstance(pattern, Var):
            self.bound.add(pattern.name)
            return _variable(pattern.name)
        if pattern not in self._matched:
            operands = [self.match(i) for i in pattern.inputs]
            if pattern.op.variadic:
                operands = [self._match_vector(operands)]
            attrs = [self._match_attr(a, k) for a, k in zip(pattern.attrs, _kinds(pattern.op), strict=True)]
            self._matched[pattern] = self.atom(f"({' '.join((constructor(pattern.op), *operands, *attrs))})")
        return self._matched[pattern]

    def settle(self) -> None:
        """Adds the conditions on computed attributes, now that the left sides have bound their variables."""
        for (_, kind), (variable, term) in self._deferred.items():
            if term.head == "vec":
                self.atoms.append(f"(= {len(term.args)} (vec-length {variable}))")
                for i, part in enumerate(term.args):
                    if part.head == "var":
                        self.bound.add(part.args[0])
                    self.atoms.append(f"(= {self.attribute(part, 'int')} (vec-get {variable} {i}))")
            else:
                self.atoms.append(f"(= {variable} {self.attribute(term, kind)})")

    def require(self, a: AttrTerm, b: AttrTerm) -> None:
        """A `where` pair. It may bind a variable that stands alone on one of its sides."""
        kind = next((t.kind for t in (a, b) if t.head != "lit"), a.kind)
        for side in (a, b):
            if side.head == "var":
                self.bound.add(side.args[0])
        self.atoms.append(f"(= {self.attribute(a, kind)} {self.attribute(b, kind)})")

    def _match_attr(self, term: AttrTerm, kind: str) -> str:
        if term.head == "var":
            self.bound.add(term.args[0])
            return _variable(term.args[0])
        if term.head == "lit" and kind != "ints":
            return literal(term.args[0], kind)
        key = repr(term), kind
        if key not in self._deferred:
            self._deferred[key] = self._fresh(), term
        return self._deferred[key][0]

    def _match_vector(self, operands: Sequence[str]) -> str:
        vector = self._fresh()
        self.atoms.append(f"(= {len(operands)} (vec-length {vector}))")
        self.atoms += [f"(= {operand} (vec-get {vector} {i}))" for i, operand in enumerate(operands)]
        return vector

    # ---- attributes ----
    def attribute(self, term: AttrTerm, kind: str) -> str:
        """The text of an attribute of that kind; what it looks up is bound in the body."""
        match term.head:
            case "var":
                if term.args[0] not in self.bound:
                    raise ValueError(f"rule {self.name!r}: no left side binds {term.args[0]!r}")
                return _variable(term.args[0])
            case "lit":
                return literal(term.args[0], kind if kind != "any" else term.kind)
            case "shape" | "dtype":
                return self.atom(f"({term.head} {self._left(term.args[0])})")
            case "call":
                function, *args = term.args
                texts = [self.attribute(a, k) for a, k in zip(args, function.params, strict=True)]
                return self.atom(f"({table_name(function)} {' '.join(texts)})")
            case "get":
                vector, index = term.args
                return f"(vec-get {self.attribute(vector, 'ints')} {self.attribute(index, 'int')})"
            case "vec":
                return f"(vec-of {' '.join(self.attribute(a, 'int') for a in term.args)})"
        return f"({term.head} {' '.join(self.attribute(a, kind) for a in term.args)})"

    def _left(self, pattern: Pattern) -> str:
        """The variable of a pattern that the left sides have matched."""
        if isinstance(pattern, Var):
            return _variable(pattern.name)
        before = len(self.atoms)
        variable = self.match(pattern)
        if len(self.atoms) != before:
            raise ValueError(f"rule {self.name!r} asks for the type of {pattern!r}, which no left side holds")
        return variable

    # ---- the right side ----
    def union(self, left: Pattern, right: Pattern) -> None:
        self.actions.append(f"(union {self.match(left)} {self.build(right)})")

    def build(self, pattern: Pattern) -> str:
        """The variable for a pattern of the right side, whose terms the actions build."""
        if isinstance(pattern, Var):
            if pattern.name not in self.bound:
                raise ValueError(f"rule {self.name!r}: no left side binds {pattern.name!r}")
            return _variable(pattern.name)
        operands = [self.build(i) for i in pattern.inputs]
        attrs = [self._build_attr(a, kind) for a, kind in zip(pattern.attrs, _kinds(pattern.op), strict=True)]
        expression = application(pattern.op, operands, attrs)
        if expression in self._named:
            return self._named[expression]
        if expression not in self._built:
            self._built[expression] = self._fresh()
            self.actions.append(f"(let {self._built[expression]} {expression})")
        return self._built[expression]

    def _build_attr(self, term: AttrTerm, kind: str) -> str:
        text = self.attribute(term, kind)
        return text if term.head in ("var", "lit") else self.atom(text)

    def atom(self, expression: str) -> str:
        """The variable that the body binds to an expression; the same text is the same variable."""
        if expression.startswith("("):
            if expression not in self._named:
                self._named[expression] = self._fresh()
                self.atoms.append(f"(= {self._named[expression]} {expression})")
            return self._named[expression]
        return expression

    def _fresh(self) -> str:
        self._count += 1
        return f"%{self._count - 1}"


def _variable(name: str) -> str:
    """A rule's variable in egglog, where it cannot shadow a function such as `shape`."""
    return f"?{name}"


def _kinds(op: OpDef) -> Iterable[str]:
    return op.attrs.values()
