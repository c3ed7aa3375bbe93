"""Contraction kernels against PyTorch in fp64, over tilings, operand layouts, epilogues and sums."""

from collections.abc import Callable, Sequence

import pytest
import torch

from egcompile import ops
from egcompile.codegen import GemmConfig, generate
from egcompile.codegen.contraction import Contraction
from egcompile.codegen.gemm import default_config
from egcompile.errors import CompileError
from egcompile.ir import Graph
from egcompile.ir.node import Node
from egcompile.ops.lower import lower
from egcompile.schedule.kernel import Buffer, Kernel
from egcompile.target import Target
from tests.codegen.harness import DEVICE, cubins, random_inputs, run

F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
HOPPER = Target.parse("cuda:90")
POINTERS = GemmConfig(32, 32, 16, 4, 2, group_m=2)
DESCRIPTORS = GemmConfig(32, 32, 16, 4, 2, 2, group_m=2, descriptors=True, tile_descriptors=True)
BOTH = pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
TOLERANCE = {F64: 1e-12, F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}


def leaf(name: str, *shape: int, dtype: torch.dtype = F32) -> Node:
    return ops.input(name=name, shape=shape, dtype=dtype)


def kernel_of(
    outputs: Sequence[Node], inputs: Sequence[Node], strides: dict[Node, tuple[int, ...]] | None = None
) -> Kernel:
    """Buffers are contiguous where `strides` says nothing."""

    def buffer(node: Node) -> Buffer:
        given = (strides or {}).get(node)
        return Buffer.contiguous(node.tensor) if given is None else Buffer(node.tensor, given)

    body = Graph(tuple(inputs), tuple(outputs))
    return Kernel("contraction", body, tuple(map(buffer, inputs)), tuple(map(buffer, outputs)))


def in_fp64(root: Node) -> Node:
    """The same computation in fp64 throughout."""
    done: dict[Node, Node] = {}

    def wide(value: object) -> object:
        return F64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    def visit(node: Node) -> Node:
        if node not in done:
            done[node] = node.op(*map(visit, node.inputs), *map(wide, node.attrs))
        return done[node]

    return visit(root)


def check(kernel: Kernel, config: GemmConfig | None = POINTERS) -> None:
    """Each output against the body in fp64; errors are relative to the largest element."""
    inputs = random_inputs(kernel, -1.0, 1.0)
    wide = {in_fp64(i): x.cpu().double() for i, x in zip(kernel.body.inputs, inputs, strict=True)}
    for node, found in zip(kernel.body.outputs, run(kernel, inputs, config), strict=True):
        (truth,) = ops.evaluate_nodes([in_fp64(node)], wide)
        assert found.shape == truth.shape
        if found.numel():
            error = (found.cpu().double() - truth).abs().max() / truth.abs().max().clamp(min=1e-6)
            assert error <= TOLERANCE[found.dtype], f"{node.op.name}: {error}"


# ---- sizes and operands ----


@pytest.mark.parametrize("config", [POINTERS, None], ids=["small tiles", "table"])
@pytest.mark.parametrize("dtype", [F64, F32, F16], ids=str)
@pytest.mark.parametrize(
    "m, n, k", [(40, 24, 48), (33, 17, 19), (1, 5, 3), (64, 1, 32), (32, 32, 1), (70, 130, 5)]
)
def test_matmul(m: int, n: int, k: int, dtype: torch.dtype, config: GemmConfig | None) -> None:
    x, w = leaf("x", m, k, dtype=dtype), leaf("w", k, n, dtype=dtype)
    check(kernel_of([ops.matmul(x, w)], [x, w]), config)


@pytest.mark.parametrize("m, n, k", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
def test_empty_axes(m: int, n: int, k: int) -> None:
    x, w, saved = leaf("x", m, k), leaf("w", k, n), leaf("saved", m, n)
    both = ops.linear_act_backward(x, w, saved, act="relu")
    check(kernel_of([both[0], both[1]], [x, w, saved]), None)


def _operands(dtype: torch.dtype) -> dict[str, tuple[list[Node], Node]]:
    x = leaf("x", 2, 20, 24, dtype=dtype)
    w, wt, xt = (leaf(n, *s, dtype=dtype) for n, s in zip(("w", "wt", "xt"), [(24, 40), (40, 24), (24, 40)]))
    return {
        "leading axes": ([x, w], ops.matmul(x, w)),
        "transposed weight": ([x, wt], ops.matmul(x, ops.transpose(wt))),
        "transposed both": ([xt, wt], ops.matmul(ops.transpose(xt), ops.transpose(wt))),
        "sliced": ([x, w], ops.matmul(ops.slice_(x, axis=1, start=3, stop=20, step=1), w)),
        "permuted": ([x, w], ops.matmul(ops.permute(x, perm=(1, 0, 2)), w)),
        "the same twice": ([wt], ops.matmul(wt, ops.transpose(wt))),
    }


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("name", _operands(F32))
def test_operands(name: str, dtype: torch.dtype) -> None:
    inputs, output = _operands(dtype)[name]
    check(kernel_of([output], inputs))


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("name", ["leading axes", "transposed weight", "transposed both", "the same twice"])
def test_operands_by_descriptor(name: str, flatten: bool) -> None:
    inputs, output = _operands(F16)[name]
    kernel = kernel_of([output], inputs)
    config = GemmConfig(32, 32, 16, 4, 2, descriptors=True, tile_descriptors=True, flatten=flatten)
    assert generate(kernel, HOPPER, config).text.count("TensorDescriptor(") == 3
    check(kernel, config)


@pytest.mark.parametrize("strides", [(1, 48), (0, 0), (0, 1), (100, 2), (56, 1)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_strided_operands(strides: tuple[int, int], dtype: torch.dtype) -> None:
    """Cotangents arrive transposed, expanded to stride 0, with gaps, and with aligned padding."""
    ct, w, x = leaf("ct", 48, 24, dtype=dtype), leaf("w", 24, 40, dtype=dtype), leaf("x", 40, 48, dtype=dtype)
    check(kernel_of([ops.matmul(ct, w)], [ct, w], {ct: strides}))
    check(kernel_of([ops.matmul(x, ct)], [x, ct], {ct: strides}))


@pytest.mark.parametrize("strides", [(0, 0), (0, 1)], ids=str)
def test_two_expanded_operands_do_not_count_past_the_end(strides: tuple[int, int]) -> None:
    a, b = leaf("a", 20, 19), leaf("b", 19, 12)
    check(kernel_of([ops.matmul(a, b)], [a, b], {a: (1, 0), b: strides}))


@pytest.mark.parametrize("strides", [(1, 20), (40, 1), (48, 2)], ids=str)
@BOTH
def test_strided_output(strides: tuple[int, int], config: GemmConfig) -> None:
    x, w = leaf("x", 20, 24, dtype=F16), leaf("w", 24, 16, dtype=F16)
    y = ops.matmul(x, w)
    check(kernel_of([y], [x, w], {y: strides}), config)


# ---- what follows the product ----


def linear_act(act: str, dtype: torch.dtype, m: int = 20, n: int = 40, k: int = 24) -> Kernel:
    x, w, b = leaf("x", 2, m, k, dtype=dtype), leaf("w", n, k, dtype=dtype), leaf("b", n, dtype=dtype)
    both = ops.linear_act(x, ops.transpose(w), b, act=act)
    return kernel_of([both[0], both[1]], [x, w, b])


def linear_act_backward(act: str, dtype: torch.dtype, m: int = 20, n: int = 40, k: int = 24) -> Kernel:
    ct, w = leaf("ct", 2, m, k, dtype=dtype), leaf("w", k, n, dtype=dtype)
    saved = leaf("saved", 2, m, n, dtype=dtype)
    both = ops.linear_act_backward(ct, w, saved, act=act)
    return kernel_of([both[0], both[1]], [ct, w, saved])


def linear_add(dtype: torch.dtype, m: int = 20, n: int = 40, k: int = 24) -> Kernel:
    x, w = leaf("x", 2, m, k, dtype=dtype), leaf("w", n, k, dtype=dtype)
    skip = leaf("skip", 2, m, n, dtype=dtype)
    return kernel_of([ops.linear_add(x, ops.transpose(w), skip)], [x, w, skip])


@BOTH
@pytest.mark.parametrize("act", ["none", *ops.ACTIVATIONS])
def test_linear_act(act: str, config: GemmConfig) -> None:
    for dtype in [F16] if config.descriptors else [F16, F32, F64]:
        check(linear_act(act, dtype), config)


@BOTH
@pytest.mark.parametrize("act", ops.ACTIVATIONS)
def test_linear_act_backward(act: str, config: GemmConfig) -> None:
    for dtype in [F16] if config.descriptors else [F16, F32, F64]:
        check(linear_act_backward(act, dtype), config)


@BOTH
def test_linear_add(config: GemmConfig) -> None:
    check(linear_add(F16), config)


@BOTH
def test_result_moved_and_split(config: GemmConfig) -> None:
    """Heads: [B, T, H D] -> [B, H, T, D], and an output of each form from one tile."""
    x, w = leaf("x", 2, 12, 24, dtype=F16), leaf("w", 24, 32, dtype=F16)
    y = ops.matmul(x, w)
    heads = ops.permute(ops.reshape(y, shape=(2, 12, 4, 8)), perm=(0, 2, 1, 3))
    check(kernel_of([ops.mul(heads, heads), y], [x, w]), config)


@BOTH
def test_result_meets_moved_operands(config: GemmConfig) -> None:
    """A flattened product, a value in its axes, and a mask from positions."""
    x, w, skip = leaf("x", 2, 12, 24, dtype=F16), leaf("w", 24, 32, dtype=F16), leaf("s", 24, 32, dtype=F16)
    y = ops.add(ops.reshape(ops.matmul(x, w), shape=(24, 32)), skip)
    causal = ops.lt(*(ops.iota(shape=(24, 32), axis=i, dtype=torch.int64) for i in (1, 0)))
    check(kernel_of([ops.where(causal, y, ops.neg(y))], [x, w, skip]), config)


def test_operand_in_the_epilogue_too() -> None:
    x, w = leaf("x", 40, 24, dtype=F16), leaf("w", 24, 24, dtype=F16)
    check(kernel_of([ops.add(x, ops.matmul(x, w))], [x, w]), DESCRIPTORS)


def test_values_are_rounded_where_they_are_cast_or_written() -> None:
    """The product's square, kept in fp32, passes fp16's range on the way; each output is rounded alone."""
    x, w = leaf("x", 16, 16, dtype=F16), leaf("w", 16, 16, dtype=F16)
    y = ops.matmul(x, w)
    thousandth = ops.full(value=1e-4, shape=y.shape, dtype=F16)
    kernel = kernel_of(
        [ops.mul(ops.mul(y, y), thousandth), ops.cast(ops.cast(y, dtype=F32), dtype=F16)], [x, w]
    )
    inputs = [torch.full((16, 16), 6.0, dtype=F16, device=DEVICE) for _ in range(2)]
    small, product = run(kernel, inputs, POINTERS)
    torch.testing.assert_close(small, torch.full_like(small, 576.0**2 * 1e-4), rtol=1e-3, atol=0)
    assert (product == 576).all()


# ---- sums over rows ----


@pytest.mark.parametrize("m, n", [(33, 40), (1, 7), (64, 1), (100, 70)])
def test_bias_gradient(m: int, n: int) -> None:
    check(linear_act_backward("gelu", F32, m, n))
    check(linear_act_backward("tanh", F64, m, n))


def test_sum_alone_and_computed_further() -> None:
    ct, w, scale = leaf("ct", 50, 24), leaf("w", 24, 40), leaf("scale", 40)
    y = ops.matmul(ct, w)
    total = ops.reshape(ops.sum(ops.mul(y, y), dims=(0,)), shape=(40,))
    check(kernel_of([ops.mul(total, scale)], [ct, w, scale]))


def test_two_sums_over_leading_axes() -> None:
    a, b = leaf("a", 3, 20, 8), leaf("b", 8, 12)
    y = ops.matmul(a, b)
    check(kernel_of([ops.sum(y, dims=(0, 1)), y, ops.sum(ops.mul(y, y), dims=(0, 1))], [a, b]))


def test_sums_repeat_bit_for_bit() -> None:
    kernel = linear_act_backward("silu", F16)
    inputs = random_inputs(kernel)
    first, second = (run(kernel, inputs, DESCRIPTORS) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- what does not fit ----


def _refused() -> dict[str, tuple[Callable[[Node, Node], list[Node]], str]]:
    return {
        "a computed operand": (lambda x, w: [ops.matmul(ops.exp(x), w)], "computes an operand"),
        "a constant": (lambda x, w: [ops.matmul(ops.full(0.5, x.shape, F32), w)], "computes an operand"),
        "a weight's gradient": (lambda x, w: [ops.contract_rows(x, w)], "no kernel is known"),
        "a batch": (
            lambda x, w: [ops.bmm(*(ops.reshape(i, (1, 16, 16)) for i in (x, w)))],
            "no kernel is known",
        ),
        "two products": (lambda x, w: [ops.matmul(ops.matmul(x, w), w)], "2 contractions"),
        "row sums": (lambda x, w: [ops.sum(ops.matmul(x, w), dims=(1,))], "no sum over a tile's rows"),
        "largest": (lambda x, w: [ops.amax(ops.matmul(x, w), dims=(0,))], "no sum over a tile's rows"),
        "other outputs": (lambda x, w: [ops.matmul(x, w), ops.neg(x)], "does not follow"),
        "transposed sum": (
            lambda x, w: [ops.add(y := ops.matmul(x, w), ops.transpose(y))],
            "different movements",
        ),
    }


@pytest.mark.parametrize("name", _refused())
def test_refusals_say_why(name: str) -> None:
    outputs, reason = _refused()[name]
    x, w = leaf("x", 16, 16), leaf("w", 16, 16)
    with pytest.raises(CompileError, match=reason):
        generate(kernel_of(outputs(x, w), [x, w]), HOPPER)


def test_descriptors_are_refused_for_unaligned_strides() -> None:
    x, w = leaf("x", 64, 20, dtype=F16), leaf("w", 20, 64, dtype=F16)
    with pytest.raises(CompileError, match="descriptors"):
        generate(kernel_of([ops.matmul(x, w)], [x, w]), HOPPER, DESCRIPTORS)


def test_descriptors_take_unaligned_inputs() -> None:
    kernel = linear_add(F16)
    inputs = random_inputs(kernel, -1.0, 1.0)
    moved = [torch.zeros(x.numel() + 1, dtype=F16, device=DEVICE)[1:].view(x.shape).copy_(x) for x in inputs]
    assert any(x.data_ptr() % 16 for x in moved)
    (expected,), (found,) = (run(kernel, values, DESCRIPTORS) for values in (inputs, moved))
    assert torch.equal(expected, found)


def test_descriptor_of_a_slice() -> None:
    x, w = leaf("x", 64, 40, dtype=F16), leaf("w", 24, 40, dtype=F16)
    part = ops.slice_(ops.slice_(x, axis=0, start=3, stop=60, step=1), axis=1, start=8, stop=32, step=1)
    kernel = kernel_of([ops.matmul(part, w)], [x, w])
    assert "_aligned(x, 2264, 128)" in generate(kernel, HOPPER, DESCRIPTORS).text
    check(kernel, DESCRIPTORS)
    inputs = random_inputs(kernel, -1.0, 1.0)
    moved = [torch.zeros(x.numel() + 1, dtype=F16, device=DEVICE)[1:].view(x.shape).copy_(x) for x in inputs]
    (expected,), (found,) = (run(kernel, values, DESCRIPTORS) for values in (inputs, moved))
    assert torch.equal(expected, found)


def test_large_offsets_take_64_bits() -> None:
    x, w = leaf("x", 2**20, 4096, dtype=F16), leaf("w", 4096, 24, dtype=F16)
    text = generate(kernel_of([ops.matmul(x, w)], [x, w]), HOPPER, POINTERS).text
    assert "rows = (m0 + tl.arange(0, 32))[:, None].to(tl.int64)" in text


# ---- tiles of the table, compiled ----

SIZES = [(8192, 4096, 4096), (8192, 5632, 2048), (4096, 1024, 1024), (16384, 768, 3072)]


def _bodies(m: int, n: int, k: int) -> dict[str, Kernel]:
    return {
        "act": linear_act("gelu", BF16, m // 2, n, k),
        "act backward": linear_act_backward("gelu", BF16, m // 2, n, k),
        "add": linear_add(BF16, m // 2, n, k),
    }


def _config(kernel: Kernel, target: Target) -> GemmConfig:
    return default_config(
        Contraction.of(Kernel(kernel.name, lower(kernel.body), kernel.inputs, kernel.outputs)), target
    )


@pytest.mark.parametrize("m, n, k", SIZES)
def test_table_uses_descriptors_on_hopper(m: int, n: int, k: int) -> None:
    for kernel in _bodies(m, n, k).values():
        config = _config(kernel, HOPPER)
        assert config.descriptors and config.tile_descriptors
        assert not _config(kernel, Target.parse("cuda:80")).descriptors


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, arch",
    [(name, 90) for name in ("act", "add")] + [("act backward", a) for a in (80, 90, 100)],
)
def test_compiled_tiles_fit_and_do_not_spill(name: str, arch: int) -> None:
    target, seen = Target.parse(f"cuda:{arch}"), set()
    for size in SIZES:
        kernel = _bodies(*size)[name]
        if (config := _config(kernel, target)) in seen:
            continue
        seen.add(config)
        for function in cubins(kernel, arch):
            assert function["shared"] <= target.shared_memory, function
            assert function["spills"] == 0, function


@pytest.mark.gpu
@pytest.mark.parametrize("act", ops.ACTIVATIONS)
def test_bfloat16(act: str) -> None:
    for config in (None, GemmConfig(128, 256, 64, 8, 4, 4, descriptors=True, tile_descriptors=True)):
        check(linear_act(act, BF16, 700, 520, 136), config)
        check(linear_act_backward(act, BF16, 700, 520, 136), config)
