"""The front half of a torch.compile backend: what Dynamo captured, as a graph and how to call it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from egcompile.errors import EgcompileError, TraceError
from egcompile.frontend import _torch
from egcompile.frontend.aliases import Argument, Shared, may_share, return_bases, sharing
from egcompile.frontend.aten import KEPT
from egcompile.frontend.autocast import cast_before_losses
from egcompile.frontend.grad_mode import detach_no_grad_values, enables_grad
from egcompile.frontend.importer import Binding, Constant, FxGraph, identifiers, import_fx
from egcompile.frontend.origins import module_path, origin_of
from egcompile.ir import Graph

T = TypeVar("T")


@dataclass(frozen=True)
class Number:
    """An output that is a 0-d tensor on the CPU, in a graph that lies elsewhere."""

    position: int


Output = int | Number | Argument | Shared | Constant


@dataclass(frozen=True, eq=False)
class Imported:
    """A captured graph, and how a callable with the captured arguments' convention runs it.

    With `args` as Dynamo passes them:

        values = run(graph, [*(args[i] for i in input_indices), *constants])
        for index, position in mutated:  args[index].copy_(values[position])
        return [resolve(output) for output in outputs]

    where an output is an index into `values`, a `Number`, an `Argument`, a `Shared`, or a `Constant`. Sizes
    and Python numbers among the arguments are those of the example, and the caller imports again for others.

    graph          inputs: the tensors among the arguments, named by their place in the model; constants
    input_indices  for each input but the constants, which argument it is
    constants      tensors that the captured code holds: the values of the last inputs
    outputs        one entry an output of the captured graph
    mutated        (argument index, index into the graph's outputs) for every argument changed in place
    requires_grad  for every input
    numbers        floats among the arguments, 0-d tensors, that have the values of the example's in the graph
    enables        whether it is to run with gradients on even where they are off: what has none is detached
    device         where the graph lies; numbers, as 0-d tensors on a CPU, and constants may lie elsewhere
    """

    graph: Graph
    input_indices: tuple[int, ...]
    constants: tuple[Tensor, ...]
    outputs: tuple[Output, ...]
    mutated: tuple[tuple[int, int], ...]
    requires_grad: tuple[bool, ...]
    numbers: tuple[int, ...]
    enables: bool
    device: torch.device


@dataclass(frozen=True, eq=False)
class Capture:
    """A captured graph made ready to import for several sizes.

    Made while the backend is called: afterwards Dynamo forgets where its inputs came from.

    numbers which arguments are floats that Dynamo passes as 0-d tensors, since they have changed
    enables whether parts have gradients on though the caller has them off
    bases   how many of the graph's outputs, the last ones, are there only for others to be views of them
    shares  whether outputs share memory, with an argument or with each other
    """

    gm: fx.GraphModule
    names: tuple[str, ...]
    numbers: tuple[int, ...]
    enables: bool
    bases: int
    shares: bool

    @staticmethod
    def of(gm: fx.GraphModule) -> Capture:
        """Raises GraphBreak where AOTAutograd would lose a gradient's meaning; `gm` stays as it is."""
        _refuse_lost_gradients(gm)
        if any(True for _ in gm.parameters()):
            raise TraceError(
                "the captured graph owns parameters; set inline_inbuilt_nn_modules in torch._dynamo"
            )
        names = tuple(map(_input_name, gm.graph.find_nodes(op="placeholder")))
        ready = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        _wrapped_numbers_stay_tensors(ready)
        bases = return_bases(ready)
        outside = torch.is_grad_enabled()
        enables = not outside and enables_grad(ready)
        if outside or enables:
            detach_no_grad_values(ready, enabled=outside)
        cast_before_losses(ready)
        placeholders = gm.graph.find_nodes(op="placeholder")
        numbers = tuple(i for i, node in enumerate(placeholders) if _torch.is_wrapped_number(node))
        return Capture(ready, names, numbers, enables, bases, may_share(ready, bases))

    def specialize(self, args: Sequence[Any], *, opaque: bool = True) -> Imported:
        """The graph for the sizes and numbers of `args`.

        A float is an input, as a tensor; where it cannot be, as the probability of a dropout cannot, floats
        are those of `args`. Raises UnsupportedOp for an op that no node can be (with `opaque=False`, any
        outside the table), and TraceError for what depends on data or changes an argument that requires
        grad in place.
        """
        try:
            return self._specialize(args, opaque)
        except TraceError:
            if not self.numbers:
                raise
        fixed = replace(self, gm=_with_numbers(self.gm, {i: args[i].item() for i in self.numbers}))
        return replace(fixed._specialize(args, opaque), numbers=self.numbers)

    def _specialize(self, args: Sequence[Any], opaque: bool) -> Imported:
        functional, signature = _guarded(_torch.aot_forward, self.gm, args, KEPT)
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
        outputs = self._outputs(args, imported, len(mutated))
        read = sorted({position for _, position in mutated}.union(*map(_positions, outputs)))
        place = {position: i for i, position in enumerate(read)}
        graph = imported.graph
        return Imported(
            graph=Graph(graph.inputs, tuple(graph.outputs[i] for i in read), origins=graph.origins),
            input_indices=tuple(tensors),
            constants=imported.constants,
            outputs=tuple(_moved(output, place) for output in outputs),
            mutated=tuple((index, place[position]) for index, position in mutated),
            requires_grad=(*(args[i].requires_grad for i in tensors), *(False for _ in imported.constants)),
            numbers=(),
            enables=self.enables,
            device=imported.device,
        )

    def _outputs(self, args: Sequence[Any], imported: FxGraph, mutated: int) -> list[Output]:
        """What each output of the captured graph is, once the values of what is `mutated` are set aside."""
        slots: list[Output] = list(imported.outputs[mutated:])
        for i in imported.numbers:
            if i >= mutated and isinstance(position := imported.outputs[i], int):
                slots[i - mutated] = Number(position)
        returned = len(slots) - self.bases
        if not self.shares:
            return slots
        arguments, results = _guarded(_torch.run_fake, self.gm, args)
        outputs = slots[:returned]
        for i, found in enumerate(sharing(arguments, results[:returned], results[returned:])):
            match found:
                case Argument():
                    outputs[i] = found
                case Shared() if isinstance(slot := slots[returned + found.position], int):
                    outputs[i] = replace(found, position=slot)
        return outputs


def _positions(output: Output) -> set[int]:
    """Which of the graph's outputs are read."""
    match output:
        case int():
            return {output}
        case Number() | Shared():
            return {output.position}
    return set()


def _moved(output: Output, place: Mapping[int, int]) -> Output:
    match output:
        case int():
            return place[output]
        case Number() | Shared():
            return replace(output, position=place[output.position])
    return output


def _wrapped_numbers_stay_tensors(gm: fx.GraphModule) -> None:
    """`x * item(s)`  -->  `x * s`, for a float `s` that Dynamo passes as a 0-d tensor."""
    for node in gm.graph.find_nodes(op="call_method", target="item"):
        if _torch.is_wrapped_number(node.args[0]):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def _with_numbers(gm: fx.GraphModule, values: Mapping[int, float]) -> fx.GraphModule:
    """A copy of `gm` with Python floats in the places of some arguments, which nothing reads then."""
    fixed = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    placeholders = fixed.graph.find_nodes(op="placeholder")
    known = {placeholders[i]: value for i, value in values.items()}
    for user in {user for node in known for user in node.users}:
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: known.get(n, n))
    fixed.recompile()
    return fixed


def _guarded(tool: Callable[..., T], *args: Any) -> T:
    """What a tool of PyTorch's gives; raises TraceError where it raises."""
    try:
        return tool(*args)
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
                raise _torch.GraphBreak(f"{what} cannot be compiled, at {origin_of(node.meta) or node.name}")


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


def _verify_outputs(captured: fx.GraphModule, functional: fx.GraphModule) -> None:
    """A float that became a tensor could change a dtype, since it promotes unlike a Python number."""
    returned, computed = _torch.returned(captured), _torch.returned(functional)
    for node, result in zip(returned, computed[len(computed) - len(returned) :], strict=True):
        wanted, found = _torch.example(node), _torch.example(result)
        if isinstance(wanted, Tensor) and isinstance(found, Tensor) and wanted.dtype != found.dtype:
            raise TraceError(
                f"output {node} came out as {found.dtype} where PyTorch has {wanted.dtype}; a Python float "
                "that changes between calls promotes as a tensor, so pass it as a tensor"
            )
