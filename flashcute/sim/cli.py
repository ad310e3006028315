"""``python -m flashcute sim``: one configuration on one shape, its error, counters and tiles."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..config import DTYPES, HEAD_DIMS, FwdConfig

_EXIT_STATUS = {"pass": 0, "fail": 1, "not covered": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``sim`` on ``parser``."""
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("-b", "--batch", type=int, default=1)
    parser.add_argument("--seqlen-q", type=int, default=300)
    parser.add_argument("--seqlen-k", type=int, default=500)
    parser.add_argument("--heads", type=int, default=2, help="query heads")
    parser.add_argument("--heads-k", type=int, default=1, help="key and value heads")
    parser.add_argument("-d", type=int, help="head dimension of the tensors (default: --head-dim)")
    parser.add_argument(
        "--capability", default="80", help="sm number that the tiles are chosen for"
    )
    parser.add_argument("--seed", type=int, default=0, help="of inputs and schedule")
    parser.add_argument("--copy-mode", default="late", help="late, random or eager")
    parser.add_argument("--checker", default="none", help="none, memcheck, racecheck or ubcheck")
    parser.add_argument("--picture", type=_svg, help="write an .svg of the tiles visited here")


def _svg(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".svg":
        raise argparse.ArgumentTypeError(f"expected a name that ends in .svg, got {text!r}")
    return path


def _config(args: argparse.Namespace) -> FwdConfig:
    """The configuration that the arguments' GPU would use."""
    from .. import heuristics
    from ..jit.kernels import capability_of

    capability = capability_of(args.capability)
    if heuristics.kernel_class(capability) == 80:
        return heuristics.fwd_config(args.dtype, args.head_dim, args.causal, capability)
    configs = heuristics.sm90_configs(args.dtype, args.head_dim, args.causal)
    return next(config for config, most_keys in configs if args.seqlen_k <= most_keys)


def run(args: argparse.Namespace) -> int:
    """Runs what the arguments describe; returns 0 for pass, 1 for fail, 2 for not covered."""
    import torch

    from .. import sim
    from ..testing import compare_forward
    from . import tiles

    config = _config(args)
    generator = torch.Generator().manual_seed(args.seed)
    d = args.d or args.head_dim
    sizes = {
        "q": (args.batch, args.seqlen_q, args.heads, d),
        "k": (args.batch, args.seqlen_k, args.heads_k, d),
        "v": (args.batch, args.seqlen_k, args.heads_k, d),
    }
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[args.dtype]
    q, k, v = (torch.randn(size, generator=generator).to(dtype) for size in sizes.values())
    result = sim.run_fwd(
        *(q, k, v, config),
        seed=args.seed,
        copy_mode=args.copy_mode,
        checker=args.checker,
        # The map of tiles takes a block for a tile.
        sms=args.batch * args.heads * -(-args.seqlen_q // config.tile_m),
        trace=True,
    )
    print(f"kernel        {config.full_name}")
    verdict, message = result.verdict, result.message
    report = None
    if result.verdict == "pass":
        report = compare_forward(result.out, result.lse, q, k, v, causal=args.causal)
        if not report.ok:
            verdict, message = "fail", "the result is wrong"
    print(f"verdict       {verdict}{': ' + message if message else ''}")
    if report is not None:
        print(report)
    for name, count in result.counters.items():
        print(f"{name:<24}{count:>14,}")
    if result.verdict == "pass" and q.numel():
        found = tiles.tile_map(result.trace, q, k, config)
        for state, (_, meaning) in tiles.STATES.items():
            print(f"{found.count(state):>6} tiles {meaning}")
        if args.picture is not None:
            tiles.write_svg(found, args.picture, f"{config.full_name}, batch 0, head 0")
    return _EXIT_STATUS[verdict]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flashcute sim", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
