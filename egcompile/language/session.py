"""One egglog e-graph at work: text goes in, rulesets run, classes and facts come out."""

from __future__ import annotations

import itertools
import math
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import egglog.bindings as egglog

from egcompile.ir.node import Attr, Node
from egcompile.ir.types import DTYPES, TensorType, ValueType
from egcompile.language.egraph import ENode
from egcompile.language.encode import Encoder, application, constructor, declarations, literal, type_facts
from egcompile.language.render import called, right_ops, rule_text, table_declaration, table_name
from egcompile.ops.opdef import OpDef
from egcompile.ops.term import AttrFunction
from egcompile.rules.rule import Rule

RULESET = "rules"

CHUNK = 40
"""Commands a call: egglog's time for one program is quadratic in its commands."""

MAX_ROWS = 100_000
"""Rows of one `AttrFunction`'s table, beyond which its parameters are too many."""

_DURATION = re.compile(r'"([^"]+)": ([\d.]+)(ns|µs|ms|s)\b')
_UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Contents:
    """What an e-graph holds. Classes have small numbers of their own, in egglog's order.

    class_of   the class of each handle that was put in
    """

    classes: dict[int, list[ENode]]
    class_of: dict[int, int]


class Session:
    """An e-graph over `ops` with `rules` in one ruleset; `encoder` holds what goes in at the next `flush`.

    `matches` and `seconds` are by rule.
    """

    def __init__(self, ops: Iterable[OpDef], rules: Sequence[Rule] = ()) -> None:
        self.encoder = Encoder()
        self.matches: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._rules = rules
        self._egglog = egglog.EGraph()
        self._ops = {constructor(op): op for op in ops}
        self._functions = called(rules)
        self._known_types: set[TensorType] = set()
        self._attrs: dict[tuple[str, Any], Attr] = {}
        self._values: dict[str, set[Attr]] = defaultdict(set)
        self._rows: dict[AttrFunction, set[tuple[Attr, ...]]] = {f: set() for f in self._functions}
        self.execute([*declarations(self._ops.values()), *map(table_declaration, self._functions)])
        self.execute([f"(ruleset {RULESET})", *(rule_text(rule, RULESET) for rule in rules)])

    def execute(self, commands: Sequence[str]) -> None:
        for i in range(0, len(commands), CHUNK):
            self._run("\n".join(commands[i : i + CHUNK]))

    def load(self, nodes: Iterable[Node]) -> None:
        """Puts nodes in, with their types as facts and the tables' rows for their attributes."""
        nodes = list(nodes)
        self.encoder.add(nodes)
        for node in nodes:
            for value, kind in zip(node.attrs, node.op.attrs.values(), strict=True):
                self._values[kind].add(value)
        self.flush()

    def flush(self) -> None:
        """Runs what the encoder holds, and makes its types facts."""
        self.execute(self.encoder.commands)
        self.encoder.commands.clear()
        types, self.encoder.types = self.encoder.types, []
        if not types:
            return
        new = {t for _, t in types} - self._known_types
        self._known_types |= new
        for t in new:
            self._values["ints"].add(t.shape)
            self._values["dtype"].add(t.dtype)
        self.execute(type_facts(sorted(new, key=str)))
        # One file of facts is a hundred times faster than one command a fact.
        with tempfile.TemporaryDirectory(prefix="egcompile-") as directory:
            path = Path(directory, "types.tsv")
            path.write_text("".join(f"{i}\t{t}\n" for i, t in types))
            self.execute([f"(input typed {literal(str(path), 'str')})", "(run types 2)"])
        self.fill_tables()

    def run(self, ruleset: str = RULESET) -> bool:
        """One iteration of a ruleset; whether anything changed."""
        (output,) = self._run(f"(run {ruleset} 1)")
        report = output.report
        self.matches.update(report.num_matches_per_rule)
        # egglog 13.2 gives a Python timedelta a thousandth of the time; its text has it right.
        spent = str(report).partition("search_and_apply_time_per_rule: {")[2].partition("}")[0]
        for name, number, unit in _DURATION.findall(spent):
            self.seconds[name] += float(number) * _UNITS[unit]
        return report.updated

    def blame(self, node: ENode) -> str:
        """Which rules that fired build such a node, in words for an error."""
        names = [r.name for r in self._rules if self.matches[r.name] and node.op in right_ops(r)]
        return f"; built by {' or '.join(names)}" if names else "; in the graph that was put in"

    def size(self) -> int:
        """How many e-nodes the ops have."""
        (output,) = self._run("(print-size)")
        return sum(count for name, count in output.sizes if name in self._ops)

    def read(self) -> Contents:
        """The e-graph as plain data; its attributes become known to the tables."""
        functions = self._egglog.freeze().functions
        number: dict[tuple[str, Any], int] = {}
        classes: dict[int, list[ENode]] = {}

        def class_of(sort: str, value: Any) -> int:
            return number.setdefault((sort, value), len(number))

        for name, op in self._ops.items():
            if name not in functions:  # it has no rows
                continue
            sorts = functions[name].input_sorts[: len(functions[name].input_sorts) - len(op.attrs)]
            for row in functions[name].rows:
                operands: list[int] = []
                for sort, value in zip(sorts, row.inputs):
                    members = self._egglog.value_to_vec(value) if sort == "TVec" else (value,)
                    operands += [class_of("Tuple" if sort == "Tuple" else "Tensor", v) for v in members]
                values = zip(row.inputs[len(sorts) :], op.attrs.values(), strict=True)
                attrs = tuple(self._attr(value, kind) for value, kind in values)
                node = ENode(op, tuple(operands), attrs)
                classes.setdefault(class_of(functions[name].output_sort, row.output), []).append(node)
        handles = {
            self._egglog.value_to_i64(row.inputs[0]): class_of(functions[name].output_sort, row.output)
            for name in ("node", "tuple_node")
            if name in functions
            for row in functions[name].rows
        }
        return Contents(classes, handles)

    def add_types(
        self, contents: Contents, types: Mapping[int, ValueType], witnesses: Mapping[int, ENode]
    ) -> bool:
        """Makes facts of the types of classes that rules built, `witnesses` in topological order.

        Whether there was anything new: a class without a handle, or an attribute without its rows.
        """
        handle = {c: self.encoder.text(i, types[c]) for i, c in contents.class_of.items()}
        new = [c for c in witnesses if c not in handle]
        for c in new:
            node = witnesses[c]
            attrs = [literal(v, k) for v, k in zip(node.attrs, node.op.attrs.values(), strict=True)]
            expression = application(node.op, [handle[i] for i in node.operands], attrs)
            handle[c] = self.encoder.text(self.encoder.put(expression, types[c]), types[c])
        self.flush()
        return self.fill_tables() or bool(new)

    def fill_tables(self) -> bool:
        """Applies the attribute functions to values that are new; whether that gave any row."""
        values = dict(self._values)
        for function in self._functions:  # one function's results may be another's arguments
            results = {function.function(*args) for args in self._arguments(function, self._values)} - {None}
            values[function.result] = values.get(function.result, set()) | results
        commands = []
        for function in self._functions:
            for args in self._arguments(function, values):
                if args in self._rows[function]:
                    continue
                self._rows[function].add(args)
                result = function.function(*args)
                if result is not None:
                    texts = [literal(a, k) for a, k in zip(args, function.params, strict=True)]
                    row = f"({table_name(function)} {' '.join(texts)})"
                    commands.append(f"(set {row} {literal(result, function.result)})")
        self.execute(commands)
        return bool(commands)

    def _arguments(
        self, function: AttrFunction, values: Mapping[str, set[Attr]]
    ) -> Iterator[tuple[Attr, ...]]:
        domains = [sorted(values.get(kind, ()), key=repr) for kind in function.params]
        if math.prod(map(len, domains)) > MAX_ROWS:
            raise ValueError(f"attribute function {function.name!r} has too many arguments for a table")
        return itertools.product(*domains)

    def _attr(self, value: Any, kind: str) -> Attr:
        if (kind, value) not in self._attrs:
            attr = self._decode(value, kind)
            self._attrs[kind, value] = attr
            self._values[kind].add(attr)
        return self._attrs[kind, value]

    def _decode(self, value: Any, kind: str) -> Attr:
        match kind:
            case "int":
                return self._egglog.value_to_i64(value)
            case "float":
                return self._egglog.value_to_f64(value)
            case "bool":
                return self._egglog.value_to_bool(value)
            case "ints":
                return tuple(map(self._egglog.value_to_i64, self._egglog.value_to_vec(value)))
        text = self._egglog.value_to_string(value)
        return DTYPES[text] if kind == "dtype" else text

    def _run(self, text: str) -> list[Any]:
        return self._egglog.run_program(*self._egglog.parse_program(text))
