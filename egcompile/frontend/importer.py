"""The importer: a functional ATen fx graph, whoever traced it, to a `Graph`."""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from egcompile import ops
from egcompile.errors import EgcompileError, TraceError, TypeMismatch, UnsupportedOp
from egcompile.frontend._torch import OpOverload, example, returned, tensors_in
from egcompile.frontend.aten import KEPT, RANDOM, TABLE
from egcompile.frontend.constants import Constants, leaf_of, nodes_in
from egcompile.frontend.derivative import derivative_of
from egcompile.frontend.devices import device_of, refuse_move
from egcompile.frontend.opaque import opaque
from egcompile.frontend.origins import origin_of
from egcompile.ir import DTYPE_NAMES, Graph, Node, TensorType, ValueType
from egcompile.ops import Kind
from egcompile.ops.opdef import Derivative

aten = torch.ops.aten

IGNORED = frozenset({aten._assert_tensor_metadata.default})
"""Calls without a result, that only check what the types already say."""

DATA_DEPENDENT = frozenset({aten._local_scalar_dense.default, aten.item.default, aten.nonzero.default})


@dataclass(frozen=True, eq=False)
class FxGraph:
    """`graph` is a pure function of its inputs.

    constants   tensors that the traced code holds: the values of the graph's last inputs
    outputs     one entry an output of the fx graph: an index into `graph.outputs`, or `Constant`
    numbers     which of these are 0-d tensors on the CPU, in a graph that lies elsewhere
    device      where the graph lies
    """

    graph: Graph
    constants: tuple[torch.Tensor, ...]
    outputs: tuple[int | Constant, ...]
    numbers: frozenset[int]
    device: torch.device


@dataclass(frozen=True)
class Constant:
    """A Python value among the outputs or inputs of a trace: None, a number, a string."""

    value: Any


Binding = str | torch.Tensor | Constant
"""What a placeholder stands for: the input of that name, a constant tensor, or a Python value."""


def import_fx(
    gm: fx.GraphModule, bindings: Sequence[Binding], *, opaque: bool = True, constants: bool = True
) -> FxGraph:
    """Imports a functional ATen graph; `bindings` say what each placeholder stands for, in order.

    Placeholders bound to one name are one input. A constant tensor of equal elements becomes a `full`,
    any other an input behind the named ones. Every node must come out with the type of `meta["val"]`.
    With `constants` false, what depends on no input is a node all the same.

    An op outside the table, or one whose row does not take its arguments, becomes an opaque node, unless
    `opaque` forbids it. Raises UnsupportedOp for an op that cannot be imported and TraceError for what no
    graph can hold; both name the op, the module path and the source line.
    """
    importer = _Importer(gm, opaque, constants, _device(gm, bindings))
    values = iter(bindings)
    for node in gm.graph.nodes:
        match node.op:
            case "placeholder":
                importer.values[node] = importer.bind(next(values), node)
            case "get_attr":
                importer.values[node] = importer.constant(_attribute(gm, node.target))
            case "call_function":
                importer.values[node] = importer.call(node)
            case "output":
                return importer.finish(returned(gm))
            case _:
                raise TraceError(f"{node.op} {node.target} in a graph that should be functional ATen")
    raise TraceError("the graph has no output node")


def identifiers(names: Sequence[str]) -> list[str]:
    """Dotted names as unique identifiers: `layers.0.weight` -> `layers_0_weight`."""
    taken: set[str] = set()
    result = []
    for name in names:
        stem = re.sub(r"\W+", "_", name).strip("_") or "x"
        stem = f"_{stem}" if stem[0].isdigit() else stem
        unique, count = stem, 1
        while unique in taken:
            count += 1
            unique = f"{stem}_{count}"
        taken.add(unique)
        result.append(unique)
    return result


@dataclass
class _Importer:
    gm: fx.GraphModule
    opaque: bool
    held: bool  # whether it may hold constants
    device: torch.device
    varying: set[fx.Node] = field(default_factory=set)  # what depends on an input
    values: dict[fx.Node, Any] = field(default_factory=dict)
    inputs: dict[str, Node] = field(default_factory=dict)
    constants: dict[Node, torch.Tensor] = field(default_factory=dict)
    origins: dict[Node, frozenset[str]] = field(default_factory=dict)
    known: Constants = field(default_factory=Constants)
    marked: set[Node] = field(default_factory=set)
    draws: Iterator[int] = field(default_factory=itertools.count)

    def bind(self, binding: Binding, node: fx.Node) -> Any:
        if isinstance(binding, Constant):
            return binding.value
        if isinstance(binding, torch.Tensor):
            return self.constant(binding)
        self.varying.add(node)
        expected = _tensor_type(node, node.meta.get("val"))
        value = ops.input(name=binding, shape=expected.shape, dtype=expected.dtype)
        if self.inputs.setdefault(binding, value) is not value:
            raise TraceError(f"input {binding} is both {self.inputs[binding].type} and {value.type}")
        return value

    def constant(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        kind = _checked(TensorType.of(value), "a constant")
        if (leaf := leaf_of(value)) is not None:
            return leaf
        for node, known in self.constants.items():
            if known is value:
                return node
        node = ops.input(name=f"constant_{len(self.constants)}", shape=kind.shape, dtype=kind.dtype)
        self.constants[node] = value
        return node

    def call(self, node: fx.Node) -> Any:
        """The value of a call; a failure says where in the model it stands."""
        operands = [n for n in node.all_input_nodes if n in self.varying]
        if operands:
            self.varying.add(node)
        if node.target is operator.getitem:
            values, index = map(self._value, node.args)
            return values[index]
        if node.target in IGNORED:
            return None
        if not isinstance(node.target, OpOverload):
            raise UnsupportedOp(f"{node.target} is no ATen op, at {_place(node)}")
        try:
            if operands:
                refuse_move(self.device, tensors_in(list(map(example, operands))), tensors_in(example(node)))
            return self._row(node)
        except (UnsupportedOp, TraceError) as error:
            raise type(error)(f"{error}, at {_place(node)}") from error
        except EgcompileError as error:
            raise TraceError(f"{node.target} cannot be imported: {error}, at {_place(node)}") from error

    def _row(self, node: fx.Node) -> Any:
        assert isinstance(node.target, OpOverload)
        arguments = [self._value(argument) for argument in _in_schema_order(node)]
        try:
            result = self._native(node, node.target, arguments)
        except UnsupportedOp:
            if not self.opaque:
                raise
            result = self._opaque(node, node.target, arguments)
        self._mark(result, arguments, origin_of(node.meta))
        if isinstance(result, tuple):
            return tuple(self.known.simplify(r) if isinstance(r, Node) else r for r in result)
        return self.known.simplify(result)

    def _native(self, node: fx.Node, target: OpOverload, arguments: Sequence[Any]) -> Any:
        """What the table, or a value that depends on no input, makes of a call; none of complex numbers."""
        if any(x.is_complex() for x in tensors_in([*map(example, node.all_input_nodes), example(node)])):
            return self._outside_the_table(node, target, arguments)
        if (row := RANDOM.get(node.target)) is not None:
            row = functools.partial(row, next(self.draws))
        elif (row := TABLE.get(node.target)) is None:
            return self._outside_the_table(node, target, arguments)
        expected = _value_type(node)
        result = row(expected, *arguments)
        _verify(result, expected)
        return result

    def _outside_the_table(self, node: fx.Node, target: OpOverload, arguments: Sequence[Any]) -> Any:
        """Computed now if it depends on no input, such as index arithmetic on an `arange`."""
        if node.target in DATA_DEPENDENT:
            raise TraceError(
                f"{node.target} reads a number out of a tensor, so that the graph depends on data"
            )
        if _is_dynamic(node.meta.get("val")):
            raise TraceError(f"the shape of what {node.target} gives depends on data")
        value = self.known.compute(target, arguments)
        if value is not None and (self.held or leaf_of(value) is not None):
            return self.constant(value.to(self.device))
        raise UnsupportedOp(f"{node.target} has no row in the import table")

    def _opaque(self, node: fx.Node, target: OpOverload, arguments: Sequence[Any]) -> Any:
        """The call as a node that ATen runs."""
        expected = tuple(_tensor_type(node, v) for v in tensors_in(example(node)))
        result = opaque(target, arguments, example(node), next(self.draws), _derivative(target))
        results = result if isinstance(result, tuple) else (result,)
        _verify(tuple(r for r in results if isinstance(r, Node)), expected)
        return result

    def _value(self, argument: Any) -> Any:
        return fx.map_arg(argument, lambda n: self.values[n]) if _has_nodes(argument) else argument

    def _mark(self, result: Any, arguments: Sequence[Any], origin: str | None) -> None:
        """Notes the origin on every node that the row made, and on a result that stood there already."""
        operands = set(nodes_in(arguments))
        results = [n for n in nodes_in(result) if n not in operands]
        new = _until(results, self.marked)
        for node in {*results, *new}:
            if origin and node.op.kind is not Kind.LEAF:
                self.origins[node] = self.origins.get(node, frozenset()) | {origin}
        self.marked.update(new)

    def finish(self, returned: Sequence[Any]) -> FxGraph:
        outputs: list[Node] = []
        slots: list[int | Constant] = []
        numbers = set()
        for argument in returned:
            value = self._value(argument)
            if isinstance(value, Node):
                result = tensors_in(example(argument))
                refuse_move(self.device, (), result)
                if result and result[0].device != self.device:
                    numbers.add(len(slots))
                slots.append(len(outputs))
                outputs.append(value)
            elif value is None or isinstance(value, (bool, int, float, str)):
                slots.append(Constant(value))
            else:
                raise TraceError(f"the model returns a {type(value).__name__}; return tensors")
        inputs = (*self.inputs.values(), *self.constants)
        graph = Graph(inputs, tuple(outputs), origins=self.origins)
        constants = tuple(self.constants.values())
        return FxGraph(graph, constants, tuple(slots), frozenset(numbers), self.device)


@functools.cache
def _derivative(overload: OpOverload) -> Derivative:
    return derivative_of(overload, KEPT, _import_derivative)


def _import_derivative(gm: fx.GraphModule, names: Sequence[str]) -> Graph:
    imported = import_fx(gm, names, constants=False)
    if imported.constants or len(imported.graph.outputs) != len(imported.outputs):
        raise TraceError("it holds a tensor of its own")
    return imported.graph


def _device(gm: fx.GraphModule, bindings: Sequence[Binding]) -> torch.device:
    """Where the inputs lie, or else the results; the CPU if nothing but numbers says."""
    placeholders = zip(gm.graph.find_nodes(op="placeholder"), bindings, strict=False)
    inputs = [example(node) for node, binding in placeholders if isinstance(binding, str)]
    results = list(map(example, returned(gm)))
    return device_of(tensors_in(inputs)) or device_of(tensors_in(results)) or torch.device("cpu")


def _in_schema_order(node: fx.Node) -> list[Any]:
    """All arguments of a call, defaults filled in."""
    target: Any = node.target
    schema = target._schema.arguments
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    return [given.get(a.name, a.default_value) for a in schema]


def _value_type(node: fx.Node) -> ValueType:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return tuple(_tensor_type(node, v) for v in value)
    return _tensor_type(node, value)


def _tensor_type(node: fx.Node, value: Any) -> TensorType:
    if not isinstance(value, torch.Tensor):
        raise TraceError(f"{node.target} gives a {type(value).__name__}, not a tensor")
    if value.layout != torch.strided:
        raise UnsupportedOp(f"{node.target} has the layout {value.layout}; tensors must be dense")
    if _is_dynamic(value):
        raise TraceError(f"{node.target} has the dynamic shape {list(value.shape)}; shapes must be static")
    return _checked(TensorType.of(value), str(node.target))


def _is_dynamic(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not all(isinstance(n, int) for n in value.shape)


def _checked(kind: TensorType, what: str) -> TensorType:
    if kind.dtype not in DTYPE_NAMES:
        raise UnsupportedOp(f"{what} has dtype {kind.dtype}; known are {', '.join(DTYPE_NAMES.values())}")
    return kind


def _verify(result: Any, expected: ValueType) -> None:
    results = result if isinstance(result, tuple) else (result,)
    wanted = expected if isinstance(expected, tuple) else (expected,)
    found = tuple(r.type for r in results)
    if found != wanted:
        raise TypeMismatch(
            f"it came out as {', '.join(map(str, found))} where PyTorch has {', '.join(map(str, wanted))}"
        )


def _place(node: fx.Node) -> str:
    return origin_of(node.meta) or f"node {node.name}"


def _attribute(gm: fx.GraphModule, target: Any) -> Any:
    return operator.attrgetter(str(target))(gm)


def _has_nodes(argument: Any) -> bool:
    if isinstance(argument, (tuple, list)):
        return any(map(_has_nodes, argument))
    return isinstance(argument, fx.Node)


def _until(roots: Sequence[Node], known: set[Node]) -> set[Node]:
    """All that the roots reach without passing through a known node."""
    found: set[Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node not in known and node not in found:
            found.add(node)
            pending.extend(node.inputs)
    return found
