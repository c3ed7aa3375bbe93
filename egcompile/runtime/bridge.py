"""Plans under autograd: one generic Function, whose backward is the plan's own.

Under `create_graph` the backward is another plan (the first one's vjp) through the same Function, which
makes every order of derivative ordinary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from egcompile.ir.types import TensorType
from egcompile.runtime._torch import current_device
from egcompile.runtime.aten import laid_out
from egcompile.schedule.kernel import Buffer

Tensor = torch.Tensor
Mask = tuple[bool, ...]
Gradients = tuple[Tensor | None, ...]


Vjp = Callable[[Sequence[Tensor | None], Sequence[Tensor | None]], Gradients]
"""From inputs and draws (None where not in `Executable.kept`) and cotangents (None where there is none)."""


def _no_backward(*masks: Mask) -> Any:
    raise AssertionError("this plan has no backward")


@dataclass(frozen=True, eq=False)
class Executable:
    """A loaded plan for one choice of gradients.

    forward      inputs -> the plan's outputs, then values that only the backward reads
    backward     a list of the saved values, then the cotangents; it is emptied -> one gradient an input
    outputs      types of the plan's outputs
    saved        what is kept for the backward, as positions in (*inputs, *forward's results)
    taken        how many of these, the first ones, `backward` takes
    kept         what `vjp` reads, inputs and behind them what was drawn at random -> its place in `saved`
    copied       inputs that change after the call and that the backward reads: it gets a copy
    constant     outputs through which no gradient flows, as positions
    cotangents   how the cotangent of each output lies in memory; None for one that the backward has not
    vjp          (which outputs have cotangents, which inputs need gradients) -> the gradients as a function
                 of inputs and cotangents that can be differentiated again
    mispredicted called with the outputs that do have cotangents, if `cotangents` foresaw others
    """

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[[list[Tensor]], Gradients] | None
    outputs: tuple[TensorType, ...]
    saved: tuple[int, ...] = ()
    taken: int = 0
    kept: Mapping[int, int] = field(default_factory=dict)
    copied: tuple[int, ...] = ()
    constant: tuple[int, ...] = ()
    cotangents: tuple[Buffer | None, ...] = ()
    vjp: Callable[[Mask, Mask], Vjp] = _no_backward
    mispredicted: Callable[[Mask], None] = _no_backward


def run(executable: Executable, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The plan's outputs, with gradients if it has a backward.

    Ambient autocast and another current device do not reach the plan: its dtypes were decided before.
    """
    device = inputs[0].device if inputs else torch.device("cpu")
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            return run(executable, inputs)
    if device.type == "cuda" and device.index != current_device():
        with torch.cuda.device(device):
            return run(executable, inputs)
    if executable.backward is None:
        with torch.no_grad():  # ATen's calls would record what the graph detaches
            return executable.forward(*inputs)
    if executable.copied:
        copied = executable.copied
        inputs = [laid_out(x, x.stride(), copy=True) if i in copied else x for i, x in enumerate(inputs)]
    return _apply(executable, *inputs)


class PlanFunction(torch.autograd.Function):
    """Runs an `Executable`. Saved values go through autograd, which notices changes in place."""

    @staticmethod
    def forward(ctx: Any, executable: Executable, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = executable.forward(*inputs)
        outputs = results[: len(executable.outputs)]
        values = (*inputs, *results)
        ctx.executable = executable
        ctx.set_materialize_grads(False)
        if executable.constant:
            ctx.mark_non_differentiable(*(outputs[i] for i in executable.constant))
        ctx.save_for_backward(*(values[i] for i in executable.saved))
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        device = next((ct.device for ct in cotangents if ct is not None), None)
        if device is None:
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                return PlanFunction.backward(ctx, *cotangents)
        executable: Executable = ctx.executable
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()
        guessed = [buffer is not None for buffer in executable.cotangents]
        present = [ct is not None for ct in cotangents]
        if present != guessed:
            executable.mispredicted(tuple(present))
        # zeros for a missing cotangent would not do: eager's gradient may be None, and 0 inf is NaN
        if torch.is_grad_enabled() or present != guessed:
            return None, *_by_vjp(executable, saved, cotangents, ctx.needs_input_grad[1:])
        del saved[executable.taken :]
        for ct, buffer in zip(cotangents, executable.cotangents, strict=True):
            if ct is not None and buffer is not None:
                saved.append(ct if ct.stride() == buffer.strides else laid_out(ct, buffer.strides))
        assert executable.backward is not None
        return None, *executable.backward(saved)


_apply: Callable[..., tuple[Tensor, ...]] = PlanFunction.apply


def _by_vjp(
    executable: Executable, saved: list[Tensor], cotangents: tuple[Tensor | None, ...], needed: Mask
) -> Gradients:
    """The gradients by the plan's vjp, which starts from the inputs and can be differentiated again."""
    inputs: list[Tensor | None] = [None] * max(len(needed), 1 + max(executable.kept, default=0))
    for position, place in executable.kept.items():
        inputs[position] = saved[place]
    return executable.vjp(tuple(ct is not None for ct in cotangents), needed)(inputs, cotangents)
