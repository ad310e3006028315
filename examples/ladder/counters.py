"""Hardware counters of a rung, read by Nsight Compute."""

from __future__ import annotations

import csv
import dataclasses
import io
import shutil
import subprocess
import sys

from flashcute.benchmarking import Shape

# Small enough that ncu's passes over the slowest rung take seconds, large enough to fill the GPU.
SHAPE = Shape(b=1, seqlen_q=1024, seqlen_k=1024, h=96, h_k=96, d=128, causal=False)


@dataclasses.dataclass(frozen=True)
class Counter:
    """A quantity that ncu reports.

    Attributes:
        metric: Its name there.
        label: In the table.
        per_score: Whether to divide by the number of scores, b h seqlen_q seqlen_k.
    """

    metric: str
    label: str
    per_score: bool


COUNTERS = {
    "warps": Counter(
        "sm__warps_active.avg.pct_of_peak_sustained_active", "% of warp slots busy", False
    ),
    "dram_bytes": Counter("dram__bytes.sum", "bytes of device memory per score", True),
    "l2_bytes": Counter("lts__t_bytes.sum", "bytes of L2 per score", True),
    "shared_accesses": Counter(
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
        "shared memory wavefronts per score",
        True,
    ),
    "bank_conflicts": Counter(
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "bank conflicts per score", True
    ),
    "instructions": Counter("smsp__inst_executed.sum", "warp instructions per score", True),
    "memory_stalls": Counter(
        "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
        "warps waiting for memory at each issue",
        False,
    ),
}


def command(rung_name: str) -> list[str] | None:
    """What reads all counters of one rung; None where there is no ncu."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return None
    metrics = ",".join(counter.metric for counter in COUNTERS.values())
    options = ["--csv", "--page=raw", "--print-units=base", "--clock-control=none"]
    options += ["--kernel-name=regex:ladder_kernel", "--launch-count=1", f"--metrics={metrics}"]
    return [ncu, *options, sys.executable, "-m", "examples.ladder", "--launch", rung_name]


def parse(text: str) -> dict[str, float]:
    """Counter to value, per score where it says so, out of ncu's CSV; a metric may be missing."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return {}
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    row = rows[-1]  # the first row after the names holds the units
    scores = SHAPE.b * SHAPE.h * SHAPE.seqlen_q * SHAPE.seqlen_k
    values = {}
    for key, counter in COUNTERS.items():
        cell = (row.get(counter.metric) or "").replace(",", "")
        try:
            value = float(cell)
        except ValueError:  # "n/a", or not there
            continue
        values[key] = value / scores if counter.per_score else value
    return values


def read(rung_name: str, cwd: str, timeout: float) -> tuple[dict[str, float], str]:
    """The counters of one rung, and why there are none."""
    words = command(rung_name)
    if words is None:
        return {}, "no ncu on PATH"
    try:
        done = subprocess.run(
            words, cwd=cwd, capture_output=True, text=True, check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {}, f"ncu took more than {timeout:.0f} s"
    values = parse(done.stdout)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line]
    return values, "" if values else "; ".join(said)[:300] or f"ncu ended with {done.returncode}"
