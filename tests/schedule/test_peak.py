"""Predicted peaks of memory."""

import torch

import egcompile
from egcompile.ir.buffer import Buffer
from egcompile.schedule.kernel import Call, Free, Program, View
from egcompile.schedule.peak import peak
from tests.extract.builder import leaf
from tests.models import Llama, LlamaConfig


def program(*steps: Call | View | Free) -> Program:
    kind = leaf("x", 10).tensor
    buffers = {name: Buffer.contiguous(kind) for name in "abcdef"}
    return Program("forward", ("a", "b"), ("f",), steps, buffers)


def call(result: str, *inputs: str) -> Call:
    return Call("neg", inputs, (), (result,))


def test_a_value_is_alive_until_it_is_dropped() -> None:
    lines = (call("c", "a"), Free(("a",)), call("d", "c"), Free(("c",)), call("f", "d", "b"))
    assert peak(program(*lines), ()) == 3 * 40
    assert peak(program(*lines), ("a", "b")) == 2 * 40


def test_a_view_keeps_its_base_alive() -> None:
    seen = View("c", Buffer.contiguous(leaf("x", 10).tensor), "d")
    lines = (call("c", "a"), seen, Free(("c",)), call("e", "d"), call("f", "e"))
    assert peak(program(*lines), ("a", "b")) == 3 * 40
    dropped = (call("c", "a"), seen, Free(("c",)), call("e", "d"), Free(("d",)), call("f", "e"))
    assert peak(program(*dropped), ("a", "b")) == 2 * 40


def test_results_that_nobody_reads_take_nothing() -> None:
    assert peak(program(Call("rms_norm", ("a", "b"), (), ("f", None))), ("a", "b")) == 40


def test_a_budget_lowers_the_peak_and_not_the_saved_bytes_alone() -> None:
    """Each layer is made again when its backward comes: all at once would keep the peak where it was."""
    config = LlamaConfig(layers=6, length=1024)
    model = Llama(config)
    tokens = torch.zeros(8, 1024, dtype=torch.int64)
    traced = egcompile.trace(model, (tokens, tokens))
    peaks = []
    for budget in (1.0, 0.7, 0.4):
        made = egcompile.optimize(traced, "cuda:90", memory_budget=budget).compiled().schedule
        assert made.backward is not None
        peaks.append(peak(made.backward, made.forward.inputs))
    assert peaks[1] < 0.85 * peaks[0] and peaks[2] < 0.65 * peaks[0], peaks
