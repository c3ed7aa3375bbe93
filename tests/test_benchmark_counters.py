"""benchmarks.counters without a GPU: how ncu is called, what its output means, and what is shown of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import counters, launch, ncu, report
from benchmarks.works import Work, works
from egcompile.runtime.loader import load_once

STALL = ncu.STALLS["long_scoreboard"], ncu.STALLS["barrier"]
TORCH = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, char *>"

LOG = f"""\
==PROF== Connected to process 4242 (/usr/bin/python3.11)
==PROF== Profiling "_batch_moments_0" - 0: 0%....50%....100% - 4 passes
==WARNING== Metric lts__t_sector_hit_rate.pct is not available for this kernel
==PROF== Disconnected from process 4242
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",\
"Device","CC","dram__bytes_read.sum","gpu__time_duration.sum","launch__registers_per_thread",\
"lts__t_sector_hit_rate.pct","{STALL[0]}","{STALL[1]}"
"","","","","","","","","","","","byte","ns","register/thread","%","inst","inst"
"0","4242","python3.11","127.0.0.1","_batch_moments_0","1","7","(128, 1, 1)","(528, 1, 1)","0",\
"9.0","134,217,728","61,504","64","n/a","6.00","2.00"
"1","4242","python3.11","127.0.0.1","nothing","1","7","(128, 1, 1)","(1, 1, 1)","0",\
"9.0","0","1,024","16","(!) nan","nan",""
"2","4242","python3.11","127.0.0.1","{TORCH}(int, T2, T3)","1","7","(128, 1, 1)","(8, 1, 1)","0",\
"9.0","1,500","2,000","20","33.25","0","0"
"3","4242","python3.11","127.0.0.1","nothing","1","7","(128, 1, 1)","(1, 1, 1)","0",\
"9.0","0","1,024","16","(!) nan","nan",""
"""


def test_a_log_has_a_launch_a_row() -> None:
    first, mark, last, _ = ncu.parse(LOG)
    assert first.kernel == "_batch_moments_0" and mark.kernel == "nothing"
    assert first.values == {
        "dram__bytes_read.sum": pytest.approx(134.217728),
        "gpu__time_duration.sum": pytest.approx(61.504),
        "launch__registers_per_thread": 64,
        STALL[0]: 6,
        STALL[1]: 2,
    }
    assert mark.values.keys() == {*first.values} - {*STALL}, "neither n/a nor nan is a number"
    assert last.values["lts__t_sector_hit_rate.pct"] == 33.25
    assert ncu.parse("==PROF== Connected to process 1\n==ERROR== no\n") == []


SCALES = {
    0.000002: ["byte"],
    0.002: ["Kbyte", "ns", "nsecond"],
    2.0: ["Mbyte", "us", "usecond", "%", "inst", "register/thread", ""],
    2000.0: ["Gbyte", "ms", "msecond"],
    2000000.0: ["s", "second"],
}


@pytest.mark.parametrize(("value", "unit"), [(v, u) for v, units in SCALES.items() for u in units])
def test_units_are_megabytes_and_microseconds(value: float, unit: str) -> None:
    ((_, values),) = ncu.parse(f'"ID","Kernel Name","a__b"\n"","","{unit}"\n"0","k","2.00"\n')
    assert values == {"a__b": pytest.approx(value)}


def test_rows_are_of_works_and_of_either_side_of_a_mark() -> None:
    launches = ncu.parse(LOG)
    marks = launches[1::2]
    work, none, again = counters.rows([*launches, *marks, *launches, *launches[:1]])
    assert none == [] and again == work
    forward, backward = work
    assert (forward["direction"], forward["kernel"]) == ("forward", "_batch_moments_0")
    assert (backward["direction"], backward["kernel"]) == ("backward", TORCH[: counters.LONGEST])
    assert forward["l2_hit"] is None and forward["dram"] is None
    assert forward["stalls"] == {"long_scoreboard": 6, "barrier": 2}


def test_a_line_has_what_there_is_under_its_heading() -> None:
    head, line = counters.head(), counters.line(next(counters.rows(ncu.parse(LOG)))[0])
    assert line.endswith("long_scoreboard 6.0 (75%)")
    for title, shown in (("us", "61.5"), ("read MB", "134.2"), ("registers", "64")):
        end = head.index(f"  {title}  ") + len(title) + 2
        assert line[:end].endswith(f" {shown}")
    assert head[: line.index("long_scoreboard")].endswith("registers  ")
    assert ncu.HEADS.keys() == ncu.METRICS.keys()
    assert counters.line(counters.row("forward", ncu.Launch("k", {}))).split() == ["k", "forward"]


def test_the_mark_is_a_kernel_of_its_name() -> None:
    assert hasattr(load_once(launch.source(1)), counters.MARK)


def test_a_step_is_forward_the_mark_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of two warm runs, and at the one to measure."""
    seen: list[str] = []

    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append("forward")
        y = x * 2
        y.register_hook(lambda ct: seen.append("backward"))  # type: ignore[no-untyped-call]
        return y, x + 1

    monkeypatch.setattr(counters, "function", lambda variant, work: work.call)
    run = counters.step(Work("two", call, ((4, 8),), 3, 3), "cpu", lambda: seen.append("mark"))
    before = [*seen]
    run()
    assert before == ["forward", *(warm := ["forward", "mark", "backward"]), *warm]
    assert seen[len(before) :] == warm


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an ncu that knows neither FMA nor misc, counts its runs there, and has only marks for
    softmax; it fails for a single work."""
    program = f"""#!{sys.executable}
import pathlib, sys
here = pathlib.Path(__file__).parent
log = pathlib.Path(sys.argv[sys.argv.index("--log-file") + 1])
metrics = sys.argv[sys.argv.index("--metrics") + 1].split(",")
titles = sys.argv[sys.argv.index("--child") + 1 :]
with (here / "runs").open("a") as runs:
    print(*sys.argv[1:], file=runs)
for bad in ("sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active", {ncu.STALLS["misc"]!r}):
    if bad in metrics:
        name = bad.partition(".")[0]
        log.write_text("==ERROR== Failed to find metric regex:^" + name + "(\\\\.(sum|avg))?$\\n")
        sys.exit(1)
if len(titles) == 1:
    log.write_text("==ERROR== The application returned an error code (1).\\n")
    sys.exit("RuntimeError: out of shared memory")
head, row, mark, other = {LOG!r}.splitlines()[4:6], *{LOG!r}.splitlines()[6:9]
lines = [*head]
for title in titles:
    lines += [mark, mark] if "softmax" in title else [row, mark, other, mark]
log.write_text("\\n".join(lines))
"""
    (tmp_path / "ncu").write_text(program)
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(counters, "versions", lambda: {"gpu": "G"})
    return tmp_path


def test_neither_a_metric_nor_a_work_breaks_the_run(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counters.main(["8192x4096", "--json", str(fake / "out.json")])
    titles = [w.title for w in works() if "8192x4096" in w.title]
    (content,) = json.loads((fake / "out.json").read_text())
    assert content["kind"] == "counters" and content["versions"] == {"gpu": "G"} and content["date"]
    assert [r["work"] for r in content["results"]] == titles
    failed = [r for r in content["results"] if "error" in r]
    assert [r["work"] for r in failed] == ["softmax 8192x4096"]
    assert content["results"][0]["launches"] == next(counters.rows(ncu.parse(LOG)))
    said = capsys.readouterr().out
    assert "softmax 8192x4096 failed: it launched nothing" in said
    assert said.count("_batch_moments_0") == len(titles) - 1
    runs = (fake / "runs").read_text().splitlines()
    assert len(runs) == 3, "a metric is asked for until it is missed, once"
    assert "--profile-from-start off --clock-control none --cache-control all" in runs[0]
    assert runs[0].endswith(f"-m benchmarks.counters --child {' '.join(titles)}")


def test_a_run_that_fails_is_an_error(fake: Path) -> None:
    with pytest.raises(RuntimeError, match="out of shared memory"):
        counters.main(["softmax 8192x4096"])


def test_what_is_missing_is_a_usage_error(
    fake: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            counters.main([*arguments])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    assert "no work's title holds nonsense" in refused("nonsense")
    (fake / "ncu").unlink()
    assert "no ncu on the PATH" in refused("softmax")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU" in refused("softmax")


def test_the_table_has_each_launch_of_a_work() -> None:
    launches = next(counters.rows(ncu.parse(LOG)))
    about = {"kind": "counters", "size": "full", "device": "cuda", "versions": {}}
    table = report.counters([about | {"results": [{"work": "w", "launches": launches}, {"work": "failed"}]}])
    first, second = table.splitlines()[2:]
    assert "`_batch_moments_0` | 61.5 |" in first and first.endswith("| long_scoreboard 75% |")
    assert second.endswith("| 20 |  |"), "it waits for nothing"
