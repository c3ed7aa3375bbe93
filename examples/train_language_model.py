"""Trains a small Llama from scratch, compiled by egcompile beside plain eager PyTorch.

    python examples/train_language_model.py                                  # two CPU cores, two minutes
    python examples/train_language_model.py --device cuda --dtype bf16 --size base --steps 2000
    python examples/train_language_model.py --resume                         # goes on where it was stopped

The text is what every machine with Python has: the source of the standard library, byte by byte. Both runs
start from the same weights and see the same batches in the same order, so their loss curves should lie
on each other; the script draws both, says how far apart they ever were, and samples from the result.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from llama import SIZES, Llama
from torch import Tensor
from tqdm import tqdm

import egcompile

EAGER, COMPILED = "eager", "egcompile"
LEARNING_RATES = {"tiny": 3e-3, "small": 1e-3, "base": 3e-4}
ROWS = {"tiny": 16, "small": 32, "base": 16}


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, on the CPU. `digest` names the text in a checkpoint."""

    train: Tensor
    validation: Tensor
    digest: str

    @staticmethod
    def standard_library(limit: int = 8_000_000) -> Corpus:
        """The modules at the top of the standard library; every tenth file is held out."""
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        train, validation = bytearray(), bytearray()
        for i, file in enumerate(files):
            (validation if i % 10 == 9 else train).extend(file.read_bytes())
        train, validation = train[:limit], validation[:limit]
        digest = hashlib.sha256(train).hexdigest()[:16]
        tensors = (torch.frombuffer(text, dtype=torch.uint8) for text in (train, validation))
        return Corpus(*tensors, digest)


def batch(text: Tensor, rows: int, length: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens, `[rows, length]`; by seed and step alone, so `step` is the data position."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - length, (rows, 1), generator=generator)
    window = text[starts + torch.arange(length + 1)].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first twentieth, then a cosine down to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


@dataclass
class Progress:
    """What a run has done: one loss a step; (step, loss) of each validation; tokens and seconds timed."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else math.nan


class Trainer:
    """One run: a model, what computes its loss, an optimizer, and where it stands."""

    REPORT_EVERY = 10
    """Steps between readings of the loss: each reading waits for the device."""

    def __init__(self, name: str, corpus: Corpus, options: argparse.Namespace) -> None:
        self.name, self.corpus, self.options = name, corpus, options
        self.device = torch.device(options.device)
        self.checkpoint = options.out / f"{name}.pt"
        torch.manual_seed(options.seed)
        self.model = Llama(SIZES[options.size]).to(self.device)
        if options.dtype == "bf16":
            self.model.to(torch.bfloat16)
        self.loss: Callable[[Tensor, Tensor], Tensor] = self.model
        if name == COMPILED:
            self.loss = egcompile.compile(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.1, fused=True)
        self.progress = Progress()

    def autocast(self) -> torch.autocast:
        """fp32 weights compute in bf16 on a GPU; on a CPU everything is fp32."""
        enabled = self.options.dtype == "fp32" and self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def batch(self, text: Tensor, seed: int, step: int) -> tuple[Tensor, ...]:
        drawn = batch(text, ROWS[self.options.size], self.model.config.context, seed, step)
        return tuple(t.to(self.device) for t in drawn)

    def train_step(self) -> Tensor:
        """One step of training; the loss stays on the device."""
        step = self.progress.step
        rate = learning_rate(step, self.options.steps, LEARNING_RATES[self.options.size])
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.autocast():
            loss = self.loss(*self.batch(self.corpus.train, self.options.seed, step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        return loss.detach()

    @torch.no_grad()
    def validate(self, batches: int = 8) -> float:
        """The mean loss over the same held-out windows every time, by the model itself."""
        with self.autocast():
            losses = [self.model(*self.batch(self.corpus.validation, 0, i)) for i in range(batches)]
        return torch.stack(losses).mean().item()

    def train(self) -> None:
        """Trains up to the last step; a checkpoint at every validation and at the end."""
        progress, steps = self.progress, self.options.steps
        with tqdm(total=steps, initial=progress.step, desc=self.name, unit="step") as bar:
            warm = False
            while progress.step < steps:
                start, first = time.perf_counter(), progress.step
                until = min(steps, first + self.REPORT_EVERY - first % self.REPORT_EVERY)
                losses = torch.stack([self.train_step() for _ in range(until - first)]).tolist()
                elapsed = time.perf_counter() - start
                progress.losses.extend(losses)
                if warm or until == steps:
                    self._count(until - first, elapsed)
                warm = True  # the first stretch compiles, and does not count
                if until == steps or until % self.options.validate_every == 0:
                    progress.validation.append((until, self.validate()))
                    self.save()
                bar.update(until - first)
                speed = f", {progress.speed:,.0f} tokens/s" if progress.seconds else ""
                bar.set_postfix_str(f"loss {losses[-1]:.3f}{speed}")

    def _count(self, steps: int, seconds: float) -> None:
        self.progress.tokens += steps * ROWS[self.options.size] * self.model.config.context
        self.progress.seconds += seconds

    def save(self) -> None:
        """Writes the whole state to a temporary file and renames it: a stop leaves the old or the new."""
        state = {
            "setting": self._setting(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "progress": vars(self.progress),
        }
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.device)
        temporary = self.checkpoint.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.checkpoint)

    def resume(self) -> bool:
        """Takes the checkpoint's state, if there is one; raises SystemExit if it is of another setting."""
        if not self.checkpoint.exists():
            return False
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        if state["setting"] != self._setting():
            raise SystemExit(
                f"{self.checkpoint} was written by {state['setting']}, but this is {self._setting()}: "
                "choose the same options, or another --out"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"].cpu(), self.device)
        self.progress = Progress(**state["progress"])
        return True

    def _setting(self) -> dict[str, Any]:
        """What must be equal for a resumed run to equal an unbroken one."""
        names = ("size", "dtype", "steps", "seed")
        return {name: getattr(self.options, name) for name in names} | {"text": self.corpus.digest}


@torch.no_grad()
def sample(model: Llama, prompt: str, length: int, seed: int, temperature: float = 0.8) -> str:
    """`prompt` and `length` more bytes, drawn from the model."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt.encode())
    for _ in range(length):
        window = torch.tensor([tokens[-model.config.context :]], device=model.cos.device)
        probabilities = (model(window)[0, -1].float().cpu() / temperature).softmax(-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(tokens).decode(errors="replace")


def plot(runs: dict[str, Progress], path: Path) -> None:
    """Loss against step: the training curve of each run as a line, its validation as dots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    styles = {EAGER: ("C0", "-", 3.0, "o"), COMPILED: ("C1", "--", 1.5, "x")}
    for name, run in runs.items():
        color, line, width, marker = styles[name]
        axes.plot(range(1, run.step + 1), run.losses, line, color=color, linewidth=width, label=name)
        held_out = {"color": "black", "fillstyle": "none", "markersize": 9, "zorder": 3}
        axes.plot(*zip(*run.validation), marker, **held_out, label=f"{name}, validation")
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="The same training, eager and compiled")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def summary(runs: dict[str, Progress]) -> str:
    """A table with a row a run, and how far apart the two curves are."""
    lines = [f"{'':12}{'final loss':>12}{'validation':>12}{'tokens/s':>12}"]
    for name, run in runs.items():
        tail = run.losses[-20:]
        final = sum(tail) / len(tail)
        lines.append(f"{name:12}{final:12.4f}{run.validation[-1][1]:12.4f}{run.speed:12,.0f}")
    if len(runs) == 2:
        eager, compiled = (run.losses for run in runs.values())
        apart = [abs(a - b) for a, b in zip(eager, compiled)]
        worst = max(range(len(apart)), key=apart.__getitem__)
        lines.append(
            f"largest difference of the losses: {apart[worst]:.2e}, at step {worst + 1} of {len(apart)}"
        )
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights; fp32 autocasts on a GPU"
    )
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validate-every", type=int, default=100, help="steps between validations")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/language_model"), help="curves and checkpoints"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in --out")
    parser.add_argument("--no-eager", action="store_true", help="train the compiled model only")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: there is no GPU that torch can use")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.device == "cpu" and options.size == "tiny":
        torch.set_num_threads(1)  # as fast as two, which on a busy machine wait for each other
    options.out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus.standard_library()
    print(f"{len(corpus.train):,} bytes to train on, {len(corpus.validation):,} held out")
    runs: dict[str, Progress] = {}
    for name in (COMPILED,) if options.no_eager else (EAGER, COMPILED):
        trainer = Trainer(name, corpus, options)
        if options.resume and trainer.resume():
            print(f"{name}: resumed at step {trainer.progress.step}")
        trainer.train()
        runs[name] = trainer.progress
    plot(runs, options.out / "loss.png")
    print(f"\n{summary(runs)}\ncurves: {options.out / 'loss.png'}\n\na sample of the compiled model:\n")
    with trainer.autocast():
        print(sample(trainer.model, "def ", 200, options.seed))


if __name__ == "__main__":
    main()
