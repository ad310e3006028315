"""Times every tile in use on shapes of all kinds: `python tools/tile_times.py --json FILE`.

`heuristics.py` compares tiles by what they compute; the speeds there are fitted to these times.
`python tools/tile_times.py --fit FILE` prints the fit of a file without a GPU.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from flashcute import benchmarking as bm
from flashcute import heuristics, jit
from flashcute.bench.sweep import DTYPES
from flashcute.config import HEAD_DIMS, FwdConfig
from flashcute.heuristics import FwdProblem
from flashcute.jit import abi, launch

TOKENS = 16384
# Shorter calls are timed, too, but not fitted: the cost of a launch would bend the fit.
FITTED_US = 60

# (b, seqlen_q, seqlen_k, h, h_k, d): encoders, vision, cross attention; then causal ones with few
# queries for many keys, and short sequences as in a ragged batch.
SHORT = (
    (83, 197, 197, 12, 12, 64),
    (64, 257, 257, 16, 16, 64),
    (64, 257, 257, 16, 16, 80),
    (22, 729, 729, 16, 16, 72),
    (128, 128, 128, 12, 12, 64),
    (64, 256, 256, 12, 12, 64),
    (32, 512, 512, 12, 12, 64),
    (128, 128, 128, 12, 12, 32),
    (64, 256, 256, 12, 12, 32),
    (11, 1500, 1500, 20, 20, 64),
    (256, 77, 77, 12, 12, 64),
    (512, 48, 48, 12, 12, 64),
    (300, 160, 160, 12, 12, 64),
    (4, 4096, 77, 10, 10, 64),
)
CAUSAL = (
    (1, 512, 8192, 32, 8, 128),
    (1, 2048, 32768, 32, 8, 128),
    (4, 256, 4096, 32, 8, 128),
    (16, 4, 4096, 32, 8, 128),
    (8, 8, 8192, 32, 8, 128),
    (100, 160, 160, 16, 4, 128),
    (200, 96, 96, 16, 4, 128),
)
GROUPED = ((64, 32, 8), (64, 64, 8), (96, 32, 8), (128, 32, 8), (128, 64, 8), (128, 28, 4))
# (b, seqlen, h, h_k, d, window)
WINDOWS = (
    (2, 8192, 16, 4, 128, (1023, 0)),
    (2, 8192, 16, 4, 128, (4095, 0)),
    (1, 32768, 16, 4, 128, (4095, 0)),
    (2, 8192, 16, 16, 128, (512, 512)),
    (4, 4096, 16, 16, 128, (255, 0)),
    (4, 4096, 16, 4, 128, (127, 0)),
    (2, 8192, 8, 4, 256, (4095, 0)),
    (2, 4096, 8, 4, 256, (511, 0)),
    (2, 8192, 32, 8, 64, (1023, 0)),
    (1, 8192, 64, 8, 64, (127, 0)),
    (2, 8192, 32, 32, 64, (511, 0)),
    (4, 4096, 16, 16, 64, (128, 128)),
    (4, 4096, 16, 16, 64, (31, 31)),
)


def problems(dtype: str = "bf16") -> Iterator[FwdProblem]:
    """Yields the sweep with short lengths, grouped heads, and the lists above."""
    for d in HEAD_DIMS:
        h = max(2048 // d, 8)
        for s in (128, 256, 512, 1024, 4096, 16384):
            for causal in (False, True):
                yield FwdProblem(dtype, causal, max(1, TOKENS // s), s, s, h, h, d)
    for d, h, h_k in (*GROUPED, (256, 8, 1), (256, 16, 8)):
        for s in (256, 1024, 4096, 8192):
            yield FwdProblem(dtype, True, max(1, TOKENS // s), s, s, h, h_k, d)
        yield FwdProblem(dtype, False, 4, 4096, 4096, h, h_k, d)
    for causal, shapes in ((False, SHORT), (True, CAUSAL)):
        for shape in shapes:
            yield FwdProblem(dtype, causal, *shape)
    for b, s, h, h_k, d, window in WINDOWS:
        yield FwdProblem(dtype, False, b, s, s, h, h_k, d, window)


def mask_of(problem: FwdProblem) -> str:
    if problem.window is not None:
        return "local"
    return "causal" if problem.causal else "none"


def candidates(problem: FwdProblem) -> list[FwdConfig]:
    """Returns the sm90 configurations that :func:`heuristics.choose_fwd` chooses among."""
    head_dim = heuristics.instantiated_head_dim(problem.d)
    found = heuristics.sm90_configs(problem.dtype, head_dim, problem.causal)
    return [dataclasses.replace(config, mask=mask_of(problem)) for config in found]


def way(config: FwdConfig, packed: bool) -> str:
    """Names how a call was computed, as in the result file."""
    return config.variant + (" packed" if packed else "")


def ways(problem: FwdProblem) -> dict[str, tuple[FwdConfig, bool]]:
    packs = (False, True) if problem.h > problem.h_k else (False,)
    return {
        way(config, packed): (config, packed) for config in candidates(problem) for packed in packs
    }


def measure(problem: FwdProblem, kernels: dict[FwdConfig, jit.Kernel]) -> dict[str, float]:
    """Measures the median microseconds of each way to compute a problem."""
    shape = bm.Shape(
        problem.b, problem.seqlen_q, problem.seqlen_k, problem.h, problem.h_k, problem.d, False
    )
    q, k, v = bm.make_qkv(shape, DTYPES[problem.dtype], "cuda")
    calls = {
        name: launch.Call(
            abi.FlashKernel.from_address(kernels[config].address),
            q,
            k,
            v,
            pack_heads=packed,
            window_size=problem.window or (0, 0),
        )
        for name, (config, packed) in ways(problem).items()
    }
    times = bm.time_interleaved(calls, repeats=7, warmup=1)
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def run(path: Path) -> None:
    todo = list(problems())
    wanted = list(dict.fromkeys(config for problem in todo for config in candidates(problem)))
    jit.build_kernels([(config, "90") for config in wanted])
    kernels = {config: jit.get_kernel(config, "90") for config in wanted}
    rows = []
    for i, problem in enumerate(todo, 1):
        row = {**dataclasses.asdict(problem), "us": measure(problem, kernels)}
        rows.append(row)
        print(f"{i}/{len(todo)} {problem}: {min(row['us'], key=row['us'].get)}", flush=True)
    bm.write_json(path, {"machine": bm.machine_info(), "rows": rows})


def load(path: Path) -> list[tuple[FwdProblem, dict[str, float]]]:
    """Loads the problems of a result file with their times."""
    found = []
    for row in json.loads(path.read_text())["rows"]:
        us = row.pop("us")
        window = row.pop("window")
        found.append((FwdProblem(**row, window=window and tuple(window)), us))
    return found


def fit(path: Path, sms: int = 132) -> dict[tuple[int, bool, str], float]:
    """Returns the speed in TFLOP/s of each tile, by head dimension and causal mask."""
    speeds = collections.defaultdict(list)
    for problem, us in load(path):
        for name, (config, packed) in ways(problem).items():
            if us.get(name, 0) >= FITTED_US:
                work, _ = heuristics.work(problem, config, packed, sms)
                flops = 4 * config.head_dim * work * sms
                key = config.head_dim, problem.causal, config.variant
                speeds[key].append(flops / us[name] / 1e6)
    return {key: statistics.median(values) for key, values in sorted(speeds.items())}


def quality(path: Path) -> list[tuple[float, FwdProblem, str]]:
    """Returns the speed of what is chosen over the best way's for each problem, worst first."""
    found = []
    for problem, us in load(path):
        config = heuristics.choose_fwd(problem, (9, 0))
        name = way(config, heuristics.packs_heads(problem, config))
        found.append((min(us.values()) / us.get(name, math.inf), problem, name))
    return sorted(found, key=lambda row: row[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the times go")
    parser.add_argument("--fit", type=Path, help="a file of times")
    args = parser.parse_args()
    if (args.json is None) == (args.fit is None):
        parser.error("expected either --json or --fit")
    if args.json is not None:
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            parser.error("expected a GPU of compute capability 9.0 for --json")
        run(args.json)
    path = args.json or args.fit
    for (head_dim, causal, variant), speed in fit(path).items():
        print(f"{head_dim:4d} {'causal' if causal else 'full':6s} {variant:22s} {speed:6.0f}")
    chosen = quality(path)
    print(f"chosen over best: {bm.geomean([share for share, *_ in chosen]):.4f}")
    for share, problem, name in chosen[:5]:
        print(f"  {share:.3f} {name} for {problem}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
