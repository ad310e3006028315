"""Rewrites the generated parts of the documents: `python tools/update_docs.py [--check]`.

A generated part is between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. Its text comes from
the code or from a result file, so it agrees with them.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from api_reference import PAGES, api_reference  # noqa: E402 - beside this file

from flashcute import benchmarking as bm  # noqa: E402 - from this checkout, installed or not
from flashcute import env, support_matrix  # noqa: E402
from flashcute.bench import serving_table, table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
FORWARD, MODELS, INPUTS = (RESULTS / f"{n}.json" for n in ("fwd", "fwd_models", "fwd_inputs"))
BACKWARD, DECODE, TRAINING = (RESULTS / f"{n}.json" for n in ("bwd", "decode", "train_gpt"))
FEW_HEADS, GENERATION = RESULTS / "bwd_few_heads.json", RESULTS / "generate.json"
TABLE_SEQLENS = (512, 4096, 16384)


def environment() -> str:
    """Formats SECURITY.md's table of environment variables."""
    rows = [(f"`{v.name}`", v.default, v.meaning) for v in env.VARIABLES]
    return bm.format_table(("variable", "default", "meaning"), rows)


def _contenders(rows: Sequence[Mapping], result: Mapping) -> list[str]:
    """Returns the contenders that ran at one of ``rows`` at least, flashcute first."""
    ran = {name for row in rows for name, time in row["us"].items() if time}
    return [name for name in result["contenders"] if name in ran]


def _commit(result: Mapping) -> str:
    """Returns the commit's first digits, and what follows them where files had changed."""
    commit, dash, changed = str(result["machine"]["commit"]).partition("-")
    return f"{commit[:7]}{dash}{changed}"


def _measured(result: Mapping) -> str:
    """Says where and how a result was measured."""
    machine = result["machine"]
    return (
        f"on one {machine['gpu']} (driver {machine['driver']}, torch {machine['torch']}), "
        f"{str(machine['date'])[:10]}, at commit {_commit(result)}, in one run, "
        "cold caches, medians ([protocol](../flashcute/benchmarking.py)). `fa2` and `cudnn` are "
        "PyTorch's"
    )


def _over(rows: Sequence[Mapping], peers: Sequence[str | None]) -> list[str]:
    """Formats a line for each peer, None for the best of each point: mean and worst ratio."""
    lines = []
    for peer in peers:
        found = bm.Ratios.of((row, table.ratio(row, peer=peer)) for row in rows)
        if found is not None:
            worst = f"{table.describe(found.worst_row)}, {found.worst_row['dtype']}"
            lines.append(
                f"- {found.geomean:.2f}x the speed of {peer or 'the best peer'} (geometric mean of "
                f"{found.count} points); worst point {found.worst:.2f}x, at {worst}"
            )
    return lines


def speed(path: Path = FORWARD) -> str:
    """Formats the table of forward speed, from the benchmark's result file."""
    if not path.is_file():
        return "Not measured yet: `make bench` on a machine with a GPU writes the figures here."
    result = json.loads(path.read_text(encoding="utf-8"))
    measured = sweep_rows(result)
    names = _contenders(measured, result)
    rows = []
    for row in measured:
        if row["seqlen_q"] in TABLE_SEQLENS:
            tflops = [row["tflops"].get(name) for name in names]
            figures = ["-" if t is None else f"{t:.0f}" for t in tflops]
            rows.append([row["d"], table.mask(row), row["seqlen_q"], *figures])
    lines = [
        f"The sweep: forward, bf16, standard normal inputs, 16k tokens, TFLOP/s, "
        f"{_measured(result)}.",
        "",
        bm.format_table(["head dim", "mask", "seqlen", *names], rows),
        "",
        *_over(measured, names[1:]),
        *(f"- {line}" for line in table.host_times(result)),
    ]
    return "\n".join(lines)


def models(path: Path = MODELS) -> str:
    """Formats the table of models' shapes; empty where they were not measured."""
    if not path.is_file():
        return ""
    result = json.loads(path.read_text(encoding="utf-8"))
    measured = table.parts(result["rows"]).get(table.Part("bf16", named="models"), [])
    names = _contenders(measured, result)
    rows = []
    for row in measured:
        sizes = [row["model"], row["b"], table.seqlens(row), f"{row['h']}/{row['h_k']}", row["d"]]
        tflops = [row["tflops"].get(name) for name in names]
        over = table.ratio(row)
        figures = ["-" if t is None else f"{t:.0f}" for t in tflops]
        rows.append([*sizes, table.mask(row), *figures, "-" if over is None else f"{over:.2f}"])
    header = ["model", "batch", "seqlen", "heads", "head dim", "mask", *names, "x best peer"]
    lines = [
        "[Shapes of public models](../flashcute/bench/models.py): forward, bf16, standard normal "
        f"inputs, TFLOP/s, {_measured(result)}, whose cuDNN has no causal mask that is aligned to "
        "the bottom-right corner.",
        "",
        bm.format_table(header, rows),
        "",
        *_over(measured, [None, *names[1:]]),
    ]
    return "\n".join(lines)


def _mean_and_least(pairs: Sequence[tuple[Mapping, float | None]]) -> str:
    found = bm.Ratios.of(pairs)
    return "-" if found is None else f"{found.geomean:.2f} ({found.worst:.2f})"


def inputs(path: Path = INPUTS) -> str:
    """Formats the table of distributions of inputs; empty where they were not measured."""
    if not path.is_file():
        return ""
    result = json.loads(path.read_text(encoding="utf-8"))
    measured = [row for row in result["rows"] if row["h"] == row["h_k"] and "model" not in row]
    dtypes = list(dict.fromkeys(row["dtype"] for row in measured))
    lines: dict[str, list[str]] = {}
    for dtype in dtypes:
        some = [row for row in measured if row["dtype"] == dtype]
        for part, rows in table.parts(some).items():
            over_normal = table.over_normal(some, part, "us")
            both = [[(row, table.ratio(row)) for row in rows], over_normal]
            lines.setdefault(part.inputs, []).extend(map(_mean_and_least, both))
    over = ("best peer", "normal inputs")
    header = ["inputs", *(f"{dtype}, over {what}" for dtype in dtypes for what in over)]
    dims, lengths = (
        ", ".join(map(str, sorted({row[size] for row in measured}))) for size in ("d", "seqlen_q")
    )
    text = [
        "[Distributions of Q and K](../flashcute/bench/inputs.py): speed over the best peer on the "
        "same inputs, and over our own on standard normal inputs; geometric mean (least); forward, "
        f"d = {dims}, s = {lengths}, {_measured(result)}.",
        "",
        bm.format_table(header, [[name, *cells] for name, cells in lines.items()]),
    ]
    worst = bm.Ratios.of((row, table.ratio(row)) for row in measured)
    if worst is not None:
        where = f"{table.describe(worst.worst_row)}, {worst.worst_row['dtype']}"
        text += ["", f"- the worst input: {worst.worst:.2f}x the best peer, at {where}"]
    return "\n".join(text)


def sweep_rows(result: Mapping) -> list[Mapping]:
    """Returns the rows that the figures on forward and backward come from."""
    return table.parts(result["rows"]).get(table.Part("bf16"), [])


def decode_rows(result: Mapping) -> list[Mapping]:
    """Returns the rows that the figures on a cache come from: contiguous, nothing appended."""
    rows = (row for row in result["rows"] if row["dtype"] == "bf16" and not row["page_size"])
    return [row for row in rows if serving_table.kind(row) == "decode"]


def backward(path: Path = BACKWARD) -> str:
    """Formats the lines on the backward; empty where it was not measured."""
    if not path.is_file():
        return ""
    result = json.loads(path.read_text(encoding="utf-8"))
    measured = sweep_rows(result)
    dims = ", ".join(map(str, sorted({row["d"] for row in measured})))
    lines = [
        "The backward by autograd ([plot](../benchmarks/results/bwd_bf16_ratio.png)), "
        f"d = {dims}, s and masks of the sweep, bf16, {_measured(result)}:",
        "",
        *_over(measured, _contenders(measured, result)[1:]),
    ]
    return "\n".join(lines)


def few_heads(path: Path = FEW_HEADS) -> str:
    """Formats the table of a backward of few key heads; empty where it was not measured."""
    if not path.is_file():
        return ""
    result = json.loads(path.read_text(encoding="utf-8"))
    names = _contenders(result["rows"], result)
    size = ("d", "causal", "seqlen_q", "h")
    of_many = {tuple(row[x] for x in size): row for row in result["rows"] if row["h"] == row["h_k"]}
    rows = []
    for row in result["rows"]:
        if row["h"] > row["h_k"]:
            mask, heads = "causal" if row["causal"] else "full", f"{row['h']}/{row['h_k']}"
            many = of_many[tuple(row[x] for x in size)]["tflops"][names[0]]
            speeds = [row["tflops"][name] for name in names]
            cells = [f"{x:.0f}" for x in (*speeds, many)]
            rows.append([row["d"], mask, row["seqlen_q"], heads, *cells])
    header = ["d", "mask", "s", "h/h_k", *names, "flashcute, as many key heads"]
    tokens = result["rows"][0]["b"] * result["rows"][0]["seqlen_q"]
    return "\n".join(
        [
            f"Few key heads, {tokens:,} tokens, TFLOP/s, bf16, {_measured(result)}:",
            "",
            bm.format_table(header, rows),
        ]
    )


def decode(path: Path = DECODE) -> str:
    """Formats the lines on queries over a contiguous KV cache; empty if they were not measured."""
    if not path.is_file():
        return ""
    result = json.loads(path.read_text(encoding="utf-8"))
    measured = decode_rows(result)
    lines = [
        "Queries over a contiguous KV cache (plots of [ratios]"
        "(../benchmarks/results/decode_bf16_ratio.png) and "
        "[TB/s](../benchmarks/results/decode_bf16_bandwidth.png)), "
        f"bf16, {_measured(result)}:",
        "",
        *_over(measured, _contenders(measured, result)[1:]),
    ]
    return "\n".join(lines)


def headline(paths: Sequence[Path] = (FORWARD, BACKWARD, DECODE)) -> str:
    """Formats README's table: the speed over each peer, a line for each result that there is."""
    whats = ("forward", "backward", "decoding over a KV cache")
    peers = {"fa3": "FlashAttention-3", "cudnn": "cuDNN", "fa2": "FlashAttention-2"}
    lines = []
    for what, path, of_result in zip(
        whats, paths, (sweep_rows, sweep_rows, decode_rows), strict=True
    ):
        if path.is_file():
            result = json.loads(path.read_text(encoding="utf-8"))
            measured = of_result(result)
            dims = sorted({row["d"] for row in measured})
            over = [
                _mean_and_least([(row, table.ratio(row, peer=peer)) for row in measured])
                for peer in peers
            ]
            where = result["machine"]["gpu"], str(result["machine"]["date"])[:10], _commit(result)
            lines.append([what, ", ".join(map(str, dims)), *over, ", ".join(where)])
    over = (f"over {name}" for name in peers.values())
    header = ["bf16", "head dims", *over, "measured on, at commit"]
    return bm.format_table(header, lines)


def training(path: Path = TRAINING) -> str:
    """Formats the table of the GPT trained with each attention; empty where it was not trained."""
    if not path.is_file():
        return ""
    result = json.loads(path.read_text(encoding="utf-8"))
    machine, settings, runs = (result[of] for of in ("machine", "settings", "runs"))
    differences = result["agreement"]["rms_difference_from_sdpa"]
    rows = []
    for name, run in runs.items():
        last = statistics.fmean(run["losses"][-10:])
        of_run = [f"{run['step_ms']:.1f}", f"{run['step_mib']:,.0f}", f"{last:.3f}"]
        rows.append([name, *of_run, f"{differences[name]:.4f}" if name in differences else "-"])
    header = ["attention", "ms a step", "MiB a step", "loss, mean of last 10"]
    return "\n".join(
        [
            f"A GPT of {settings['layers']} layers and {settings['heads']} heads, "
            f"{settings['batch']} sequences of {settings['sequence']} bytes a step, "
            f"{settings['steps']} steps from one seed, {settings['dtype']} autocast "
            "([train_gpt.py](../examples/train_gpt.py), "
            "[plot](../benchmarks/results/train_gpt.png)), on one "
            f"{machine['gpu']} (driver {machine['driver']}, torch {machine['torch']}), "
            f"{str(machine['date'])[:10]}, at commit {_commit(result)}. `sdpa permuted` and `sdpa "
            "other kernel` show what PyTorch's own curve depends on: the order of the rows of a "
            "batch, and the kernel.",
            "",
            bm.format_table([*header, "difference from sdpa's loss, rms"], rows),
        ]
    )


def generation(path: Path = GENERATION) -> str:
    """Formats the table of the Llama that generates; empty where it was not measured."""
    if not path.is_file():
        return ""
    result = json.loads(path.read_text(encoding="utf-8"))
    machine, settings, model, check = (
        result[of] for of in ("machine", "settings", "model", "check")
    )
    caches = {
        "flashcute": f"pages of {settings['page_size']}, CUDA graph",
        "sdpa dynamic": "DynamicCache",
        "sdpa static": "StaticCache, compiled",
    }
    rows = []
    for name, run in result["runs"].items():
        judged = check["runs"][name]
        times = [f"{run['prompts_s']:.2f}", f"{run['step_ms']:.2f}"]
        tokens = [f"{run['tokens_per_second']:,.0f}", f"{judged['exact']:,}", judged["wrong"]]
        rows.append([name.split()[0], caches[name], *times, *tokens, f"{judged['rms_error']:.3f}"])
    header = ["attention", "cache", "prompts, s", "ms a step", "tokens a second"]
    heads = "/".join(str(model[f"num_{of}_heads"]) for of in ("attention", "key_value"))
    return "\n".join(
        [
            f"A Llama with random weights, {model['num_hidden_layers']} layers, {heads} heads of "
            f"{model['head_dim']}, hidden size {model['hidden_size']:,}, {settings['dtype']}, "
            f"which continues {settings['batch']} prompts of {settings['prompts'][0]:,} to "
            f"{settings['prompts'][1]:,} tokens by {settings['new_tokens']} each "
            "([generate.py](../examples/generate.py)). Each new token is the one with the largest "
            f"logit. Exact tokens are the same in {check['reference']}. A token is wrong if its "
            f"logit in {check['reference']} is more than {check['tolerance']:.2f} below the "
            "largest, twice the largest error of a logit on SDPA; in "
            f"{check['runs']['flashcute']['decided']} places one could be. `sdpa` is transformers' "
            "own generation, which pads prompts. Tokens a second count the median step alone, "
            "without prompts. Measured on "
            f"one {machine['gpu']} (driver {machine['driver']}, torch {machine['torch']}, "
            f"transformers {machine['transformers']}), {str(machine['date'])[:10]}, at commit "
            f"{_commit(result)}.",
            "",
            bm.format_table([*header, "exact", "wrong", "error of logits, rms"], rows),
        ]
    )


SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"headline": headline, "support": support_matrix},
    "docs/speed.md": {
        **{"speed": speed, "models": models, "inputs": inputs},
        **{"backward": backward, "few-heads": few_heads, "training": training, "decode": decode},
        "generation": generation,
    },
    "SECURITY.md": {"environment": environment},
    **{page: {"api": functools.partial(api_reference, page)} for page in PAGES},
}


def rewrite(text: str, sections: dict[str, Callable[[], str]]) -> str:
    """Returns ``text`` with each generated part made anew.

    Raises:
        ValueError: if a part's markers are not there exactly once.
    """
    for name, make in sections.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"update_docs: expected {begin} ... {end} exactly once, got another")
        made = make()
        body = f"{begin}\n\n{made}\n\n{end}" if made else f"{begin}\n{end}"
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
