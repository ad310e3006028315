"""Pictures of a result: speed over sequence length, ratio to the best peer, roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import benchmarking as bm
from .table import parts, ratio, unit_of

_COLOURS = {
    **{"flashcute": "#d1495b", "fa2": "#2a6f97", "cudnn": "#6a994e", "fa3": "#8d6a9f"},
    "torch": "#2a6f97",
}
_MASKS = {False: "full", True: "causal"}


def _seqlens(axes, rows: Sequence[Mapping]) -> None:
    ticks = sorted({row["seqlen_q"] for row in rows})
    axes.set_xscale("log", base=2)
    labels = [f"{s // 1024}k" if s % 1024 == 0 else str(s) for s in ticks]
    axes.set_xticks(ticks, labels)
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _title(result: Mapping, what: str, part: str) -> str:
    where = result["machine"].get("gpu") or "CPU"
    return f"{what}, {part.replace('_group', ', query heads per key head: ')}, {where}"


def speed(result: Mapping, rows: Sequence[Mapping], title: str, suffix: str = ""):
    """TFLOP/s over sequence length: a column for each head dim, a row for each mask."""
    from matplotlib.figure import Figure

    field = f"tflops{suffix}"
    unit, factor = unit_of(rows, field)
    dims = sorted({row["d"] for row in rows})
    masks = sorted({row["causal"] for row in rows})
    figure = Figure(figsize=(1 + 3.1 * len(dims), 0.8 + 2.8 * len(masks)), layout="constrained")
    grid = figure.subplots(len(masks), len(dims), squeeze=False, sharey=True)
    ceiling = result.get("ceiling", {}).get(field)
    for line, mask in zip(grid, masks, strict=True):
        for axes, d in zip(line, dims, strict=True):
            here = [row for row in rows if (row["d"], row["causal"]) == (d, mask)]
            for name in result["contenders"]:
                have = [row for row in here if name in row[field]]
                if have:
                    axes.plot(
                        [row["seqlen_q"] for row in have],
                        [factor * row[field][name] for row in have],
                        marker="o",
                        markersize=4,
                        linewidth=2.2 if name == "flashcute" else 1.3,
                        color=_COLOURS[name],
                        label=name,
                    )
            if ceiling:
                axes.axhline(
                    factor * ceiling, color="#555", linestyle="--", linewidth=1, label="matmul"
                )
            _seqlens(axes, rows)
            axes.set_title(f"d = {d}, {_MASKS[mask]}", fontsize=10)
        line[0].set_ylabel(unit)
    grid[0][0].set_ylim(bottom=0)  # of all: the axis is shared, and its top known only now
    for axes in grid[-1]:
        axes.set_xlabel("sequence length")
    handles = {}
    for axes in grid.flat:  # a peer can be missing at the first head dim
        handles |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle(title)
    return figure


def ratios(rows: Sequence[Mapping], title: str, suffix: str = ""):
    """Speed over the best peer: a line for each head dim, a panel for each mask."""
    from matplotlib.figure import Figure

    dims = sorted({row["d"] for row in rows})
    masks = sorted({row["causal"] for row in rows})
    figure = Figure(figsize=(1 + 4.6 * len(masks), 4), layout="constrained")
    grid = figure.subplots(1, len(masks), squeeze=False, sharey=True)[0]
    for axes, mask in zip(grid, masks, strict=True):
        axes.axhline(1, color="#555", linewidth=1, linestyle="--")
        for number, d in enumerate(dims):
            have = [
                (row["seqlen_q"], over)
                for row in rows
                if (row["d"], row["causal"]) == (d, mask)
                and (over := ratio(row, f"us{suffix}")) is not None
            ]
            if have:
                axes.plot(
                    *zip(*have, strict=True), marker="o", label=f"d = {d}", color=f"C{number}"
                )
        _seqlens(axes, rows)
        axes.set_title(_MASKS[mask], fontsize=10)
        axes.set_xlabel("sequence length")
    grid[0].set_ylabel("speed over the best peer")
    grid[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(title)
    return figure


def roofline(result: Mapping, rows: Sequence[Mapping], title: str):
    """TFLOP/s over arithmetic intensity under the measured ceilings of product and copy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    peak, bandwidth = result["ceiling"]["tflops"], result["ceiling"]["bytes_per_second"] / 1e12
    names = ("b", "seqlen_q", "seqlen_k", "h", "h_k", "d", "causal")
    shapes = [bm.Shape(**{name: row[name] for name in names}) for row in rows]
    intensity = [shape.flops / shape.bytes() for shape in shapes]
    knee = peak / bandwidth
    ends = [min([knee / 4, *intensity]) / 1.5, knee, max([4 * knee, *intensity]) * 1.5]
    axes.plot(ends, [min(peak, bandwidth * x) for x in ends], color="#555", linewidth=1.3)
    # Above every point, as those at the right lie on the line or over it.
    speeds = [row["tflops"]["flashcute"] for row in rows]
    top = max(peak, *speeds) * 1.06
    axes.text(ends[2], top, f"matmul {peak:.0f} TFLOP/s", ha="right", fontsize=9)
    axes.text(knee / 2.2, peak / 2, f"copy {bandwidth:.2f} TB/s", ha="right", fontsize=9)
    for number, d in enumerate(sorted({row["d"] for row in rows})):
        for mask, marker in ((False, "o"), (True, "^")):
            have = [
                (x, row["tflops"]["flashcute"])
                for x, row in zip(intensity, rows, strict=True)
                if (row["d"], row["causal"]) == (d, mask)
            ]
            if have:
                label = f"d = {d}, {_MASKS[mask]}"
                axes.scatter(
                    *zip(*have, strict=True), marker=marker, s=26, color=f"C{number}", label=label
                )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(min([peak / 4, *speeds]) / 1.5, top * 1.25)
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(lambda value, _: f"{value:g}")
    axes.set_xlabel("FLOP per byte of device memory that has to move")
    axes.set_ylabel("TFLOP/s")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    figure.suptitle(title)
    return figure


def draw(result: Mapping, folder: Path, stem: str) -> list[Path]:
    """Writes every picture that the result has data for as PNG; returns the files."""
    figures = {}
    for key, rows in parts(result["rows"]).items():
        if key.models:
            continue
        part = str(key).replace("group ", "group").replace(", ", "_")
        figures[f"{part}_tflops"] = speed(result, rows, _title(result, "Forward", part))
        if any(ratio(row) is not None for row in rows):
            figures[f"{part}_ratio"] = ratios(rows, _title(result, "Forward", part))
        if all("tflops_sustained" in row for row in rows):
            title = _title(result, "Forward, sustained", part)
            figures[f"{part}_tflops_sustained"] = speed(result, rows, title, "_sustained")
            if any(ratio(row) is not None for row in rows):
                figures[f"{part}_ratio_sustained"] = ratios(rows, title, "_sustained")
        if result.get("ceiling"):
            title = _title(result, "Roofline", part)
            figures[f"{part}_roofline"] = roofline(result, rows, title)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{stem}_{name}.png")
        # Without the software's version the same result gives the same bytes.
        figure.savefig(paths[-1], dpi=110, metadata={"Software": None})
    return paths
