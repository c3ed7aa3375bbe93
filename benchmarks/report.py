"""Writes the measured tables of the documentation from the JSON under benchmarks/results/.

    python -m benchmarks.report            rewrites README.md and docs/*.md
    python -m benchmarks.report --check    only says whether they are up to date

A table stands between `<!-- benchmarks:KIND -->` and `<!-- /benchmarks:KIND -->`, KIND one of speed, check,
loss, coverage, kernels, counters and op_database. Of equal measurements the newest counts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import ncu

Result = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PENDING = "No measurements yet."
_MARKED = re.compile(r"(<!-- benchmarks:(\w+) -->\n)(.*?)(<!-- /benchmarks:\2 -->)", re.DOTALL)


def load(folder: Path = RESULTS) -> list[Result]:
    """The newest result of each kind, model, size, dtype and device, in order of kind and model."""
    newest: dict[tuple[str, ...], Result] = {}
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        for result in content if isinstance(content, list) else []:
            key = (result["kind"], result["model"], result["size"], result["dtype"], _where(result))
            if key not in newest or newest[key]["date"] <= result["date"]:
                newest[key] = result
    return [newest[key] for key in sorted(newest)]


def _where(result: Result) -> str:
    """What a result depends on besides its model; a plan's coverage is the same wherever it is made."""
    if result["kind"] == "coverage":
        return str(result.get("target"))
    return str(result["versions"].get("gpu")) if result["device"] != "cpu" else "cpu"


def _of(results: Iterable[Result], kind: str) -> list[Result]:
    return [r for r in results if r["kind"] == kind and r["size"] == "full"]


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _measured_on(results: Iterable[Result]) -> str:
    """A line on what the numbers were measured with, and when last."""
    found: dict[str, str] = {}
    for result in results:
        v = result["versions"]
        made_with = f"{v.get('gpu', 'without a GPU')}, torch {v['torch']}, triton {v['triton']}"
        found[made_with] = max(found.get(made_with, ""), result["date"][:10])
    return "Measured: " + "; ".join(f"{what}, {date}" for what, date in sorted(found.items())) + "."


def _time(row: Result | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "failed"
    return f"{row['ms']:.2f} [{row['p20']:.2f}, {row['p80']:.2f}]"


def _ratio(slow: Result | None, fast: Result | None) -> str:
    if not slow or not fast or "error" in slow or "error" in fast:
        return ""
    return f"{slow['ms'] / fast['ms']:.2f}x"


def _several(rows: list[Result | None], key: str) -> str:
    values = [None if r is None or "error" in r else r.get(key) for r in rows]
    return " / ".join("-" if v is None else f"{v:.1f}" if v >= 1 else f"{v:.2f}" for v in values)


VARIANTS = {
    "eager": "eager",
    "torch.compile": "torch.compile",
    "torch.compile:reduce-overhead": "torch.compile, graphs",
    "egcompile": "egcompile",
    "egcompile:reduce-overhead": "egcompile, graphs",
}
RATIOS = (
    ("vs eager", "eager", "egcompile"),
    ("vs torch.compile", "torch.compile", "egcompile"),
    ("graphs vs graphs", "torch.compile:reduce-overhead", "egcompile:reduce-overhead"),
)


def speed(results: list[Result]) -> str:
    """Milliseconds of a training step, median and 20th and 80th percentiles, of what was measured."""
    steps = [r for r in _of(results, "speed") if "variants" in r and r["device"] != "cpu"]
    found = [{v["variant"]: v for v in result["variants"]} for result in steps]
    shown = [name for name in VARIANTS if any(name in variants for variants in found)]
    ratios = [ratio for ratio in RATIOS if {*ratio[1:]} <= {*shown}]
    rows = []
    for result, variants in zip(steps, found, strict=True):
        each = [variants.get(name) for name in shown]
        cells = [result["model"], *map(_time, each)]
        cells += [_ratio(variants.get(slow), variants.get(fast)) for _, slow, fast in ratios]
        compiled = [variants.get(name) for name in shown if name != "eager"]
        rows.append([*cells, _several(each, "peak_gb"), _several(compiled, "compile_s")])
    head = ["model", *(f"{VARIANTS[name]}, ms" for name in shown), *(name for name, _, _ in ratios)]
    order = [VARIANTS[name] for name in shown]
    head += [f"peak GB ({' / '.join(order)})", f"compile s ({' / '.join(n for n in order if n != 'eager')})"]
    return _markdown(head, rows) if rows else ""


def check(results: list[Result]) -> str:
    """The largest gradient error over eager's, by parameter."""
    rows = [
        [
            result["model"],
            result["dtype"],
            row["variant"],
            str(row["step"]),
            f"failed: {row['error']}" if "error" in row else f"{row['max_ratio']:.2f} (`{row['parameter']}`)",
        ]
        for result in _of(results, "check")
        for row in result.get("rows", ())
    ]
    head = ["model", "dtype", "variant", "after steps", "largest RMSE against fp64, over eager's"]
    return _markdown(head, rows) if rows else ""


def loss(results: list[Result]) -> str:
    """Losses after training, and eager's own distance from fp32."""
    rows = [
        [
            result["model"],
            result["dtype"],
            row["variant"],
            "failed" if "error" in row else f"{row['difference']:+.4f}",
            ", ".join(f"{d:+.4f}" for d in result["spread"]),
        ]
        for result in _of(results, "loss")
        for row in result.get("rows", ())
    ]
    head = ["model", "dtype", "variant", "final loss minus eager's", "eager's minus fp32's, three seeds"]
    return _markdown(head, rows) if rows else ""


def coverage(results: list[Result]) -> str:
    """How much of the memory traffic outside products and attention is in generated kernels."""
    rows = [
        [result["model"], result["target"], f"{result['share']:.1%}", str(result["opaque"])]
        for result in _of(results, "coverage")
        if "share" in result
    ]
    head = ["model", "target", "bytes outside products and attention in generated kernels", "opaque nodes"]
    return _markdown(head, rows) if rows else ""


def op_database(results: list[Result]) -> str:
    """What became of PyTorch's own samples of each op, and which are not compiled."""
    rows = []
    for result in _of(results, "op_database"):
        counts = result["counts"]
        named = {
            kind: [f"`{r['op']}`" for r in result["ops"] if r["kind"] == kind] for kind in ("eager", "wrong")
        }
        refused = "; ".join(
            f"{reason}: {', '.join(f'`{name}`' for name in names)}"
            for reason, names in result["refused"].items()
        )
        derivatives = (
            "value, gradients and their gradients" if result["orders"] == 2 else "value and gradients"
        )
        rows += [
            ["native", str(counts["native"]), "rules know all of it"],
            ["opaque", str(counts["opaque"]), "ATen runs and differentiates some of it"],
            ["eager", str(counts["eager"]), f"Dynamo leaves it to eager: {', '.join(named['eager'])}"],
            ["refused", str(counts["refused"]), refused],
            ["wrong", str(counts["wrong"]), ", ".join(named["wrong"])],
            ["all", str(sum(counts.values())), f"{derivatives}; samples an op, at most: {result['samples']}"],
        ]
    return _markdown(["ops", "number", ""], rows) if rows else ""


AUTOTUNED = "torch.compile:max-autotune-no-cudagraphs"


def kernels(results: list[Result]) -> str:
    """Microseconds of memory-bound work, forward and backward, and the share of a copy's speed."""
    rows = []
    for result in _of(results, "kernels"):
        for row in result["results"]:
            variants = row["variants"]
            ours, copy = variants.get("egcompile", {}), variants["copy"]
            peers = {v: r["us"] for v, r in variants.items() if v not in ("egcompile", "copy") and "us" in r}
            cells = [row["work"], row["direction"], f"{row['bytes'] / 1e6:.0f}", f"{copy['us']:.1f}"]
            cells += [f"{ours['us']:.1f}", f"{ours['share']:.2f}"] if "us" in ours else ["failed", ""]
            shown = ("eager", "torch.compile", AUTOTUNED, "liger")
            cells += [f"{peers[v]:.1f}" if v in peers else "" for v in shown]
            for times in (peers, {v: us for v, us in peers.items() if v != AUTOTUNED}):
                cells += [f"{min(times.values()) / ours['us']:.2f}x" if times and "us" in ours else ""]
            rows.append(cells)
    head = ["work", "", "floor, MB", "copy of as much, us", "egcompile", "share of the copy", "eager"]
    head += ["torch.compile", "its max-autotune", "Liger", "over the best peer", "without max-autotune"]
    return _markdown(head, rows) if rows else ""


def counters(results: list[Result]) -> str:
    """What hardware counters say of each launch of some works."""
    rows = []
    for result in _of(results, "counters"):
        for work in result["results"]:
            for launch in work.get("launches", ()):
                cells = [work["work"], launch["direction"], f"`{launch['kernel']}`"]
                for key, (_, digits) in ncu.HEADS.items():
                    cells.append("" if launch[key] is None else f"{launch[key]:.{digits}f}")
                reason, share = ncu.longest(launch["stalls"])
                rows.append([*cells, f"{reason} {share:.0%}" if reason else ""])
    head = ["work", "", "kernel", *(title for title, _ in ncu.HEADS.values()), "waits for"]
    return _markdown(head, rows) if rows else ""


TABLES: dict[str, Callable[[list[Result]], str]] = {
    "speed": speed,
    "check": check,
    "loss": loss,
    "coverage": coverage,
    "kernels": kernels,
    "counters": counters,
    "op_database": op_database,
}


def render(text: str, results: list[Result]) -> str:
    """`text` with each marked table made anew; raises KeyError for a marker of an unknown kind."""

    def replace(match: re.Match[str]) -> str:
        kind = match[2]
        made = TABLES[kind](results)
        body = f"{made}\n\n{_measured_on(_of(results, kind))}" if made else PENDING
        return f"{match[1]}{body}\n{match[4]}"

    return _MARKED.sub(replace, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if a page is out of date"
    )
    options = parser.parse_args(arguments)
    results, stale = load(), []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        if (new := render(text, results)) != text:
            stale.append(page)
            if not options.check:
                page.write_text(new)
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'out of date' if options.check else 'written'}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
