"""`trace`: a model or function and example arguments to a graph, through torch.export."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode

from egcompile.errors import EgcompileError, TraceError, TypeMismatch, UnsupportedOp
from egcompile.frontend import _torch
from egcompile.frontend.aten import KEPT
from egcompile.frontend.autocast import cast_before_losses
from egcompile.frontend.grad_mode import detach_no_grad_values
from egcompile.frontend.importer import Binding, Constant, FxGraph, identifiers, import_fx
from egcompile.ir import Graph, TensorType


@dataclass(frozen=True, eq=False)
class Traced:
    """A graph and how to call it as its model is called.

    graph          inputs: parameters and buffers, then the arguments' tensors, then constants
    parameters     dotted names of the first inputs: parameters, then buffers; tied ones once
    state          their tensors, the model's own
    constants      tensors that the traced code holds: the values of the last inputs
    requires_grad  for every input, whether its example requires a gradient
    arguments      for each flattened argument, the input that it is, or the `Constant` it must be
    outputs        for each flattened result, an index into `graph.outputs`, or `Constant`
    mutated        (index of a buffer among the inputs, index of its new value among `graph.outputs`) for
                   each buffer that the model changes in place; whoever runs the graph writes them back
    strides        how each input's example lies in memory
    """

    graph: Graph
    parameters: tuple[str, ...]
    state: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    requires_grad: tuple[bool, ...]
    arguments: tuple[int | Constant, ...]
    outputs: tuple[int | Constant, ...]
    mutated: tuple[tuple[int, int], ...]
    strides: tuple[tuple[int, ...], ...]
    _call: _Call
    _out_spec: _torch.TreeSpec

    def inputs(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[Tensor]:
        """The values of `graph.inputs` after the parameters, for a call like the traced one.

        Raises TypeMismatch for a call of other types, structure or Python values.
        """
        call = _Call.of(self._call.signature, args, kwargs or {})
        if call.spec != self._call.spec:
            raise TypeMismatch(f"the arguments are {call.spec}; the trace was made for {self._call.spec}")
        for name, leaf, slot in zip(call.names, call.leaves, self.arguments, strict=True):
            expected = slot.value if isinstance(slot, Constant) else self.graph.inputs[slot].type
            found = TensorType.of(leaf) if isinstance(leaf, Tensor) else leaf
            if found is not expected and found != expected:
                raise TypeMismatch(f"argument {name} is {found}; the trace was made for {expected}")
        return [*call.tensors, *self.constants]

    def restore(self, values: Sequence[Any]) -> Any:
        """The model's result from the values of `graph.outputs`."""
        leaves = [slot.value if isinstance(slot, Constant) else values[slot] for slot in self.outputs]
        return _torch.unflatten(leaves, self._out_spec)

    def to_networkx(self) -> Any:
        """As `Graph.to_networkx`."""
        return self.graph.to_networkx()

    def __str__(self) -> str:
        return str(self.graph)


def trace(
    model: nn.Module | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    opaque: bool = True,
) -> Traced:
    """Traces a call of `model`: sizes, dtypes, training mode and Python values are those of the example.

    Raises TraceError where a graph cannot say what the model does (control flow on data, an input changed
    in place, hooks, custom autograd Functions), and UnsupportedOp for an op that no node can be; both name
    the module path and the source line. An ATen op outside the table is an opaque node, which ATen runs and
    differentiates; with `opaque=False` it raises UnsupportedOp too.
    """
    module = model if isinstance(model, nn.Module) else _Function(model)
    call = _Call.of(_signature(model), args, kwargs or {})
    for name, leaf in zip(call.names, call.leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.layout != torch.strided:
            raise UnsupportedOp(f"argument {name} has the layout {leaf.layout}; tensors must be dense")
    state = _state(module)
    program = _export(module, *_without_aliases(list(state.values()), args, kwargs or {}))
    _refuse_mutation(program)
    parameters = _parameter_names(program, state)
    imported = import_fx(program.graph_module, _bindings(program, parameters, call), opaque=opaque)
    first = tuple(dict.fromkeys(parameters.values()))
    tensors = [state[name] for name in first]
    values = [*tensors, *call.tensors, *imported.constants]
    positions = itertools.count(len(first))
    mutated = _mutated(program, parameters, imported)
    if any(i >= len(mutated) for i in imported.numbers):
        raise TraceError(
            f"the model returns a number on the CPU from a graph on {imported.device}; move it there"
        )
    return Traced(
        graph=imported.graph,
        parameters=first,
        state=tuple(tensors),
        constants=imported.constants,
        requires_grad=tuple(x.requires_grad for x in values),
        arguments=tuple(
            next(positions) if isinstance(leaf, Tensor) else Constant(leaf) for leaf in call.leaves
        ),
        outputs=imported.outputs[len(mutated) :],
        mutated=mutated,
        strides=tuple(x.stride() for x in values),
        _call=call,
        _out_spec=_torch.out_spec(program),
    )


class _Function(nn.Module):
    """A function as the module that torch.export wants."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _NoForeignGradients():
            return self._function(*args, **kwargs)


class _NoForeignGradients(TorchFunctionMode):
    """Refuses tensors from outside that need a gradient: torch.export would make them constants."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for leaf in _torch.flatten((args, kwargs))[0]:
            if type(leaf) in (Tensor, nn.Parameter) and leaf.requires_grad:
                raise TraceError(
                    f"the function closes over a tensor {TensorType.of(leaf)} that needs a gradient: "
                    "pass it as an argument, or trace the module that owns it"
                )
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, eq=False)
class _Call:
    """A call's arguments, flattened in the signature's order, whether given by keyword or not."""

    signature: inspect.Signature | None
    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    spec: _torch.TreeSpec

    @staticmethod
    def of(signature: inspect.Signature | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call:
        if isinstance(args, Tensor):
            raise TraceError("the arguments are a tensor; give a tuple of them, such as (x,)")
        arguments: Any = (tuple(args), dict(kwargs))
        if signature is not None:
            try:
                arguments = dict(signature.bind(*args, **kwargs).arguments)
            except TypeError as error:
                raise TraceError(f"the arguments do not fit {signature}: {error}") from error
        named = _torch.flatten_with_names(arguments)
        names, leaves = zip(*named, strict=True) if named else ((), ())
        return _Call(signature, names, leaves, _torch.flatten(arguments)[1])

    @property
    def tensor_names(self) -> list[str]:
        return [n for n, leaf in zip(self.names, self.leaves, strict=True) if isinstance(leaf, Tensor)]

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


def _signature(model: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except ValueError:  # some builtins have none
        return None


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Every name of every parameter and buffer, tied names too."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _without_aliases(
    state: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example with a tensor that stands in it twice, or is a parameter, copied.

    torch.export would bind all its uses to one placeholder.
    """
    seen = {id(x) for x in state}

    def distinct(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and id(leaf) in seen:
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        seen.add(id(leaf))
        return leaf

    leaves, spec = _torch.flatten((tuple(args), dict(kwargs)))
    copied: tuple[tuple[Any, ...], dict[str, Any]] = _torch.unflatten([distinct(x) for x in leaves], spec)
    return copied


def _export(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """The functional ATen program, no-grad regions made explicit."""
    for name, child in module.named_modules():
        if _torch.has_backward_hooks(child):
            raise TraceError(
                f"module {name or type(child).__name__} has backward hooks; a trace would drop them"
            )
    try:
        with torch.enable_grad(), _torch.refusing_lost_semantics():
            program = _torch.export(module, args, kwargs)
            detach_no_grad_values(program.graph_module)
            cast_before_losses(program.graph_module)
            return _torch.decompose(program, KEPT)
    except EgcompileError:
        raise
    except Exception as error:
        raise _torch.trace_error("torch.export", error) from error


def _refuse_mutation(program: ExportedProgram) -> None:
    signature = program.graph_signature
    if signature.user_inputs_to_mutate:
        inputs = ", ".join(signature.user_inputs_to_mutate.values())
        raise TraceError(f"the model changes its input {inputs} in place; clone it first")
    if changed := [*_torch.parameters_to_mutate(program).values()]:
        raise UnsupportedOp(f"the model changes its parameter {', '.join(changed)} in place")


def _mutated(
    program: ExportedProgram, parameters: Mapping[str, str], imported: FxGraph
) -> tuple[tuple[int, int], ...]:
    """Buffers changed in place: the program returns their new values first."""
    first = list(dict.fromkeys(parameters.values()))
    changed = []
    for slot, name in zip(imported.outputs, program.graph_signature.buffers_to_mutate.values()):
        if not isinstance(slot, int):
            raise TraceError(f"the model makes its buffer {name} a constant")
        changed.append((first.index(parameters[name]), slot))
    return tuple(changed)


def _parameter_names(program: ExportedProgram, state: Mapping[str, Tensor]) -> dict[str, str]:
    """From each parameter's and buffer's name to the first name of that very tensor."""
    first: dict[int, str] = {}
    names = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            name = str(spec.target)
            names[name] = first.setdefault(id(state[name]), name)
    return names


def _bindings(program: ExportedProgram, parameters: Mapping[str, str], call: _Call) -> list[Binding]:
    """What each placeholder of the program stands for."""
    first = list(dict.fromkeys(parameters.values()))
    unique = identifiers([*first, *call.tensor_names])
    known = dict(zip(first, unique, strict=False))
    inputs, leaves = iter(unique[len(first) :]), iter(call.leaves)
    bindings: list[Binding] = []
    for spec in program.graph_signature.input_specs:
        match spec.kind:
            case InputKind.PARAMETER | InputKind.BUFFER:
                bindings.append(known[parameters[str(spec.target)]])
            case InputKind.CONSTANT_TENSOR:
                bindings.append(program.constants[str(spec.target)])
            case InputKind.USER_INPUT:
                leaf = next(leaves)
                bindings.append(next(inputs) if isinstance(leaf, Tensor) else Constant(leaf))
            case _:
                raise TraceError(f"the model has an input of kind {spec.kind.name}, which no graph can hold")
    return bindings
