"""Draws a result.

For a sweep: speed over sequence length, ratio to the best peer, roofline. The ratio for each named
shape and each distribution of inputs. Over a cache: bytes a second over its bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import benchmarking as bm
from . import ring_plots, serving, serving_table
from .table import Part, describe, over_normal, parts, pass_of, ratio, unit_of

_COLOURS = {
    **{"flashcute": "#d1495b", "fa2": "#2a6f97", "cudnn": "#6a994e", "fa3": "#8d6a9f"},
    **{"torch": "#2a6f97", "flex": "#bc8034", "plain": "#e7a1ab", "fa3_ragged": "#c4aed0"},
    "repeatable": "#8c9db5",
}
_MASKS = {False: "full", True: "causal"}


def _colour(name: str, contenders: Sequence[str]) -> str:
    """Returns a contender's colour, also a distinct one for each contender from a file."""
    from_files = [other for other in contenders if other not in _COLOURS]
    return _COLOURS[name] if name in _COLOURS else f"C{5 + from_files.index(name)}"


def _seqlens(axes, rows: Sequence[Mapping]) -> None:
    ticks = sorted({row["seqlen_q"] for row in rows})
    axes.set_xscale("log", base=2)
    labels = [f"{s // 1024}k" if s % 1024 == 0 else str(s) for s in ticks]
    axes.set_xticks(ticks, labels)
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _title(result: Mapping, what: str, part: Part, inputs: str | None = None) -> str:
    """Returns the title of a picture: what is shown, dtype, inputs and device."""
    where = result["machine"].get("gpu") or "CPU"
    group = [f"query heads per key head: {part.group}"] * (part.group != 1)
    return ", ".join([what, part.dtype, *group, inputs or f"{part.inputs} inputs", where])


def speed(result: Mapping, rows: Sequence[Mapping], title: str, suffix: str = ""):
    """Draws TFLOP/s over sequence length: a column for each head dim, a row for each mask."""
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
                        color=_colour(name, result["contenders"]),
                        label=name,
                    )
            if ceiling:
                axes.axhline(
                    factor * ceiling, color="#555", linestyle="--", linewidth=1, label="matmul"
                )
            _seqlens(axes, rows)
            axes.set_title(f"d = {d}, {_MASKS[mask]}", fontsize=10)
        line[0].set_ylabel(unit)
    # The axis is shared; set after plotting, so that the top is fitted to the data.
    grid[0][0].set_ylim(bottom=0)
    for axes in grid[-1]:
        axes.set_xlabel("sequence length")
    handles = {}
    for axes in grid.flat:  # a peer can be missing at the first head dim
        handles |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle(title)
    return figure


def ratios(rows: Sequence[Mapping], title: str, suffix: str = ""):
    """Draws the speed over the best peer: a line for each head dim, a panel for each mask."""
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
    """Draws TFLOP/s over arithmetic intensity, under the measured ceilings of matmul and copy."""
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
    # The label is above every point, as points at the right may lie on or above the line.
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


def models(result: Mapping, rows: Sequence[Mapping], title: str, suffix: str = ""):
    """Draws, for each named shape, a bar of speed over the best peer, a dot over each contender."""
    from matplotlib.figure import Figure

    field = f"us{suffix}"
    best = [ratio(row, field) for row in rows]
    figure = Figure(figsize=(8, 1.6 + 0.21 * len(rows)), layout="constrained")
    axes = figure.subplots()
    lines = range(len(rows))
    # Bars begin at 1: to the right is faster than every peer, to the left slower than one.
    widths = [0.0 if x is None else x - 1 for x in best]
    colours = [_COLOURS["flashcute"] if width >= 0 else "#888" for width in widths]
    axes.barh(lines, widths, left=1, height=0.6, color=colours, alpha=0.55)
    for peer in result["contenders"][1:]:
        have = [(x, y) for y in lines if (x := ratio(rows[y], field, peer)) is not None]
        if have:
            colour = _colour(peer, result["contenders"])
            axes.scatter(*zip(*have, strict=True), s=16, color=colour, label=f"over {peer}")
    for y, x in zip(lines, best, strict=True):
        if x is not None:
            place = axes.get_yaxis_transform()
            axes.text(1.01, y, f"{x:.2f}", transform=place, va="center", fontsize=8)
    axes.axvline(1, color="#555", linewidth=1)
    axes.set_yticks(lines, [describe(row) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(alpha=0.3, axis="x")
    axes.set_xscale("log")
    seen = [x for row in rows for p in result["contenders"][1:] if (x := ratio(row, field, p))]
    low, high = min([1, *seen]) / 1.05, max([1, *seen]) * 1.05
    axes.set_xlim(low, high)
    ticks = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.5, 2, 3, 5, 10, 20)
    ticks = [x for x in ticks if low <= x <= high]
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.set_xlabel("speed over the best peer (bars and figures) and over each (dots)")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=4)
    figure.suptitle(title)
    return figure


def inputs(members: Mapping[Part, Sequence[Mapping]], title: str, suffix: str = ""):
    """Draws a line for each distribution and a column for each point.

    One panel shows the speed over the best peer, another the speed over that on normal inputs where
    those were measured.

    Args:
        members: Parts that differ in the distribution only, with their rows.
    """
    from matplotlib.figure import Figure

    field = f"us{suffix}"
    every = [row for rows in members.values() for row in rows]
    panels = {
        "speed over the best peer": [
            [(row, ratio(row, field)) for row in rows] for rows in members.values()
        ],
        "speed over that on normal inputs": [over_normal(every, part, field) for part in members],
    }
    panels = {
        name: lines
        for name, lines in panels.items()
        if any(over is not None for line in lines for _, over in line)
    }
    columns = {name: number for number, name in enumerate(dict.fromkeys(map(_point, every)))}
    size = (max(5, 2.2 + 0.46 * len(columns)), 1.7 + len(panels) * (0.9 + 0.26 * len(members)))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(max(1, len(panels)), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (name, lines) in zip(grid, panels.items(), strict=False):
        cells = [[math.nan] * len(columns) for _ in lines]
        for y, line in enumerate(lines):
            for row, over in line:
                if over is None:
                    continue
                x = columns[_point(row)]
                cells[y][x] = over
                colour = "white" if abs(over - 1) > 0.2 else "black"
                style = {"ha": "center", "va": "center", "fontsize": 7, "color": colour}
                axes.text(x, y, f"{over:.2f}", **style)
        image = axes.imshow(cells, cmap="RdBu", vmin=0.7, vmax=1.3, aspect="auto")
        axes.set_yticks(range(len(lines)), [part.inputs for part in members], fontsize=8)
        axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=8)
        axes.set_title(name, fontsize=10)
        figure.colorbar(image, ax=axes, extend="both")
    figure.suptitle(title)
    return figure


def bandwidth(result: Mapping, rows: Sequence[Mapping], title: str):
    """Draws TB/s of the cache over its bytes, under the measured read ceiling.

    Each contender and page size has points, and a line through the means of those with as many
    bytes. Each pair of heads has a column; one query has a row, and several queries have one.
    """
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys(serving_table.heads(row) for row in rows))
    several = sorted({row["seqlen_q"] > 1 for row in rows})
    figure = Figure(
        figsize=(1 + 3.3 * len(columns), 1.2 + 2.8 * len(several)), layout="constrained"
    )
    grid = figure.subplots(len(several), len(columns), squeeze=False, sharex=True, sharey=True)
    sizes = list(dict.fromkeys(row["page_size"] for row in rows))
    ceiling = result.get("ceiling", {}).get("read_bytes_per_second")
    handles = {}
    for line, more in zip(grid, several, strict=True):
        line[0].set_ylabel("TB/s of the cache")
        for axes, column in zip(line, columns, strict=True):
            for name in result["contenders"]:
                for number, size in enumerate(sizes):
                    speeds: dict[float, list[float]] = {}
                    for row in rows:
                        found = serving_table.heads(row), row["seqlen_q"] > 1, row["page_size"]
                        if name in row["tb_per_second"] and found == (column, more, size):
                            mib = row["cache_bytes"] / 2**20
                            speeds.setdefault(mib, []).append(row["tb_per_second"][name])
                    if speeds:
                        label = f"{name}, pages of {size}" if size else name
                        style = {"color": _colour(name, result["contenders"])}
                        style["alpha"] = 1 - 0.6 * number / len(sizes)
                        points = [(mib, x) for mib, of_mib in speeds.items() for x in of_mib]
                        axes.scatter(*zip(*points, strict=True), s=12, **style)
                        means = [(x, statistics.fmean(speeds[x])) for x in sorted(speeds)]
                        (handles[label],) = axes.plot(
                            *zip(*means, strict=True),
                            linewidth=2.2 if name == "flashcute" and not size else 1.3,
                            linestyle=("-", "--", "-.", ":")[number % 4],
                            **style,
                        )
            if ceiling:
                style = {"color": "#555", "linestyle": ":", "linewidth": 1.3}
                handles["read"] = axes.axhline(ceiling / 1e12, **style)
            axes.set_xscale("log", base=2)
            axes.grid(alpha=0.3)
            axes.set_title(f"{column}, {'several queries' if more else 'one query'}", fontsize=10)
    grid[0][0].set_ylim(bottom=0)
    for axes in grid[-1]:
        axes.set_xlabel("MiB of keys and values")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=5)
    figure.suptitle(title)
    return figure


def _over_cache(result: Mapping) -> dict:
    """Draws the pictures of calls over a cache; returns them by suffix of the file name."""
    figures = {}
    for dtype in dict.fromkeys(row["dtype"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["dtype"] == dtype]
        title = _title(result, pass_of(result).capitalize(), Part(dtype))
        decode = [row for row in rows if serving_table.kind(row) == "decode"]
        if decode:
            figures[f"{dtype}_bandwidth"] = bandwidth(result, decode, title)
        compared = [row for row in rows if ratio(row) is not None]
        if compared:
            figures[f"{dtype}_ratio"] = models(result, compared, title)
    return figures


def _point(row: Mapping) -> str:
    return describe({**row, "inputs": "normal"})


def _suffixes(rows: Sequence[Mapping]) -> dict[str, str]:
    """The suffixes of the fields that all rows have, with their words for a title."""
    sustained = {"_sustained": ", sustained"}
    return {"": ""} | (sustained if all("us_sustained" in row for row in rows) else {})


def _of_part(result: Mapping, part: Part, rows: Sequence[Mapping]) -> dict:
    """Draws rows that differ only in their shapes; returns pictures by suffix of the file name."""
    figures = {}
    compared = any(ratio(row) is not None for row in rows)
    for suffix, how in _suffixes(rows).items():
        title = _title(result, f"{pass_of(result).capitalize()}{how}", part)
        if not part.named:
            figures[f"tflops{suffix}"] = speed(result, rows, title, suffix)
        if compared:
            figures[f"ratio{suffix}"] = (
                models(result, rows, title, suffix) if part.named else ratios(rows, title, suffix)
            )
    # The roofline's bytes are those of a forward; a backward moves others.
    if result.get("ceiling") and not part.named and pass_of(result) == "forward":
        figures["roofline"] = roofline(result, rows, _title(result, "Roofline", part))
    return figures


def _of_inputs(result: Mapping, family: Part, members: Mapping[Part, Sequence[Mapping]]) -> dict:
    """Draws rows that also differ in their distributions; returns pictures by file name suffix."""
    figures = {}
    for suffix, how in _suffixes([row for rows in members.values() for row in rows]).items():
        title = _title(result, f"{pass_of(result).capitalize()}{how}", family, "by inputs")
        figures[f"inputs{suffix}"] = inputs(members, title, suffix)
    return figures


def _of_shapes(result: Mapping) -> dict:
    """Draws the passes without a cache; returns pictures by suffix of the file name."""
    families: dict[Part, dict[Part, list[Mapping]]] = {}
    for part, rows in parts(result["rows"]).items():
        families.setdefault(part._replace(inputs="normal"), {})[part] = rows
    figures = {}
    for family, members in families.items():
        several = len(members) > 1
        for part, rows in members.items():
            if part == family or not several:
                made = _of_part(result, part, rows)
                figures |= {f"{_stem(part)}_{what}": figure for what, figure in made.items()}
        if several:
            made = _of_inputs(result, family, members)
            figures |= {f"{_stem(family)}_{what}": figure for what, figure in made.items()}
    return figures


def draw(result: Mapping, folder: Path, stem: str) -> list[Path]:
    """Writes every picture that the result has data for as PNG; returns the files.

    If points were measured on several distributions of inputs, one picture shows them all; the
    others are of normal inputs.
    """
    if result.get("pass") == "ring":
        figures = ring_plots.figures(result)
    else:
        cached = result.get("pass") in serving.PASSES
        figures = _over_cache(result) if cached else _of_shapes(result)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{stem}_{name}.png")
        # Leaving out the software's version makes the same result give the same bytes.
        figure.savefig(paths[-1], dpi=110, metadata={"Software": None})
    return paths


def _stem(part: Part) -> str:
    return str(part).replace("group ", "group").replace(", ", "_")
