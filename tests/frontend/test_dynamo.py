"""What Dynamo captures, imported: values, gradients, the calling convention, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import egcompile
from egcompile import ops
from egcompile.backend import backend
from egcompile.errors import TraceError
from egcompile.frontend import trace
from egcompile.frontend.aliases import Argument
from egcompile.frontend.dynamo import Capture, Imported
from tests.models import CASES, Case


class Backend:
    """Runs what was captured by the reference meaning of each op, for the sizes of each call."""

    def __init__(self) -> None:
        self.imported: list[Imported] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., list[Any]]:
        capture = Capture.of(gm)
        first = not capture.numbers
        if first:  # else it depends on the numbers, of which there are no examples
            self.imported.append(capture.specialize(example_inputs))

        def call(*args: Any) -> list[Any]:
            imported = capture.specialize(args)
            if not first:
                self.imported.append(imported)
            tensors = [*(args[i] for i in imported.input_indices), *imported.constants]
            values = ops.evaluate(imported.graph, tensors)
            for index, position in imported.mutated:
                args[index].copy_(values[position])
            return [
                values[out]
                if isinstance(out, int)
                else args[out.index]
                if isinstance(out, Argument)
                else out.value
                for out in imported.outputs
            ]

        return call

    @property
    def text(self) -> str:
        return str(self.imported[-1].graph)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Backend]:
    backend = Backend()
    return torch.compile(function, backend=backend, fullgraph=True, **options), backend


def check(function: Callable[..., Any], *args: Any, **options: Any) -> Backend:
    """Results and gradients of one call."""
    call, backend = compiled(function, **options)
    found, expected = call(*args), function(*args)
    torch.testing.assert_close(found, expected)
    inputs = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
    if inputs:
        mine, theirs = (
            torch.autograd.grad(y.sum(), inputs, allow_unused=True, materialize_grads=True)
            for y in (found, expected)
        )
        torch.testing.assert_close(mine, theirs)
    return backend


@pytest.mark.parametrize(
    "case", [CASES[n] for n in ("llama", "llama_hf", "mlp_silu", "residual_block")], ids=lambda c: c.name
)
def test_both_routes_give_one_graph(case: Case) -> None:
    """The same nodes with the same origins, whichever way the model came in."""
    model, inputs = case.make(torch.float64)
    call, backend = compiled(model)
    torch.testing.assert_close(call(*inputs), model(*inputs), rtol=1e-12, atol=1e-12)
    traced, captured = trace(model, inputs).graph, backend.imported[0].graph
    assert set(captured.outputs) == set(traced.outputs)
    assert set(captured.inputs) == set(traced.inputs)
    for node in traced.outputs:
        assert captured.origins[node] == traced.origins[node]


def test_inputs_are_named_by_their_place() -> None:
    model, inputs = CASES["residual_block"].make(torch.float32)
    call, backend = compiled(model)
    call(*inputs)
    (imported,) = backend.imported
    found = [i.attr("name") for i in imported.graph.inputs]
    assert found == ["x", "r", "norm_weight", "linear_weight", "linear_bias"]
    assert imported.input_indices == (0, 1, 2, 3, 4)
    assert imported.requires_grad == (False, False, True, True, True)


def test_open_sizes_are_those_of_the_call() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(-1, 2, x.shape[1] // 2).sum(0), x * x.shape[0]

    call, backend = compiled(function, dynamic=True)
    for size in (3, 5):
        x = torch.rand(size, 4)
        torch.testing.assert_close(call(x), function(x))
    (imported,) = backend.imported
    assert imported.graph.inputs[0].shape == (3, 4)


def test_a_float_that_changes_is_an_input() -> None:
    def function(x: Tensor, scale: float) -> Tensor:
        return x * scale + scale**2

    call, backend = compiled(function)
    x = torch.rand(3)
    for scale in (0.3, 0.4, 0.5):
        torch.testing.assert_close(call(x, scale), function(x, scale))
    assert [(len(i.graph.inputs), i.numbers) for i in backend.imported] == [(1, ()), (2, ()), (2, ())]


NUMBERS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "promotes otherwise as a tensor": lambda x, s: x.long() * s,
    "an argument of an op": lambda x, s: F.leaky_relu(x - 0.5, s) + F.layer_norm(x, (4,), eps=s),
    "a computed one": lambda x, s: F.leaky_relu(x * s, s * 0.5 + 0.1),
    "a power": lambda x, s: x**s + s**2,
    "a bound": lambda x, s: x.clamp(max=s),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_floats_that_change(what: str) -> None:
    """Each way a float can be used, as an input or with its value in the plan."""
    function = NUMBERS[what]
    compiled = egcompile.compile(function, fullgraph=True)
    x = torch.rand(1, 2, 3, 4)
    for s in (0.25, 0.5, 0.75, 0.5):
        torch.testing.assert_close(compiled(x, s), function(x, s))


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x)


@pytest.mark.parametrize("attribute", [False, True])
def test_a_dropout_whose_probability_changes(attribute: bool) -> None:
    module = Drops()
    x = torch.ones(20_000, requires_grad=True)
    compiled = egcompile.compile(module if attribute else F.dropout, fullgraph=True)
    for p in (0.1, 0.5, 0.9, 0.5):
        module.dropout.p = p
        y = compiled(x) if attribute else compiled(x, p)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(gradient, y)
        assert abs((y == 0).float().mean().item() - p) < 0.02
        torch.testing.assert_close(y.amax(), torch.tensor(1 / (1 - p)))


def test_constants_and_python_results() -> None:
    backend = check(lambda x: (x + torch.tensor([1.0, 2.0, 4.0]), x * torch.tensor(3.0)), torch.rand(3))
    (imported,) = backend.imported
    assert [c.tolist() for c in imported.constants] == [[1.0, 2.0, 4.0]]
    assert imported.graph.inputs[-1].attr("name") == "constant_0"


# ---- changes in place ----


def test_an_argument_changed_in_place() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(y)
        return x * 2, x

    call, backend = compiled(function)
    x, y = torch.rand(3), torch.rand(3)
    expected = (x + y) * 2
    doubled, same = call(x, y)
    assert same is x
    torch.testing.assert_close(doubled, expected)
    torch.testing.assert_close(x * 2, expected)
    (imported,) = backend.imported
    assert imported.outputs[1:] == () or imported.outputs[1] == Argument(0)


def test_a_buffer_changed_in_place_stays_the_buffer() -> None:
    class Counter(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * self.count

    model = Counter()
    buffer = model.count
    call, backend = compiled(model)
    for expected in (1.0, 2.0):
        assert torch.equal(call(torch.ones(2)), torch.full((2,), expected))
    assert model.count is buffer
    assert buffer.item() == 2
    (imported,) = backend.imported
    assert len(imported.mutated) == 1
    assert Argument(imported.mutated[0][0]) in imported.outputs


def test_local_changes_in_place_are_functional() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        y[0] = 1.0
        y += 1
        return y.mul_(3)

    check(function, torch.rand(3, 4, requires_grad=True))


# ---- gradients and autocast ----


def test_no_grad_is_a_stop_gradient() -> None:
    def function(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x @ w).mean()
            with torch.enable_grad():
                live = w * 3
            first, second = x.chunk(2)
        return (w * scale + live).sum() + first.sum() + second.sum() + w.detach().sum()

    w, x = torch.rand(4, 4, requires_grad=True), torch.rand(4, 4, requires_grad=True)
    assert "stop_gradient" in check(function, w, x).text


def test_a_checkpointed_region() -> None:
    def function(w: Tensor, x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.tanh(x @ w), x, use_reentrant=False)

    check(function, torch.rand(3, 3, requires_grad=True), torch.rand(2, 3, requires_grad=True))


def _autocast(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast(x.device.type, torch.bfloat16):
        y = F.linear(x, w, b)
        hidden = F.rms_norm(F.gelu(y), (5,))
        loss = F.cross_entropy(y, torch.zeros(3, dtype=torch.long, device=x.device))
        with torch.autocast(x.device.type, enabled=False):
            full = F.linear(hidden.float(), torch.ones(2, 5, device=x.device))
        q = (y * 2).view(1, 1, 3, 5)
        return y, hidden, loss, full, F.softmax(y, -1), F.scaled_dot_product_attention(q, q, q)


def _check_autocast(device: str) -> None:
    with torch.device(device):  # the reference's constants, too
        x, w, b = torch.rand(3, 4), torch.rand(5, 4), torch.rand(5)
        call, backend = compiled(_autocast)
        for mine, theirs in zip(call(x, w, b), _autocast(x, w, b), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    assert "bf16[3,5] = matmul" in backend.text


def test_autocast_regions_on_a_cpu() -> None:
    _check_autocast("cpu")


@pytest.mark.gpu
def test_autocast_regions_on_a_gpu() -> None:
    _check_autocast("cuda")


@pytest.mark.gpu
def test_a_model_on_a_gpu() -> None:
    model, inputs = CASES["llama"].make(torch.bfloat16)
    model, inputs = model.cuda(), tuple(x.cuda() for x in inputs)
    call, _ = compiled(model)
    with torch.device("cuda"):
        torch.testing.assert_close(call(*inputs), model(*inputs), rtol=2e-2, atol=2e-2)
    assert trace(model, inputs).graph.outputs[0].shape == ()


def test_ambient_autocast() -> None:
    call, backend = compiled(lambda x, w: F.linear(x, w))
    with torch.autocast("cpu", torch.bfloat16):
        assert call(torch.rand(3, 4), torch.rand(5, 4)).dtype == torch.bfloat16
    assert "bf16[3,5] = matmul" in backend.text


# ---- refusals ----


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct * 3


def _hook(w: Tensor) -> Tensor:
    y = w * 2
    y.register_hook(lambda ct: ct * 0)
    return y


def _inference(w: Tensor) -> Tensor:
    with torch.inference_mode():
        return w * 2


def _in_place(w: Tensor) -> Tensor:
    return w.add_(1) * 2


def _in_place_under_no_grad(w: Tensor) -> Tensor:
    with torch.no_grad():
        w.add_(1)
    return w * 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda w: Double.apply(w), r"custom autograd.Function cannot be compiled, at test_dynamo.py:\d+"),
        (lambda w: torch.func.grad(lambda v: v.sin().sum())(w), r"torch.func.grad.* cannot be compiled"),
        (_hook, r"(a hook on a tensor|a custom autograd.Function) cannot be compiled, at test_dynamo.py:\d+"),
        (_inference, "torch.inference_mode cannot be compiled"),
        (_in_place, "w requires grad and is changed in place; clone it first"),
        (_in_place_under_no_grad, "needs a gradient and is changed in place under no_grad"),
    ],
)
def test_refused(function: Any, message: str) -> None:
    call, _ = compiled(function)
    with pytest.raises(Exception, match=message):
        call(torch.rand(4, requires_grad=True) * 1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Around(nn.Module):
    """Calls what no graph can hold between two modules that one can."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after, self.function = Layer(), Layer(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function(self.before(x))).square().sum()


def _full_backward_hook(x: Tensor) -> Tensor:
    layer = nn.Identity()
    layer.register_full_backward_hook(lambda module, given, received: (given[0] * 5,))
    return layer(x)


@pytest.mark.parametrize(
    "function",
    [Double.apply, _hook, _full_backward_hook, lambda w: torch.func.grad(lambda v: v.sin().sum())(w)],
    ids=["Function", "hook", "full backward hook", "torch.func"],
)
def test_a_graph_break_where_no_graph_can_be(function: Callable[[Tensor], Tensor]) -> None:
    model = Around(function).double()
    made: list[Any] = []

    def counting(gm: Any, inputs: Any) -> Any:
        call = backend(gm, inputs)
        made.append(call)
        return call

    results = []
    for run in (model, torch.compile(model, backend=counting)):
        for _ in range(2):
            x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4).requires_grad_()
            loss = run(x)
            results.append((loss, torch.autograd.grad(loss, (x, *model.parameters()))))
    torch.testing.assert_close(results[2:], results[:2])
    assert made  # the layers


def test_inference_mode_breaks_the_graph() -> None:
    w = torch.rand(4, requires_grad=True)
    y = egcompile.compile(_inference)(w)
    assert y.is_inference() and torch.equal(y, w * 2)


def test_a_view_of_an_argument_stays_one() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    weight = torch.randn(3, 2)

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[1:].t(), x * weight, x.detach().view(-1)

    view, product, detached = egcompile.compile(model)(x)
    assert view._base is x
    assert not detached.requires_grad
    assert detached.data_ptr() == x.data_ptr()
    (view.sum() + product.sum()).backward()
    expected = weight.clone()
    expected[1:] += 1
    torch.testing.assert_close(x.grad, expected)
    with torch.no_grad():
        detached.fill_(7.0)
    assert (x == 7.0).all()


def test_arguments_that_share_memory_are_not_changed_in_place() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    compiled = egcompile.compile(model)
    compiled(torch.zeros(4), torch.zeros(2))
    base = torch.zeros(4)
    with pytest.raises(TraceError, match="share memory"):
        compiled(base, base[:2])
    assert (base == 0).all()


def test_a_batched_function() -> None:
    """Inside of vmap a tensor has no memory of its own."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: (row @ w).tanh() * row.sum())(x)

    x, w = torch.rand(5, 4, requires_grad=True), torch.rand(4, 3, requires_grad=True)
    results = [run(x, w) for run in (function, torch.compile(function, backend="egcompile", fullgraph=True))]
    torch.testing.assert_close(results[1], results[0])
    gradients = [torch.autograd.grad(y.square().sum(), (x, w)) for y in results]
    torch.testing.assert_close(gradients[1], gradients[0])
