"""Tiles by measurement, with a timer that makes times up; and once for real, where there is a GPU."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import egcompile
from egcompile.codegen import Config, KernelSource, generate
from egcompile.codegen.neighbours import neighbours
from egcompile.errors import CacheCorrupt
from egcompile.ir import TensorType
from egcompile.ops import gelu, softmax
from egcompile.plan import Plan
from egcompile.runtime.timing import rotated, tensor
from egcompile.schedule.kernel import Buffer, Kernel
from egcompile.target import Target
from egcompile.tune import GAIN, Tuner, tuner_for
from tests.codegen.harness import build

H200 = Target.parse("cuda:90")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("EGCOMPILE_CACHE_DIR", str(tmp_path))
    yield
    assert not list(tmp_path.glob("*.tmp"))


class Clock:
    """A timer: `microseconds` of a source's config. It keeps what it was asked."""

    def __init__(self, microseconds: Callable[[Config], float]) -> None:
        self.of = microseconds
        self.asked: list[Sequence[KernelSource]] = []

    def __call__(self, kernel: Kernel, sources: Sequence[KernelSource], target: Target) -> list[float]:
        self.asked.append(sources)
        return [self.of(source.config) for source in sources if source.config]


def _softmax(dtype: str = "bf16", rows: int = 8192, name: str = "kernel") -> Kernel:
    return build(lambda x: softmax(x, dim=1), f"{dtype}[{rows},3000]", name=name)


def _more_warps(config: Config) -> float:
    return 100.0 / config.num_warps


def test_the_fastest_is_chosen_and_kept() -> None:
    clock = Clock(_more_warps)
    kernel = _softmax()
    chosen = Tuner(H200, "a machine", clock)(kernel)
    configs = [s.config for s in neighbours(kernel, H200) if s.config]
    assert chosen == min(configs, key=_more_warps) != configs[0]
    again = Clock(lambda config: 1 / 0)
    assert Tuner(H200, "a machine", again)(kernel) == chosen
    assert Tuner(H200, "a machine", again)(_softmax(name="softmax_17")) == chosen
    assert len(clock.asked) == 1 and not again.asked


@pytest.mark.parametrize(
    ("machine", "target", "kernel"),
    [
        ("another machine", H200, _softmax()),
        ("a machine", Target.parse("cuda:100"), _softmax()),
        ("a machine", H200, _softmax("f16")),  # whose text is that for bf16
        ("a machine", H200, _softmax(rows=8191)),
        ("a machine", H200, build(gelu, "bf16[8192,3000]")),
    ],
)
def test_what_differs_is_timed_anew(machine: str, target: Target, kernel: Kernel) -> None:
    Tuner(H200, "a machine", Clock(_more_warps))(_softmax())
    clock = Clock(_more_warps)
    Tuner(target, machine, clock)(kernel)
    assert len(clock.asked) == 1


def test_the_heuristics_stay_unless_clearly_beaten() -> None:
    kernel = _softmax()
    first = generate(kernel, H200).config
    for clock in (
        Clock(lambda config: 100.0 if config == first else 100.0 * (GAIN + 0.01)),
        Clock(lambda config: 100.0 if config == first else math.inf),
    ):
        tuner = Tuner(H200, repr(clock), clock)
        assert tuner(kernel) is None
        assert tuner(kernel) is None  # kept as well
        assert len(clock.asked) == 1


BROKEN = ("", "[]", '{"config": {"rows": 1}}', '{"config": {"num_warps": "4"}}', "\xff")


@pytest.mark.parametrize("text", BROKEN)
def test_a_corrupt_file_is_chosen_anew(text: str, tmp_path: Path) -> None:
    tuner = Tuner(H200, "a machine", Clock(_more_warps))
    chosen = tuner(_softmax())
    (path,) = tmp_path.glob("tiles_*.json")
    kept = json.loads(path.read_text())
    assert Config(**kept["config"]) == chosen
    assert len(kept["times"]) == len(neighbours(_softmax(), H200))
    path.write_bytes(text.encode("latin1"))
    with pytest.warns(CacheCorrupt, match="chosen anew"):
        assert tuner(_softmax()) == chosen
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuner(_softmax()) == chosen


def test_a_directory_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EGCOMPILE_CACHE_DIR", str(tmp_path / "file" / "below"))
    tuner = Tuner(H200, "a machine", Clock(_more_warps))
    with pytest.warns(UserWarning, match="not kept"):
        assert tuner(_softmax()) is not None


def test_without_memory_nothing_is_chosen_or_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def full(kernel: Kernel, sources: Sequence[KernelSource], target: Target) -> list[float]:
        raise torch.OutOfMemoryError

    assert Tuner(H200, "a machine", full)(_softmax()) is None
    assert "want of memory" in caplog.text
    assert not list(tmp_path.iterdir())


def test_small_kernels_are_not_timed() -> None:
    clock = Clock(_more_warps)
    assert Tuner(H200, "a machine", clock)(_softmax(rows=16)) is None
    assert not clock.asked


def _step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, w.shape, w, 1e-6)


def _graph() -> Any:
    x = torch.empty(8192, 3000, dtype=torch.bfloat16, device="meta", requires_grad=True)
    w = torch.empty(3000, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return egcompile.trace(_step, (x, w)).graph


def test_a_plan_is_rendered_with_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egcompile.plan.tuner_for", lambda target: Tuner(target, "one", Clock(_more_warps)))
    plain, tuned = Plan(_graph(), H200), Plan(_graph(), H200, tune=True)
    changed = [(a.source, b.source) for a, b in zip(plain.kernels, tuned.kernels, strict=True)]
    assert len(changed) == 2
    for before, after in changed:
        assert before != after
        assert before.replace("num_warps=", "") != after.replace("num_warps=", "")
        assert after in tuned.source


def test_without_the_gpu_the_plan_is_the_heuristics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Plan(_graph(), H200, tune=True).source == Plan(_graph(), H200).source
    (record,) = (r for r in caplog.records if r.name == "egcompile.kernels")
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "tiles for cuda:90 are the heuristics': there is no GPU here"


def test_another_gpu_is_not_asked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Target, "of", lambda device: H200)
    assert tuner_for(Target.parse("cuda:80")) is None
    assert caplog.messages == ["tiles for cuda:80 are the heuristics': the GPU here is cuda:90"]


@pytest.mark.parametrize(
    ("mode", "graphs", "tune"),
    [
        (None, False, False),
        ("default", False, False),
        ("reduce-overhead", True, False),
        ("max-autotune", True, True),
        ("max-autotune-no-cudagraphs", False, True),
    ],
)
def test_the_modes_of_torch_compile(
    mode: str | None, graphs: bool, tune: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    def plan(*args: Any, **kwargs: Any) -> Plan:
        made.append(kwargs)
        return Plan(*args, **kwargs)

    monkeypatch.setattr("egcompile.backend.Plan", plan)
    x = torch.randn(4, 8, requires_grad=True)
    y = egcompile.compile(lambda x: torch.softmax(x, -1), mode=mode)(x)
    torch.testing.assert_close(y, torch.softmax(x, -1))
    ((kwargs),) = made
    assert (kwargs["graphs"], kwargs["tune"]) == (graphs, tune)


def test_arguments_lie_as_the_kernel_expects() -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.random.get_rng_state()
    for text, strides, offset in (
        ("bf16[4,6]", (1, 4), 0),
        ("f32[3,5]", (0, 1), 3),
        ("f64[2,2]", (8, 2), 1),
        ("i64[7]", (1,), 2),
        ("bool[3,3]", (3, 1), 17),
        ("f16[0,3]", (3, 1), 0),
    ):
        buffer = Buffer(TensorType.parse(text), strides, offset)
        x = tensor(buffer, CPU, generator)
        assert (TensorType.of(x), x.stride()) == (buffer.type, strides)
        assert (x.storage_offset() - offset) * x.element_size() % 16 == 0
        assert x.numel() == 0 or bool((x != 0).any()) == x.dtype.is_floating_point
    assert torch.equal(torch.random.get_rng_state(), before)


def test_buffers_rotate_through_more_than_a_cache() -> None:
    kernel = build(gelu, "bf16[4096,4096]")
    sets = list(rotated(kernel, CPU))
    assert len(sets) == 5
    assert len({x.data_ptr() for xs in sets for x in xs}) == 10


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4096, 3000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(3000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ct = torch.randn_like(x)
    state = torch.cuda.get_rng_state()
    tuned = egcompile.compile(_step, mode="max-autotune-no-cudagraphs")(x, w)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    plain = egcompile.compile(_step)(x, w)
    torch.testing.assert_close(tuned, plain)
    gradients = [torch.autograd.grad(y, (x, w), ct) for y in (tuned, plain)]
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("tiles_*.json")}
    assert len(files) == 2
    for path in files:
        assert all(t["microseconds"] > 1 for t in json.loads(path.read_text())["times"])
    torch._dynamo.reset()
    egcompile.compile(_step, mode="max-autotune")(x, w)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("tiles_*.json")} == files
