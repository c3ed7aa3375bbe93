"""benchmarks.tune and benchmarks.launch, as far as they go without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks import launch, tune
from benchmarks.unseen import UNSEEN
from benchmarks.works import works
from egcompile.codegen import KernelSource
from egcompile.schedule.kernel import Kernel
from egcompile.target import Target

H200 = Target.parse("cuda:90")


def test_no_heuristic_has_seen_the_shapes() -> None:
    assert len(UNSEEN) == len({w.title for w in UNSEEN}) == 20
    assert not {(w.name, w.shapes) for w in UNSEEN} & {(w.name, w.shapes) for w in works()}
    assert [w.title for w in tune.chosen(["50304"])] == ["softmax 4096x50304"]


def _kernels(title: str) -> list[Kernel]:
    (work,) = tune.chosen([title])
    return list(tune.kernels_of(work, H200))


@pytest.mark.parametrize("work", UNSEEN, ids=lambda w: w.title)
def test_each_work_has_loops_to_time(work: tune.Work) -> None:
    kernels = list(tune.kernels_of(work, H200))
    assert len(kernels) >= 2
    assert all(len(tune.candidates(k, H200, 3, 0)[0]) == 3 for k in kernels)


def test_candidates_are_the_heuristics_then_neighbours_then_others() -> None:
    kernel, _ = _kernels("softmax 4096x50304")
    sources, near = tune.candidates(kernel, H200, 20, 0)
    assert len(sources) == len({s.text for s in sources}) == 20
    assert 1 < near <= 12
    text, name, points = tune.task(kernel, sources[0], H200)
    assert f"def {name}(x0, out0)" in text
    assert [(p.type.shape, p.type.dtype) for p in points] == [((1,), b.type.dtype) for b in kernel.inputs] * 2


def test_ratios_are_of_a_second_measurement() -> None:
    """The first makes the fifth source, which is no neighbour, look best by luck; the second does not."""
    (work,) = tune.chosen(["softmax 4096x50304"])
    kernel = _kernels(work.title)[0]
    sources, _ = tune.candidates(kernel, H200, 5, 0)
    answers = iter([[10.0, 9.0, float("inf"), 11.0, 5.0], [10.0, 8.0, 9.5]])
    asked: list[Sequence[KernelSource]] = []

    def clock(texts: Sequence[KernelSource]) -> list[float]:
        asked.append(texts)
        return next(answers)

    result = tune.measure(work, kernel, sources, 4, clock)
    assert asked == [sources, [sources[0], sources[1], sources[4]]]
    assert (result["heuristic_us"], result["tuned_us"], result["best_us"]) == (10.0, 8.0, 8.0)
    assert result["failed"] == 1
    assert "10.0 us  autotuned      8.0 (1.25)" in tune.line(result)
    assert "by the best's: 1.250 (geometric mean)" in tune.summary([result])
    assert tune.summary([]) == "nothing was measured"


def test_a_kernel_that_fails_leaves_the_others() -> None:
    def clock(texts: Sequence[KernelSource]) -> list[float]:
        raise RuntimeError("an illegal access")

    (work,) = tune.chosen(["softmax 4096x50304"])
    kernel = _kernels(work.title)[0]
    result = tune.measure(work, kernel, tune.candidates(kernel, H200, 2, 0)[0], 2, clock)
    assert result["error"] == "RuntimeError: an illegal access"
    assert "failed: RuntimeError" in tune.line(result)


@pytest.mark.parametrize("count", launch.COUNTS)
def test_the_launched_kernel_has_as_many_tensors(count: int) -> None:
    head = launch.source(count).split("def nothing(")[1].split(")")[0]
    assert head.count("_ptr") == count
