"""A tile of a loop nest: evaluates a body graph at an index, line by line, each value once.

`Tile.value(node, index)` is the one mechanism behind every generated loop. It walks from a node to its
operands: pointwise ops keep the index, movement ops map it, inputs load at its offset. A value is emitted
into the outermost scope that has the loop axes it depends on, so what a loop does not change stays outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from egcompile.codegen.index import Axis, Digit, Index, offset, operand_index
from egcompile.codegen.scalar import TL_DTYPES, literal, pointwise, rounded, typed
from egcompile.codegen.source import span
from egcompile.codegen.text import Block, Line, Value
from egcompile.errors import CompileError
from egcompile.ir.node import Node
from egcompile.ir.types import accumulate_dtype
from egcompile.ops.opdef import Kind
from egcompile.schedule.kernel import Buffer

Indices = tuple[Index, ...]


@dataclass(frozen=True, eq=False)
class AxisTile:
    """How the kernel's text writes a loop axis: its index, its mask (None: all lanes are in range)."""

    index: Value
    mask: Value | None = None


@dataclass(eq=False)
class Scope:
    """A block that is being written, the axes that are bound in it, and what it holds already."""

    axes: frozenset[Axis]
    block: Block = field(default_factory=Block)
    memo: dict[object, Value] = field(default_factory=dict)


@dataclass(eq=False)
class Tile:
    """Evaluates nodes at indices.

    pointers   for each input node: the parameter's name and how the argument lies in memory
    axes       how each loop axis is written
    scopes     outermost first
    other      evaluates what is neither pointwise nor movement (reductions, contractions), or None
    hints      names for nodes' values at an index
    tiles      of an axis: the axis of its tiles, of which one is at work, and how long each is; or of its
               runs, of which a folded tile has several
    evictions  inputs, and the `eviction_policy` of their loads in the innermost scope
    exact      whether divisions and roots are correctly rounded, or to 2 ulp
    """

    pointers: dict[Node, tuple[str, Buffer]]
    axes: dict[Axis, AxisTile]
    scopes: list[Scope]
    other: Callable[[Tile, Node, Indices], Value] | None = None
    hints: Mapping[tuple[Node, Indices], str] = field(default_factory=dict)
    tiles: dict[Axis, tuple[Axis, int]] = field(default_factory=dict)
    evictions: Mapping[Node, str] = field(default_factory=dict)
    exact: bool = True

    def value(self, node: Node, index: Indices, guard: Value | None = None) -> Value:
        """The element of `node` at `index`, in the accumulation dtype; `guard` says which lanes matter.

        Raises CompileError for an op that this tile cannot evaluate.
        """
        key = (node, index, guard)
        for scope in self.scopes:
            if key in scope.memo:
                return scope.memo[key]
        result = self._compute(node, index, guard)
        self.scope_of(result.axes).memo[key] = result
        return result

    def _compute(self, node: Node, index: Indices, guard: Value | None) -> Value:
        match node.op.kind, node.op.name:
            case Kind.LEAF, "input":
                return self.load(node, index, guard)
            case Kind.LEAF, "full":
                return literal(node.attr("value"), accumulate_dtype(node.dtype))
            case Kind.LEAF, "iota":
                return self._iota(node, index)
            case Kind.POINTWISE, "eq" if (narrow := self._equals_position(node, index, guard)) is not None:
                return narrow
            case Kind.POINTWISE, _:
                operands = tuple(self.value(i, index, guard) for i in node.inputs)
                if node.dtype == torch.bool:
                    operands = tuple(self._rounded(o, i.dtype) for o, i in zip(operands, node.inputs))
                return self.emit(pointwise(node, operands, exact=self.exact), self.hints.get((node, index)))
            case Kind.MOVEMENT, "pad":
                return self._pad(node, index, guard)
            case Kind.MOVEMENT, "cat":
                return self._cat(node, index, guard)
            case Kind.MOVEMENT, _:
                return self.value(node.inputs[0], operand_index(node, index), guard)
        if guard is not None:
            return self.value(node, index)  # there whatever the lanes
        if self.other is not None:
            return self.other(self, node, index)
        raise CompileError(f"{node.op.name} is no part of a pointwise kernel: {node}")

    def _rounded(self, value: Value, dtype: torch.dtype) -> Value:
        result = rounded(value, dtype)
        return value if result is value else self.emit(result)

    # ---- memory ----

    def load(self, node: Node, index: Indices, guard: Value | None = None) -> Value:
        name, buffer = self.pointers[node]
        where = self.of_tile(offset(index, buffer.strides))
        axes = where.axes
        if guard is not None and not guard.axes <= axes:
            # The guard changes along axes on which the address does not depend.
            if where.low >= 0 and where.high <= span(buffer):
                guard = None
            else:
                axes |= guard.axes
        mask = self.mask(axes, guard)
        pointer, operands = self._pointer(name, where)
        if guard is not None and axes != where.axes:
            operands = (
                self.emit(Value("tl.where({0}, {1}, 0)", (guard, self.index(where)), None, axes, "offset")),
            )
            pointer = f"{name} + {{0}}"
        template = f"tl.load({pointer}"
        if mask is not None:
            template += f", mask={{{len(operands)}}}, other={_nothing(buffer.type.dtype)}"
            operands = (*operands, mask)
        if node in self.evictions and self.scope_of(axes) is self.scopes[-1]:  # what is outside is few bytes
            template += f', eviction_policy="{self.evictions[node]}"'
        template += ")"
        acc = accumulate_dtype(node.dtype)
        if buffer.type.dtype != acc:
            template += f".to({TL_DTYPES[acc]})"
        zero = frozenset(axis for axis in axes if self.axes[axis].mask is not None)
        return self.emit(Value(template, operands, acc, axes, node.attr("name"), zero, inline=False))

    def store(self, name: str, buffer: Buffer, index: Indices, value: Value) -> None:
        """Writes `value` at `index` of an argument, rounding to its dtype, where all its axes are bound."""
        where = offset(index, buffer.strides)
        axes = frozenset().union(*(i.axes for i in index), value.axes)
        mask = self.mask(axes)
        pointer, operands = self._pointer(name, where)
        scope = self.scope_of(axes)
        if value.template == f"{{0}}.to({TL_DTYPES[buffer.type.dtype]}).to(tl.float32)":
            value = value.operands[0]  # the store rounds
        operands = (*operands, typed(value))
        template = f"tl.store({pointer}, {{{len(operands) - 1}}}"
        if mask is not None:
            operands = (*operands, mask)
            template += f", mask={{{len(operands) - 1}}}"
        scope.block.items.append(Line(template + ")", operands))

    def _pointer(self, name: str, where: Index) -> tuple[str, tuple[Value, ...]]:
        if where == Index(()):
            return name, ()
        return f"{name} + {{0}}", (self.index(where),)

    def mask(self, axes: frozenset[Axis], guard: Value | None = None) -> Value | None:
        """Which lanes are in range along `axes` and within the guard; None for all.

        Where a point is in range, so are its tile and its run.
        """
        within = {number for axis, (number, _) in self.tiles.items() if axis in axes}
        ordered = sorted(axes - within, key=lambda a: list(self.axes).index(a))
        masks = [m for a in ordered if (m := self.axes[a].mask) is not None]
        return self.both(*masks, *([guard] if guard is not None else []))

    def both(self, *conditions: Value) -> Value | None:
        if len(conditions) < 2:
            return conditions[0] if conditions else None
        template = " & ".join(f"{{{i}}}" for i in range(len(conditions)))
        axes = frozenset().union(*(c.axes for c in conditions))
        return self.emit(Value(template, conditions, torch.bool, axes, "mask"))

    # ---- indices ----

    def bind_number(self, scope: Scope, axis: Axis, number: str, pid: Value | None, size: int) -> None:
        """Binds which tile of an axis, of `size` each, is at work: for what is one value for all of it.

        `number` is its text, in which `{0}` is `pid`.
        """
        numbers = Axis(f"tile of {axis.name}", -(-axis.size // size))
        scope.axes |= {numbers}
        value = Value(number, (pid,) if pid else (), axes=frozenset({numbers}))
        self.axes[numbers] = AxisTile(self.emit(value) if pid else value)
        self.tiles[axis] = numbers, size

    def bind_runs(self, scope: Scope, axis: Axis, numbers: str, size: int, run: int) -> Value:
        """Binds which runs of `run` points (in the text RUN) a tile of `size`, folded into them, has.

        `numbers` is their text. What is one for all of a run is then `[runs, 1]`. Returns the index along the
        axis, `[runs, RUN]`, which the caller binds.
        """
        runs = runs_of(axis, run)
        scope.axes |= {runs}
        own = frozenset({runs})
        text = f"({numbers})[:, None]" if " + " in numbers else f"{numbers}[:, None]"
        number = self.emit(Value(text, axes=own, hint="run", inline=False))
        mask = None
        if axis.size % size:
            mask = self.emit(Value(f"{{0}} < {runs.size}", (number,), torch.bool, own, "run_mask"))
        self.axes[runs] = AxisTile(number, mask)
        self.tiles[axis] = runs, run
        return Value(
            "{0} * RUN + tl.arange(0, RUN)[None, :]", (number,), axes=frozenset({axis}), inline=False
        )

    def of_tile(self, where: Index) -> Index:
        """The same index, but of a tile's number what is one for all of it: `rows // 4096` in tiles of 32."""
        total = Index(())
        for atom, c in where.terms:
            part = Index(((atom, 1),))
            if isinstance(atom, Digit):
                for axis, (number, length) in self.tiles.items():
                    if atom.of == Index.of(axis) and atom.div % length == 0:
                        part = Index.of(number).digit(atom.div // length, atom.mod)
            total = total + part * c
        return total + where.const

    def index(self, where: Index) -> Value:
        """An index as an expression of the loop axes."""
        if not where.terms:
            return Value(str(where.const), literal=where.const)
        parts: list[str] = []
        operands: list[Value] = []
        for atom, c in where.terms:
            if isinstance(atom, Axis):
                value = self.axes[atom].index
            else:
                template = "{0}" if atom.div == 1 else f"{{0}} // {atom.div}"
                template += f" % {atom.mod}" if atom.mod else ""
                value = self.emit(Value(template, (self.index(atom.of),), None, atom.of.axes, "index"))
            sign = ("" if not parts else " + ") if c > 0 else ("-" if not parts else " - ")
            parts.append(f"{sign}{{{len(operands)}}}" + (f" * {abs(c)}" if abs(c) != 1 else ""))
            operands.append(value)
        if where.const:
            parts.append(f" {'+' if where.const > 0 else '-'} {abs(where.const)}")
        template = "".join(parts)
        if template == "{0}":
            return operands[0]
        return self.emit(Value(template, tuple(operands), None, where.axes, "offset"))

    def _iota(self, node: Node, index: Indices) -> Value:
        where = index[node.attr("axis")]
        dtype = accumulate_dtype(node.dtype)
        if not where.terms:
            return literal(where.const, dtype)
        value = self.index(where)
        if dtype == torch.int32:
            return value
        template = f"{{0}}.to({TL_DTYPES[dtype]})"
        return self.emit(Value(template, (value,), dtype, where.axes, "position"))

    def _equals_position(self, node: Node, index: Indices, guard: Value | None) -> Value | None:
        """`iota == i` in 32 bits, where `i` changes along fewer axes and so is narrowed less often."""
        for place, other in (node.inputs, node.inputs[::-1]):
            where = index[place.attr("axis")] if place.op.name == "iota" else Index(())
            if place.dtype != torch.int64 or not where.terms:
                continue
            value = self.value(other, index, guard)
            if value.literal is not None or where.axes <= value.axes:
                continue
            inside = f"({{0}} >= 0) & ({{0}} <= {where.high})"
            narrow = f"tl.where({inside}, {{0}}, -1).to(tl.int32)"
            position = self.emit(Value(narrow, (value,), torch.int32, value.axes, f"{value.hint}_position"))
            axes = where.axes | value.axes
            equal = Value("{0} == {1}", (self.index(where), position), torch.bool, axes, "hit")
            return self.emit(equal)
        return None

    # ---- movement that is no plain index map ----

    def _pad(self, node: Node, index: Indices, guard: Value | None) -> Value:
        """Zero where the index has no source; lanes without one do not load."""
        axis, before, step = (node.attr(name) for name in ("axis", "before", "step"))
        size = node.inputs[0].shape[axis]
        where = index[axis] + (-before)
        source = where.digit(step, 0) if step > 1 else where
        zero = literal(0.0, accumulate_dtype(node.dtype))
        if where.high < 0 or where.low > (size - 1) * step or (not where.terms and where.const % step):
            return zero
        inside = self._within(where, (size - 1) * step + 1)
        if step > 1 and where.terms:
            on_step = Value(f"{{0}} % {step} == 0", (self.index(where),), torch.bool, where.axes, "on_step")
            inside.append(self.emit(on_step))
        condition = self.both(*inside)
        moved = (*index[:axis], source, *index[axis + 1 :])
        if condition is None:
            return self.value(node.inputs[0], moved, guard)
        both = self.both(condition, *([guard] if guard is not None else []))
        value = self.value(node.inputs[0], moved, both)
        return self.select(condition, value, zero)

    def _cat(self, node: Node, index: Indices, guard: Value | None) -> Value:
        """Each part within its own span of the axis; lanes outside a part's span do not load it."""
        axis, start = node.attr("axis"), 0
        result: Value | None = None
        for part in node.inputs:
            size = part.shape[axis]
            where = index[axis] + (-start)
            start += size
            if size == 0 or where.low >= size or where.high < 0:
                continue
            inside = self.both(*self._within(where, size))
            both = self.both(*(c for c in (inside, guard) if c is not None))
            value = self.value(part, (*index[:axis], where, *index[axis + 1 :]), both)
            result = value if result is None or inside is None else self.select(inside, value, result)
        if result is None:
            return literal(0.0, accumulate_dtype(node.dtype))
        return result

    def _within(self, where: Index, size: int) -> list[Value]:
        conditions = []
        if where.low < 0:
            conditions.append(Value("{0} >= 0", (self.index(where),), torch.bool, where.axes, "inside"))
        if where.high >= size:
            conditions.append(
                Value(f"{{0}} < {size}", (self.index(where),), torch.bool, where.axes, "inside")
            )
        return [self.emit(c) for c in conditions]

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        axes = condition.axes | a.axes | b.axes
        zero = a.zero if b.literal == 0 else frozenset[Axis]()
        value = Value("tl.where({0}, {1}, {2})", (condition, typed(a), typed(b)), a.dtype, axes, a.hint, zero)
        return self.emit(value)

    # ---- scopes ----

    def scope_of(self, axes: frozenset[Axis]) -> Scope:
        """The outermost scope in which all of `axes` are bound."""
        for scope in self.scopes:
            if axes <= scope.axes:
                return scope
        raise CompileError(f"no loop binds {sorted(a.name for a in axes)} together")

    def emit(self, value: Value, hint: str | None = None) -> Value:
        """Places an expression in its scope, or finds the equal one that is there."""
        if value.literal is not None:
            return value
        value.hint = hint or value.hint
        scope = self.scope_of(value.axes)
        key = (value.template, value.operands, value.dtype)
        if key not in scope.memo:
            scope.memo[key] = value
            scope.block.items.append(value)
        return scope.memo[key]


def runs_of(axis: Axis, run: int) -> Axis:
    """The axis that counts the runs of an axis."""
    return Axis(f"run of {axis.name}", -(-axis.size // run))


def _nothing(dtype: torch.dtype) -> str:
    return "0.0" if dtype.is_floating_point else "0"
