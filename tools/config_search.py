"""Propose tile choices from registers and shared memory, build them all, and measure them on a GPU.

For each head dimension and mask: enumerate the configurations of one kernel class whose
accumulators fit the register file and whose tiles fit shared memory, build them in parallel, check
each against fp32, time them beside those in use and the peers, contenders taking turns, and write
every figure to a JSON file. ``heuristics.py`` then takes the winners.

    python tools/config_search.py --arch 90 --head-dim 64 128 --out search.json
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import pathlib
import statistics
import sys
from collections.abc import Iterator

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from flashcute import benchmarking, heuristics, jit
from flashcute.bench import peers
from flashcute.config import HEAD_DIMS, KERNEL_CLASSES, MAX_SMEM_BYTES, FwdConfig
from flashcute.jit import abi, launch

MAX_REGISTERS = 255
REGISTER_FILE = 65536
# Addresses, predicates, row statistics and the K or V fragments in flight, seen in ptxas reports.
OVERHEAD_REGISTERS = 44


def accumulator_registers(config: FwdConfig) -> int:
    """Registers a thread needs for S, for O and, where it is kept, for Q."""
    rows = config.tile_m // config.warps
    scores = rows * config.tile_n // 32
    out = rows * config.head_dim // 32
    query = rows * config.head_dim // 64 if config.q_in_regs else 0
    return scores + out + query


# What ptxas leaves of the sm90 class's 240 and 160 registers once accumulators and P are placed.
SM90_ACCUMULATOR_REGISTERS = {8: 200, 12: 132}


def sm90_registers(config: FwdConfig) -> int:
    """Registers a thread of the sm90 class needs for S, P and O."""
    return config.tile_n // 2 + config.tile_n // 4 + config.head_dim // 2


def fits(config: FwdConfig, capability: tuple[int, int]) -> bool:
    """Whether registers and shared memory allow ``config.min_ctas`` CTAs on an SM."""
    budget = min(MAX_REGISTERS, REGISTER_FILE // (config.threads * config.min_ctas))
    registers = accumulator_registers(config) + OVERHEAD_REGISTERS
    smem = MAX_SMEM_BYTES[capability] // config.min_ctas - 1024
    return registers <= budget and config.smem_bytes <= smem


def smem_clocks(config: FwdConfig) -> float:
    """Clocks of the shared memory port per MMA, at 128 bytes a clock: the roofline of this class.

    An MMA's B fragment is 256 bytes, shared by the m16 tiles of a warp; an A fragment of Q is 512
    bytes, shared by a warp's n8 tiles and free where Q stays in registers. Half the MMAs are P V.
    """
    b = 256 / (config.tile_m // config.warps // 16)
    a = 0 if config.q_in_regs else 512 / (config.tile_n // 8)
    return (b + a / 2) / 128


def candidates(
    arch: int, head_dim: int, causal: bool, capability: tuple[int, int], slack: float = 1.3
) -> list[FwdConfig]:
    """The configurations for bf16 that fit; of the sm80 class, whose roof the shared memory port
    is, those whose clocks there are near the least."""
    if arch == 90:
        return list(dict.fromkeys(fitting_sm90(head_dim, causal)))
    fitting = list(fitting_sm80(head_dim, causal, capability))
    least = min(map(smem_clocks, fitting))
    return [config for config in fitting if smem_clocks(config) <= slack * least]


def fitting_sm80(head_dim: int, causal: bool, capability: tuple[int, int]) -> Iterator[FwdConfig]:
    """Every configuration of the sm80 class that keeps 8 warps on an SM without spilling."""
    options = itertools.product(
        (64, 128, 256),
        (32, 48, 64, 80, 96, 128),
        (4, 8),
        (1, 2),
        (False, True),
        (1, 2, 3),
        (False, True),
    )
    row = 64 if head_dim % 64 == 0 else 32
    for tile_m, tile_n, warps, stages, q_in_regs, min_ctas, peel_masked in options:
        rows_per_copy = 32 * warps // (row // 8)
        if tile_m % (16 * warps) or tile_m % rows_per_copy or tile_n % rows_per_copy:
            continue
        config = FwdConfig(
            arch=80,
            dtype="bf16",
            head_dim=head_dim,
            mask="causal" if causal else "none",
            tile_m=tile_m,
            tile_n=tile_n,
            warps=warps,
            stages=stages,
            q_in_regs=q_in_regs,
            min_ctas=min_ctas,
            peel_masked=peel_masked,
        )
        # A higher min_ctas of the same tile is another register budget, worth trying where it fits;
        # fewer than 8 warps an SM leave the tensor cores idle during every softmax.
        if config.warps * min_ctas >= 8 and fits(config, capability):
            yield config


def fitting_sm90(head_dim: int, causal: bool) -> Iterator[FwdConfig]:
    """The configurations of the sm90 class whose S, P and O fill most of the registers and fit, and
    whose tiles fit shared memory; then those in use with one switch set the other way."""
    for warps, tile_n in itertools.product((8, 12), range(48, 257, 16)):
        config = FwdConfig(
            arch=90,
            dtype="bf16",
            head_dim=head_dim,
            mask="causal" if causal else "none",
            tile_m=16 * warps,
            tile_n=tile_n,
            warps=warps,
            stages=2,
            q_in_regs=False,
            min_ctas=1,
            peel_masked=True,
            lazy_rescale=True,
            ping_pong=True,
        )
        # Small tiles read K and V more often from L2 and shared memory, for nothing.
        filled = sm90_registers(config) / SM90_ACCUMULATOR_REGISTERS[warps]
        if 0.7 <= filled <= 1 and config.smem_bytes <= MAX_SMEM_BYTES[9, 0]:
            yield config
    for config, _ in heuristics.sm90_configs("bf16", head_dim, causal):
        for change in (
            {"lazy_rescale": not config.lazy_rescale},
            {"ping_pong": not config.ping_pong},
            {"stages": 4},
        ):
            other = dataclasses.replace(config, **change)
            if other.smem_bytes <= MAX_SMEM_BYTES[9, 0]:
                yield other


def launcher(kernel: jit.Kernel, q, k, v) -> launch.Call:
    """A call that runs ``kernel`` on q, k, v of (b, s, h, d); elements it leaves out stay NaN."""
    b, seqlen_q, h, _ = q.shape
    lse = torch.full((b, h, seqlen_q), math.nan, dtype=torch.float32, device=q.device)
    entry = abi.FlashKernel.from_address(kernel.address)
    return launch.Call(entry, q, k, v, outputs=(torch.full_like(q, math.nan), lse))


def relative_error(kernel: jit.Kernel, causal: bool) -> float:
    """Largest relative error of one head of awkward lengths against fp32 SDPA."""
    shape = benchmarking.Shape(2, 333, 715, 2, 1, kernel.config.head_dim, causal)
    q, k, v = benchmarking.make_qkv(shape, torch.bfloat16, "cuda", seed=1)
    out, _ = launcher(kernel, q, k, v)()
    mask = torch.ones(333, 715, dtype=torch.bool, device="cuda")
    mask = mask.tril(715 - 333) if causal else mask
    qf, kf, vf = (x.float().transpose(1, 2) for x in (q, k, v))
    ref = torch.nn.functional.scaled_dot_product_attention(
        qf, kf, vf, attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    return ((out.float() - ref).norm() / ref.norm()).item()


def in_use(arch: int, head_dim: int, causal: bool, capability: tuple[int, int]) -> list[FwdConfig]:
    """The configurations that ``heuristics.py`` chooses among."""
    if arch == 90:
        return [config for config, _ in heuristics.sm90_configs("bf16", head_dim, causal)]
    return [heuristics.fwd_config("bf16", head_dim, causal, capability)]


def chosen(head_dim: int, causal: bool, capability: tuple[int, int], args) -> list[FwdConfig]:
    """The candidates, or those of them that ``--variant`` names, and the configurations in use."""
    slack = float("inf") if args.variant else 1.3
    configs = candidates(args.arch, head_dim, causal, capability, slack)
    if args.variant:
        configs = [config for config in configs if config.variant in args.variant]
    current = in_use(args.arch, head_dim, causal, capability)
    return [*configs, *(config for config in current if config not in configs)]


def load(configs: list[FwdConfig], target: str, causal: bool) -> dict[str, jit.Kernel]:
    """The kernels by name, each checked against fp32."""
    kernels = {}
    for config in configs:
        kernel = jit.get_kernel(config, target)
        error = relative_error(kernel, causal)
        if not error < 1e-2:
            raise RuntimeError(f"{config.full_name}: relative error {error}")
        kernels[config.full_name] = kernel
    return kernels


def search(head_dim: int, causal: bool, args) -> list[dict]:
    capability = torch.cuda.get_device_capability()
    target = f"{capability[0]}{capability[1]}"
    current = in_use(args.arch, head_dim, causal, capability)
    kernels = load(chosen(head_dim, causal, capability, args), target, causal)
    rows = {
        name: {
            "head_dim": head_dim,
            "causal": causal,
            "config": name,
            "current": kernel.config in current,
            "registers": kernel.registers,
            "spill_bytes": kernel.spill_bytes,
            "smem_bytes": kernel.smem_bytes,
            "tflops": {},
            "ratio": {},
        }
        for name, kernel in kernels.items()
    }
    for seqlen in args.seqlen:
        shape = benchmarking.sweep_shape(head_dim, seqlen, causal)
        q, k, v = benchmarking.make_qkv(shape, torch.bfloat16, "cuda")
        calls = {name: launcher(kernel, q, k, v) for name, kernel in kernels.items()}
        calls |= peers.make(q, k, v, causal, args.peers)[0]
        times = benchmarking.time_interleaved(calls, repeats=args.repeats, warmup=1)
        medians = {name: statistics.median(samples) for name, samples in times.items()}
        best_peer = min(medians[name] for name in medians.keys() & set(args.peers))
        for name, row in rows.items():
            row["tflops"][seqlen] = round(shape.flops / medians[name] / 1e6, 1)
            row["ratio"][seqlen] = round(best_peer / medians[name], 4)
    for row in rows.values():
        row["geomean"] = round(benchmarking.geomean(list(row["ratio"].values())), 4)
    return sorted(rows.values(), key=lambda row: -row["geomean"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90, choices=KERNEL_CLASSES)
    parser.add_argument("--head-dim", type=int, nargs="+", default=HEAD_DIMS, choices=HEAD_DIMS)
    parser.add_argument("--seqlen", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--causal", type=int, nargs="+", default=[0, 1], choices=[0, 1])
    parser.add_argument("--variant", nargs="*", help="tile choices as configurations spell them")
    parser.add_argument("--peers", nargs="+", default=["fa2"], choices=["fa2", "cudnn", "fa3"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--top", type=int, default=8, help="rows printed for each search")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    capability = torch.cuda.get_device_capability()
    target = f"{capability[0]}{capability[1]}"
    specs = {
        (config, target)
        for head_dim, causal in itertools.product(args.head_dim, args.causal)
        for config in chosen(head_dim, bool(causal), capability, args)
    }
    jit.build_kernels(sorted(specs, key=lambda spec: spec[0].full_name), jobs=None, progress=None)
    found = []
    for head_dim, causal in itertools.product(args.head_dim, args.causal):
        rows = search(head_dim, bool(causal), args)
        found.extend(rows)
        for row in rows[: args.top]:
            mark = "*" if row["current"] else " "
            ratios = " ".join(f"{ratio:.3f}" for ratio in row["ratio"].values())
            flops = " ".join(f"{value:6.1f}" for value in row["tflops"].values())
            print(
                f"{mark} {row['config']:52s} {row['registers']:3d} regs {row['spill_bytes']:4d} "
                f"spill | {flops} | {ratios} | {row['geomean']:.3f}",
                flush=True,
            )
        payload = {
            "machine": benchmarking.machine_info(),
            "ratio_to": f"the better of {', '.join(args.peers)}",
            "rows": found,
        }
        benchmarking.write_json(args.out, payload)


if __name__ == "__main__":
    main()
