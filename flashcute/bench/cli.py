"""Declares ``python -m flashcute bench``, which times flashcute beside the peers installed here.

It times the forward, the backward or both over a sweep or the shapes of public models, the forward
with its options and on inputs of named distributions, and decoding over a cache.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments import natural, output_file, output_folder, positive, seconds
from ..config import DTYPES, HEAD_DIMS

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS = ("full", "causal")
INPUTS = (
    *("normal", "scaled4", "scaled16", "scaled64", "ramp", "steep_ramp", "ramp_up", "sink"),
    *("constant", "outliers", "peaked", "heavy_tailed", "positive"),
)
# Contenders that are flashcute itself.
_OURS = ("flashcute", "plain", "repeatable")
_PEERS = ("fa2", "cudnn", "fa3", "fa3_ragged", "flex", "torch", "plain", "repeatable")


def _peer_module(text: str) -> tuple[str, Path]:
    """Parses ``NAME=FILE`` for ``argparse``: a contender's name and the Python file of its code."""
    name, equals, file = text.partition("=")
    if not equals or not name.isidentifier() or name in _OURS:
        raise argparse.ArgumentTypeError(
            f"expected NAME=FILE with a name other than {', '.join(_OURS)}, got {text!r}"
        )
    if not Path(file).is_file():
        raise argparse.ArgumentTypeError(f"expected a Python file in {text!r}, found none")
    return name, Path(file)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``bench`` on ``parser``."""
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["sweep"],
        metavar="sweep|models|options|NAME",
        help="the sweep, all shapes of public models, all options (windows, sinks, "
        "packed sequences, softcap, ALiBi, dropout), or the models and options with NAME in "
        "theirs; of --pass decode, append and integrations all points, or those with NAME in "
        "theirs, as 64x4096, h32/8, mixed, gpt",
    )
    parser.add_argument(
        "--pass",
        dest="what",
        choices=("fwd", "bwd", "fwd+bwd", "ring", "decode", "append", "integrations"),
        default="fwd",
        help="what is timed (fwd); a backward counts 2.5 times the FLOPs of a forward; ring: "
        "sequences split over several GPUs, forward alone and with the backward; decode: a few "
        "queries over a cache, chunks of prompts beside decodes, and host time of a call, also of "
        "a KVCachePlan; append: a token written to the cache by the same call, with and without "
        "rotary embedding, beside none, and the same host time; integrations: models that call "
        "PyTorch's SDPA or transformers, by whose kernels, and host time of SDPA",
    )
    parser.add_argument(
        "--nproc", type=positive, help="--pass ring: processes (all GPUs; 2 without one)"
    )
    parser.add_argument(
        "--page-sizes",
        type=natural,
        nargs="+",
        metavar="TOKENS",
        help="--pass decode and append: tokens of a page of the cache, timed in turns; 0: a "
        "contiguous cache (0 1 16 64 256)",
    )
    parser.add_argument(
        "--num-splits",
        type=natural,
        help="--pass decode and append: parts of flashcute's keys; 0: chosen by shape (0)",
    )
    parser.add_argument(
        "--inputs",
        nargs="+",
        choices=(*INPUTS, "all"),
        default=["normal"],
        help="distributions of Q and K, timed in turns (flashcute/bench/inputs.py)",
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=["bf16"], help="of the tensors (bf16)"
    )
    sweep = parser.add_argument_group("the sweep")
    sweep.add_argument(
        "--head-dims", type=int, nargs="+", choices=HEAD_DIMS, help="default: all from 64"
    )
    sweep.add_argument(
        "--seqlens", type=positive, nargs="+", help="tokens of queries and of keys (512 to 16384)"
    )
    sweep.add_argument("--masks", nargs="+", choices=MASKS, help="default: both")
    sweep.add_argument(
        "--groups",
        type=positive,
        nargs="+",
        help="query heads per key head; the number of query heads is the same for all of them",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        help="batch x sequence length of each point; named shapes are made smaller to fit",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=_PEERS,
        help="default: all that run here; plain: without the option; fa3_ragged: a mixed batch of "
        "--pass decode in one call of fa3, which else takes two; repeatable: flashcute's gradients "
        "with deterministic=True",
    )
    parser.add_argument(
        "--peer-module",
        type=_peer_module,
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="another contender, or another in the place of one here: a Python file with "
        "forward(q, k, v, causal), backward(q, k, v, out, dout, lse, causal) or both, which "
        "return a call without arguments (flashcute/bench/peers.py); on shapes with options only "
        "windows, by forward_local(q, k, v, left, right)",
    )
    parser.add_argument("--repeats", type=positive, help="timed calls of each contender")
    parser.add_argument("--warmup", type=positive, help="calls before those")
    parser.add_argument(
        "--sustained",
        type=seconds,
        nargs="?",
        const=1.0,
        default=0.0,
        metavar="SECONDS",
        help="also time each back to back for so long, with clock and power (1 s by default)",
    )
    parser.add_argument("--time-limit", type=seconds, default=540.0, help="seconds for the sweep")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument("--json", type=output_file, help="file for the result")
    parser.add_argument("--plots", type=output_folder, help="folder for pictures")
    parser.add_argument(
        "--plot-only",
        type=Path,
        metavar="JSON",
        help="measure nothing: tables and pictures of this result",
    )


def run(args: argparse.Namespace) -> int:
    """Measures or draws what the arguments describe; returns 0 if every output was right."""
    from . import command  # here, as it imports torch, which the other commands do not need

    return command.run(args)
