"""Proposes tile sizes from registers, shared memory and the roofline, builds and measures them.

For each head dimension and mask it enumerates the configurations of one kernel class whose
accumulators fit the register file and whose tiles fit shared memory. It builds them in parallel,
checks each against fp32, and times them in turns with those in use and the peers. The JSON file
holds every figure and the roof of each configuration. The winners then go into ``heuristics.py``.
It needs a GPU.

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
from flashcute.arguments import output_file
from flashcute.bench import peers
from flashcute.bench.sweep import DTYPES
from flashcute.config import HEAD_DIMS, KERNEL_CLASSES, MAX_SMEM_BYTES, FwdConfig
from flashcute.jit import abi, launch
from flashcute.profiling import machine as machines

MAX_REGISTERS = 255
REGISTER_FILE = 65536
# Addresses, predicates, row statistics and the K or V fragments in flight, from ptxas reports.
OVERHEAD_REGISTERS = 44


def accumulator_registers(config: FwdConfig) -> int:
    """Returns the registers a thread needs for S, for O and, where it is kept, for Q."""
    rows = config.tile_m // config.warps
    scores = rows * config.tile_n // 32
    out = rows * config.head_dim // 32
    query = rows * config.head_dim // 64 if config.q_in_regs else 0
    return scores + out + query


# Registers of a thread in the sm90 class's consumers for S, P, O and Q, by warps and CTAs an SM. A
# thread has 240 or 160 in all, and 232, 136 or 104 where CTAs have one consumer.
SM90_ACCUMULATOR_REGISTERS = {(8, 1): 200, (12, 1): 132, (4, 2): 200, (4, 3): 108, (4, 4): 80}


def sm90_registers(config: FwdConfig) -> int:
    """Returns the registers a thread of the sm90 class needs for S, P, O and what is kept of Q."""
    scores = config.tile_n // 2 + config.tile_n // 4
    return scores + config.head_dim // 2 + 4 * config.q_in_regs


def most_q_in_regs(config: FwdConfig) -> int:
    """Returns how many k16 steps of Q the sm90 class's registers can hold beside S, P and O."""
    without = sm90_registers(dataclasses.replace(config, q_in_regs=0))
    left = SM90_ACCUMULATOR_REGISTERS[config.warps, config.min_ctas] - without
    return max(0, min(config.head_dim // 16, left // 4))


def fits(config: FwdConfig, capability: tuple[int, int]) -> bool:
    """Returns whether registers and shared memory allow ``config.min_ctas`` CTAs on an SM."""
    budget = min(MAX_REGISTERS, REGISTER_FILE // (config.threads * config.min_ctas))
    registers = accumulator_registers(config) + OVERHEAD_REGISTERS
    smem = MAX_SMEM_BYTES[capability] // config.min_ctas - 1024
    return registers <= budget and config.smem_bytes <= smem


def smem_clocks(config: FwdConfig) -> float:
    """Returns clocks of the shared memory port per MMA of the sm80 class, at 128 bytes a clock.

    An MMA's B fragment is 256 bytes, shared by the m16 tiles of a warp; an A fragment of Q is 512
    bytes, shared by a warp's n8 tiles and free where Q stays in registers. Half the MMAs are P V.
    """
    b = 256 / (config.tile_m // config.warps // 16)
    a = 0 if config.q_in_regs else 512 / (config.tile_n // 8)
    return (b + a / 2) / machines.SMEM_BYTES


def instructions(config: FwdConfig) -> float:
    """Estimates the instructions that a warp issues for a key block without a mask.

    It is the sum of: 3.5 a score for the softmax (FFMA, MUFU, FADD and half a conversion); the MMAs
    and ``ldmatrix`` of the sm80 class; descriptors, addresses and barriers. It is within 6 % of the
    counts of ``python -m flashcute profile --static`` in the kernels in use.
    """
    rows = config.tile_m // config.warps
    scores = 3.5 * rows * config.tile_n / machines.WARP
    if config.arch == 90:
        return scores + 7.6 * (config.head_dim + config.tile_n) / 16
    mmas = 2 * rows * config.tile_n * config.head_dim / 2048
    fragments = mmas * smem_clocks(config) * machines.SMEM_BYTES / 512
    return scores + mmas + fragments + 65 + 0.55 * config.head_dim


def block_clocks(config: FwdConfig, capability: tuple[int, int]) -> dict[str, float]:
    """Returns the clocks for which a CTA's key block keeps each unit of an SM busy.

    Units have their names in ``flashcute.profiling``. The result is empty where the rates of
    ``capability`` are not known.

    A wgmma m64nNk16 reads B, 32 N bytes, from shared memory. For Q K^T it also reads A, 2048 bytes,
    unless that step of Q is in registers. TMA's writes are left out, as in the port's hardware
    counter; ``cp.async`` counts. L2 is left out, too: at tensor peak K and V take 4096 / tile_m
    bytes a clock, which depends on tile_m only.
    """
    rates = machines.machine(capability)
    if rates is None:
        return {}
    scores = config.tile_m * config.tile_n
    macs = 2 * scores * config.head_dim
    if config.arch == 90:
        tensor = macs / rates.tensor_macs
        k_steps, v_steps = config.head_dim / 16, config.tile_n / 16
        read = 32 * (k_steps * config.tile_n + v_steps * config.head_dim)
        read += 2048 * (k_steps - config.q_in_regs)
        smem = config.warps / 4 * read / machines.SMEM_BYTES
    else:
        tensor = macs / (rates.tensor_macs * rates.mma_sync)
        copied = 4 * config.tile_n * config.head_dim
        smem = macs / 2048 * smem_clocks(config) + copied / machines.SMEM_BYTES
    return {
        "tensor": tensor,
        "smem": smem,
        "mufu": scores / rates.mufu,
        "issue": config.warps * instructions(config) / machines.SUBPARTITIONS,
    }


def roofline(config: FwdConfig, capability: tuple[int, int]) -> dict[str, object]:
    """Returns the busiest unit of :func:`block_clocks`, and the percentage of the tensor peak.

    The percentage is the one that is reached if that unit is never idle. Both are None where rates
    are not known.
    """
    clocks = block_clocks(config, capability)
    if not clocks:
        return {"block_clocks": clocks, "roof": None, "tensor_peak_percent": None}
    roof = max(clocks, key=clocks.__getitem__)
    macs = 2 * config.tile_m * config.tile_n * config.head_dim
    least = macs / machines.machine(capability).tensor_macs
    return {
        "block_clocks": {unit: round(value, 1) for unit, value in clocks.items()},
        "roof": roof,
        "tensor_peak_percent": round(100 * least / clocks[roof], 1),
    }


def candidates(
    arch: int,
    dtype: str,
    head_dim: int,
    causal: bool,
    capability: tuple[int, int],
    slack: float = 1.3,
) -> list[FwdConfig]:
    """Returns the configurations that fit.

    Of the sm80 class these are only those whose shared memory clocks, that class's tightest roof,
    are near the least.

    Of the sm90 class all are returned: their roofs differ by 3 % at most. One is up to 1.4 times as
    fast as another because of latency and waiting, which a roof does not show.
    """
    if arch == 90:
        return list(dict.fromkeys(fitting_sm90(dtype, head_dim, causal)))
    fitting = list(fitting_sm80(dtype, head_dim, causal, capability))
    least = min(map(smem_clocks, fitting))
    return [config for config in fitting if smem_clocks(config) <= slack * least]


def fitting_sm80(
    dtype: str, head_dim: int, causal: bool, capability: tuple[int, int]
) -> Iterator[FwdConfig]:
    """Yields every configuration of the sm80 class that keeps 8 warps on an SM without spilling."""
    options = itertools.product(
        (64, 128, 256),
        (32, 48, 64, 80, 96, 128),
        (4, 8),
        (1, 2),
        (0, head_dim // 16),
        (1, 2, 3),
    )
    row = 64 if head_dim % 64 == 0 else 32
    for tile_m, tile_n, warps, stages, q_in_regs, min_ctas in options:
        rows_per_copy = 32 * warps // (row // 8)
        if tile_m % (16 * warps) or tile_m % rows_per_copy or tile_n % rows_per_copy:
            continue
        config = FwdConfig(
            arch=80,
            dtype=dtype,
            head_dim=head_dim,
            mask="causal" if causal else "none",
            tile_m=tile_m,
            tile_n=tile_n,
            warps=warps,
            stages=stages,
            q_in_regs=q_in_regs,
            min_ctas=min_ctas,
        )
        # A higher min_ctas of the same tile is another register budget, worth trying if it fits.
        # With fewer than 8 warps an SM the tensor cores idle during every softmax.
        if config.warps * min_ctas >= 8 and fits(config, capability):
            yield config


def fitting_sm90(dtype: str, head_dim: int, causal: bool) -> Iterator[FwdConfig]:
    """Yields the configurations of the sm90 class that fit.

    S, P and O fit the registers and fill most of them, and the tiles fit shared memory. Q is not in
    registers, or as many of its steps as fit are. The configurations in use follow, with one field
    changed.
    """

    def fits_smem(config: FwdConfig) -> bool:
        return config.min_ctas * (config.smem_bytes + 1024) <= MAX_SMEM_BYTES[9, 0] + 1024

    sizes = itertools.product(SM90_ACCUMULATOR_REGISTERS, range(48, 257, 16))
    for (warps, min_ctas), tile_n in sizes:
        config = FwdConfig(
            arch=90,
            dtype=dtype,
            head_dim=head_dim,
            mask="causal" if causal else "none",
            tile_m=16 * warps,
            tile_n=tile_n,
            warps=warps,
            stages=2,
            q_in_regs=0,
            min_ctas=min_ctas,
            ping_pong=warps > 4,
        )
        # Smaller tiles only read K and V more often from L2 and shared memory.
        filled = sm90_registers(config) / SM90_ACCUMULATOR_REGISTERS[warps, min_ctas]
        if 0.7 <= filled <= 1 and fits_smem(config):
            yield config
            yield dataclasses.replace(config, q_in_regs=most_q_in_regs(config))
    for config in heuristics.sm90_configs(dtype, head_dim, causal):
        for change in (
            {"ping_pong": not config.ping_pong and config.warps > 4},
            {"stages": 4},
            {"q_in_regs": 0 if config.q_in_regs else most_q_in_regs(config)},
        ):
            other = dataclasses.replace(config, **change)
            if fits_smem(other):
                yield other


def launcher(kernel: jit.Kernel, q, k, v) -> launch.Call:
    """Makes a call of ``kernel`` on q, k, v of (b, s, h, d); elements it leaves out stay NaN."""
    b, seqlen_q, h, _ = q.shape
    lse = torch.full((b, h, seqlen_q), math.nan, dtype=torch.float32, device=q.device)
    entry = abi.FlashKernel.from_address(kernel.address)
    return launch.Call(entry, q, k, v, outputs=(torch.full_like(q, math.nan), lse))


def relative_error(kernel: jit.Kernel, causal: bool) -> float:
    """Returns the error of a small problem of odd lengths against fp32 SDPA, relative by norm."""
    shape = benchmarking.Shape(2, 333, 715, 2, 1, kernel.config.head_dim, causal)
    q, k, v = benchmarking.make_qkv(shape, DTYPES[kernel.config.dtype], "cuda", seed=1)
    out, _ = launcher(kernel, q, k, v)()
    mask = torch.ones(333, 715, dtype=torch.bool, device="cuda")
    mask = mask.tril(715 - 333) if causal else mask
    qf, kf, vf = (x.float().transpose(1, 2) for x in (q, k, v))
    ref = torch.nn.functional.scaled_dot_product_attention(
        qf, kf, vf, attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    return ((out.float() - ref).norm() / ref.norm()).item()


def in_use(
    arch: int, dtype: str, head_dim: int, causal: bool, capability: tuple[int, int]
) -> list[FwdConfig]:
    """Returns the configurations that ``heuristics.py`` chooses among."""
    if arch == 90:
        return heuristics.sm90_configs(dtype, head_dim, causal)
    return [heuristics.fwd_config(dtype, head_dim, causal, capability)]


def chosen(head_dim: int, causal: bool, capability: tuple[int, int], args) -> list[FwdConfig]:
    """Returns the candidates, or those that ``--variant`` names, and the configurations in use."""
    slack = float("inf") if args.variant else 1.3
    configs = candidates(args.arch, args.dtype, head_dim, causal, capability, slack)
    if args.variant:
        configs = [config for config in configs if config.variant in args.variant]
    current = in_use(args.arch, args.dtype, head_dim, causal, capability)
    return [*configs, *(config for config in current if config not in configs)]


def load(configs: list[FwdConfig], target: str, causal: bool) -> dict[str, jit.Kernel]:
    """Loads the kernels, by name, and checks each against fp32."""
    kernels = {}
    for config in configs:
        kernel = jit.get_kernel(config, target)
        error = relative_error(kernel, causal)
        if not error < 1e-2:
            raise RuntimeError(f"{config.full_name}: relative error {error}")
        kernels[config.full_name] = kernel
    return kernels


def describe(kernel: jit.Kernel, current: bool, capability: tuple[int, int]) -> dict[str, object]:
    """Returns a row of the result, without the times."""
    return {
        "dtype": kernel.config.dtype,
        "head_dim": kernel.config.head_dim,
        "causal": kernel.config.mask == "causal",
        "config": kernel.config.full_name,
        "current": current,
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "smem_bytes": kernel.smem_bytes,
        **roofline(kernel.config, capability),
        "tflops": {},
        "ratio": {},
    }


def line(row: dict) -> str:
    """Formats a row as printed text; a star marks configurations in use."""
    mark = "*" if row["current"] else " "
    ratios = " ".join(f"{ratio:.3f}" for ratio in row["ratio"].values())
    flops = " ".join(f"{value:6.1f}" for value in row["tflops"].values())
    roof = "unknown" if row["roof"] is None else f"{row['roof']} {row['tensor_peak_percent']:.0f} %"
    return (
        f"{mark} {row['config']:52s} {row['registers']:3d} regs {row['spill_bytes']:4d} spill | "
        f"roof {roof:12s} | {flops} | {ratios} | {row['geomean']:.3f}"
    )


def search(head_dim: int, causal: bool, args) -> list[dict]:
    capability = torch.cuda.get_device_capability()
    target = f"{capability[0]}{capability[1]}"
    current = in_use(args.arch, args.dtype, head_dim, causal, capability)
    kernels = load(chosen(head_dim, causal, capability, args), target, causal)
    rows = {
        name: describe(kernel, kernel.config in current, capability)
        for name, kernel in kernels.items()
    }
    for seqlen in args.seqlen:
        shape = benchmarking.sweep_shape(head_dim, seqlen, causal)
        q, k, v = benchmarking.make_qkv(shape, DTYPES[args.dtype], "cuda")
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
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES))
    parser.add_argument("--head-dim", type=int, nargs="+", default=HEAD_DIMS, choices=HEAD_DIMS)
    parser.add_argument("--seqlen", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--causal", type=int, nargs="+", default=[0, 1], choices=[0, 1])
    parser.add_argument("--variant", nargs="*", help="tile choices as configurations spell them")
    parser.add_argument("--peers", nargs="+", default=["fa2"], choices=["fa2", "cudnn", "fa3"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--top", type=int, default=8, help="rows printed for each search")
    parser.add_argument("--out", type=output_file, required=True)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected an NVIDIA GPU that torch can use, found none; run it there")
    if "fa3" in args.peers:
        try:
            peers.fa3_module()
        except ImportError as error:
            parser.error(f"--peers fa3: {error}")
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
            print(line(row), flush=True)
        payload = {
            "machine": benchmarking.machine_info(),
            "ratio_to": f"the better of {', '.join(args.peers)}",
            "rows": found,
        }
        benchmarking.write_json(args.out, payload)


if __name__ == "__main__":
    main()
