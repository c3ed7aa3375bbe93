"""Every use of PyTorch's private interfaces by the frontend, for torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import fx, nn
from torch._C import _functorch as functorch
from torch._functorch.aot_autograd import aot_export_module
from torch._guards import tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.export import ExportedProgram, default_decompositions, exported_program
from torch.export.exported_program import (
    _override_composite_implicit_decomp,
    _split_decomp_table_to_cia_and_python_decomp,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.proxy import TracerBase
from torch.utils import _pytree as pytree

import egcompile
from egcompile.errors import NoGradientRule, TraceError, TypeMismatch
from egcompile.frontend.decompositions import DECOMPOSITIONS
from egcompile.ir import TensorType, is_differentiable

SET_GRAD_ENABLED = torch._C._set_grad_enabled
GRAD_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
_DATA_DEPENDENT = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)

TreeSpec = pytree.TreeSpec
OpOverload = torch._ops.OpOverload

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LIBRARIES = tuple(path + os.sep for package in (torch, egcompile) for path in package.__path__)


class GraphBreak(TraceError, UnsupportedFakeTensorException):
    """A TraceError on which Dynamo leaves the function to Python, and goes on with what that calls.

    The second base is one of those after which Dynamo does so, unless `fullgraph` forbids it.
    """


def source_line(trace: str | Sequence[tuple[str, str]]) -> str:
    """The innermost frame of a stack that is the user's, as `model.py:42`; "" if there is none."""
    frames = _FRAME.findall(trace) if isinstance(trace, str) else trace
    for file, line in reversed(frames):
        if not file.startswith(_LIBRARIES) and not file.startswith("<frozen"):
            return f"{os.path.basename(file)}:{line}"
    return ""


def trace_error(tool: str, error: Exception) -> TraceError:
    """What an exception inside of torch's tracing means to the one who called."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    frames = [(f.filename, str(f.lineno)) for f in traceback.extract_tb(error.__traceback__)]
    place = source_line(frames) or source_line(str(error))
    where = f", at {place}" if place else ""
    if isinstance(error, _DATA_DEPENDENT):
        return TraceError(
            "the model's control flow, a shape or a Python number depends on the data of a tensor: "
            f"compute it with tensor ops such as torch.where, or leave that part out ({line}){where}"
        )
    return TraceError(f"{tool} failed: {type(error).__name__}: {line}{where}")


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    return pytree.tree_flatten(tree)


def flatten_with_names(tree: Any) -> list[tuple[str, Any]]:
    """Each leaf with its dotted path: `{"x": [a, b]}` gives `x.0` and `x.1`."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return [(".".join(map(_key_name, path)), leaf) for path, leaf in leaves]


def _key_name(key: Any) -> str:
    for field in ("key", "idx", "name"):
        if hasattr(key, field):
            return str(getattr(key, field))
    return str(key)


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    return pytree.tree_unflatten(leaves, spec)


def export(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    """The pre-dispatch program of `module`, static in every size."""
    with mock.patch.object(TracerBase, "_filter_traceback_frames", _frames_of_the_model, create=True):
        return torch.export.export(module, args, kwargs, strict=False)


def _frames_of_the_model(_: TracerBase, stack: traceback.StackSummary) -> traceback.StackSummary:
    """The model's own calls, of whatever name; torch keeps those of functions called `forward`."""
    start = next((i for i, frame in enumerate(stack) if frame.name == "forward"), len(stack))
    frames = [frame for frame in stack[start:] if not frame.filename.startswith(_LIBRARIES)]
    return traceback.StackSummary.from_list(frames)


_SPLITTING = threading.RLock()


def decompose(program: ExportedProgram, keep: frozenset[OpOverload]) -> ExportedProgram:
    """The functional ATen program, with the ops `keep` whole."""
    ours: Any = {"keep": keep}

    def split(table: Any) -> Any:
        """Of another thread's table as ever."""
        return _overrides(keep) if table == ours else _split_decomp_table_to_cia_and_python_decomp(table)

    name = _split_decomp_table_to_cia_and_python_decomp.__name__
    with _SPLITTING, mock.patch.object(exported_program, name, split), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own copy of its tree specs
        _interpret_regions(program.graph_module)
        return program.run_decompositions(ours)


def _interpret_regions(gm: fx.GraphModule) -> None:
    """Has the bodies of no-grad and autocast regions run node by node, so that their origins survive."""
    for body in gm.modules():
        if body is not gm and isinstance(body, fx.GraphModule):
            body.forward = fx.Interpreter(body).run


@functools.cache
def _overrides(keep: frozenset[OpOverload]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Rules for composite ops, and for others, that leave the ops `keep` whole; all of them are ATen's.

    Of composite ops, those alone that are not taken apart as ATen does. The rest, 500, needs none, and to put
    one in each one's place and take it away again lasts longer than to trace a small graph. What is
    registered later for another than a composite op is not seen.
    """
    usual: dict[Any, Any] = dict(default_decompositions())
    composite, python = _split_decomp_table_to_cia_and_python_decomp(
        {op: rule for op, rule in usual.items() if op not in keep} | DECOMPOSITIONS
    )
    return {op: rule for op, rule in composite.items() if rule is not usual.get(op)}, python


def out_spec(program: ExportedProgram) -> TreeSpec:
    spec = program.call_spec.out_spec
    assert spec is not None
    return spec


def parameters_to_mutate(program: ExportedProgram) -> Mapping[str, str]:
    """Placed in the signature from torch 2.9 on."""
    return getattr(program.graph_signature, "parameters_to_mutate", {})


def aot_forward(
    gm: fx.GraphModule, example_inputs: Sequence[Any], keep: frozenset[OpOverload]
) -> tuple[fx.GraphModule, Any]:
    """The functional ATen forward graph of a Dynamo graph, and its signature.

    Inputs may be real, fake or SymInt; the trace has static sizes and a fake mode of its own, and leaves
    Dynamo's tracing context and guards alone.
    """
    composite, python = _overrides(keep)
    mode = FakeTensorMode(static_shapes=True, allow_non_fake_inputs=True)
    inputs = [_static(mode, x) for x in example_inputs]
    with tracing(None), mode, _override_composite_implicit_decomp(composite):
        graph, signature = aot_export_module(
            gm,
            inputs,
            trace_joint=False,
            decompositions=python,
        )
    assert isinstance(graph, fx.GraphModule)
    return graph, signature


def run_fake(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Inputs and outputs of a run of a Dynamo graph on fake tensors, which share memory as real ones do."""
    mode = FakeTensorMode(static_shapes=True, allow_non_fake_inputs=True)
    inputs = [_static(mode, x) for x in example_inputs]
    for value, x in zip(inputs, example_inputs, strict=True):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            value.requires_grad_()
    with tracing(None), mode, torch.set_grad_enabled(torch.is_grad_enabled()):
        return inputs, list(fx.Interpreter(gm).run(*inputs))


def _static(mode: FakeTensorMode, x: Any) -> Any:
    """The input in `mode`, sizes as numbers, without a guard on any of them."""
    if not isinstance(x, torch.Tensor):
        return static_number(x)
    if isinstance(x, FakeTensor):
        sizes, strides = (tuple(map(static_number, numbers)) for numbers in (x.shape, x.stride()))
        with mode:
            return torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)
    return mode.from_tensor(x.detach() if x.requires_grad else x, static_shapes=True)


def static_number(x: Any) -> Any:
    """The example's value of a symbolic number, without a guard on it; other values as they are."""
    return x.node.hint if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) else x


def returned(gm: fx.GraphModule) -> list[Any]:
    """What a graph returns: nodes, and constants as they are."""
    values: Any = gm.graph.output_node().args[0]
    return list(values)


def example(node: Any) -> Any:
    """The example value that a tracer left on an fx node; None on what is no node or has none."""
    return node.meta.get("val", node.meta.get("example_value")) if isinstance(node, fx.Node) else None


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones and those that a transform wraps too."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()._cdata


def is_wrapped_number(node: Any) -> bool:
    """Whether a placeholder is a Python float that Dynamo passes as a 0-d tensor, since it has changed."""
    return isinstance(node, fx.Node) and getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False)


def source_name(placeholder: fx.Node) -> str:
    """Where Dynamo read an input: `L['self']._modules['norm']._parameters['weight']`; "" if not known."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    if source is None:
        return ""
    name = source.name
    return str(name() if callable(name) else name)


@contextlib.contextmanager
def refusing_lost_semantics() -> Iterator[None]:
    """Within it, what torch.export would silently drop raises TraceError instead."""
    leave = "use egcompile.compile for this model, or leave it out"
    enter = torch.inference_mode.__enter__

    def enter_inference(mode: torch.inference_mode) -> None:
        if mode.mode:  # torch itself enters inference_mode(False)
            _refuse("torch.inference_mode", "use torch.no_grad instead")
        enter(mode)

    def apply(function: type, *_: Any, **__: Any) -> NoReturn:
        _refuse(f"the custom autograd.Function {function.__name__}", leave)

    def register_hook(*_: Any) -> NoReturn:
        _refuse("a hook on a tensor", leave)

    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        mock.patch.object(torch.Tensor, "register_hook", register_hook),
        mock.patch.object(torch.inference_mode, "__enter__", enter_inference),
    ):
        yield


def _refuse(what: str, advice: str) -> NoReturn:
    raise TraceError(f"{what} cannot be traced, since torch.export would drop it without a word: {advice}")


def has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


# ---- opaque ops ----
Assemble = Callable[[Sequence[Any], torch.device], tuple[list[Any], dict[str, Any]]]
"""From an op's tensors, and the device of new ones, to its positional and keyword arguments."""

_CPU = torch.device("cpu")
_NAMES_ONLY = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
"""What autograd puts around its saved values. Left in, they would make second derivatives zero."""

_ONE_FORM = frozenset({torch.ops.aten.index_reduce.default, torch.ops.aten.scatter_reduce.two})
"""Of all others, PyTorch computes a derivative that is to be differentiated again from what allows that: of
`solve`, from its matrix and not from the factors. Here it would only look for zeros in the data."""

_WITH_EVERY_COTANGENT = frozenset({torch.ops.aten.linalg_eig.default})
"""Ops whose derivative is not the sum of those for each result: eigenvectors are known up to a phase, and the
part of a cotangent that turns it is dropped only if there is one of the eigenvalues too."""


def tensors_in(tree: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def contains(tree: Any, kind: type) -> bool:
    return any(isinstance(leaf, kind) for leaf in pytree.tree_leaves(tree))


def fake_call(overload: OpOverload, types: Sequence[TensorType], assemble: Assemble) -> Any:
    """What a call gives on tensors of `types`, fake; raises TypeMismatch where ATen refuses it."""
    with _fakes(types) as tensors:
        args, kwargs = assemble(tensors, _CPU)
        try:
            return overload(*args, **kwargs)
        except (*_DATA_DEPENDENT, RuntimeError, TypeError, ValueError, IndexError) as error:
            raise TypeMismatch(f"{overload} of {', '.join(map(str, types))}: {error}") from error


def outputs_with_gradients(
    overload: OpOverload, types: Sequence[TensorType], assemble: Assemble
) -> list[bool]:
    """Whether each tensor that a call gives has a gradient with respect to some operand."""
    found: list[bool] = []
    with _fakes(types) as tensors, torch.enable_grad():
        for operand in tensors:
            if not is_differentiable(operand.dtype):
                continue
            operand.requires_grad_()
            args, kwargs = assemble(tensors, _CPU)
            try:
                flags = [value.requires_grad for value in tensors_in(overload(*args, **kwargs))]
            except RuntimeError:  # an operand that PyTorch refuses a gradient, such as a running mean
                flags = []
            found = [a or b for a, b in itertools.zip_longest(found, flags, fillvalue=False)]
            operand.requires_grad_(False)
    return found


@contextlib.contextmanager
def _fakes(types: Sequence[TensorType]) -> Iterator[list[torch.Tensor]]:
    """Tensors of these types without memory, in a mode of their own."""
    with (
        tracing(None),
        torch.autocast("cpu", enabled=False),
        FakeTensorMode(static_shapes=True, allow_non_fake_inputs=True),
    ):
        yield [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in types]


def trace_gradients(
    overload: OpOverload,
    types: Sequence[TensorType],
    assemble: Assemble,
    cotangents: Sequence[int],
    operands: Sequence[int],
    keep: frozenset[OpOverload],
) -> tuple[fx.GraphModule, list[int]]:
    """PyTorch's derivative of an op as a functional ATen graph, and the operands that it has results for.

    The graph takes the op's tensors, all its results, and the cotangents of the results `cotangents`; what
    autograd would save of the results, it takes from there. Ops in `keep` stay whole. Raises NoGradientRule
    where PyTorch has no derivative, or has one that draws random numbers.
    """
    flows: list[int] = []

    def gradients(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        xs = values[: len(types)]
        args, kwargs = assemble(xs, _CPU)
        ys = tensors_in(overload(*args, **kwargs))
        cts = dict(zip(cotangents, values[len(types) + len(ys) :], strict=True))
        if overload in _WITH_EVERY_COTANGENT:
            cts = {i: cts.get(i, torch.zeros_like(y)) for i, y in enumerate(ys)}
        pairs = [(ys[i], ct) for i, ct in cts.items() if ys[i].requires_grad]
        if not pairs:
            return tuple(ys)
        roots, weights = zip(*pairs, strict=True)
        found = torch.autograd.grad(
            roots,
            [xs[i] for i in operands],
            weights,
            allow_unused=True,
            create_graph=overload not in _ONE_FORM,
        )
        flows.extend(i for i, g in zip(operands, found, strict=True) if g is not None)
        return *ys, *(g for g in found if g is not None)

    results = tensors_in(fake_call(overload, types, assemble))
    each = [*types, *map(TensorType.of, results), *(TensorType.of(results[i]) for i in cotangents)]
    try:
        with _fakes(each) as values, torch.enable_grad():
            for i in operands:
                values[i].requires_grad_()
            gm = make_fx(gradients)(*values)
        _take_results(gm, len(types), len(results))
        composite, python = _overrides(keep)
        with _fakes(each) as values, torch.no_grad(), _override_composite_implicit_decomp(composite):
            table: Any = python
            functional = make_fx(torch.func.functionalize(gm), decomposition_table=table)(*values)
    except (*_DATA_DEPENDENT, RuntimeError, NotImplementedError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NoGradientRule(f"PyTorch has no derivative of {overload} that can be traced: {line}") from error
    _remove_names(functional)
    functional.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    for node in functional.graph.nodes:
        if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            raise NoGradientRule(
                f"the derivative of {overload} draws random numbers ({node.target}): make the draw an op "
                "of its own, such as a dropout"
            )
    return functional, flows


def _take_results(gm: fx.GraphModule, operands: int, results: int) -> None:
    """Reads the op's results, which the graph returns first, from its inputs, and returns the rest only."""
    _remove_names(gm)
    values = returned(gm)
    inputs = gm.graph.find_nodes(op="placeholder")
    gm.graph.output_node().args = (tuple(values[results:]),)
    for node, given in zip(values[:results], inputs[operands:], strict=False):
        if isinstance(node, fx.Node) and node.op == "call_function":
            node.replace_all_uses_with(given)
    gm.graph.eliminate_dead_code(_is_wanted)
    gm.recompile()


def _remove_names(gm: fx.GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.target in _NAMES_ONLY:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.recompile()


def _is_wanted(node: fx.Node) -> bool:
    """Whether a node without users does something: it is an input, an output, or changes something."""
    changes = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    return changes or node.op in ("placeholder", "output")
