"""A result over a cache as tables: times and bytes a second, ratios, shares of the read ceiling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .. import benchmarking as bm
from .table import (
    CPU_NOTE,
    Pairs,
    best_peer,
    describe,
    host_of_add,
    missing,
    pass_of,
    ratio,
)

# Ranges of the cache's bytes, by which shares of the read ceiling are grouped.
_SIZES = {
    "cache >= 512 MiB": (512 << 20, float("inf")),
    "64 to 512 MiB": (64 << 20, 512 << 20),
    "< 64 MiB": (0, 64 << 20),
}


def kind(row: Mapping) -> str:
    """Returns a row's group: ``decode``, ``mixed``, ``no append``, ``append rotary``..."""
    if row["append"]:
        return f"append {row['append']}"
    if row["model"].startswith("append"):
        return "no append"
    return "mixed" if row["decodes"] else "decode"


def heads(row: Mapping) -> str:
    """Formats heads and head dimension, as ``h=32/8 d=128``."""
    return f"h={row['h']}/{row['h_k']} d={row['d']}"


def _beside(rows: Sequence[Mapping], row: Mapping, **changed: object) -> Mapping | None:
    """Returns the row of the same point, timed in the same turns, with these fields changed."""
    wanted = {name: row[name] for name in ("model", "dtype", "page_size", "append")} | changed
    found = (x for x in rows if all(x[name] == value for name, value in wanted.items()))
    return next(found, None)


def _over(row: Mapping, other: Mapping | None, name: str | None = "flashcute") -> float | None:
    """Returns the speed of flashcute at ``row`` over that of contender ``name`` at ``other``."""
    ours = row["us"].get("flashcute")
    theirs = other["us"].get(name) if other else None
    return theirs / ours if ours and theirs else None


def over_contiguous(rows: Sequence[Mapping], row: Mapping) -> float | None:
    """Returns the speed of a row with pages over flashcute's own on a contiguous cache."""
    return _over(row, _beside(rows, row, page_size=0)) if row["page_size"] else None


def over_peer(rows: Sequence[Mapping], row: Mapping, peer: str | None = None) -> float | None:
    """Returns the speed over a peer, by default the best one.

    For pages that no peer supports, it is the speed over the peer on the contiguous cache.
    """
    own = ratio(row, "us", peer)
    if own is not None or not row["page_size"]:
        return own
    other = _beside(rows, row, page_size=0)
    return _over(row, other, peer or best_peer(other)) if other else None


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _points(result: Mapping) -> str:
    rows = result["rows"]
    names = [name for name in result["contenders"] if any(name in row["us"] for row in rows)]
    others = [name for name in names if name != "flashcute"]
    lines = []
    for row in rows:
        cells = [row["model"], row["dtype"], row["page_size"] or "-", row["append"] or "-"]
        cells.append(f"{row['cache_bytes'] / 2**20:.1f}")
        cells += [_number(row["us"].get(name), 1) for name in names]
        cells += [f"{x:.4g}" if (x := row["tb_per_second"].get(name)) else "-" for name in names]
        for field in ("percent_of_read", "beyond_read_us"):
            cells.append(_number(row.get(field, {}).get("flashcute"), 1))
        cells += [_number(over_peer(rows, row, name)) for name in (None, *others)]
        cells.append(_number(over_contiguous(rows, row)))
        lines.append(cells)
    header = ["point", "dtype", "page", "append", "MiB"]
    header += [f"{name}, us" for name in names] + [f"{name}, TB/s" for name in names]
    header += ["% of read", "us beyond read", "x best peer", *(f"x {name}" for name in others)]
    table = bm.format_table([*header, "x contiguous"], lines)
    return f"Microseconds, and TB/s of the cache, {pass_of(result)}\n\n{table}"


def _groups(rows: Sequence[Mapping]) -> Iterator[tuple[str, list[Mapping]]]:
    """Yields rows by kind, dtype and page size; those of contiguous ``decode`` also by heads."""
    found: dict[str, list[Mapping]] = {}
    for row in rows:
        pages = f", pages of {row['page_size']}" if row["page_size"] else ""
        name = f"{kind(row)}, {row['dtype']}{pages}"
        found.setdefault(name, []).append(row)
        if kind(row) == "decode" and not pages:
            found.setdefault(f"{name}, {heads(row)}", []).append(row)
    yield from found.items()


def _compared(result: Mapping) -> Iterator[tuple[str, str, Pairs]]:
    """Yields comparisons of flashcute: what, over what, and rows with their ratios."""
    rows = result["rows"]
    _, *others = result["contenders"]
    for name, some in _groups(rows):
        for peer in (None, *others):
            pairs = [(row, over_peer(rows, row, peer)) for row in some]
            yield name, peer or "best peer", pairs
        yield name, "contiguous", [(row, over_contiguous(rows, row)) for row in some]
        plain = [
            (row, _over(row, _beside(rows, row, append="")) if row["append"] else None)
            for row in some
        ]
        yield name, "no append", plain


def _ratios(result: Mapping) -> str:
    lines = []
    for name, over, pairs in _compared(result):
        found = bm.Ratios.of(pairs)
        if found is not None:
            figures = [found.count, f"{found.geomean:.3f}", f"{found.worst:.3f}"]
            lines.append([name, over, *figures, describe(found.worst_row)])
    header = ["speed of flashcute", "over", "points", "geomean", "worst", "where"]
    note = "Of pages that a peer does not run on, over the peer on the contiguous cache."
    return f"Ratios. {note}\n\n{bm.format_table(header, lines)}"


def _shares(result: Mapping) -> str:
    """Formats each contender's share of the read ceiling, by size of the cache."""
    lines = []
    for name in result["contenders"]:
        for title, (least, most) in _SIZES.items():
            for paged in (False, True):
                pairs = [
                    (row, row["percent_of_read"].get(name))
                    for row in result["rows"]
                    if least <= row["cache_bytes"] < most
                    and bool(row["page_size"]) == paged
                    and not row["decodes"]
                ]
                found = bm.Ratios.of(pairs)
                if found is not None:
                    figures = [found.count, f"{found.geomean:.1f}", f"{found.worst:.1f}"]
                    cells = [name, title, "pages" if paged else "contiguous"]
                    lines.append([*cells, *figures, describe(found.worst_row)])
    header = ["", "", "", "points", "geomean", "worst", "where"]
    return f"Percent of the read ceiling\n\n{bm.format_table(header, lines)}"


def _ceiling(result: Mapping) -> str:
    ceiling = dict(result["ceiling"])
    most = ceiling.pop("read_bytes_per_second") / 1e12
    reads = ", ".join(
        f"{name.removesuffix('_bytes_per_second')} {value / 1e12:.3f}"
        for name, value in ceiling.items()
    )
    return f"read ceiling: {most:.3f} TB/s, the fastest of PyTorch's reductions of 4 GiB: {reads}"


def _host_times(result: Mapping) -> Iterator[str]:
    yield from host_of_add(result)
    fields = {
        "host_us_decode": "another length each time, on the device",
        "host_us_decode_int": "another length each time, an int",
        "host_us_decode_plan": "the same lengths each time, through a KVCachePlan",
    }
    for field, how in fields.items():
        if result.get(field):
            times = ", ".join(f"{name} {us:.1f} us" for name, us in result[field].items())
            yield f"host time of a decode call, {how}: {times}"


def summary(result: Mapping) -> str:
    """Formats each point, ratios over all of them, shares of the read ceiling, the host time."""
    text = [CPU_NOTE] if result.get("device") == "cpu" else []
    if result["rows"]:
        text += [_points(result), _ratios(result)]
    if result.get("ceiling"):
        if result["rows"]:
            text.append(_shares(result))
        text.append(_ceiling(result))
    text += _host_times(result)
    # A peer without pages lacks them at every point, so its line does not list the points.
    text += missing(
        [{"missing": row["missing"]} if row["page_size"] else row for row in result["rows"]]
    )
    text += [f"{name}: {values}" for name, values in result["gpu_samples"].items()]
    if result["stopped_early"]:
        text.append("STOPPED EARLY: the time limit was reached, points are missing")
    return "\n\n".join(text)
