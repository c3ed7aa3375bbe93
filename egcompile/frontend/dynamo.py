"""The front half of a torch.compile backend: what Dynamo captured, as a graph and how to call it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from egcompile.errors import EgcompileError, TraceError
from egcompile.frontend import _torch
from egcompile.frontend.aten import TABLE
from egcompile.frontend.grad_mode import detach_no_grad_values
from egcompile.frontend.importer import Binding, Constant, FxGraph, identifiers, import_fx
from egcompile.frontend.origins import module_path, origin_of
from egcompile.ir import Graph


@dataclass(frozen=True)
class Argument:
    """An output that is the argument of that index itself, not a copy of it."""

    index: int


@dataclass(frozen=True, eq=False)
class Imported:
    """A captured graph, and how a callable with the captured arguments' convention runs it.

    With `args` as Dynamo passes them:

        values = run(graph, [*(args[i] for i in input_indices), *constants])
        for index, position in mutated:  args[index].copy_(values[position])
        return [resolve(output) for output in outputs]

    where an output is an index into `values`, an `Argument`, or a `Constant`. Sizes and Python numbers
    among the arguments are those of the example: the caller checks the types (`graph.inputs`) and the
    numbers (`numbers`) of each call, and imports again for others.

    graph          inputs: the tensors among the arguments, named by their place in the model; constants
    input_indices  for each input but the constants, which argument it is
    constants      tensors that the captured code holds: the values of the last inputs
    numbers        (argument index, its value when imported) for every argument that is not a tensor
    outputs        one entry an output of the captured graph
    mutated        (argument index, index into the graph's outputs) for every argument changed in place
    requires_grad  for every input
    """

    graph: Graph
    input_indices: tuple[int, ...]
    constants: tuple[Tensor, ...]
    numbers: tuple[tuple[int, Any], ...]
    outputs: tuple[int | Argument | Constant, ...]
    mutated: tuple[tuple[int, int], ...]
    requires_grad: tuple[bool, ...]


def import_dynamo(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Imported:
    """Imports what Dynamo captured, for the sizes and numbers of `example_inputs`; `gm` stays as it is.

    Raises UnsupportedOp for an ATen op outside the table, and TraceError where the graph would lose what
    the code does: a custom autograd.Function, or an argument that requires grad and is changed in place.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    _refuse_custom_gradients(gm)
    if any(True for _ in gm.parameters()):
        raise TraceError(
            "the captured graph owns parameters; set torch._dynamo.config.inline_inbuilt_nn_modules"
        )
    plain = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    detach_no_grad_values(plain)
    functional, signature = _trace(plain, example_inputs)
    tensors = [i for i, x in enumerate(example_inputs) if isinstance(x, Tensor)]
    names = identifiers([_input_name(placeholders[i]) for i in tensors])
    bindings: list[Binding] = [Constant(_torch.static_number(x)) for x in example_inputs]
    for i, name in zip(tensors, names, strict=True):
        bindings[i] = name
    imported = import_fx(functional, bindings)
    mutated = _mutated(functional, signature, imported)
    _refuse_gradients_of(mutated, placeholders, example_inputs)
    return Imported(
        graph=imported.graph,
        input_indices=tuple(tensors),
        constants=imported.constants,
        numbers=tuple((i, b.value) for i, b in enumerate(bindings) if isinstance(b, Constant)),
        outputs=_outputs(imported, tensors)[len(mutated) :],
        mutated=mutated,
        requires_grad=(
            *(example_inputs[i].requires_grad for i in tensors),
            *(False for _ in imported.constants),
        ),
    )


def _trace(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[fx.GraphModule, Any]:
    try:
        return _torch.aot_forward(gm, example_inputs, TABLE.keys())
    except EgcompileError:
        raise
    except Exception as error:
        raise TraceError(f"AOTAutograd failed: {type(error).__name__}: {error}") from error


def _refuse_custom_gradients(gm: fx.GraphModule) -> None:
    """AOTAutograd would trace the forward of a custom Function and forget its backward."""
    for node in gm.graph.nodes:
        if "autograd_function_apply" in str(node.target):
            place = origin_of(node.meta) or node.name
            raise TraceError(f"a custom autograd.Function cannot be compiled yet, at {place}")


def _input_name(placeholder: fx.Node) -> str:
    """The dotted path of a parameter, or the name of an argument."""
    return module_path(_torch.source_name(placeholder)) or placeholder.name


def _mutated(gm: fx.GraphModule, signature: Any, imported: FxGraph) -> tuple[tuple[int, int], ...]:
    """Arguments changed in place; their new values are the first outputs."""
    position = {node.name: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    changed = []
    for i, name in enumerate(signature.user_inputs_to_mutate.values()):
        slot = imported.outputs[i]
        assert isinstance(slot, int)
        changed.append((position[name], slot))
    return tuple(changed)


def _refuse_gradients_of(
    mutated: Sequence[tuple[int, int]], placeholders: Sequence[fx.Node], example_inputs: Sequence[Any]
) -> None:
    for index, _ in mutated:
        if example_inputs[index].requires_grad:
            name = _input_name(placeholders[index])
            raise TraceError(f"{name} requires grad and is changed in place; clone it first")


def _outputs(imported: FxGraph, tensors: Sequence[int]) -> tuple[int | Argument | Constant, ...]:
    """The outputs, those that are an argument itself marked so."""
    inputs = imported.graph.inputs
    argument = {node: Argument(i) for node, i in zip(inputs, tensors, strict=False)}
    return tuple(
        slot if isinstance(slot, Constant) else argument.get(imported.graph.outputs[slot], slot)
        for slot in imported.outputs
    )
