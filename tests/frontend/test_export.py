"""`trace`: graphs that mean what their models mean, how they are called, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from egcompile import ops
from egcompile.errors import TraceError, TypeMismatch, UnsupportedOp
from egcompile.frontend import Traced, trace
from tests.models import CASES, Case

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
LOW = ("llama", "llama_hf", "mlp_gelu_tanh", "residual_block")
CALLS = [(case, torch.float64) for case in CASES.values()] + [
    (CASES[name], dtype) for name in LOW for dtype in (torch.float32, torch.bfloat16)
]


def run(traced: Traced, *args: Any, **kwargs: Any) -> Any:
    """The traced call by the reference meaning of each op."""
    return traced.restore(ops.evaluate(traced.graph, [*traced.state, *traced.inputs(args, kwargs)]))


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def names(traced: Traced) -> list[str]:
    return [node.op.name for node in traced.graph.nodes]


@pytest.mark.parametrize(("case", "dtype"), CALLS, ids=[f"{case.name}-{dtype}" for case, dtype in CALLS])
def test_a_model_and_its_gradients(case: Case, dtype: torch.dtype) -> None:
    model, inputs = case.make(dtype)
    traced = trace(model, inputs)
    found, expected = as_tuple(run(traced, *inputs)), as_tuple(model(*inputs))
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if dtype != torch.bfloat16:
        parameters = list(model.parameters())
        mine = torch.autograd.grad(found[-1], parameters)
        theirs = torch.autograd.grad(expected[-1], parameters)
        torch.testing.assert_close(mine, theirs, rtol=100 * TOLERANCE[dtype], atol=100 * TOLERANCE[dtype])


@pytest.mark.parametrize("name", LOW)
def test_every_line_of_a_model_has_its_origin(name: str) -> None:
    model, inputs = CASES[name].make(torch.float32)
    graph = trace(model, inputs).graph
    for node in graph.nodes:
        if node.inputs and node.op is not ops.out:
            assert all("models.py:" in origin for origin in graph.origins[node]), node
    if name == "llama":
        assert "layers.1.mlp.up_proj (models.py:" in str(graph)


def test_the_text_of_a_residual_block() -> None:
    model, inputs = CASES["residual_block"].make(torch.float32)
    text = str(trace(model, inputs))
    assert [line.split("  #")[0] for line in text.splitlines()] == [
        "graph(%norm_weight: f32[12], %linear_weight: f32[12,12], %linear_bias: f32[12], "
        "%x: f32[2,3,12], %r: f32[2,3,12]):",
        "  %0: f32[2,3,12] = add(%x, %r)",
        "  %1, %2: f32[2,3,12], f32[2,3,1] = rms_norm(%0, %norm_weight, eps=1e-06, cast_first=False)",
        "  %3: f32[12,12] = transpose(%linear_weight)",
        "  %4: f32[2,3,12] = matmul(%1, %3)",
        "  %5: f32[1,1,12] = reshape(%linear_bias, shape=[1,1,12])",
        "  %6: f32[2,3,12] = expand(%5, shape=[2,3,12])",
        "  %7: f32[2,3,12] = add(%4, %6)",
        "  %8: f32[2,3,12] = gelu(%7)",
        "  %9: f32[2,3,12] = add(%0, %8)",
        "  %10: f32[2,3,12] = mul(%9, %9)",
        "  %11: f32[1,1,1] = mean(%10, dims=[0,1,2])",
        "  %12: f32[] = reshape(%11, shape=[])",
        "  return out0=%9, out1=%12",
    ]


@pytest.mark.parametrize("name", ["llama", "llama_hf"])
def test_attention_and_loss_stay_whole(name: str) -> None:
    model, inputs = CASES[name].make(torch.bfloat16)
    found = names(trace(model, inputs))
    assert found.count("sdpa") == 2
    assert found.count("cross_entropy") == 1
    assert found.count("rms_norm") == (5 if name == "llama" else 0)


# ---- inputs and outputs ----


def test_parameters_come_first_and_tied_ones_once() -> None:
    model, inputs = CASES["llama_tied"].make(torch.float32)
    traced = trace(model, inputs)
    assert traced.parameters[0] == "embed.weight"
    assert "head.weight" not in traced.parameters
    assert traced.parameters[-2:] == ("cos", "sin")
    assert [i.attr("name") for i in traced.graph.inputs[-2:]] == ["ids", "target"]
    assert all(a is b for a, b in zip(traced.state, map(model.get_parameter, traced.parameters[:-2])))
    assert traced.requires_grad == (*(True for _ in traced.parameters[:-2]), False, False, False, False)


def test_structures_of_arguments_and_results() -> None:
    def function(
        batch: dict[str, Tensor], pair: tuple[Tensor, Tensor], flag: bool, *, scale: float = 2.0
    ) -> Any:
        total = batch["a"] + pair[0] * scale if flag else batch["a"]
        return {"total": total, "none": None, "count": 3, "list": [pair[1], total * 2]}

    a, b, c = torch.rand(3, 2, 2).unbind()
    traced = trace(function, ({"a": a}, (b, c), True), {"scale": 3.0})
    assert [i.attr("name") for i in traced.graph.inputs] == ["batch_a", "pair_0", "pair_1"]
    result = run(traced, {"a": a}, (b, c), flag=True, scale=3.0)
    assert (result["none"], result["count"]) == (None, 3)
    torch.testing.assert_close(result["list"][1], (a + b * 3) * 2)
    assert result["list"][0] is c


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.zeros(3, 2), 2.0), r"argument x is f32\[3,2\]; the trace was made for f32\[2,3\]"),
        ((torch.zeros(2, 3).double(), 2.0), r"argument x is f64\[2,3\]"),
        ((torch.zeros(2, 3), 4.0), r"argument scale is 4.0; the trace was made for 2.0"),
        (([torch.zeros(2, 3)], 2.0), "the arguments are"),
        ((1, 2.0), "argument x is 1"),
    ],
)
def test_another_call_is_refused(args: tuple[Any, ...], message: str) -> None:
    traced = trace(lambda x, scale: x * scale, (torch.zeros(2, 3), 2.0))
    with pytest.raises(TypeMismatch, match=message):
        traced.inputs(args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (torch.zeros(3), "give a tuple"),
        ((torch.zeros(3),) * 2, r"do not fit .*: too many positional"),
        ((), "missing a required argument: 'x'"),
    ],
)
def test_examples_that_do_not_fit(args: Any, message: str) -> None:
    def function(x: Tensor) -> Tensor:
        return x * 2

    with pytest.raises(TraceError, match=message):
        trace(function, args)


def test_a_tensor_given_twice_is_two_inputs() -> None:
    x = torch.rand(3, requires_grad=True)
    traced = trace(lambda a, b: a * 2 + b, (x, x))
    y = torch.rand(3)
    torch.testing.assert_close(run(traced, x, y), x * 2 + y)


def test_constants_are_inputs_or_leaves() -> None:
    table = torch.tensor([1.0, 2.0, 4.0])
    traced = trace(lambda x: x * table + torch.tensor(3.0) + torch.arange(3), (torch.rand(3),))
    assert [i.attr("name") for i in traced.graph.inputs] == ["x", "constant_0"]
    torch.testing.assert_close(run(traced, torch.ones(3)), table + 3 + torch.arange(3))


def test_what_depends_on_no_input_is_computed() -> None:
    """Hugging Face's check for packed sequences: zeros, through a cumsum that has no row."""

    def function(x: Tensor) -> Tensor:
        positions = torch.arange(5).expand(2, 5)
        packed = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        return x + packed

    assert names(trace(function, (torch.rand(2, 5),))) == ["input", "full", "add"]


def test_a_causal_mask_is_recognized() -> None:
    def function(q: Tensor, offset: int) -> Tensor:
        rows, columns = torch.arange(5)[:, None], torch.arange(5)[None]
        mask = (columns <= rows + offset)[None, None].expand(2, 1, 5, 5)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q = torch.rand(2, 3, 5, 4, dtype=torch.float64)
    for offset, causal in ((0, True), (5, False)):
        traced = trace(function, (q, offset))
        (node,) = (n for n in traced.graph.nodes if n.op is ops.sdpa)
        assert node.attr("causal") is causal
        torch.testing.assert_close(run(traced, q, offset), function(q, offset))
    banded = trace(function, (q, 1))
    assert "sdpa" not in names(banded)
    torch.testing.assert_close(run(banded, q, 1), function(q, 1))


# ---- gradients ----


def test_no_grad_is_a_stop_gradient() -> None:
    def function(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x @ w).mean()
            kept = x  # an input that passes through stays itself
            with torch.enable_grad():
                live = w * 3
        return (w * scale + live).sum() + kept.sum() + w.detach().sum()

    w, x = torch.rand(3, 3, requires_grad=True), torch.rand(3, 3, requires_grad=True)
    found = torch.autograd.grad(run(trace(function, (w, x)), w, x), (w, x))
    torch.testing.assert_close(found, torch.autograd.grad(function(w, x), (w, x)))


def test_training_and_eval_dropout() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    x = torch.rand(2, 3)
    (mask,) = [node for node in trace(model, (x,)).graph.nodes if node.op.random]
    assert mask.op is ops.dropout_mask
    torch.testing.assert_close(run(trace(model.eval(), (x,)), x), model(x))


# ---- refusals ----


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct * 3


def _change_input(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def _hook(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda ct: ct * 0)
    return y


def _inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: x * 2 if x.sum() > 0 else x,
            "depends on the data of a tensor.*torch.where.*test_export.py",
        ),
        (lambda x: x * x.sum().item(), "data"),
        (lambda x: x[x > 0], "data"),
        (_change_input, "changes its input .* in place; clone it first"),
        (_hook, "a hook on a tensor"),
        (_inference, "torch.inference_mode cannot be traced.*use torch.no_grad"),
        (lambda x: Double.apply(x), "custom autograd.Function Double"),
        (lambda x: torch.Size(x.shape) and object(), "torch.export failed"),
        (lambda x: torch.zeros(2, 3) @ x, "torch.export failed: RuntimeError.*test_export.py"),
    ],
)
def test_refused(function: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace(function, (torch.rand(4),))


def test_patches_of_the_refusals_end() -> None:
    with pytest.raises(TraceError):
        trace(_hook, (torch.rand(4),))
    x = torch.rand(4, requires_grad=True)
    _hook(x).sum().backward()
    assert torch.equal(torch.autograd.grad(Double.apply(x).sum(), x)[0], torch.full((4,), 3.0))
    _inference(x)


def test_module_backward_hooks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(TraceError, match="module 0 has backward hooks"):
        trace(model, (torch.rand(2, 3),))


def test_a_closed_over_parameter_is_refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(TraceError, match="needs a gradient"):
        trace(lambda x: x @ model.weight, (torch.rand(2, 3),))


def test_buffers_that_change_are_named_with_their_new_values() -> None:
    model, x = nn.BatchNorm1d(3).double(), torch.rand(4, 3, dtype=torch.float64)
    traced = trace(model, (x,))
    values = ops.evaluate(traced.graph, [*(t.clone() for t in traced.state), *traced.inputs((x,))])
    torch.testing.assert_close(traced.restore(values), model(x))
    new = {traced.parameters[i]: values[slot] for i, slot in traced.mutated}
    assert new.keys() == {"running_mean", "running_var", "num_batches_tracked"}
    torch.testing.assert_close(new, dict(model.named_buffers()))


def test_an_op_outside_the_table_names_its_place() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.FractionalMaxPool2d(2, output_size=2))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    message = r"aten.\w+.default has no row in the import table, at inner.0 \(test_export.py:\d+\)"
    with pytest.raises(UnsupportedOp, match=message):
        trace(Model(), (torch.rand(2, 3, 4, 4),), opaque=False)


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedOp, match=r"argument args.0 has the layout torch.sparse_csr"):
        trace(lambda *args: args[0] @ args[0], (torch.eye(2).to_sparse_csr(),))


def test_a_dtype_outside_the_ir_is_refused() -> None:
    with pytest.raises(UnsupportedOp, match="complex32"):
        trace(lambda x: x * 2, (torch.zeros(2, dtype=torch.complex32),))


@dataclass
class Opaque:
    x: Tensor


def test_an_unknown_container_is_refused() -> None:
    with pytest.raises(TraceError, match=r"torch.export failed"):
        trace(lambda o: o.x * 2, (Opaque(torch.zeros(2)),))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_autocast_region(device: str) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, torch.bfloat16):
            y = F.linear(x, w)
            return y, F.cross_entropy(y, torch.zeros(3, dtype=torch.long, device=device))

    with torch.device(device):
        x, w = torch.rand(3, 4), torch.rand(5, 4)
        traced = trace(function, (x, w))
        for mine, theirs in zip(run(traced, x, w), function(x, w), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    origins = {origin for found in traced.graph.origins.values() for origin in found}
    assert all("test_export.py:" in origin for origin in origins)
