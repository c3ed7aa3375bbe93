"""The benchmark harness: its judgements, that one failure stays one, and the pages made from results."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import models, report, speed
from benchmarks.accuracy import gradient_ratios
from benchmarks.variants import Batches, Training, make_model
from benchmarks.zoo import CASES

ROOT = Path(__file__).resolve().parents[1]
NEEDS = {"hf_llama": "transformers"}
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CASES)
def test_a_case_learns(name: str) -> None:
    """Each small case has a finite loss that falls over ten steps on the same batch."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    case = CASES[name]["small"]()
    training = Training("eager", make_model(case, CPU, torch.float32), case.learning_rate)
    batch = Batches(case, CPU, torch.float32, 1)(0)
    losses = [training.step(batch).item() for _ in range(10)]
    assert math.isfinite(losses[0])
    assert losses[-1] < losses[0]


def test_batches_repeat_in_turn() -> None:
    case = CASES["mlp_small"]["small"]()
    batches = Batches(case, CPU, torch.float32, 2)
    assert batches(0) is batches(2)
    assert not torch.equal(batches(0)[0], batches(1)[0])


def test_a_variant_that_fails_leaves_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    models.main(
        ["mlp_small", "--device", "cpu", "--modes", "nonsense,eager", "--rounds", "5", "--json", str(path)]
    )
    (result,) = json.loads(path.read_text())
    failed, eager = result["variants"]
    assert "nonsense" in failed["error"]
    assert eager["rounds"] == 5
    assert eager["p20"] <= eager["ms"] <= eager["p80"]
    assert result["versions"]["torch"] == torch.__version__
    assert "failed" in capsys.readouterr().out.splitlines()[-2]


def test_percentiles_are_between_the_samples() -> None:
    measured = speed.Measurement("x", samples=[5.0, 1.0, 2.0, 4.0, 3.0])
    assert measured.percentile(0.5) == 3.0
    assert measured.percentile(0.2) == pytest.approx(1.8)
    assert math.isnan(speed.Measurement("x").percentile(0.5))


def test_gradient_ratios_compare_errors() -> None:
    truth = {"w": torch.tensor([1.0, -1.0]).double(), "zero": torch.zeros(2).double()}
    eager = {"w": truth["w"] + 0.01, "zero": truth["zero"]}
    ratios = gradient_ratios(truth, eager, {"w": truth["w"] + 0.02, "zero": truth["zero"]}, 2**-7)
    assert ratios == {"w": pytest.approx(2.0), "zero": 0.0}
    missing = gradient_ratios(truth, eager, {"w": truth["w"] * math.nan}, 2**-7)
    assert missing == {"w": math.inf, "zero": math.inf}
    exact = gradient_ratios(truth, truth, {"w": truth["w"] + 2**-14, "zero": truth["zero"]}, 2**-7)
    assert exact["w"] == pytest.approx(0.25), "an error below the floor passes, though eager has none"


def _result(ms: float, date: str) -> dict[str, object]:
    row = {"ms": ms, "p20": ms, "p80": ms, "peak_gb": 1.0, "compile_s": 2.0}
    variants = [{"variant": "eager", **row}, {"variant": "egcompile", **row, "ms": ms / 2}]
    about = {"kind": "speed", "model": "llama", "size": "full", "dtype": "bf16", "device": "cuda"}
    versions = {"torch": "2", "triton": "3", "gpu": "G"}
    return {**about, "versions": versions, "date": date, "variants": variants}


def test_report_takes_the_newest_result(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([_result(8.0, "2026-02-02"), _result(6.0, "2026-01-01")]))
    text = "before\n<!-- benchmarks:speed -->\nold\n<!-- /benchmarks:speed -->\nafter"
    made = report.render(text, report.load(tmp_path))
    assert "| llama | 8.00 [8.00, 8.00] |" in made
    assert "2.00x" in made
    assert "old" not in made
    assert made.startswith("before\n") and made.endswith("\nafter")
    assert report.render(made, report.load(tmp_path)) == made


def test_the_pages_hold_what_was_measured() -> None:
    """The tables of README and docs are those that `python -m benchmarks.report` writes."""
    assert report.main(["--check"]) == 0


@pytest.mark.parametrize("name", ["environment", "kernels", "launch", "profile", "tune"])
def test_without_a_gpu_a_command_ends_with_its_usage(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, *(["llama"] if name == "profile" else [])])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"benchmarks.{name}").main()
    assert stopped.value.code == 2 and "no GPU" in capsys.readouterr().err
