"""The static profile of a kernel's machine code: resources, the main loop, its tightest roof.

The estimate is a bound, not a prediction. It counts the clocks for which one iteration of the main
loop keeps each unit of an SM busy, and assumes perfect overlap. The difference to a measurement is
latency, waiting, and the work outside the loop.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from ..config import FwdConfig
from ..occupancy import ctas_per_sm, warps_per_sm
from . import machine as machines
from .backward import BwdKernel
from .disassembly import Binary
from .sass import Instruction, Loop

_FP32 = {"FADD", "FMUL", "FFMA", "IMAD"}
_ALU = {
    *("FMNMX", "FSEL", "FSETP", "F2FP", "IADD3", "VIADD", "IMNMX", "VIMNMX", "VIMNMX3", "ISETP"),
    *("LEA", "LOP3", "SHF", "PRMT", "SEL", "MOV", "PLOP3", "P2R", "R2P", "VIADDMNMX", "IABS"),
}
_MUFU = {"MUFU", "I2F", "F2I"}
_SMEM = {"LDSM", "STSM", "LDS", "STS", "LDGSTS"}
GROUPS = {
    "matrix": {"HMMA", "HGMMA"},
    "softmax": {"FMNMX", "FFMA", "FADD", "MUFU", "F2FP", "SHFL"},
    "scaling": {"FMUL"},
    "mask and compare": {"FSEL", "FSETP", "ISETP", "SEL", "VIADDMNMX", "R2P"},
    "shared memory": _SMEM,
}
OTHER = "addresses and control"  # the group of every other opcode
_RESOURCES = ("tensor", "issue", "mufu", "fp32", "alu", "smem")


def smem_clocks(instruction: Instruction) -> float:
    """Counts clocks of the SM's shared memory port for a warp's issue, without bank conflicts.

    An HGMMA's four warps share its reads: B's n x k, and A's 64 x k unless it is in registers.
    Copies by TMA are left out, as in the port's hardware counter.
    """
    if instruction.name == "HGMMA":
        m, n, k = instruction.mma_shape
        rows = n + (m if instruction.reads_a_from_smem else 0)
        return 2 * rows * k / machines.SMEM_BYTES / 4
    if instruction.name not in _SMEM:
        return 0.0
    parts = instruction.opcode.split(".")
    if instruction.name in ("LDSM", "STSM"):  # 8 x 8 matrices of 2 bytes
        matrices = int(parts[-1]) if parts[-1].isdecimal() else 1
        return matrices * 128 / machines.SMEM_BYTES
    bits = next((int(part) for part in parts[1:] if part in ("64", "128")), 32)
    return machines.WARP * bits / 8 / machines.SMEM_BYTES


def loop_clocks(code: Iterable[Instruction], rates: machines.Machine) -> dict[str, float]:
    """Counts the clocks that one warp's issue of ``code`` keeps each unit of a subpartition busy.

    A unit that the subpartitions share, such as the shared memory port, counts four times: once for
    the same work of each subpartition.
    """
    clocks = dict.fromkeys(_RESOURCES, 0.0)
    lanes = {"mufu": rates.mufu, "fp32": rates.fp32, "alu": rates.alu}
    names = {"mufu": _MUFU, "fp32": _FP32, "alu": _ALU}
    for x in code:
        clocks["issue"] += 1
        if x.never_runs:
            continue
        clocks["smem"] += machines.SUBPARTITIONS * smem_clocks(x)
        peak = rates.tensor_macs / machines.SUBPARTITIONS
        clocks["tensor"] += x.warp_macs / (peak * (1 if x.name == "HGMMA" else rates.mma_sync))
        for unit, width in lanes.items():
            if x.name in names[unit]:
                clocks[unit] += machines.WARP * machines.SUBPARTITIONS / width
    return clocks


def _per_element(code: Iterable[Instruction], elements: float) -> dict[str, float]:
    """Counts thread-instructions per score element of each opcode, the most frequent first."""
    counts = collections.Counter(x.name for x in code)
    return {name: round(machines.WARP * n / elements, 3) for name, n in counts.most_common()}


def group_of(opcode: str) -> str:
    """Returns the group of :data:`GROUPS` that an opcode belongs to."""
    return next((group for group, names in GROUPS.items() if opcode in names), OTHER)


def _describe_loop(loop: Loop, head_dim: int, products: float) -> dict[str, object]:
    # Each product takes head_dim multiply-adds for every score.
    elements = loop.warp_macs / (products * head_dim)
    per_element = _per_element(loop.always, elements)
    groups: dict[str, float] = dict.fromkeys([*GROUPS, OTHER], 0.0)
    for opcode, value in per_element.items():
        groups[group_of(opcode)] += value
    everything = len(loop.always) + len(loop.sometimes)
    return {
        "address": f"0x{loop.address:x}",
        "score_elements_per_warp": elements,
        "instructions": len(loop.always),
        "instructions_at_most": everything,
        "per_element": round(machines.WARP * len(loop.always) / elements, 3),
        "per_element_at_most": round(machines.WARP * everything / elements, 3),
        "mma": loop.mma_shapes(),
        "mix_per_element": per_element,
        "groups_per_element": {name: round(value, 3) for name, value in groups.items()},
        "sometimes_per_element": _per_element(loop.sometimes, elements),
    }


def _estimate(loop: Loop, capability: tuple[int, int]) -> dict[str, object] | None:
    rates = machines.machine(capability)
    if rates is None:
        return None
    least = loop_clocks(loop.always, rates)
    most = loop_clocks([*loop.always, *loop.sometimes], rates)
    ideal = loop.warp_macs / (rates.tensor_macs / machines.SUBPARTITIONS)
    bound = max(least, key=least.__getitem__)
    return {
        "clocks": {name: round(value, 1) for name, value in least.items()},
        "clocks_at_most": {name: round(value, 1) for name, value in most.items()},
        "percent_of_tensor_peak_time": {
            name: round(100 * value / ideal, 1) for name, value in least.items()
        },
        "bound_by": bound,
        "tensor_peak_percent_at_best": round(100 * ideal / least[bound], 1),
        "tensor_peak_percent_every_branch": round(100 * ideal / max(most.values()), 1),
    }


def _occupancy(
    config: FwdConfig | BwdKernel, registers: int, capability: tuple[int, int]
) -> dict[str, object]:
    fit = ctas_per_sm(config.threads, registers, config.smem_bytes, capability)
    warps = fit.ctas * config.threads // machines.WARP
    percent = round(100 * warps / warps_per_sm(capability), 1)
    return {"ctas_per_sm": fit.ctas, "limit": fit.limit, "warps_per_sm": warps, "percent": percent}


def _notes(report: Mapping, log: str) -> list[str]:
    """Returns the main findings as text."""
    notes = []
    resources, loop, estimate = report["resources"], report["loop"], report["estimate"]
    if resources["stack_bytes"] or resources["spill_bytes"]:
        notes.append(
            f"local memory is used: {resources['stack_bytes']} bytes of stack, "
            f"{resources['spill_bytes'] or 0} bytes of spills per thread"
        )
    for line in log.splitlines():
        if "wgmma" in line:  # ptxas reports here that it serialised wgmmas
            notes.append(line.strip())
    if loop is None:
        notes.append("no loop holds a matrix instruction")
        return notes
    if report["other_loops"]:
        others = ", ".join(f"{x['address']} ({x['per_element']})" for x in report["other_loops"])
        notes.append(
            f"the main loop at {loop['address']} is the leanest; others, with their "
            f"instructions per score element: {others}"
        )
    if "MUFU" not in loop["mix_per_element"]:  # as in one loop for blocks with and without a mask
        notes.append(
            "every exponential of the main loop is under a branch, so read the figures of every "
            "branch, which count each attempt at the softmax"
        )
    if estimate is not None:
        bound = estimate["bound_by"]
        percent = estimate["tensor_peak_percent_at_best"]
        if bound == "tensor":
            text = f"the tensor cores are the tightest roof: {percent} % of their peak"
        else:
            text = (
                f"{bound} is the tightest roof: it holds the tensor cores to {percent} % of their "
                "peak even if everything overlaps"
            )
        clocks = estimate["clocks"]
        near = [x for x in clocks if x != bound and clocks[x] > 0.75 * clocks[bound]]
        if near:
            text += f"; close behind, all to be kept busy at once: {', '.join(near)}"
        notes.append(text)
    return notes


def profile(
    binary: Binary,
    capability: tuple[int, int],
    head_dim: int,
    config: FwdConfig | BwdKernel | None = None,
    spill_bytes: int | None = None,
    log: str = "",
) -> dict[str, object]:
    """Returns the static profile, as a JSON-ready dict.

    Args:
        binary: The kernel.
        capability: Compute capability of the GPU that it is meant for.
        head_dim: The kernel's head dimension; turns multiply-adds into score elements.
        config: Its configuration if known; without it there is no occupancy. For a backward, one of
            its kernels.
        spill_bytes: As ptxas reported; None without its report.
        log: The compiler's output.
    """
    main = binary.function.main_loop()
    products = config.products if isinstance(config, BwdKernel) else 2  # Q K^T and P V
    others = [loop for loop in binary.function.mma_loops if loop is not main]
    report = {
        "kind": "static",
        "kernel": config.full_name if config is not None else binary.function.name,
        "config": dataclasses.asdict(config) if config is not None else None,
        "target": binary.target,
        "capability": "{}.{}".format(*capability),
        "head_dim": head_dim,
        "resources": {
            "registers": binary.registers,
            "register_pools": binary.function.register_pools(),
            "spill_bytes": spill_bytes,
            "stack_bytes": binary.stack_bytes,
            "threads": config.threads if config is not None else None,
            "smem_bytes": config.smem_bytes if config is not None else None,
            "instructions": len(binary.function.instructions),
        },
        "occupancy": (
            _occupancy(config, binary.registers, capability) if config is not None else None
        ),
        "loop": _describe_loop(main, head_dim, products) if main is not None else None,
        "other_loops": [_describe_loop(loop, head_dim, products) for loop in others],
        "estimate": _estimate(main, capability) if main is not None else None,
    }
    return report | {"notes": _notes(report, log)}
