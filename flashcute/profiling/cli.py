"""``python -m flashcute profile``: a kernel's bottlenecks, measured, or from its machine code."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments import natural, output_file, positive
from ..config import DTYPES, HEAD_DIMS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``profile`` on ``parser``."""
    parser.add_argument(
        "--static", action="store_true", help="from the machine code alone: needs no GPU"
    )
    parser.add_argument(
        "--head-dim", type=int, choices=HEAD_DIMS, default=128, help="of the kernel (128)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the tensors (bf16)")
    parser.add_argument("--causal", action="store_true", help="with the causal mask")
    parser.add_argument(
        "--pass",
        dest="what",
        choices=("fwd", "bwd"),
        default="fwd",
        help="fwd, or bwd: its kernel for all gradients, or with --static each with products (fwd)",
    )
    parser.add_argument("--target", help="sm number, e.g. 90 (default: the GPU here, else 90)")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="fields of the configuration that differ from the heuristics' choice; of a backward's "
        "tiles as dkv.step=32",
    )
    parser.add_argument(
        "--file", type=Path, help="with --static: a shared object or cubin instead of a kernel here"
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="each a saved .json profile, or FIELD=VALUE[,FIELD=VALUE...] as in --set, or default",
    )
    problem = parser.add_argument_group("problem", "with --static it only selects the kernel")
    problem.add_argument(
        "--cache",
        action="store_true",
        help="queries over a cache of keys and values: flash_attn_with_kvcache, as in decoding",
    )
    problem.add_argument(
        "-b", "--batch", type=positive, help="default: 16k tokens in all; with --cache 16"
    )
    problem.add_argument("--seqlen-q", type=positive, help="query tokens (4096; with --cache 1)")
    problem.add_argument(
        "--seqlen-k",
        type=positive,
        help="key tokens (default: --seqlen-q); with --cache tokens of each sequence in it (8192)",
    )
    problem.add_argument("--heads", type=positive, help="query heads (default: 2048 / head dim)")
    problem.add_argument("--heads-k", type=positive, help="key and value heads (default: --heads)")
    problem.add_argument(
        "--page-size",
        type=natural,
        default=0,
        metavar="TOKENS",
        help="with --cache: tokens of a page, which divide --seqlen-k; 0: a contiguous cache (0)",
    )
    parser.add_argument("--report", type=_report, help="keep ncu's report in this .ncu-rep file")
    parser.add_argument("--json", type=output_file, help="also write the profile to this file")
    parser.add_argument("--html", type=output_file, help="also write a page to this file")


def _report(text: str) -> Path:
    if not text.endswith(".ncu-rep"):  # ncu would append it
        raise argparse.ArgumentTypeError(f"expected a name that ends in .ncu-rep, got {text!r}")
    return output_file(text)


def run(args: argparse.Namespace) -> int:
    """Profiles what the arguments describe; returns 0, or 1 with a message on standard error."""
    from . import command  # here, as it imports torch, which the other commands do not need

    return command.run(args)
