"""Pictures of ``bench --pass ring``: tokens a second, over one GPU, and transfers not hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_STYLES = {
    **{"ring": ("#d1495b", "-"), "allgather": ("#e28f3c", "-"), "one": ("#333333", "--")},
    **{"torch_ring": ("#2a6f97", "-"), "torch_gather": ("#6a994e", "-")},
    **{"torch_ring_ours": ("#2a6f97", ":"), "torch_gather_ours": ("#6a994e", ":")},
}


def _lines(axes, rows: Sequence[Mapping], names: Sequence[str], value) -> None:
    """Plots ``value(row, name)`` over the sequence length, where it is not None."""
    for name in names:
        points = [(row["seqlen_q"], value(row, name)) for row in rows]
        have = [(s, y) for s, y in points if y is not None]
        if have:
            colour, style = _STYLES[name]
            axes.plot(*zip(*have, strict=True), style, color=colour, marker="o", label=name)
    ticks = sorted({row["seqlen_q"] for row in rows})
    labels = [f"{s // 1024}k" if s % 1024 == 0 else str(s) for s in ticks]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels)
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _over_one(row: Mapping, name: str) -> float | None:
    speeds = row["tokens_per_second"]
    return speeds[name] / speeds["one"] if name in speeds and "one" in speeds else None


def _speed(row: Mapping, name: str) -> float | None:
    return row["tokens_per_second"].get(name)


def _percent_not_hidden(row: Mapping, name: str) -> float | None:
    return 100 * row["not_hidden"][name] if name in row["not_hidden"] else None


def _figure(result: Mapping, rows: Sequence[Mapping]):
    """Draws three pictures side by side for each pass."""
    from matplotlib.figure import Figure

    passes = list(dict.fromkeys(row["pass"] for row in rows))
    names = result["contenders"]
    figure = Figure(figsize=(13, 0.9 + 3.1 * len(passes)), layout="constrained")
    grid = figure.subplots(len(passes), 3, squeeze=False)
    for line, what in zip(grid, passes, strict=True):
        here = sorted((x for x in rows if x["pass"] == what), key=lambda x: x["seqlen_q"])
        _lines(line[0], here, names, _speed)
        line[0].set_yscale("log")
        line[0].set_ylabel(f"{what}: tokens a second")
        several = [name for name in names if name != "one"]
        _lines(line[1], here, several, _over_one)
        for count in (1, result["nproc"]):
            line[1].axhline(count, color="#333333", linestyle="--", linewidth=1)
        line[1].set_ylim(bottom=0)
        line[1].set_ylabel("times one process")
        _lines(line[2], here, several, _percent_not_hidden)
        line[2].set_ylim(bottom=0)
        line[2].set_ylabel("% of the time in transfers not hidden")
    for axes in grid[-1]:
        axes.set_xlabel("sequence length")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    row = rows[0]
    where = result["machine"].get("gpu") or "CPU"
    figure.suptitle(
        f"One sequence on {result['nproc']} x {where}: {row['dtype']}, d = {row['d']}, "
        f"{row['h']}/{row['h_k']} heads, {'causal' if row['causal'] else 'full'}"
    )
    return figure


def figures(result: Mapping) -> dict:
    """Draws a picture for each dtype, mask and heads; returns them by suffix of the file name."""
    parts: dict[str, list[Mapping]] = {}
    for row in result["rows"]:
        mask = "causal" if row["causal"] else "full"
        name = f"{row['dtype']}_{mask}_d{row['d']}_h{row['h']}over{row['h_k']}"
        parts.setdefault(name, []).append(row)
    return {name: _figure(result, rows) for name, rows in parts.items()}
