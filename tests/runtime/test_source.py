"""Rendered source runs, and means what the graph means."""

import math
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from egcompile import ops
from egcompile.codegen.source import KernelSource
from egcompile.errors import CacheCorrupt, CompileError
from egcompile.ir import Graph, TensorType
from egcompile.ir.joint import Joint
from egcompile.ops.opdef import REGISTRY, OpDef, Sample
from egcompile.runtime.loader import load, store
from egcompile.runtime.source import render
from egcompile.schedule.kernel import Buffer, Call, Free, Kernel, Launch, Program, Schedule, View
from egcompile.target import Target
from tests.extract.builder import forward_only
from tests.runtime.naive import naive_schedule

CPU, CUDA = Target.parse("cpu"), Target.parse("cuda:90")


def values(sample: Sample) -> list[torch.Tensor]:
    types = [TensorType.parse(text) for text in sample.operands]
    made = []
    for t in types:
        x = torch.empty(t.shape, dtype=torch.float64).uniform_(sample.low, sample.high)
        made.append(x.round().abs().to(t.dtype) if not t.dtype.is_floating_point else x.to(t.dtype))
    return made


def graph_of(op: OpDef, sample: Sample) -> Graph:
    types = [TensorType.parse(text) for text in sample.operands]
    inputs = tuple(ops.input(name=f"x{k}", shape=t.shape, dtype=t.dtype) for k, t in enumerate(types))
    node = op(*inputs, **sample.attrs)
    return Graph(inputs, tuple(node) if isinstance(node.type, tuple) else (node,))


CASES = [(op, s) for op in REGISTRY.values() for s in op.samples]


@pytest.mark.parametrize(("op", "sample"), CASES, ids=[f"{o.name}-{i}" for i, (o, _) in enumerate(CASES)])
def test_every_op_as_a_call(op: OpDef, sample: Sample) -> None:
    graph = graph_of(op, sample)
    module = load(render(naive_schedule(forward_only(graph)), (), CPU))
    inputs = values(sample)
    for got, expected in zip(module.forward(*inputs), ops.evaluate(graph, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(("op", "sample"), CASES, ids=[f"{o.name}-{i}" for i, (o, _) in enumerate(CASES)])
def test_every_op_as_a_kernel_on_a_cpu(op: OpDef, sample: Sample) -> None:
    """The outputs are new memory with the planned strides, here the reverse of row-major ones."""
    graph = graph_of(op, sample)
    inputs = values(sample)
    strides = [torch.empty(o.shape[::-1]).stride()[::-1] for o in graph.outputs]
    buffers = [Buffer(o.tensor, s) for o, s in zip(graph.outputs, strides, strict=True)]
    module = load(render(_one_kernel(graph, buffers), (), CPU))
    results = module.forward(*inputs)
    for got, expected, stride in zip(results, ops.evaluate(graph, inputs), strides, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
        assert all(n <= 1 or a == b for n, a, b in zip(got.shape, got.stride(), stride, strict=True))
        assert all(got.data_ptr() != x.data_ptr() for x in inputs)


def _one_kernel(graph: Graph, outputs: Sequence[Buffer]) -> Schedule:
    names = tuple(f"y{i}" for i in range(len(outputs)))
    inputs = tuple(i.attr("name") for i in graph.inputs)
    kernel = Kernel("k", graph, tuple(Buffer.contiguous(i.tensor) for i in graph.inputs), tuple(outputs))
    buffers = dict(zip(inputs, kernel.inputs, strict=True)) | dict(zip(names, outputs, strict=True))
    return Schedule(Program("forward", inputs, names, (Launch(kernel, inputs, names),), buffers), None, ())


def test_launches_views_and_frees() -> None:
    x = ops.input(name="lambda", shape=(4, 8), dtype=torch.bfloat16)
    graph = Graph((x,), (ops.neg(x),))
    schedule = _one_kernel(graph, [Buffer.contiguous(graph.outputs[0].tensor)])
    program = schedule.forward
    transposed = Buffer(TensorType((8, 2), torch.bfloat16), (1, 8), 16)
    steps = (*program.steps, View("y0", transposed, "op"), Free(("y0",)))
    buffers = program.buffers | {"op": transposed}
    text = render(
        Schedule(Program("forward", program.inputs, ("op", None), steps, buffers), None, ()),
        [KernelSource("k", "def k(x_ptr, y_ptr):\n    y_ptr.copy_(-x_ptr)")],
        CUDA,
    )
    assert "def forward(_lambda):" in text
    assert "y0 = empty((4, 8), (8, 1), bf16)  # bf16[4,8]" in text
    assert "op_1 = y0.as_strided((8, 2), (1, 8), y0.storage_offset() + 16)  # bf16[8,2]" in text
    assert text.index("del y0") > text.index("op_1 =")
    value = torch.randn(4, 8, dtype=torch.bfloat16)
    got, nothing = load(text).forward(value)
    assert nothing is None
    assert torch.equal(got, -value[2:].mT)


VIEWS = {
    "begins alike": (0, None, (), "k(y, z)"),
    "begins elsewhere": (16, None, (), "k(v, z)"),
    "is returned": (0, "v", (), "k(v, z)"),
    "is read by a call": (0, None, (Call("neg", ("v",), (), ("m",)),), "k(v, z)"),
}


@pytest.mark.parametrize("target", [CPU, CUDA], ids=["cpu", "cuda"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_launch_gets_the_source_of_a_view_that_begins_alike(name: str, target: Target) -> None:
    """And the source lives until the launch has run, under all names that it goes by."""
    offset, returned, calls, launch = VIEWS[name]
    x = ops.input(name="x", shape=(4, 8), dtype=torch.float32)
    seen = Buffer(TensorType.parse("f32[16]"), (1,))
    inside = ops.input(name="x0", shape=(16,), dtype=torch.float32)
    kernel = Kernel("k", Graph((inside,), (ops.neg(inside),)), (seen,), (seen,))
    view = Buffer(seen.type, (1,), offset)
    whole = Buffer.contiguous(x.tensor)
    buffers = {"x": whole, "y": whole, "v": view, "w": view, "z": seen, "n": seen, "m": seen}
    steps = (
        Call("exp", ("x",), (), ("y",)),
        View("y", view, "v"),
        View("y", view, "w"),
        Free(("y",)),
        *calls,
        Launch(kernel, ("v",), ("z",)),
        *([] if returned else [Free(("v",))]),
        Launch(kernel, ("w",), ("n",)),
        Free(("w",)),
    )
    program = Program("forward", ("x",), ("z", "n", returned), steps, buffers)
    kernels = [KernelSource("k", "def k(x, y):\n    y.copy_(-x.as_strided((16,), (1,)))")]
    text = render(Schedule(program, None, ()), kernels, target)
    if target is CUDA:
        last = "k(w, n)" if offset else "k(y, n)"
        assert launch in text and last in text
        assert (text.index("del y") > text.index(last)) == (not offset)
    value = torch.randn(4, 8)
    expected = value.exp().flatten()[offset : offset + 16]
    z, n, got = load(text).forward(value)
    assert torch.equal(z, -expected) and torch.equal(n, -expected)
    assert got is None or torch.equal(got, expected)


def test_helpers_stand_once() -> None:
    x = ops.input(name="x", shape=(3,), dtype=torch.float32)
    schedule = _one_kernel(Graph((x,), (ops.neg(x),)), [Buffer.contiguous(x.tensor)])
    helper = "def half(x):\n    return x / 2"
    first = KernelSource("k", f"{helper}\n\n\ndef k(x, y):\n    y.copy_(half(x))\n", (helper,))
    second = KernelSource("j", f"{helper}\n\n\ndef j(x, y):\n    y.copy_(half(x))\n", (helper,))
    text = render(schedule, [first, second], CUDA)
    assert text.count("def half") == 1
    assert load(text).forward(torch.ones(3))[0].tolist() == [0.5] * 3


def test_the_backward_empties_its_list() -> None:
    x = ops.input(name="x", shape=(3,), dtype=torch.float64)
    ct = ops.input(name="ct", shape=(3,), dtype=torch.float64)
    y = ops.exp(x)
    joint = Joint(Graph((x, ct), (y, ops.mul(ct, y))), (x,), (ct,), (y,), (ops.mul(ct, y),))
    module = load(render(naive_schedule(joint), (), CPU))
    value = torch.randn(3, dtype=torch.float64)
    (result,) = module.forward(value)
    arguments = [result, torch.ones(3, dtype=torch.float64)]
    (gradient,) = module.backward(arguments)
    assert arguments == []
    assert torch.equal(gradient, value.exp())


def test_float_literals() -> None:
    fulls = [ops.full(value=v, shape=(2,), dtype=torch.float32) for v in (-math.inf, math.nan, -0.0, 0.1)]
    program = Program(
        "forward",
        (),
        tuple(f"v{i}" for i in range(4)),
        tuple(
            Call("full", (), tuple(zip(n.op.attr_names, n.attrs, strict=True)), (f"v{i}",))
            for i, n in enumerate(fulls)
        ),
        {f"v{i}": Buffer.contiguous(n.tensor) for i, n in enumerate(fulls)},
    )
    results = load(render(Schedule(program, None, ()), (), CPU)).forward()
    for got, node in zip(results, fulls, strict=True):
        assert torch.equal(got.view(torch.int32), torch.full((2,), node.attr("value")).view(torch.int32))
        assert got.stride() == (1,)


def test_an_input_of_any_name() -> None:
    x = ops.input(name="float", shape=(2,), dtype=torch.float32)
    infinite = ops.full(value=math.inf, shape=(2,), dtype=torch.float32)
    joint = forward_only(Graph((x,), (ops.minimum(x, infinite),)))
    (result,) = load(render(naive_schedule(joint), (), CPU)).forward(torch.ones(2))
    assert torch.equal(result, torch.ones(2))


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EGCOMPILE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="for EGCOMPILE_CACHE_DIR"):
        assert load("def forward():\n    return 'elsewhere'\n").forward() == "elsewhere"


def test_source_that_does_not_run() -> None:
    with pytest.raises(CompileError, match="does not run: NameError") as error:
        load("undefined_name")
    assert error.value.source == "undefined_name"


def test_threads_wait_for_a_module_that_another_loads() -> None:
    source = "import time\ntime.sleep(0.05)\ndef forward():\n    return 1\n"
    results: list[int] = []
    barrier = threading.Barrier(3)

    def run() -> None:
        barrier.wait()
        results.append(load(source).forward())

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1, 1, 1]


def test_a_corrupt_cache_entry_is_replaced(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGCOMPILE_CACHE_DIR", str(tmp_path))
    path = store("plan.py", "x = 1\n")
    for damage in (b"x = ", b"\xff\xfe"):
        path.write_bytes(damage)
        with pytest.warns(CacheCorrupt, match=r"plan\.py"):
            store("plan.py", "x = 1\n")
        assert path.read_text() == "x = 1\n"
    assert [p.name for p in path.parent.iterdir()] == ["plan.py"]
