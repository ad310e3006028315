"""Two ceilings of a Hopper SM: wgmma alone, and the main loop's wgmma beside its softmax.

    python tools/wgmma_rates.py --out benchmarks/results/experiments/wgmma_rates.json

The first table is the rate of m64nNk16 with one to three warpgroups on each SM, A in shared memory
or in registers. The second one runs the sm90 class's main loop (``step`` in
``mainloop_fwd_sm90.h``) without what surrounds it: no loads, no barriers of buffers, no masks, and
nothing of Q in registers. The share of the tensor cores' peak that is left there is what the chip's
overlap allows this order of instructions; what a kernel of the library reaches below that, it loses
to the rest. Clocks are the SM's own, so neither power nor temperature changes them. Kernels:
``wgmma_rates.h``.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashcute import benchmarking
from flashcute.config import FwdConfig
from flashcute.jit import build, sources, toolchain
from flashcute.profiling.machine import SMEM_BYTES, SUBPARTITIONS, WARP, machine

HOPPER = machine((9, 0))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ELEMENTS = {"bf16": "cutlass::bfloat16_t", "fp16": "cutlass::half_t"}
WIDTHS = (64, 80, 96, 112, 128, 192, 256)
# A from shared memory or registers; transposed: B MN-major as V is, here in whole rows of 64.
OPERANDS = {"ss": WIDTHS, "rs": WIDTHS, "rs_transposed": (64, 128, 192, 256)}
DEPTH = 64  # of A and B; each iteration multiplies them GROUPS times
GROUPS = 4
SHAPES = ((64, 128, 3), (64, 128, 2), (128, 80, 3), (128, 128, 2), (256, 64, 2))
PARTS = ("products", "softmax", "both", "turns", "eager")
CLOCKS = 4e6  # that one launch takes at least: a few milliseconds
LAUNCHES = 3


class Problem(ctypes.Structure):
    """``rates::Problem`` of wgmma_rates.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "v", "out", "clocks")),
        *((name, ctypes.c_int32) for name in ("ctas", "warpgroups", "iterations")),
        *((name, ctypes.c_float) for name in ("scale", "scale_log2")),
    )


@dataclasses.dataclass(frozen=True)
class Rate:
    """wgmma alone: m64nNk16 of one type, operands as in :data:`OPERANDS`."""

    dtype: str
    n: int
    operands: str

    @property
    def name(self) -> str:
        return f"rate_{self.dtype}_n{self.n}_{self.operands}"

    @property
    def cpp(self) -> str:
        return f"Rate<{ELEMENTS[self.dtype]}, {self.n}, rates::Operands::{self.operands}>"

    @property
    def warpgroups(self) -> tuple[int, ...]:
        """How many an SM's registers have room for, as ``kMaxThreads`` says."""
        return (1, 2) if self.n == 256 and self.operands != "ss" else (1, 2, 3)

    @property
    def tensor_clocks(self) -> float:
        """Least clocks of one instruction at the tensor cores' peak."""
        return 64 * self.n * 16 / HOPPER.tensor_macs

    @property
    def port_clocks(self) -> float:
        """Clocks in which the shared memory port delivers its operands."""
        return 2 * 16 * (self.n + (64 if self.operands == "ss" else 0)) / SMEM_BYTES


@dataclasses.dataclass(frozen=True)
class Loop:
    """The main loop for one head dimension, keys a block and warpgroups, bf16."""

    d: int
    n: int
    warpgroups: int
    part: str

    @property
    def name(self) -> str:
        return f"loop_d{self.d}_n{self.n}_w{self.warpgroups}_{self.part}"

    @property
    def cpp(self) -> str:
        config = FwdConfig(
            arch=90,
            dtype="bf16",
            head_dim=self.d,
            mask="none",
            tile_m=64 * self.warpgroups,
            tile_n=self.n,
            warps=4 * self.warpgroups,
            stages=2,
            q_in_regs=0,
            min_ctas=1,
            peel_masked=True,
        )
        return f"Loop<flash::FwdConfig{config.to_cpp()}, rates::Part::{self.part}>"

    @property
    def scores(self) -> int:
        """Of one block, all warpgroups."""
        return 64 * self.warpgroups * self.n

    @property
    def tensor_clocks(self) -> float:
        """Least clocks of a block's two products at the tensor cores' peak."""
        return 2 * self.scores * self.d / HOPPER.tensor_macs

    @property
    def mufu_clocks(self) -> float:
        """Least clocks of a block's exponentials on the MUFU units."""
        return self.scores / HOPPER.mufu

    @property
    def issue_clocks(self) -> float:
        """Least clocks to issue FFMA, MUFU, FADD a score and a conversion for two; where each
        maximum is sought, FMNMX."""
        each = 4.5 if self.part == "eager" else 3.5
        return each * self.scores / (WARP * SUBPARTITIONS)

    @property
    def port_clocks(self) -> float:
        """Clocks in which the shared memory port delivers Q, K and V to the products."""
        qk = Rate("bf16", self.n, "ss").port_clocks * self.d / 16
        pv = Rate("bf16", self.d, "rs_transposed").port_clocks * self.n / 16
        return self.warpgroups * (qk + pv)


Kernel = Rate | Loop


def units() -> dict[tuple[Kernel, ...], build.Unit]:
    """Every kernel, in shared objects that take the compiler about as long."""
    groups: list[tuple[Kernel, ...]] = []
    for dtype in DTYPES:
        for operands, widths in OPERANDS.items():
            for chosen in (lambda n: n < 128, lambda n: n >= 128):
                groups.append(tuple(Rate(dtype, n, operands) for n in widths if chosen(n)))
    groups += [tuple(Loop(*shape, part) for part in PARTS) for shape in SHAPES]
    return {group: unit(group) for group in groups}


def unit(kernels: tuple[Kernel, ...]) -> build.Unit:
    """A shared object with ``kernels``, each behind a function of its name."""
    entries = "".join(
        'extern "C" __attribute__((visibility("default"))) char const *\n'
        f"{kernel.name}(rates::Problem const *problem) {{\n"
        f"    return rates::run<rates::{kernel.cpp}>(*problem);\n}}\n"
        for kernel in kernels
    )
    return build.Unit(
        name=f"rates_{kernels[0].name}",
        target="sm_90a",
        source=f'#include "wgmma_rates.h"\n\n{entries}',
        suffix=".cu",
        flags=(*toolchain.NVCC_FLAGS, "-gencode=arch=compute_90a,code=sm_90a"),
        project_dirs=(Path(__file__).resolve().parent, sources.kernel_include_dir()),
        external_dirs=(sources.cutlass_include_dir(),),
        external=(f"cutlass {sources.cutlass_version()}",),
    )


def check_log(meta: dict) -> None:
    """Refuses what would measure something else.

    Raises:
        RuntimeError: where ptxas spilled registers or serialised wgmma.
    """
    complaints = re.findall(r".*\(C7\d{3}\).*", meta["log"])
    if meta["spill_bytes"] or complaints:
        raise RuntimeError(
            f"wgmma_rates: expected no spills and no wgmma serialised in {meta['name']}, got "
            f"{meta['spill_bytes']} bytes and {complaints}"
        )


def build_all(wanted: dict[tuple[Kernel, ...], build.Unit]) -> dict[str, Callable]:
    """The entry of each kernel by its name, built if it is not in the user's cache.

    Raises:
        toolchain.BuildError: where the compiler is missing or fails.
        RuntimeError: as of :func:`check_log`.
    """
    entries = {}
    results = build.build_many(list(wanted.values()), toolchain.find_nvcc())
    for kernels, result in zip(wanted, results, strict=True):
        if result.artefact is None:
            raise toolchain.BuildError(result.error)
        check_log(result.artefact.meta)
        library = ctypes.CDLL(str(result.artefact.path))
        for kernel in kernels:
            entry = getattr(library, kernel.name)
            entry.argtypes, entry.restype = [ctypes.POINTER(Problem)], ctypes.c_char_p
            entries[kernel.name] = entry
    return entries


@functools.cache
def random(dtype: str, *shape: int) -> torch.Tensor:
    """Standard normal on the GPU, the same for all kernels: zeros would draw less power."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(DTYPES[dtype]).cuda()


def launch(
    entry: Callable, operands: Iterable[torch.Tensor], out: torch.Tensor, warpgroups: int, its: int
) -> list[int]:
    """One launch on all SMs; fills ``out`` and returns each one's clocks.

    Raises:
        RuntimeError: with CUDA's message where it fails.
    """
    ctas = torch.cuda.get_device_properties(0).multi_processor_count
    clocks = torch.zeros(ctas, dtype=torch.int64, device="cuda")
    out.fill_(math.nan)
    torch.cuda.synchronize()
    pointers = [x.data_ptr() for x in operands]
    pointers += [0] * (3 - len(pointers)) + [out.data_ptr(), clocks.data_ptr()]
    scale = 1 / math.sqrt(out.shape[1])  # of the softmax, which is the head dimension's
    error = entry(Problem(*pointers, ctas, warpgroups, its, scale, scale * math.log2(math.e)))
    if error is not None:
        raise RuntimeError(f"wgmma_rates: the launch failed: {error.decode()}")
    return clocks.tolist()


def require_close(name: str, out: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Raises RuntimeError where a result is more than ``tolerance`` away, or not finite."""
    error = (out.double() - expected).abs().max().item()
    if not error <= tolerance:
        raise RuntimeError(f"wgmma_rates: expected {name} within {tolerance:.1e}, got {error:.1e}")


def clocks_of(call: Callable[[int], list[int]], least: float) -> tuple[float, float]:
    """Median over SMs and launches of the clocks an iteration takes, and greatest over least."""
    its = math.ceil(CLOCKS / least)
    found = [clocks / its for _ in range(LAUNCHES) for clocks in call(its)]
    return statistics.median(found), max(found) / min(found)


def measure_rate(kernel: Rate, warpgroups: int, entry: Callable) -> dict:
    """One figure of the first table, its result checked beforehand."""
    a = random(kernel.dtype, warpgroups * 64, DEPTH)
    b = random(kernel.dtype, kernel.n, DEPTH)
    out = torch.empty(warpgroups * 64, kernel.n, device="cuda")
    launch(entry, (a, b), out, warpgroups, 2)
    expected = 2 * GROUPS * (a.double() @ b.double().T)
    require_close(kernel.name, out, expected, 1e-3 * expected.abs().max().item())
    wgmmas = warpgroups * GROUPS * DEPTH // 16
    clocks, spread = clocks_of(
        lambda its: launch(entry, (a, b), out, warpgroups, its), wgmmas * kernel.tensor_clocks
    )
    return {
        **dataclasses.asdict(kernel),
        "warpgroups": warpgroups,
        "tensor_clocks": kernel.tensor_clocks,
        "port_clocks": kernel.port_clocks,
        "clocks": round(clocks / wgmmas, 3),
        "spread": round(spread, 4),
        "tensor_share": round(kernel.tensor_clocks * wgmmas / clocks, 4),
    }


def measure_loop(kernel: Loop, entry: Callable) -> dict:
    """One figure of the second table, its result checked beforehand."""
    q = random("bf16", 64 * kernel.warpgroups, kernel.d)
    k, v = random("bf16", 2 * kernel.n, kernel.d).split(kernel.n)
    out = torch.empty(64 * kernel.warpgroups, kernel.d, device="cuda")

    def run(its: int) -> list[int]:
        return launch(entry, (q, k, v), out, kernel.warpgroups, its)

    run(2)
    scores = q.double() @ k.double().T / math.sqrt(kernel.d)
    expected = scores.softmax(dim=1) @ v.double()
    if kernel.part == "softmax":  # of what came out of the softmax before: only finite
        expected = out.double()
    elif kernel.part == "products":  # three times P V, over the row sums of one
        expected *= 3
    require_close(kernel.name, out, expected, 1e-2)
    clocks, spread = clocks_of(run, max(kernel.tensor_clocks, kernel.mufu_clocks))
    return {
        **dataclasses.asdict(kernel),
        **{f"{x}_clocks": getattr(kernel, f"{x}_clocks") for x in ("tensor", "mufu", "issue")},
        "port_clocks": kernel.port_clocks,
        "clocks": round(clocks, 1),
        "spread": round(spread, 4),
        "tensor_share": 0 if kernel.part == "softmax" else round(kernel.tensor_clocks / clocks, 4),
        "mufu_share": 0 if kernel.part == "products" else round(kernel.mufu_clocks / clocks, 4),
    }


def rates_table(rows: list[dict]) -> str:
    """Percent of the tensor cores' peak, a column for each type and number of warpgroups."""
    columns = [(dtype, warpgroups) for dtype in DTYPES for warpgroups in (1, 2, 3)]
    shares = {
        (x["operands"], x["n"], x["dtype"], x["warpgroups"]): f"{100 * x['tensor_share']:.1f}"
        for x in rows
    }
    header = ["operands", "n", "tensor clocks", "port clocks"]
    return benchmarking.format_table(
        [*header, *(f"{dtype}, {warpgroups} wg" for dtype, warpgroups in columns)],
        [
            [operands, n, rate.tensor_clocks, rate.port_clocks]
            + [shares.get((operands, n, *column), "-") for column in columns]
            for operands, widths in OPERANDS.items()
            for n in widths
            for rate in [Rate("bf16", n, operands)]
        ],
    )


def loops_table(rows: list[dict]) -> str:
    """Clocks of a key block and percent of the tensor cores' peak; of the MUFU's for softmax."""

    def cell(row: dict) -> str:
        share = row["mufu_share" if row["part"] == "softmax" else "tensor_share"]
        return f"{row['clocks']:.0f} ({100 * share:.1f})"

    found = {(x["d"], x["n"], x["warpgroups"], x["part"]): cell(x) for x in rows}
    bounds = ("tensor", "mufu", "issue", "port")
    table = []
    for shape in SHAPES:
        loop = Loop(*shape, "both")
        least = [f"{getattr(loop, f'{bound}_clocks'):.0f}" for bound in bounds]
        table.append([*shape, *least, *(found.get((*shape, part), "-") for part in PARTS)])
    return benchmarking.format_table(["d", "n", "wg", *bounds, *PARTS], table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        found = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        print(
            "wgmma_rates: expected a GPU of compute capability 9.0, H100 or H200, got "
            f"{found}; run it there",
            file=sys.stderr,
        )
        return 1
    wanted = units()
    entries = build_all(wanted)
    kernels = [kernel for group in wanted for kernel in group]
    rates = [
        measure_rate(kernel, warpgroups, entries[kernel.name])
        for kernel in kernels
        if isinstance(kernel, Rate)
        for warpgroups in kernel.warpgroups
    ]
    print(f"wgmma alone, % of the tensor cores' peak\n\n{rates_table(rates)}\n", flush=True)
    loops = [measure_loop(x, entries[x.name]) for x in kernels if isinstance(x, Loop)]
    print("A key block of the main loop, clocks: least ones by unit, then measured ones with % of")
    print(f"the tensor cores' peak, for softmax of the MUFU's\n\n{loops_table(loops)}")
    if args.out is not None:
        payload = {"machine": benchmarking.machine_info(), "rates": rates, "loops": loops}
        benchmarking.write_json(args.out, payload)
    return 0


if __name__ == "__main__":
    sys.exit(main())
