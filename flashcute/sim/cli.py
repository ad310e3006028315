"""``python -m flashcute sim``: one configuration on one shape, its error and counters, and of a
forward the tiles."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments import MAX_INT32, natural, output_file, positive
from ..config import DTYPES, HEAD_DIMS, BwdConfig, FwdConfig
from . import COPY_MODES
from .build import CHECKERS

_EXIT_STATUS = {"pass": 0, "fail": 1, "not covered": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``sim`` on ``parser``."""
    parser.add_argument(
        "--pass",
        dest="direction",
        choices=("fwd", "bwd"),
        default="fwd",
        help="forward or backward (fwd)",
    )
    parser.add_argument(
        "--head-dim", type=int, choices=HEAD_DIMS, default=64, help="of the kernel (64)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="fp16", help="of the tensors (fp16)")
    parser.add_argument("--causal", action="store_true", help="with the causal mask")
    parser.add_argument("-b", "--batch", type=positive, default=1, help="batch entries (1)")
    parser.add_argument("--seqlen-q", type=positive, default=300, help="query tokens (300)")
    parser.add_argument("--seqlen-k", type=natural, default=500, help="key tokens (500)")
    parser.add_argument("--heads", type=positive, default=2, help="query heads (2)")
    parser.add_argument("--heads-k", type=positive, default=1, help="key and value heads (1)")
    parser.add_argument(
        "-d", type=positive, help="head dimension of the tensors (default: --head-dim)"
    )
    parser.add_argument(
        "--capability", default="80", help="sm number that the tiles are chosen for (80)"
    )
    parser.add_argument("--seed", type=natural, default=0, help="of inputs and schedule (0)")
    parser.add_argument(
        "--copy-mode", choices=COPY_MODES, default="late", help="when copies complete (late)"
    )
    parser.add_argument(
        "--checker", choices=CHECKERS, default="none", help="sanitizer to run under (none)"
    )
    parser.add_argument("--picture", type=_svg, help="write an .svg of the tiles visited here")


def _svg(text: str) -> Path:
    if not text.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"expected a name that ends in .svg, got {text!r}")
    return output_file(text)


def _check(args: argparse.Namespace) -> None:
    if args.d is not None and (args.d % 8 or args.d > args.head_dim):
        raise ValueError(
            f"flashcute sim: expected -d to be a multiple of 8 up to {args.head_dim}, which the "
            f"kernel is compiled for, got -d {args.d}; choose another kernel with --head-dim"
        )
    if args.picture is not None and args.direction == "bwd":
        raise ValueError(
            f"flashcute sim: expected --pass fwd with --picture, got --picture {args.picture}; "
            "there is no picture of a backward: leave it out"
        )
    if args.heads % args.heads_k:
        raise ValueError(
            "flashcute sim: expected --heads to be a multiple of --heads-k, got "
            f"--heads {args.heads} and --heads-k {args.heads_k}"
        )
    elements = args.batch * max(args.seqlen_q, args.seqlen_k) * args.heads * args.head_dim
    if elements > MAX_INT32:
        raise ValueError(
            f"flashcute sim: expected tensors of at most {MAX_INT32} elements, got {elements}; the "
            "simulator runs a few thousand queries and keys in minutes"
        )


def _build(config: FwdConfig | BwdConfig, checker: str) -> None:
    """Builds kernel and runner with a progress display; the run then finds them in the cache."""
    from ..jit.progress import Progress
    from . import build

    with Progress(2) as shown:
        build.build_kernels([(config, checker)], progress=shown.finished, watch=shown.running)
        build.build_runners([checker], progress=shown.finished, watch=shown.running)


def _config(args: argparse.Namespace) -> FwdConfig | BwdConfig:
    """Returns the configuration that the arguments' GPU would use."""
    from .. import heuristics
    from ..jit.kernels import capability_of

    problem = heuristics.FwdProblem(
        dtype=args.dtype,
        causal=args.causal,
        b=args.batch,
        seqlen_q=args.seqlen_q,
        seqlen_k=args.seqlen_k,
        h=args.heads,
        h_k=args.heads_k,
        d=args.head_dim,
    )
    choose = {"fwd": heuristics.choose_fwd, "bwd": heuristics.choose_bwd}[args.direction]
    return choose(problem, capability_of(args.capability))


def _run_fwd(config: FwdConfig, qkv, args: argparse.Namespace, **options):
    """Runs a forward; returns the result, and reports by name, None if it failed."""
    from .. import sim
    from ..testing import compare_forward

    result = sim.run_fwd(
        *qkv,
        config,
        # tile_map() needs one CTA for each tile.
        sms=args.batch * args.heads * -(-args.seqlen_q // config.tile_m),
        trace=True,
        **options,
    )
    if result.verdict != "pass":
        return result, None
    return result, {"": compare_forward(result.out, result.lse, *qkv, causal=args.causal)}


def _run_bwd(config: BwdConfig, qkv, args: argparse.Namespace, **options):
    """Runs a backward; returns the result, and a report for each gradient, None if it failed."""
    import torch

    from .. import sim
    from ..reference import attention_ref
    from ..testing import compare_backward

    q = qkv[0]
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(args.seed + 1)).to(q.dtype)
    out, lse, _ = attention_ref(*qkv, causal=args.causal, upcast=torch.float64)
    result = sim.run_bwd(config, *qkv, out.to(q.dtype), lse.float(), dout, **options)
    if result.verdict != "pass":
        return result, None
    return result, compare_backward(result.outputs, *qkv, dout, causal=args.causal)


def run(args: argparse.Namespace) -> int:
    """Runs what the arguments describe; returns 0 for pass, 1 for fail, 2 for not covered."""
    import torch  # imported here, as other commands start without it

    from . import tiles

    _check(args)
    config = _config(args)
    _build(config, args.checker)
    generator = torch.Generator().manual_seed(args.seed)
    d = args.d or args.head_dim
    sizes = {
        "q": (args.batch, args.seqlen_q, args.heads, d),
        "k": (args.batch, args.seqlen_k, args.heads_k, d),
        "v": (args.batch, args.seqlen_k, args.heads_k, d),
    }
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[args.dtype]
    q, k, v = (torch.randn(size, generator=generator).to(dtype) for size in sizes.values())
    options = {"seed": args.seed, "copy_mode": args.copy_mode, "checker": args.checker}
    go = {"fwd": _run_fwd, "bwd": _run_bwd}[args.direction]
    result, found = go(config, (q, k, v), args, **options)
    reports = found or {}
    print(f"kernel        {config.full_name}")
    verdict, message = result.verdict, result.message
    if not all(report.ok for report in reports.values()):
        verdict, message = "fail", "the result is wrong"
    print(f"verdict       {verdict}{': ' + message if message else ''}")
    for name, report in reports.items():
        print(f"{name}\n{report}" if name else report)
    for name, count in result.counters.items():
        print(f"{name:<24}{count:>14,}")
    if args.direction == "fwd" and result.verdict == "pass" and q.numel():
        found = tiles.tile_map(result.trace, q, k, config)
        for state, (_, meaning) in tiles.STATES.items():
            print(f"{found.count(state):>6} tiles {meaning}")
        if args.picture is not None:
            tiles.write_svg(found, args.picture, f"{config.full_name}, batch 0, head 0")
    return _EXIT_STATUS[verdict]
