"""ATen ops outside the import table, as opaque nodes: ATen runs them, and PyTorch has their derivative.

    aten.topk(x, 3, dim=0)   -->   %0, %1: f64[3], i64[3] = aten_topk(%x, arguments='[..., 3, 0]')

An overload is one op for each number of tensors that it gives. Its tensors are the operands, in order; the
other arguments are a canonical text, in which `...` stands for the next tensor. Two draws of a random op
have different keys.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from egcompile.errors import TypeMismatch, UnsupportedOp
from egcompile.frontend import _torch
from egcompile.frontend._torch import OpOverload
from egcompile.ir import Node, TensorType, ValueType, is_differentiable
from egcompile.ops import Kind, OpDef, register, stop_gradient
from egcompile.ops.opdef import Derivative

aten = torch.ops.aten

_PREFIX = "torch."
"""How the text of a dtype, a layout or a memory format starts."""

_CPU = torch.device("cpu")
_NOT_A_NUMBER = "torch.nan"


def opaque(
    overload: OpOverload, arguments: Sequence[Any], example: Any, key: int, derivative: Derivative
) -> Any:
    """The node of a call, in the structure of its `example` result: a node for each tensor.

    `arguments` are in the schema's order, tensors as nodes; `key` tells a random call from others.
    `derivative` is of the op. Raises UnsupportedOp for arguments that no text can hold, for an op that
    changes them, and for a result that is neither a tensor nor a sequence of them.
    """
    if overload._schema.is_mutable:
        raise UnsupportedOp(f"{overload} changes its arguments in place")
    operands: list[Node] = []
    text = arguments_text(overload, arguments, operands)
    count = len(_torch.tensors_in(example))
    if not count:
        raise UnsupportedOp(f"{overload} gives no tensor")
    op = _op(overload, count, derivative)
    attrs: dict[str, Any] = {"arguments": text}
    if op.random:
        attrs["key"] = key
        if not _draws_with_gradient(overload, text, operands):
            operands = [_detached(operand) for operand in operands]
    node = op(*operands, **attrs)
    if isinstance(example, Tensor):
        return node
    outputs = iter(_without_false_gradients(overload, tuple(node) if count > 1 else (node,), text, operands))
    return tuple(next(outputs) if isinstance(value, Tensor) else value for value in example)


def _draws_with_gradient(overload: OpOverload, text: str, operands: Sequence[Node]) -> bool:
    """Whether a draw has a gradient. `randn_like` and its kin read the shape alone, whatever ATen says."""
    if overload._schema.name.endswith("_like"):
        return False
    return any(_flows(overload, text, tuple(operand.tensor for operand in operands)))


def _detached(x: Node) -> Node:
    return stop_gradient(x) if x.dtype.is_floating_point else x


def _without_false_gradients(
    overload: OpOverload, outputs: Sequence[Node], text: str, operands: Sequence[Node]
) -> Iterator[Node]:
    """Outputs that PyTorch gives no gradient, such as BatchNorm's new running mean, are detached."""
    flows = _flows(overload, text, tuple(operand.tensor for operand in operands))
    for i, output in enumerate(outputs):
        constant = is_differentiable(output.dtype) and not (i < len(flows) and flows[i])
        yield stop_gradient(output) if constant else output


@functools.lru_cache(maxsize=4096)
def _flows(overload: OpOverload, text: str, types: tuple[TensorType, ...]) -> list[bool]:
    return _torch.outputs_with_gradients(
        overload, types, lambda tensors, device: arguments_of(overload, text, tensors, device)
    )


@functools.cache
def _op(overload: OpOverload, count: int, derivative: Derivative) -> OpDef:
    attrs = {"arguments": "str"}
    random = torch.Tag.nondeterministic_seeded in overload.tags
    if random:
        attrs["key"] = "int"
    return register(
        OpDef(
            _name(overload, count),
            Kind.EXTERN,
            ("*tensors",),
            attrs,
            outputs=_outputs(overload, count),
            type_rule=_type_rule(overload),
            evaluate=_evaluate(overload),
            derivative=derivative,
            random=random,
        )
    )


def _name(overload: OpOverload, count: int) -> str:
    """`aten_topk`, `aten_sort_stable`; with the number of outputs where the schema leaves it open."""
    name = str(overload).removesuffix(".default").replace(".", "_").replace("::", "_")
    fixed = [str(value.type) for value in overload._schema.returns]
    return name if len(fixed) == count and "List[Tensor]" not in fixed else f"{name}_{count}"


def _outputs(overload: OpOverload, count: int) -> tuple[str, ...]:
    names = [value.name for value in overload._schema.returns]
    if len(names) == count and all(names):
        return tuple(names)
    return ("y",) if count == 1 else tuple(f"y{i}" for i in range(count))


# ---- arguments as text ----
def arguments_text(overload: OpOverload, arguments: Sequence[Any], operands: list[Node]) -> str:
    """The arguments as text, whose tensors are appended to `operands`; trailing defaults are left out.

    The device is that of the operands when the op is called, and no part of the text.
    """
    schema = overload._schema.arguments
    values = [None if a.name == "device" else v for a, v in zip(schema, arguments, strict=True)]
    while (
        values
        and schema[len(values) - 1].has_default_value()
        and _is_default(values[-1], schema[len(values) - 1].default_value)
    ):
        values.pop()
    return f"[{', '.join(_text(overload, value, operands) for value in values)}]"


def _is_default(value: Any, default: Any) -> bool:
    return not _torch.contains(value, Node) and type(value) is type(default) and value == default


def _text(overload: OpOverload, value: Any, operands: list[Node]) -> str:
    match value:
        case Node():
            operands.append(value)
            return "..."
        case tuple() | list():
            return f"[{', '.join(_text(overload, v, operands) for v in value)}]"
        case float() if not math.isfinite(value):
            return repr(_NOT_A_NUMBER) if math.isnan(value) else f"{'-' if value < 0 else ''}1e999"
        case None | bool() | int() | float() | complex() | str():
            return repr(value)
        case torch.dtype() | torch.layout() | torch.memory_format():
            return repr(str(value))
    raise UnsupportedOp(f"{overload} has an argument of type {type(value).__name__}, which no graph can hold")


def arguments_of(
    overload: OpOverload, text: str, tensors: Sequence[Any], device: torch.device
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments for a call, from their text; raises TypeMismatch where a tensor is
    missing or left over.
    """
    rest = iter(tensors)
    values = [_value(v, rest) for v in _parsed(text)]
    if next(rest, None) is not None:
        raise TypeMismatch(f"{overload} with the arguments {text} takes fewer than {len(tensors)} tensors")
    schema = overload._schema.arguments
    given = {a.name: v for a, v in zip(schema, values, strict=False)}
    if any(a.name == "device" for a in schema):
        given["device"] = device
    args: list[Any] = []
    for argument in schema:
        if argument.kwarg_only or argument.name not in given:
            break
        args.append(given.pop(argument.name))
    return args, given


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    values: list[Any] = ast.literal_eval(text)
    return values


def _value(value: Any, tensors: Iterator[Any]) -> Any:
    if value is ...:
        try:
            return next(tensors)
        except StopIteration:
            raise TypeMismatch("a call has fewer tensors than its arguments name") from None
    if isinstance(value, list):
        return [_value(v, tensors) for v in value]
    if isinstance(value, str) and value.startswith(_PREFIX):
        return getattr(torch, value.removeprefix(_PREFIX))
    return value


# ---- meaning ----
def _type_rule(overload: OpOverload) -> Callable[..., ValueType]:
    def rule(*types: TensorType, arguments: str, key: int = 0) -> ValueType:
        result = _torch.fake_call(
            overload, types, lambda tensors, device: arguments_of(overload, arguments, tensors, device)
        )
        found = tuple(map(TensorType.of, _torch.tensors_in(result)))
        return found[0] if len(found) == 1 else found

    return rule


def _evaluate(overload: OpOverload) -> Callable[..., Any]:
    by_memory = any(value.alias_info is not None for value in overload._schema.returns)

    def evaluate(*tensors: Tensor, arguments: str, key: int = 0, device: torch.device | None = None) -> Any:
        if by_memory:  # a view, such as as_strided, which may read its operand as it lies in memory
            tensors = tuple(x.contiguous() for x in tensors)
        tensors = tuple(x.resolve_conj() if x.is_complex() else x for x in tensors)
        where = tensors[0].device if tensors else device or _CPU
        args, kwargs = arguments_of(overload, arguments, tensors, where)
        results = [_own(value, tensors) for value in _torch.tensors_in(overload(*args, **kwargs))]
        return results[0] if len(results) == 1 else tuple(results)

    return evaluate


def _own(result: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """The result in memory of its own, as it is written there: ops that may give an operand back do not all
    say so, and `conj` and `imag` give one that is to be read otherwise."""
    memory = result.untyped_storage().data_ptr()
    shared = result._is_view() or any(memory == x.untyped_storage().data_ptr() for x in operands)
    result = result.clone() if shared else result
    return result.resolve_conj().resolve_neg()
