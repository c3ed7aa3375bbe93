"""The front half of a torch.compile backend: what Dynamo captured, as a graph and how to call it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from egcompile.errors import EgcompileError, TraceError
from egcompile.frontend import _torch
from egcompile.frontend.aten import KEPT
from egcompile.frontend.autocast import cast_before_losses
from egcompile.frontend.grad_mode import detach_no_grad_values
from egcompile.frontend.importer import Binding, Constant, FxGraph, identifiers, import_fx
from egcompile.frontend.origins import module_path, origin_of
from egcompile.ir import Graph


@dataclass(frozen=True)
class Argument:
    """An output that is the argument of that index itself, or a view of its memory; not a copy of it.

    `view` is (shape, strides, elements between their starts) of a view; `detached` cuts its gradient, as a
    view made by `detach` or under `no_grad` has none.
    """

    index: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    detached: bool = False

    def of(self, args: Sequence[Any]) -> Any:
        """The output itself, from the arguments of a call."""
        x = args[self.index]
        if self.view is None:
            return x
        shape, strides, offset = self.view
        x = x.detach() if self.detached else x
        return x.as_strided(shape, strides, x.storage_offset() + offset)


@dataclass(frozen=True)
class Number:
    """An output that is a 0-d tensor on the CPU, in a graph that lies elsewhere."""

    position: int


@dataclass(frozen=True, eq=False)
class Imported:
    """A captured graph, and how a callable with the captured arguments' convention runs it.

    With `args` as Dynamo passes them:

        values = run(graph, [*(args[i] for i in input_indices), *constants])
        for index, position in mutated:  args[index].copy_(values[position])
        return [resolve(output) for output in outputs]

    where an output is an index into `values`, a `Number`, an `Argument`, or a `Constant`. Sizes and Python
    numbers among the arguments are those of the example, and the caller imports again for others.

    graph          inputs: the tensors among the arguments, named by their place in the model; constants
    input_indices  for each input but the constants, which argument it is
    constants      tensors that the captured code holds: the values of the last inputs
    outputs        one entry an output of the captured graph
    mutated        (argument index, index into the graph's outputs) for every argument changed in place
    requires_grad  for every input
    device         where the graph lies; numbers, as 0-d tensors on a CPU, and constants may lie elsewhere
    """

    graph: Graph
    input_indices: tuple[int, ...]
    constants: tuple[Tensor, ...]
    outputs: tuple[int | Number | Argument | Constant, ...]
    mutated: tuple[tuple[int, int], ...]
    requires_grad: tuple[bool, ...]
    device: torch.device


@dataclass(frozen=True, eq=False)
class Capture:
    """A captured graph made ready to import for several sizes.

    Made while the backend is called: afterwards Dynamo forgets where its inputs came from.
    """

    gm: fx.GraphModule
    names: tuple[str, ...]

    @staticmethod
    def of(gm: fx.GraphModule) -> Capture:
        """Raises TraceError where AOTAutograd would lose a gradient's meaning; `gm` stays as it is."""
        _refuse_lost_gradients(gm)
        if any(True for _ in gm.parameters()):
            raise TraceError(
                "the captured graph owns parameters; set inline_inbuilt_nn_modules in torch._dynamo"
            )
        names = tuple(map(_input_name, gm.graph.find_nodes(op="placeholder")))
        ready = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        _wrapped_numbers_stay_tensors(ready)
        detach_no_grad_values(ready)
        cast_before_losses(ready)
        return Capture(ready, names)

    def specialize(self, args: Sequence[Any], *, opaque: bool = True) -> Imported:
        """The graph for the sizes and numbers of `args`.

        Raises UnsupportedOp for an op that no node can be (with `opaque=False`, any outside the table), and
        TraceError for what depends on data or changes an argument that requires grad in place.
        """
        functional, signature = _trace(self.gm, args)
        tensors = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
        bindings: list[Binding] = [Constant(_torch.static_number(x)) for x in args]
        for i, name in zip(tensors, identifiers([self.names[i] for i in tensors]), strict=True):
            bindings[i] = name
        imported = import_fx(functional, bindings, opaque=opaque)
        _verify_outputs(self.gm, functional)
        mutated = _mutated(functional, signature, imported)
        for index, _ in mutated:
            if args[index].requires_grad:
                raise TraceError(f"{self.names[index]} requires grad and is changed in place; clone it first")
        return Imported(
            graph=imported.graph,
            input_indices=tuple(tensors),
            constants=imported.constants,
            outputs=_outputs(self.gm, _with_numbers(imported)[len(mutated) :]),
            mutated=mutated,
            requires_grad=(*(args[i].requires_grad for i in tensors), *(False for _ in imported.constants)),
            device=imported.device,
        )


def _wrapped_numbers_stay_tensors(gm: fx.GraphModule) -> None:
    """`x * item(s)`  -->  `x * s`, for a float `s` that Dynamo passes as a 0-d tensor."""
    for node in gm.graph.find_nodes(op="call_method", target="item"):
        if _torch.is_wrapped_number(node.args[0]):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def _trace(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[fx.GraphModule, Any]:
    try:
        return _torch.aot_forward(gm, example_inputs, KEPT)
    except EgcompileError:
        raise
    except Exception as error:
        raise _torch.trace_error("AOTAutograd", error) from error


_REFUSED = {
    "autograd_function_apply": "a custom autograd.Function",
    "register_hook": "a hook on a tensor",
    "inference_mode": "torch.inference_mode",
    "_grad_increment_nesting": "torch.func.grad, or another transform that takes gradients,",
}
"""Calls whose effect on gradients AOTAutograd's forward graph would forget."""


def _refuse_lost_gradients(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        for call, what in _REFUSED.items():
            if call in str(node.target) and node.op == "call_function":
                raise TraceError(f"{what} cannot be compiled, at {origin_of(node.meta) or node.name}")


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


def _with_numbers(imported: FxGraph) -> list[int | Number | Constant]:
    return [
        Number(slot) if i in imported.numbers and isinstance(slot, int) else slot
        for i, slot in enumerate(imported.outputs)
    ]


def _outputs(
    gm: fx.GraphModule, slots: Sequence[int | Number | Constant]
) -> tuple[int | Number | Argument | Constant, ...]:
    """The outputs; those that are an argument (after a change in place, say) or a view of one marked so."""
    arguments = {
        i: value
        for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))
        if isinstance(value := _torch.example(node), Tensor)
    }
    return tuple(
        _argument(_torch.example(node), arguments) or slot
        for node, slot in zip(_returned(gm), slots, strict=True)
    )


def _argument(value: Any, arguments: Mapping[int, Tensor]) -> Argument | None:
    """The argument that an output is, or is a view of; at open sizes a view is not seen, and is a copy."""
    for i, argument in arguments.items():
        if argument is value:
            return Argument(i)
    if not isinstance(value, Tensor) or not _has_plain_memory(value):
        return None
    for i, argument in arguments.items():
        if not _has_plain_memory(argument) or argument.dtype != value.dtype:
            continue
        if _torch.storage_key(argument) == _torch.storage_key(value):
            offset = int(value.storage_offset()) - int(argument.storage_offset())
            view = tuple(value.shape), value.stride(), offset
            return Argument(i, view, detached=argument.requires_grad and not value.requires_grad)
    return None


def _has_plain_memory(x: Tensor) -> bool:
    """Strided, and at sizes that are known."""
    return x.layout == torch.strided and all(
        isinstance(n, int) for n in (*x.shape, *x.stride(), x.storage_offset())
    )


def _verify_outputs(captured: fx.GraphModule, functional: fx.GraphModule) -> None:
    """A float that became a tensor could change a dtype, since it promotes unlike a Python number."""
    returned, computed = _returned(captured), _returned(functional)
    for node, result in zip(returned, computed[len(computed) - len(returned) :], strict=True):
        wanted, found = _torch.example(node), _torch.example(result)
        if isinstance(wanted, Tensor) and isinstance(found, Tensor) and wanted.dtype != found.dtype:
            raise TraceError(
                f"output {node} came out as {found.dtype} where PyTorch has {wanted.dtype}; a Python float "
                "that changes between calls promotes as a tensor, so pass it as a tensor"
            )


def _returned(gm: fx.GraphModule) -> list[Any]:
    return list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
