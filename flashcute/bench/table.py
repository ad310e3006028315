"""A result as tables for a terminal, and the points that are wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import benchmarking as bm
from . import peers
from .sweep import AGREEMENT

CPU_NOTE = (
    "No GPU: measured on the CPU by the wall clock, flashcute's reference path and PyTorch's own "
    "attention.\nNothing here says anything of the kernels' speed; `python -m flashcute profile "
    "--static` and `sim` do without a GPU."
)


def describe(row: Mapping) -> str:
    """A point in words."""
    mask = "causal" if row["causal"] else "full"
    group = f" h={row['h']}/{row['h_k']}" if row.get("h") != row.get("h_k") else ""
    return f"d={row['d']} s={row['seqlen_q']} {mask}{group}"


def best_peer(row: Mapping, field: str = "us") -> str | None:
    """The fastest contender beside flashcute, None where there is none."""
    others = {name: us for name, us in row.get(field, {}).items() if name != "flashcute"}
    return min(others, key=others.__getitem__, default=None)


def unit_of(rows: Sequence[Mapping], field: str = "tflops") -> tuple[str, float]:
    """The unit that suits the values, and its factor: a CPU's are a thousandth of a GPU's."""
    largest = max((value for row in rows for value in row[field].values()), default=10)
    return ("TFLOP/s", 1.0) if largest >= 10 else ("GFLOP/s", 1e3)


def ratio(row: Mapping, field: str = "us") -> float | None:
    """Speed over the best peer: above 1 is faster."""
    peer = best_peer(row, field)
    return None if peer is None else row[field][peer] / row[field]["flashcute"]


def disagreements(result: Mapping) -> list[str]:
    """Points where an output is not the trusted peer's: a wrong result's time is worth nothing."""
    trusted = peers.NAMES[result.get("device", "cuda")][1]
    return [
        f"{name} differs from {trusted} by {value} at {describe(row)} {row['dtype']}"
        for row in result["rows"]
        for name, value in row["difference"].items()
        if not value <= AGREEMENT[row["dtype"]]  # NaN too
    ]


def _points(result: Mapping, suffix: str) -> str:
    """TFLOP/s of each contender at each point, our speed over the best peer, percent of ceiling."""
    names = result["contenders"]
    unit, factor = unit_of(result["rows"])
    rows = []
    for row in result["rows"]:
        over = ratio(row, f"us{suffix}")
        share = row.get(f"percent_of_ceiling{suffix}", {}).get("flashcute", "-")
        cells = [row["dtype"], row["d"], "causal" if row["causal"] else "full", row["seqlen_q"]]
        cells.append(f"{row['h']}/{row['h_k']}" if "h_k" in row else "-")
        speeds = row[f"tflops{suffix}"]
        cells += [f"{factor * speeds[name]:.1f}" if name in speeds else "-" for name in names]
        cells += ["-" if over is None else f"{over:.3f}", share]
        if suffix:
            state = row["gpu_sustained"].get("flashcute", {})
            cells += [state.get("sm_mhz", "-"), state.get("power_w", "-")]
        rows.append(cells)
    header = ["dtype", "d", "mask", "s", "h/h_k", *names, "x best peer", "% of matmul"]
    table = bm.format_table([*header, *(["MHz", "W"] if suffix else [])], rows)
    return f"{unit} {'sustained' if suffix else 'in bursts'}\n\n{table}"


def _ratios(result: Mapping) -> str:
    names: Sequence[str] = result["contenders"]
    rows = []
    for dtype in dict.fromkeys(row["dtype"] for row in result["rows"]):
        part = [row for row in result["rows"] if row["dtype"] == dtype]
        for peer in names[1:]:
            found = bm.Ratios.of(part, names[0], peer)
            if found is not None:
                figures = [f"{found.geomean:.3f}", f"{found.worst:.3f}"]
                where = describe(found.worst_row)
                rows.append([dtype, peer, found.count, *figures, where])
    return bm.format_table(["dtype", "speed over", "points", "geomean", "worst", "where"], rows)


def summary(result: Mapping) -> str:
    """Short tables: each point, then ratios to each peer, the ceiling and the host time."""
    parts = [CPU_NOTE] if result.get("device") == "cpu" else []
    parts.append(_points(result, ""))
    if any("tflops_sustained" in row for row in result["rows"]):
        parts.append(_points(result, "_sustained"))
    parts.append(_ratios(result))
    if result.get("ceiling"):
        values = {name: f"{value:.4g}" for name, value in result["ceiling"].items()}
        parts.append(f"matmul ceiling: {values}")
    if result["host_us"]:
        host = "  ".join(f"{name} {us} us" for name, us in result["host_us"].items())
        parts.append(f"host time per call: {host}")
    missing = {n: why for row in result["rows"] for n, why in row.get("missing", {}).items()}
    parts += [f"{name} did not run everywhere: {why}" for name, why in missing.items()]
    parts += [f"{name}: {values}" for name, values in result["gpu_samples"].items()]
    if result["stopped_early"]:
        parts.append("STOPPED EARLY: the time limit was reached, points are missing")
    return "\n\n".join(parts)
