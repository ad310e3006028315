"""A profile, or a comparison of two, as a self-contained HTML page."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import text

_COLOURS = ("#2a6f97", "#e07a1f", "#6a994e")  # a backward has up to three kernels
_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
h1, h2 { overflow-wrap: anywhere }
table { border-collapse: collapse; margin: 1em 0 }
td, th { border: 1px solid #ccc; padding: .2em .7em; text-align: left }
td + td { text-align: right }
figure { margin: 1.5em 0 } svg { max-width: 100%; height: auto }
pre { overflow-x: auto; background: #f6f6f6; padding: 1em; font-size: 13px }
"""


def bars(
    series: Mapping[str, Mapping[str, float | None]], title: str, unit: str, limit: float | None
):
    """Draws horizontal bars, a group for each name and a bar in it for each series, as a figure.

    A missing value has no bar and the label "missing". ``limit`` draws a line.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for values in series.values() for name in values))
    height = 0.8 / len(series)
    rows = len(names) * (0.6 + 0.4 * len(series)) + 0.6 * len(series)
    figure = Figure(figsize=(8, 1.2 + 0.42 * rows), layout="constrained")
    axes = figure.add_subplot()
    if limit is not None:
        axes.axvline(limit, color="#888", linewidth=1, linestyle="--", zorder=0)
    for number, (label, values) in enumerate(series.items()):
        places = [i + (number - (len(series) - 1) / 2) * height for i in range(len(names))]
        widths = [values.get(name) or 0.0 for name in names]
        axes.barh(places, widths, height * 0.92, label=label, color=_COLOURS[number])
        for place, name, width in zip(places, names, widths, strict=True):
            value = values.get(name)
            said = "missing" if value is None else f"{value:.4g}"
            ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axes.annotate(
                *(said, (width, place), (4, 0)),
                textcoords="offset points",
                **{"va": "center", "fontsize": 8, "bbox": ground},
            )
    axes.set_yticks(range(len(names)), [text.word(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    if len(series) > 1:
        figure.legend(loc="outside lower center", fontsize=9)
    return figure


def _charts(report: Mapping) -> dict[str, tuple[str, float | None, Mapping[str, float | None]]]:
    """Returns (unit, limit, values) of each picture that a profile has, by title."""
    if report["kind"] == "ncu":
        quantities = report["quantities"]
        charts = {
            "How busy each unit is": ("% of its peak", 100, report["utilisation_percent"]),
            "How busy the main loop alone would keep them": (
                "% of its peak, from the machine code and the measured speed",
                100,
                report.get("expected_percent", {}),
            ),
            "Distance to each roof": (
                "% of the least clocks over those it took",
                100,
                {name: roof["percent_reached"] for name, roof in report["roofs"].items()},
            ),
            "What warps wait for": (
                "warps per issue",
                None,
                {reason: x["warps_per_issue"] for reason, x in list(report["stalls"].items())[:10]},
            ),
            "Bytes moved over bytes asked for": (
                "% (L2 can be below 100: it merges requests of several SMs for the same line)",
                100,
                {
                    "device memory": quantities["dram_percent_of_ideal"],
                    "L2, for these tiles": quantities["l2_percent_of_ideal"],
                },
            ),
        }
        return charts | (_charts(report["static"]) if report.get("static") else {})
    charts = {}
    if report["estimate"] is not None:
        charts["Clocks of the main loop, from its machine code"] = (
            "% of the tensor cores' least time",
            100,
            report["estimate"]["percent_of_tensor_peak_time"],
        )
    if report["loop"] is not None:
        charts["Thread-instructions per score element"] = (
            "instructions",
            None,
            report["loop"]["groups_per_element"],
        )
    return charts


def pictures(reports: Sequence[Mapping]) -> dict[str, object]:
    """Draws figures, by title; two reports share each picture that one of them has."""
    labels = [report["kernel"] for report in reports]
    if len(set(labels)) < len(labels):
        labels = [f"{letter}: {label}" for letter, label in zip("AB", labels, strict=True)]
    charts = [_charts(report) for report in reports]
    figures = {}
    for title in dict.fromkeys(title for chart in charts for title in chart):
        have = [(label, c[title]) for label, c in zip(labels, charts, strict=True) if title in c]
        unit, limit, _ = have[0][1]
        series = {label: values for label, (_, _, values) in have}
        if any(series.values()):
            figures[title] = bars(series, title, unit, limit)
    return figures


def _svg(figure) -> str:
    import matplotlib

    buffer = io.StringIO()
    # Without a date and with fixed ids the same profile gives the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "flashcute", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def write(path: Path, reports: Sequence[Mapping]) -> None:
    """Writes the page: notes, pictures, then every figure as text."""
    title = html.escape(" and ".join(dict.fromkeys(report["kernel"] for report in reports)))
    parts = [
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
    ]
    for report in reports:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in report["notes"])
        if len(reports) > 1:
            parts.append(f"<h2>{html.escape(report['kernel'])}</h2>")
        parts.append(f"<ul>{notes}</ul>")
    for heading, figure in pictures(reports).items():
        parts.append(f"<figure role='img' aria-label='{html.escape(heading)}'>{_svg(figure)}")
        parts.append("</figure>")
    if len(reports) == 2:
        parts.append(f"<h2>Differences</h2><pre>{html.escape(text.comparison(reports))}</pre>")
    for report in reports:
        parts.append(f"<h2>Every figure</h2><pre>{html.escape(text.report_text(report))}</pre>")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</body></html>", ""]), encoding="utf-8")
