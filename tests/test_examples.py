"""The examples, run as a reader runs them, in small."""

from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    """The module that the test names, its folder on the path, as `python examples/x.py` has it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(request.param)


TRAIN = pytest.mark.parametrize("example", ["train_language_model"], indirect=True)
INSPECT = pytest.mark.parametrize("example", ["inspect_rewrites"], indirect=True)


@TRAIN
def test_training_follows_eager(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both runs learn, the curves agree, and the picture, the summary and the sample are there."""
    example.main(["--steps", "20", "--validate-every", "10", "--out", str(tmp_path)])
    runs = {
        name: torch.load(tmp_path / f"{name}.pt", weights_only=True)["progress"]
        for name in (example.EAGER, example.COMPILED)
    }
    eager, compiled = (run["losses"] for run in runs.values())
    assert len(eager) == len(compiled) == 20
    assert compiled[-1] < compiled[0] - 0.5
    assert max(abs(a - b) for a, b in zip(eager, compiled, strict=True)) < 1e-3
    assert [step for step, _ in runs[example.COMPILED]["validation"]] == [10, 20]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "largest difference of the losses" in printed
    assert "def " in printed.split("a sample of the compiled model:")[1]


@TRAIN
def test_a_resumed_run_equals_an_unbroken_one(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after the checkpoint of step 10 and resumed, a run ends with the same bits."""
    arguments = ["--steps", "20", "--validate-every", "10", "--no-eager", "--out"]
    example.main([*arguments, str(tmp_path / "unbroken")])

    class Stopped(Exception):
        pass

    save = example.Trainer.save

    def save_and_stop(trainer: object) -> None:
        save(trainer)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(example.Trainer, "save", save_and_stop)
        with pytest.raises(Stopped):
            example.main([*arguments, str(tmp_path / "broken")])
    example.main([*arguments, str(tmp_path / "broken"), "--resume"])

    whole, resumed = (
        torch.load(tmp_path / name / f"{example.COMPILED}.pt", weights_only=True)
        for name in ("unbroken", "broken")
    )
    assert whole["progress"]["losses"] == resumed["progress"]["losses"]
    for name, weight in whole["model"].items():
        assert torch.equal(weight, resumed["model"][name]), name
    moments, resumed_moments = (state["optimizer"]["state"] for state in (whole, resumed))
    for index, state in moments.items():
        for key, value in state.items():
            assert torch.equal(value, resumed_moments[index][key]), (index, key)


@TRAIN
def test_resuming_another_setting_is_refused(example: ModuleType, tmp_path: Path) -> None:
    arguments = ["--no-eager", "--validate-every", "5", "--out", str(tmp_path)]
    example.main([*arguments, "--steps", "5"])
    with pytest.raises(SystemExit, match="choose the same options"):
        example.main([*arguments, "--steps", "10", "--resume"])


@TRAIN
def test_batches_depend_on_seed_and_step_alone(example: ModuleType) -> None:
    text = torch.arange(256, dtype=torch.uint8)
    tokens, targets = example.batch(text, 3, 8, seed=1, step=5)
    again, _ = example.batch(text, 3, 8, seed=1, step=5)
    other, _ = example.batch(text, 3, 8, seed=1, step=6)
    assert torch.equal(tokens, again) and not torch.equal(tokens, other)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.shape == targets.shape == (3, 8)


@TRAIN
def test_the_learning_rate_warms_up_and_decays(example: ModuleType) -> None:
    rates = [example.learning_rate(step, 100, 1.0) for step in range(100)]
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates[0] == pytest.approx(0.2)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
    assert all(a >= b for a, b in itertools.pairwise(rates[5:]))


@TRAIN
def test_speed_without_time_is_unknown(example: ModuleType) -> None:
    assert math.isnan(example.Progress().speed)
    assert example.Progress(tokens=10, seconds=2.0).speed == 5.0


@INSPECT
def test_inspecting_shows_every_stage(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan for a GPU, without one: what is printed holds the fused ops and a kernel's source."""
    source = tmp_path / "plan.py"
    example.main(["--width", "256", "--rows", "256", "--source", str(source)])
    printed = capsys.readouterr().out
    assert "add_rms_norm(" in printed.split("The forward, optimized")[1].split("The backward")[0]
    assert "@triton.jit" in printed
    assert "def backward(" in source.read_text()
