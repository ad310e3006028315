"""Writes README.md's table and draws the plot: ``python -m examples.ladder.report``.

Both come from the result file of ``python -m examples.ladder``. ``--check`` only compares.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from flashcute.benchmarking import format_table

from .counters import COUNTERS
from .rungs import RUNGS, Rung

ROOT = Path(__file__).resolve().parents[2]
README = Path(__file__).resolve().parent / "README.md"
RESULT = ROOT / "benchmarks" / "results" / "ladder.json"
PLOT = RESULT.with_suffix(".svg")
SEQLEN = 2048  # GPT-3's

# Dense 16-bit tensor core TFLOP/s with fp32 accumulation, from NVIDIA's data sheets.
PEAKS = {"H200": 989.4, "H100 80GB HBM3": 989.4, "A100": 312.0}
PEERS = {
    "flashcute": "this library",
    "flashcute_sm80": "its sm80 kernel",
    "sdpa": "PyTorch's SDPA",
}
# The rungs that are reduced kernels of the library, and the kernel of each.
REDUCED = {"12_sm80": "flashcute_sm80", "13_sm90": "flashcute"}
_PEER_COLOURS = ("black", "tab:blue", "tab:red")
HEADER = ("rung", "idea", "lines", "ms", "TFLOP/s", "% of roof", "x predicted", "x", "what moved")


def peak(gpu: str) -> float | None:
    """Returns the tensor cores' peak of a GPU in TFLOP/s, by its name; None if unknown."""
    return next((value for name, value in PEAKS.items() if name in gpu), None)


def _row(rows: list[dict], causal: bool) -> dict:
    """Returns the point of GPT-3's shape; empty if it was not measured."""
    return next((r for r in rows if r["seqlen_q"] == SEQLEN and r["causal"] == causal), {})


def _short(value: float) -> str:
    """Formats a value with three digits, never as a power of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _moved(rung: Rung, before: Rung | None, records: Mapping[str, Mapping]) -> str:
    """Describes how a rung's counter moved: its value on the rung before and on this one."""
    counter = COUNTERS[rung.counter]
    values = [
        records.get(r.name, {}).get("counters", {}).get(rung.counter) if r else None
        for r in (before, rung)
    ]
    if values[1] is None:
        return ""
    shown = [_short(value) for value in values if value is not None]
    return f"{counter.label}: {' to '.join(shown)}"


def _figures(us: float | None, tflops: float | None, roof: float | None) -> list[str]:
    if not us or not tflops:
        return ["", "", ""]
    return [_short(us / 1e3), _short(tflops), f"{100 * tflops / roof:.2g}" if roof else ""]


def table(result: Mapping) -> str:
    """Formats README's table; figures are empty where the result holds none."""
    row = _row(result.get("rows", []), causal=False)
    us, tflops = row.get("us", {}), row.get("tflops", {})
    gpu = result.get("machine", {}).get("gpu", "")
    roof = peak(gpu)
    rows = []
    for before, rung in zip((None, *RUNGS), RUNGS, strict=False):
        link = f"[{rung.number}](kernels/{rung.stem}.h)"
        times = [us.get(r.name) if r else None for r in (before, rung)]
        gain = _short(times[0] / times[1]) if times[0] and times[1] else ""
        predicted = "" if rung.predicted is None else f"{rung.predicted:g}"
        figures = _figures(times[1], tflops.get(rung.name), roof)
        moved = _moved(rung, before, result.get("rungs", {}))
        rows.append([link, rung.idea, rung.lines, *figures, predicted, gain, moved])
    for name, label in PEERS.items():
        figures = _figures(us.get(name), tflops.get(name), roof)
        rows.append(["", label, "", *figures, "", "", ""])
    return format_table(HEADER, rows)


def _reduced(result: Mapping) -> str:
    """Says how close the last rungs come to the library."""
    parts = []
    for causal, mask in ((False, "without a mask"), (True, "causal")):
        us = _row(result["rows"], causal).get("us", {})
        for name, peer in REDUCED.items():
            if us.get(name) and us.get(peer):
                speed = 100 * us[peer] / us[name]
                parts.append(f"{name} {speed:.0f} % of {PEERS[peer]} {mask}")
    return f"Speed of the reduced kernels: {', '.join(parts)}." if parts else ""


def text(result: Mapping) -> str:
    """Returns the generated part of README.md."""
    if not result:
        return (
            "Not measured yet: `python -m examples.ladder --out benchmarks/results/ladder.json` on "
            f"a machine with a GPU, then `python -m examples.ladder.report`.\n\n{table({})}"
        )
    machine = result["machine"]
    wrong = [name for name, record in result["rungs"].items() if record["errors"]]
    lines = [
        f"Measured on one {machine['gpu']} (driver {machine['driver']}, torch {machine['torch']}), "
        f"{str(machine['date'])[:10]}, at commit {str(machine['commit'])[:7]}: bf16, batch 4, "
        f"96 heads, s = {SEQLEN}, d = 128, no mask, "
        "cold caches, medians. Each rung was compared with the reference before it was timed"
        + (f"; NOT RIGHT: {', '.join(wrong)}." if wrong else "; all are right."),
        "",
        table(result),
        "",
        _reduced(result),
        "",
        "![TFLOP/s over the sequence length](../../benchmarks/results/ladder.svg)",
    ]
    return "\n".join(lines)


def replaced(document: str, part: str) -> str:
    """Returns ``document`` with ``part`` between its markers."""
    pattern = r"(<!-- begin ladder -->\n).*?(<!-- end ladder -->)"
    return re.sub(pattern, lambda found: f"{found[1]}{part}\n{found[2]}", document, flags=re.DOTALL)


def draw(result: Mapping, path: Path) -> None:
    """Draws TFLOP/s of every rung over the sequence length, without and with the causal mask."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "ladder"  # gives the same file for the same result
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 6), sharey=True)
    colours = pyplot.get_cmap("viridis")
    machine = result["machine"]
    roof = peak(machine.get("gpu", ""))
    for axis, causal in zip(axes, (False, True), strict=True):
        rows = sorted(
            (r for r in result["rows"] if r["causal"] == causal), key=lambda r: r["seqlen_q"]
        )
        names = {rung.name: rung.name.replace("_", " ") for rung in RUNGS} | PEERS
        for i, (name, label) in enumerate(names.items()):
            points = [(r["seqlen_q"], r["tflops"][name]) for r in rows if name in r["tflops"]]
            if points:
                style = {"color": colours(i / len(RUNGS)), "marker": "o", "markersize": 4}
                if name in PEERS:
                    style = {"color": _PEER_COLOURS[i - len(RUNGS)], "linestyle": "--"}
                axis.plot(*zip(*points, strict=True), label=label, **style)
        if roof:
            axis.axhline(roof, color="grey", linewidth=1)
            axis.text(0.01, roof, f"tensor cores' roof, {roof:.0f}", va="bottom", color="grey",
                      transform=axis.get_yaxis_transform())  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("sequence length")
        axis.set_title("causal" if causal else "no mask")
        axis.grid(True, which="both", alpha=0.3)
    axes[0].set_ylabel("TFLOP/s")
    handles, labels = axes[0].get_legend_handles_labels()
    place = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), "fontsize": 9}
    axes[1].legend(handles[::-1], labels[::-1], **place)  # in the order of the curves
    figure.suptitle(f"The ladder on {machine.get('gpu')}: bf16, batch 4, 96 heads, d = 128")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--check", action="store_true", help="write nothing, say what is stale")
    args = parser.parse_args(argv)
    result = json.loads(args.result.read_text(encoding="utf-8")) if args.result.is_file() else {}
    before = README.read_text(encoding="utf-8")
    after = replaced(before, text(result))
    if args.check:
        if before != after:
            print(f"{README}: stale, run `python -m examples.ladder.report`", file=sys.stderr)
        return int(before != after)
    README.write_text(after, encoding="utf-8")
    if result:
        draw(result, PLOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
