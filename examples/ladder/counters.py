"""Hardware counters of a rung, read by Nsight Compute."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Sequence

from flashcute.benchmarking import Shape

# Small enough that ncu's replays of the slowest rung take seconds, large enough to fill the GPU.
SHAPE = Shape(b=1, seqlen_q=1024, seqlen_k=1024, h=96, h_k=96, d=128, causal=False)


@dataclasses.dataclass(frozen=True)
class Counter:
    """A quantity that ncu reports.

    Attributes:
        metric: Its name in ncu.
        label: Its name in the table.
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


def command(names: Sequence[str]) -> list[str] | None:
    """Returns the command that reads all counters of one launch of each rung; None without ncu."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return None
    metrics = ",".join(counter.metric for counter in COUNTERS.values())
    options = ["--csv", "--page=raw", "--print-units=base", "--clock-control=none"]
    options += ["--kernel-name=regex:ladder_kernel", f"--metrics={metrics}"]
    return [ncu, *options, sys.executable, "-m", "examples.ladder", "--launch", *names]


def parse(text: str, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Parses ncu's CSV; returns the value of each counter of each rung.

    Values are divided by the number of scores where ``per_score`` is set. Metrics unknown to ncu
    are left out. The result is empty unless there is a row for each of ``names``, which were
    launched in this order.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(lines) if row.get("ID")]  # the row of units has no ID
    if len(rows) != len(names):
        return {}
    scores = SHAPE.b * SHAPE.h * SHAPE.seqlen_q * SHAPE.seqlen_k
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for name, row in zip(names, rows, strict=True):
        for key, counter in COUNTERS.items():
            with contextlib.suppress(ValueError):  # "n/a", or missing
                value = float((row.get(counter.metric) or "").replace(",", ""))
                found[name][key] = value / scores if counter.per_score else value
    return found


def read(names: Sequence[str], cwd: str, timeout: float) -> tuple[dict[str, dict[str, float]], str]:
    """Returns the counters of rungs, and an error message if there are none."""
    words = command(names)
    if words is None:
        return {}, "no ncu on PATH"
    try:
        done = subprocess.run(
            words, cwd=cwd, capture_output=True, text=True, check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {}, f"ncu took more than {timeout:.0f} s"
    values = parse(done.stdout, names)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line]
    return values, "" if values else "; ".join(said)[:300] or f"ncu ended with {done.returncode}"
