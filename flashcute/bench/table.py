"""A result as tables for a terminal, and the points with wrong outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .. import benchmarking as bm
from . import option_peers, peers
from .sweep import AGREEMENT, HOST_SHAPES, NEW_LENGTHS, NEW_LENGTHS_SHAPE

SHORT = 1024  # tokens; up to here the prologue and epilogue of a kernel weigh most

CPU_NOTE = (
    "No GPU: measured on the CPU by the wall clock, flashcute's CPU path and PyTorch's own "
    "attention.\nNothing here says anything of the kernels' speed; `python -m flashcute profile "
    "--static` and `sim` do without a GPU."
)


def describe(row: Mapping) -> str:
    """Describes a point as text: its model, its shape, and its inputs unless they are normal.

    Over a cache: its name, its pages and what is appended.
    """
    if "page_size" in row:
        pages = f", pages of {row['page_size']}" if row["page_size"] else ""
        return row["model"] + pages + (f", append {row['append']}" if row["append"] else "")
    group = f" h={row['h']}/{row['h_k']}" if row.get("h") != row.get("h_k") else ""
    model = f"{row['model']}: " if "model" in row else ""
    inputs = "" if inputs_of(row) == "normal" else f", {row['inputs']}"
    return f"{model}d={row['d']} s={seqlens(row)} {mask(row)}{group}{inputs}"


def mask(row: Mapping) -> str:
    """Returns ``causal`` or ``full``, or for a window e.g. ``1023,0``."""
    left, right = row.get("window", (-1, -1))
    if (left, right) != (-1, -1):
        return f"window {left},{right}"
    return "causal" if row["causal"] else "full"


def pass_of(result: Mapping) -> str:
    """Says what was timed; older results lack the field and are of the forward."""
    names = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}
    names |= {"decode": "decoding", "append": "appending"}
    return names[result.get("pass", "fwd")]


def inputs_of(row: Mapping) -> str:
    """Returns the distribution of a row's inputs: normal in older results, which lack the field."""
    return row.get("inputs", "normal")


def seqlens(row: Mapping) -> str:
    """Formats lengths: ``4096``, or ``512/8192`` if there are fewer or more queries than keys.

    For packed sequences it is the longest length, and the number of all tokens.
    """
    if row.get("lengths"):
        return f"up to {row['seqlen_q']} ({sum(row['lengths'])} tokens)"
    seqlen_q, seqlen_k = row["seqlen_q"], row.get("seqlen_k", row["seqlen_q"])
    return str(seqlen_q) if seqlen_q == seqlen_k else f"{seqlen_q}/{seqlen_k}"


def best_peer(row: Mapping, field: str = "us") -> str | None:
    """Returns the fastest contender that is not a form of flashcute; None if there is none."""
    ours = ("flashcute", option_peers.PLAIN, peers.REPEATABLE)
    others = {name: us for name, us in row.get(field, {}).items() if name not in ours}
    return min(others, key=others.__getitem__, default=None)


def unit_of(rows: Sequence[Mapping], field: str = "tflops") -> tuple[str, float]:
    """Returns the unit, TFLOP/s, or GFLOP/s for a CPU's values, and the factor to convert to it."""
    largest = max((value for row in rows for value in row[field].values()), default=10)
    return ("TFLOP/s", 1.0) if largest >= 10 else ("GFLOP/s", 1e3)


def ratio(row: Mapping, field: str = "us", peer: str | None = None) -> float | None:
    """Returns flashcute's speed over ``peer``, or the best one; None if either did not run."""
    times = row.get(field, {})
    ours, other = times.get("flashcute"), times.get(peer or best_peer(row, field))
    return other / ours if ours and other else None


class Part(NamedTuple):
    """The fields that all rows of one figure share."""

    dtype: str
    named: str = ""  # "models", "options", or "" for the sweep
    group: int = 1  # query heads per key head; 1 for all named shapes
    inputs: str = "normal"

    def __str__(self) -> str:
        group = f"group {self.group}" if self.group != 1 else ""
        inputs = self.inputs if self.inputs != "normal" else ""
        return ", ".join(filter(None, (self.dtype, self.named, group, inputs)))


def parts(rows: Iterable[Mapping]) -> dict[Part, list[Mapping]]:
    """Groups rows by dtype, inputs, and kind of named shape or query heads per key head.

    Named shapes are models or options; query heads per key head group the rows of the sweep.
    """
    found: dict[Part, list[Mapping]] = {}
    for row in rows:
        named = "options" if "window" in row else "models" if "model" in row else ""
        group = 1 if named else row["h"] // row["h_k"]
        part = Part(row["dtype"], named, group, inputs_of(row))
        found.setdefault(part, []).append(row)
    return found


def disagreements(result: Mapping) -> list[str]:
    """Lists points where an output differs from the trusted peer's, or could not be compared.

    The times of such points are not valid.
    """
    return [
        f"{row['trusted']}, which outputs are compared with, did not run at {describe(row)} "
        f"{row['dtype']}"
        for row in result["rows"]
        if row["difference"] is None
    ] + [
        f"{name} differs from {row['trusted']} by {value} at {describe(row)} {row['dtype']}"
        for row in result["rows"]
        for name, value in (row["difference"] or {}).items()
        if not value <= AGREEMENT[row["dtype"]]  # NaN too
    ]


def _points(result: Mapping, suffix: str) -> str:
    """Formats each point: TFLOP/s by contender, speed over the best peer, percent of ceiling."""
    names = result["contenders"]
    unit, factor = unit_of(result["rows"])
    named = any("model" in row for row in result["rows"])
    distributions = any(inputs_of(row) != "normal" for row in result["rows"])
    plain = option_peers.PLAIN in names
    rows = []
    for row in result["rows"]:
        over = ratio(row, f"us{suffix}")
        share = row.get(f"percent_of_ceiling{suffix}", {}).get("flashcute", "-")
        cells = [row.get("model", "-"), row["b"]] if named else []
        cells += [inputs_of(row)] if distributions else []
        cells += [row["dtype"], row["d"], mask(row), seqlens(row)]
        cells.append(f"{row['h']}/{row['h_k']}")
        speeds = row[f"tflops{suffix}"]
        cells += [f"{factor * speeds[name]:.1f}" if name in speeds else "-" for name in names]
        cells.append("-" if over is None else f"{over:.3f}")
        if plain:
            over = ratio(row, f"us{suffix}", option_peers.PLAIN)
            cells.append("-" if over is None else f"{over:.3f}")
        cells.append(share)
        if suffix:
            state = row["gpu_sustained"].get("flashcute", {})
            for name, digits in {"sm_mhz": 0, "power_w": 0, "power_capped": 2}.items():
                cells.append(f"{state[name]:.{digits}f}" if name in state else "-")
        rows.append(cells)
    header = [*(["model", "b"] if named else []), *(["inputs"] if distributions else [])]
    header += ["dtype", "d", "mask", "s", "h/h_k", *names, "x best peer"]
    header += [*(["x plain"] if plain else []), "% of matmul"]
    table = bm.format_table([*header, *(["MHz", "W", "power-capped"] if suffix else [])], rows)
    what = f", {pass_of(result)}" if pass_of(result) != "forward" else ""
    return f"{unit} {'sustained' if suffix else 'in bursts'}{what}\n\n{table}"


def _subsets(rows: Sequence[Mapping]) -> Iterator[tuple[str, list[Mapping]]]:
    """Yields all rows, then their subsets by length and by head dimension, each with a name.

    A subset that has all rows is left out. Rows of options have subsets by family instead.
    """
    yield "", list(rows)
    found: dict[str, list[Mapping]] = {}
    if "window" in rows[0]:
        for row in rows:
            found.setdefault(f": {row['model'].partition('-')[0]}", []).append(row)
        yield from found.items()
        return
    found = {f", s <= {SHORT}": [row for row in rows if row["seqlen_q"] <= SHORT]}
    for d in sorted({row["d"] for row in rows}):
        found[f", d = {d}"] = [row for row in rows if row["d"] == d]
    yield from ((name, some) for name, some in found.items() if len(some) < len(rows))


Pairs = list[tuple[Mapping, float | None]]
Compared = Iterator[tuple[str, str, Pairs]]


def _over_peers(result: Mapping, field: str) -> Compared:
    """Yields flashcute over each peer: what, over what, and rows with their ratios.

    It compares on normal inputs only; :func:`_inputs` shows the others.
    """
    ours, *peers_here = result["contenders"]
    for part, rows in parts(result["rows"]).items():
        for peer in (None, *peers_here) if part.inputs == "normal" else ():
            for name, some in _subsets(rows):
                if name and part.named != "options" and (part.named or peer not in (None, "fa3")):
                    continue
                pairs = [(row, ratio(row, field, peer)) for row in some]
                yield f"{ours}, {part}{name}", peer or "best peer", pairs


def _over_itself(result: Mapping, field: str) -> Compared:
    """Yields each contender over itself at the same points in bf16, and with ungrouped heads."""
    found = parts(result["rows"])
    for part, rows in found.items():
        for name in result["contenders"]:
            for base in (part._replace(dtype="bf16"), part._replace(group=1)):
                if base != part and part.inputs == "normal":
                    pairs = _same_points(rows, found.get(base, ()), field, name)
                    yield f"{name}, {part}", str(base), pairs


def over_normal(rows: Sequence[Mapping], part: Part, field: str, name: str = "flashcute") -> Pairs:
    """Returns rows of ``part`` with a contender's speed over that on normal inputs in ``rows``."""
    found = parts(rows)
    base = found.get(part._replace(inputs="normal"), ())
    return list(_same_points(found[part], base, field, name))


def _same_points(
    part: Sequence[Mapping], base: Sequence[Mapping], field: str, name: str
) -> Iterator[tuple[Mapping, float | None]]:
    """Yields rows of ``part`` with a contender's speed over that at the same points of ``base``."""

    def point(row: Mapping) -> tuple:
        sizes = (row[size] for size in ("b", "seqlen_q", "seqlen_k", "h", "d", "causal"))
        return row.get("model"), *sizes

    times = {point(row): row.get(field, {}).get(name) for row in base}
    for row in part:
        here, there = row.get(field, {}).get(name), times.get(point(row))
        yield row, there / here if here and there else None


def _ratios(result: Mapping, suffix: str) -> str:
    lines = []
    for compared in (_over_peers, _over_itself):
        for what, over, pairs in compared(result, f"us{suffix}"):
            found = bm.Ratios.of(pairs)
            if found is not None:
                figures = [found.count, f"{found.geomean:.3f}", f"{found.worst:.3f}"]
                lines.append([what, over, *figures, describe(found.worst_row)])
    header = ["speed of", "over", "points", "geomean", "worst", "where"]
    table = bm.format_table(header, lines)
    return f"Ratios {'sustained' if suffix else 'in bursts'}\n\n{table}"


def _range(pairs: Pairs) -> str:
    found = bm.Ratios.of(pairs)
    return "-" if found is None else f"{found.geomean:.3f}, {found.worst:.3f}"


def _inputs(result: Mapping, suffix: str) -> str:
    """Formats, for each distribution, our speed over each peer and over ours on normal inputs."""
    field = f"us{suffix}"
    _, *peers_here = result["contenders"]
    lines = []
    for part, rows in parts(result["rows"]).items():
        best = [(row, ratio(row, field)) for row in rows]
        cells = [_range([(row, ratio(row, field, peer)) for row in rows]) for peer in peers_here]
        cells.append(_range(over_normal(result["rows"], part, field)))
        worst = bm.Ratios.of(best)
        where = describe(worst.worst_row) if worst else "-"
        label = str(part._replace(inputs="normal"))
        lines.append([label, part.inputs, len(rows), _range(best), *cells, where])
    header = ["", "inputs", "points", "best peer", *peers_here, "ours, normal inputs"]
    table = bm.format_table([*header, "worst over the best peer"], lines)
    title = f"Speed of flashcute {'sustained' if suffix else 'in bursts'} over, by inputs"
    return f"{title}: geometric mean, least\n\n{table}"


def host_of_add(result: Mapping) -> Iterator[str]:
    """Yields a line on the host time of an addition, by which hosts can be compared."""
    for name, us in result.get("host_us_add", {}).items():
        yield f"host time of {name} of one small tensor: {us:.1f} us"


def host_times(result: Mapping) -> Iterator[str]:
    """Yields a line for each host time that was measured: of shapes, new lengths, an addition."""
    yield from host_of_add(result)
    for field, shape in HOST_SHAPES.items():
        if result.get(field):
            times = ", ".join(f"{name} {us:.1f} us" for name, us in result[field].items())
            yield f"host time per call, {describe(dataclasses.asdict(shape))}: {times}"
    if result.get("host_us_new_lengths"):
        times = ", ".join(
            f"{name} {us['mean']:.1f} us (p95 {us['p95']:.1f}, p99 {us['p99']:.1f})"
            for name, us in result["host_us_new_lengths"].items()
        )
        about = f"s={NEW_LENGTHS[0]} to {NEW_LENGTHS[-1]}, d={NEW_LENGTHS_SHAPE.d} causal"
        yield f"host time per call whose length is new, kernels loaded, {about}: {times}"


def missing(rows: Sequence[Mapping]) -> Iterator[str]:
    """Yields a line for each contender and reason, with the named shapes where it did not run."""
    where: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        for name, why in row.get("missing", {}).items():
            places = where.setdefault((name, why), {})
            if "model" in row:
                places[row["model"]] = None
    for (name, why), places in where.items():
        yield f"{name} did not run everywhere: {why}" + (
            f" ({', '.join(places)})" if places else ""
        )


def summary(result: Mapping) -> str:
    """Formats short tables: each point, ratios over all of them, the ceiling, the host time."""
    suffixes = [""]
    if any("tflops_sustained" in row for row in result["rows"]):
        suffixes.append("_sustained")
    text = [CPU_NOTE] if result.get("device") == "cpu" else []
    text += [_points(result, suffix) for suffix in suffixes]
    if any(inputs_of(row) == "normal" for row in result["rows"]):
        text += [_ratios(result, suffix) for suffix in suffixes]
    if any(inputs_of(row) != "normal" for row in result["rows"]):
        text += [_inputs(result, suffix) for suffix in suffixes]
    if result.get("ceiling"):
        values = {name: f"{value:.4g}" for name, value in result["ceiling"].items()}
        text.append(f"matmul ceiling: {values}")
    text += host_times(result)
    text += missing(result["rows"])
    text += [f"{name}: {values}" for name, values in result["gpu_samples"].items()]
    if result["stopped_early"]:
        text.append("STOPPED EARLY: the time limit was reached, points are missing")
    return "\n\n".join(text)
