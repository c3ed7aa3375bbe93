"""Hardware counters of each kernel that a command launches, through Nsight Compute's command line.

Each launch is replayed until all counters were read, from the same memory and with empty caches: what the one
before it would leave in the L2 does not show.
"""

from __future__ import annotations

import csv
import math
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

METRICS = {
    "us": "gpu__time_duration.sum",
    "read_mb": "dram__bytes_read.sum",
    "write_mb": "dram__bytes_write.sum",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit": "lts__t_sector_hit_rate.pct",
    "xu": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "fma": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "alu": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
"""Microseconds, megabytes, percent (of the peak; of an SM's warps), and registers a thread."""

HEADS = {
    # key of METRICS -> heading, and digits after the point
    "us": ("us", 1),
    "read_mb": ("read MB", 1),
    "write_mb": ("write MB", 1),
    "dram": ("DRAM %", 0),
    "l2_hit": ("L2 hit %", 0),
    "xu": ("XU %", 0),
    "fma": ("FMA %", 0),
    "alu": ("ALU %", 0),
    "issue": ("issue %", 0),
    "occupancy": ("occupancy %", 0),
    "registers": ("registers", 0),
}

REASONS = "long_scoreboard short_scoreboard barrier math_pipe_throttle mio_throttle lg_throttle tex_throttle"
REASONS += (
    " wait drain membar branch_resolving dispatch_stall imc_miss no_instruction sleeping misc not_selected"
)
STALLS = {r: f"smsp__average_warps_issue_stalled_{r}_per_issue_active.ratio" for r in REASONS.split()}
"""Why warps do not issue: cycles that a warp waits for it, an instruction."""

UNITS = {"byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1.0, "Gbyte": 1e3, "ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
UNITS |= {"nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3, "second": 1e6}
"""What a unit is in megabytes or microseconds; all others stay as they are."""


class Launch(NamedTuple):
    """A kernel's name and its values by metric, in the units of `METRICS`; without those that it lacks."""

    kernel: str
    values: dict[str, float]


def command(target: Sequence[str], metrics: Sequence[str], log: Path) -> list[str]:
    """The command line that profiles `target`, from where it says so, into `log`."""
    options = ["--profile-from-start", "off", "--clock-control", "none", "--cache-control", "all"]
    options += [
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--log-file",
        str(log),
        "--metrics",
        ",".join(metrics),
    ]
    return ["ncu", *options, *target]


def parse(log: str) -> list[Launch]:
    """The launches in a log of `ncu --csv --page raw`: after a row of names and one of units, one a row."""
    table = list(csv.reader(line for line in log.splitlines() if line.startswith('"')))
    if not table:
        return []
    names, units, *rows = table
    launches = []
    for row in rows:
        cells = {name: (cell, unit) for name, cell, unit in zip(names, row, units)}
        values = {name: _number(*cells[name]) for name in names if "__" in name}
        kernel, _ = cells["Kernel Name"]
        launches.append(Launch(kernel, {name: v for name, v in values.items() if v is not None}))
    return launches


def _number(cell: str, unit: str) -> float | None:
    try:
        value = float(cell.replace(",", "")) * UNITS.get(unit, 1.0)
    except ValueError:
        return None  # as n/a
    return value if math.isfinite(value) else None


def longest(stalls: Mapping[str, float]) -> tuple[str, float]:
    """What warps wait for longest, and its share of all waiting; nothing where they do not wait."""
    if not any(stalls.values()):
        return "", 0.0
    reason = max(stalls, key=stalls.__getitem__)
    return reason, stalls[reason] / sum(stalls.values())


def errors(said: str) -> list[str]:
    return [line.removeprefix("==ERROR== ") for line in said.splitlines() if line.startswith("==ERROR==")]


def unknown(said: str, metrics: Sequence[str]) -> list[str]:
    """Those metrics that ncu says there are not; it names them in full, or by their first part."""
    missed = " ".join(line for line in errors(said) if "find metric" in line)
    return [m for m in metrics if re.search(rf"(?<!\w){m.partition('.')[0]}(?!\w)", missed)]


def launches(target: Sequence[str]) -> list[Launch]:
    """Of a command, from cudaProfilerStart to cudaProfilerStop; raises RuntimeError where it fails.

    What the device turns out not to know is not asked for again.
    """
    metrics = [*METRICS.values(), *STALLS.values()]
    while True:
        with tempfile.TemporaryDirectory(prefix="egcompile-") as folder:
            file = Path(folder, "log.csv")
            ran = subprocess.run(command(target, metrics, file), capture_output=True, text=True)
            log = file.read_text() if file.exists() else ""
        said = f"{ran.stdout}\n{log}\n{ran.stderr}"
        if missing := unknown(said, metrics):
            metrics = [m for m in metrics if m not in missing]
            continue
        found = parse(log)
        if ran.returncode or not found:
            last = [line for line in ran.stderr.splitlines() if line.strip()][-1:]
            raise RuntimeError("; ".join([*last, *errors(said)]) or "ncu found no launches")
        return found
