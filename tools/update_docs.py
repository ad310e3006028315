"""Rewrites the generated parts of the documents: `python tools/update_docs.py [--check]`.

A generated part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. Its text comes
from the code or from a result file, so a document cannot say what the code does not do.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from api_reference import PAGES, api_reference  # noqa: E402 - beside this file

from flashcute import benchmarking as bm  # noqa: E402 - from this checkout, installed or not
from flashcute import env, support_matrix  # noqa: E402
from flashcute.bench import table  # noqa: E402

FORWARD = ROOT / "benchmarks" / "results" / "fwd.json"
TABLE_SEQLENS = (512, 4096, 16384)


def environment() -> str:
    """SECURITY.md's table of environment variables."""
    rows = [(f"`{v.name}`", v.default, v.meaning) for v in env.VARIABLES]
    return bm.format_table(("variable", "default", "meaning"), rows)


def speed(path: Path = FORWARD) -> str:
    """README's table of forward speed, from the benchmark's result file."""
    if not path.is_file():
        return "Not measured yet: `make bench` on a machine with a GPU writes the figures here."
    result = json.loads(path.read_text(encoding="utf-8"))
    machine = result["machine"]
    ran = {name for row in result["rows"] for name, time in row["us"].items() if time}
    names = [name for name in result["contenders"] if name in ran]
    ours, peers = names[0], names[1:]
    measured = [row for row in result["rows"] if row["h"] == row["h_k"]]
    rows = []
    for row in measured:
        if row["dtype"] == "bf16" and row["seqlen_q"] in TABLE_SEQLENS:
            mask = "causal" if row["causal"] else "full"
            tflops = [row["tflops"].get(name) for name in names]
            figures = ["-" if t is None else f"{t:.0f}" for t in tflops]
            rows.append([row["d"], mask, row["seqlen_q"], *figures])
    speeds = bm.format_table(["head dim", "mask", "seqlen", *names], rows)
    lines = [
        f"Forward, bf16, TFLOP/s, on one {machine['gpu']} (driver {machine['driver']}, torch "
        f"{machine['torch']}), {str(machine['date'])[:10]}, at commit "
        f"{str(machine['commit'])[:7]}: 16k tokens, {ours} beside "
        f"{', '.join(peers)} in the same run, cold caches, medians "
        "([protocol](flashcute/benchmarking.py)). `fa2` and `cudnn` are PyTorch's.",
        "",
        speeds,
        "",
    ]
    for peer in peers:
        found = bm.Ratios.of((row, table.ratio(row, peer=peer)) for row in measured)
        if found is not None:
            worst = found.worst_row
            mask = "causal" if worst["causal"] else "full"
            lines.append(
                f"- {found.geomean:.2f}x the speed of {peer} (geometric mean of {found.count} "
                f"points); worst point {found.worst:.2f}x, at d = {worst['d']}, "
                f"s = {worst['seqlen_q']}, {mask}, {worst['dtype']}"
            )
    lines += [f"- {line}" for line in table.host_times(result)]
    return "\n".join(lines)


SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"support": support_matrix, "speed": speed},
    "SECURITY.md": {"environment": environment},
    **{page: {"api": functools.partial(api_reference, page)} for page in PAGES},
}


def rewrite(text: str, sections: dict[str, Callable[[], str]]) -> str:
    """``text`` with each generated part made anew.

    Raises:
        ValueError: a part's markers are not there exactly once.
    """
    for name, make in sections.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"update_docs: expected {begin} ... {end} exactly once, got another")
        body = f"{begin}\n\n{make()}\n\n{end}"
        text = pattern.sub(lambda _, body=body: body, text)
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if outdated")
    args = parser.parse_args(argv)
    outdated = []
    for name, sections in SECTIONS.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        new = rewrite(text, sections)
        if new != text:
            outdated.append(name)
            if not args.check:
                path.write_text(new, encoding="utf-8")
    if args.check and outdated:
        print(f"outdated: {', '.join(outdated)}; run: python tools/update_docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
