"""A report of Nsight Compute as utilisation, traffic, stalls and roofs.

Metric names change with the GPU and the release, so each quantity has a list of names, best first.
A quantity for which no metric is found is None in every output.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from .. import heuristics, occupancy
from ..bench.serving import Serving
from ..benchmarking import Shape
from ..config import BwdConfig, FwdConfig
from . import machine as machines
from .ncu import Metrics, Report

_ACTIVE = ".avg.pct_of_peak_sustained_active"
_ELAPSED = ".avg.pct_of_peak_sustained_elapsed"

# Percent of the peak of each unit, while the SMs were active.
_UTILISATION = {
    "tensor": (
        f"sm__pipe_tensor_cycles_active{_ACTIVE}",
        f"sm__pipe_tensor_op_gmma_cycles_active{_ACTIVE}",
        f"sm__pipe_tensor_op_hmma_cycles_active{_ACTIVE}",
        f"sm__inst_executed_pipe_tensor{_ACTIVE}",
    ),
    "issue": (
        f"smsp__issue_active{_ACTIVE}",
        f"sm__inst_issued{_ACTIVE}",
        "smsp__issue_active.avg.pct",
    ),
    "mufu": (f"sm__inst_executed_pipe_xu{_ACTIVE}", f"smsp__inst_executed_pipe_xu{_ACTIVE}"),
    "fp32": (f"sm__inst_executed_pipe_fma{_ACTIVE}", f"sm__pipe_fma_cycles_active{_ACTIVE}"),
    "alu": (f"sm__inst_executed_pipe_alu{_ACTIVE}", f"sm__pipe_alu_cycles_active{_ACTIVE}"),
    "smem": (
        f"l1tex__data_pipe_lsu_wavefronts{_ACTIVE}",
        f"l1tex__data_pipe_lsu_wavefronts{_ELAPSED}",
        f"l1tex__data_pipe_lsu_wavefronts_mem_shared{_ACTIVE}",
        f"l1tex__data_pipe_lsu_wavefronts_mem_shared{_ELAPSED}",
    ),
    "l2": (f"lts__throughput{_ELAPSED}", f"lts__t_sectors{_ELAPSED}"),
    "dram": (f"gpu__dram_throughput{_ELAPSED}", f"dram__throughput{_ELAPSED}"),
}
_QUANTITIES = {
    "seconds": ("gpu__time_duration.sum", "gpu__time_duration.avg"),
    "cycles": ("sm__cycles_elapsed.max", "sm__cycles_elapsed.avg", "gpc__cycles_elapsed.max"),
    "sm_hz": ("gpc__cycles_elapsed.avg.per_second", "smsp__cycles_elapsed.avg.per_second"),
    "multiprocessors": ("device__attribute_multiprocessor_count", "launch__sm_count"),
    "warp_instructions": ("smsp__inst_executed.sum", "sm__inst_executed.sum"),
    "gmma_instructions": (
        "sm__inst_executed_pipe_tensor_op_gmma.sum",
        "smsp__inst_executed_pipe_tensor_op_gmma.sum",
    ),
    "hmma_instructions": (
        "sm__inst_executed_pipe_tensor_op_hmma.sum",
        "smsp__inst_executed_pipe_tensor_op_hmma.sum",
    ),
    "smem_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",),
    "smem_bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
    "l2_bytes": ("lts__t_bytes.sum",),
    "l2_hit_percent": ("lts__t_sector_hit_rate.pct",),
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    "achieved_occupancy_percent": (f"sm__warps_active{_ACTIVE}",),
    "theoretical_occupancy_percent": ("sm__maximum_warps_per_active_cycle_pct",),
    "registers": ("launch__registers_per_thread",),
    "smem_bytes": ("launch__shared_mem_per_block_dynamic", "launch__shared_mem_per_block"),
    "threads": ("launch__block_size",),
    "ctas": ("launch__grid_size",),
    "waves": ("launch__waves_per_multiprocessor",),
}
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
# What a warp waits for, with the usual cause in attention kernels. The reasons are those of the
# Nsight Compute documentation, "Warp Scheduler States".
_STALLS = {
    "barrier": "another warp at a CTA or named barrier: the ping-pong between warpgroups",
    "branch_resolving": "a branch's target",
    "dispatch_stall": "the dispatcher, held back by register ports or a busy pipe",
    "drain": "outstanding stores before the warp exits: the epilogue",
    "gmma": "the tensor cores to finish a warpgroup's MMA: the softmax cannot start earlier",
    "imc_miss": "a constant: a cold constant cache",
    "lg_throttle": "the queue of global memory instructions",
    "long_scoreboard": "global memory or a TMA barrier: loads are not far enough ahead",
    "math_pipe_throttle": "a busy math pipe: the unit is saturated",
    "membar": "a memory fence",
    "mio_throttle": "the queue of shared memory and MUFU instructions: the port is oversubscribed",
    "misc": "other reasons",
    "no_instruction": "an instruction: code larger than the instruction cache, or a jump",
    "not_selected": "the scheduler, which issued another eligible warp: no loss",
    "selected": "nothing: the warp issued",
    "short_scoreboard": "shared memory or MUFU results: latency of exp2, ldmatrix, shuffles",
    "sleeping": "the end of a sleep",
    "tex_throttle": "the texture queue",
    "wait": "a fixed latency: too little independent work between dependent instructions",
    "warpgroup_arrive": "the other warps of its warpgroup before an MMA",
}
_NOT_STALLED = ("selected", "not_selected")
_DRAM = "dram"  # a unit, and a roof


def _pick(metrics: Metrics, names: tuple[str, ...]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)


def stalls(metrics: Metrics) -> dict[str, dict[str, object]]:
    """Returns the warps waiting for each reason in an average clock with an issue, most first."""
    found = {}
    for name, value in metrics.items():
        match = _STALL.fullmatch(name)
        if match and not match[1].endswith("_not_issued"):
            found[match[1]] = value
    return {
        reason: {"warps_per_issue": round(value, 3), "waits_for": _STALLS.get(reason)}
        for reason, value in sorted(found.items(), key=lambda item: -item[1])
        if reason not in _NOT_STALLED and value > 0
    }


def _tile(config: FwdConfig | BwdConfig) -> tuple[int, int]:
    """Returns the rows of queries and of keys of a main loop step, of a cluster for a backward."""
    if isinstance(config, BwdConfig):
        return config.dkv.step, config.cluster * config.dkv.rows
    return config.tile_m, config.tile_n


def visible_tiles(shape: Shape, config: FwdConfig | BwdConfig, sms: int = 132) -> int:
    """Counts pairs of query tile and key tile with an unmasked score, of all heads and batches.

    A backward, which is one kernel for all gradients, has tiles of one head. In a forward with
    pack-GQA (:func:`heuristics.packs_heads`), a tile has ``tile_m`` rows of all query heads of a
    key head, whose number is rounded up to a power of two.
    """
    tile_m, tile_n = _tile(config)
    backward = isinstance(config, BwdConfig)
    packs = not backward and heuristics.packs_heads(shape.problem(config.dtype), config, sms)
    shift = (shape.h // shape.h_k - 1).bit_length() if packs else 0
    rows = shape.seqlen_q << shift
    count = 0
    tiles_k = -(-shape.seqlen_k // tile_n)
    for first in range(0, rows, tile_m):
        last = (min(first + tile_m, rows) - 1) >> shift
        seen = last + 1 + shape.seqlen_k - shape.seqlen_q if shape.causal else shape.seqlen_k
        count += min(tiles_k, max(0, -(-seen // tile_n)))
    return shape.b * (shape.h_k if packs else shape.h) * count


def ideal(shape: Shape, config: FwdConfig | BwdConfig, sms: int = 132) -> dict[str, float]:
    """Returns the least work for the problem and its tiles on so many SMs, whatever the kernel.

    ``tile_macs`` and ``tile_exponentials`` count whole tiles, as a kernel computes them; ``flops``
    and ``dram_bytes`` are those of the problem. ``l2_bytes``: Q and O once, K and V once for each
    query tile that needs them; with multicast in a cluster it can be less. Over a cache,
    ``cache_bytes`` are those of ``dram_bytes`` that are the cache's.

    A backward has five products instead of two. Its main kernel reads Q, dO, K, V and two
    statistics of each query, and writes dK, dV and the sums of dQ in 32 bits; O is read by the
    kernel before it. ``l2_bytes``: all that a query has once for each key tile that it sees.
    """
    tile_m, tile_n = _tile(config)
    pairs = visible_tiles(shape, config, sms)
    scores = pairs * tile_m * tile_n
    rows = shape.b * shape.h * shape.seqlen_q
    if isinstance(config, BwdConfig):
        of_keys = 4 * 2 * shape.d * shape.b * shape.h_k * shape.seqlen_k
        of_query = 2 * 2 * shape.d + 4 * config.dq_accum + 2 * 4
        return {
            "flops": 5 * shape.flops // 2,
            "tile_macs": 5 * scores * config.head_dim,
            "tile_exponentials": scores,
            "dram_bytes": of_keys + of_query * rows,
            "l2_bytes": of_keys + of_query * pairs * tile_m,
        }
    cache = {"cache_bytes": shape.cache_bytes} if isinstance(shape, Serving) else {}
    return cache | {
        "flops": shape.flops,
        "tile_macs": 2 * scores * config.head_dim,
        "tile_exponentials": scores,
        "dram_bytes": shape.bytes(),
        "l2_bytes": 2 * shape.d * (2 * rows + 2 * pairs * tile_n) + 4 * rows,
    }


def _roofs(
    quantities: Mapping, wanted: Mapping, utilisation: Mapping, capability: tuple[int, int]
) -> dict[str, dict[str, float | None]]:
    """Returns the least clocks for each roof, and their share of the measured clocks in percent."""
    rates = machines.machine(capability)
    cycles, sms = quantities["cycles"], quantities["multiprocessors"]
    if rates is None or not cycles or not sms:
        return {}
    issue = quantities["warp_instructions"]
    floors = {
        "tensor, useful FLOPs": wanted["flops"] / 2 / rates.tensor_macs / sms,
        "tensor, whole tiles": wanted["tile_macs"] / rates.tensor_macs / sms,
        "mufu": wanted["tile_exponentials"] / rates.mufu / sms,
        "issue": None if issue is None else issue / machines.SUBPARTITIONS / sms,
    }
    dram = quantities["dram_percent_of_ideal"], utilisation["dram"]
    if None not in dram and dram[0]:
        # The measured share of the peak, scaled to the ideal bytes.
        floors[_DRAM] = cycles * dram[1] / 100 * 100 / dram[0]
    return {
        name: {
            "least_cycles": None if floor is None else round(floor),
            "percent_reached": None if floor is None else round(100 * floor / cycles, 1),
        }
        for name, floor in floors.items()
    }


def profile(
    report: Report,
    config: FwdConfig | BwdConfig,
    shape: Shape,
    capability: tuple[int, int],
    multiprocessors: int | None = None,
) -> dict[str, object]:
    """Returns the profile of one call's main kernel, as a JSON-ready dict.

    Args:
        report: Report of Nsight Compute.
        config: The kernel's configuration; a backward is one kernel for all gradients.
        shape: The problem.
        capability: Compute capability of the GPU.
        multiprocessors: SMs of the GPU, for a report without that metric.
    """
    metrics = report.metrics
    utilisation = {name: _pick(metrics, names) for name, names in _UTILISATION.items()}
    quantities = {name: _pick(metrics, names) for name, names in _QUANTITIES.items()}
    if quantities["multiprocessors"] is None:
        quantities["multiprocessors"] = multiprocessors
    wanted = ideal(shape, config, int(quantities["multiprocessors"] or 132))
    reads, writes = quantities["dram_read_bytes"], quantities["dram_write_bytes"]
    moved = None if reads is None or writes is None else reads + writes
    quantities["dram_bytes"] = moved
    quantities["dram_percent_of_ideal"] = _percent(moved, wanted["dram_bytes"])
    quantities["l2_percent_of_ideal"] = _percent(quantities["l2_bytes"], wanted["l2_bytes"])
    quantities["bank_conflict_percent"] = _percent(
        quantities["smem_bank_conflicts"], quantities["smem_wavefronts"]
    )
    seconds = quantities["seconds"]
    quantities["tflops"] = None if not seconds else round(wanted["flops"] / seconds / 1e12, 1)
    elements = wanted["tile_exponentials"]
    issued = quantities["warp_instructions"]
    quantities["instructions_per_score_element"] = (
        None if issued is None else round(machines.WARP * issued / elements, 3)
    )
    result = {
        "kind": "ncu",
        "kernel": config.full_name,
        "config": dataclasses.asdict(config),
        "shape": dataclasses.asdict(shape),
        "capability": "{}.{}".format(*capability),
        "utilisation_percent": utilisation,
        "quantities": quantities,
        "ideal": wanted,
        "roofs": _roofs(quantities, wanted, utilisation, capability),
        "stalls": stalls(metrics),
        "other_kernels": [
            {"kernel": name, "seconds": _pick(of, _QUANTITIES["seconds"])}
            for name, of in report.others
        ],
        "missing": sorted(k for k, v in (utilisation | quantities).items() if v is None),
    }
    warps = occupancy.warps_per_sm(capability)
    return result | {"notes": _notes(result, warps), "metrics": dict(metrics)}


def expected(report: Mapping, static: Mapping) -> dict[str, float]:
    """Returns each unit's utilisation in percent at the measured speed, from the main loop alone.

    It is computed from the machine code's clocks per score and the clocks of the launch. A counter
    that is much higher shows work that is not in the loop's code: bank conflicts, replays.
    """
    whole = report["roofs"].get("tensor, whole tiles", {}).get("percent_reached")
    if whole is None or static["estimate"] is None:
        return {}
    times = static["estimate"]["percent_of_tensor_peak_time"]
    return {name: round(whole * percent / 100, 1) for name, percent in times.items()}


def _percent(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else round(100 * part / whole, 1)


def _tightest_roof(result: Mapping) -> str | None:
    """Returns the roof that asks for the most clocks; None where no roof is known."""
    known = {n: x["least_cycles"] for n, x in result["roofs"].items() if x["least_cycles"]}
    return max(known, key=known.__getitem__, default=None)


def _roof_notes(result: Mapping, roof: str | None) -> list[str]:
    """Returns what there is to say about the tightest roof, and of a cache."""
    if roof is None:
        return []
    quantities, wanted = result["quantities"], result["ideal"]
    reached = result["roofs"][roof]["percent_reached"]
    said = f"the tightest roof is {roof}: the launch reaches {reached} % of it"
    if roof == _DRAM:
        said += (
            f"; it moves {quantities['dram_bytes'] / 1e6:.1f} MB where "
            f"{wanted['dram_bytes'] / 1e6:.1f} MB are needed, at "
            f"{result['utilisation_percent'][_DRAM]:.1f} % of the throughput of device memory"
        )
    notes = [said]
    if "cache_bytes" in wanted:
        share = 100 * wanted["cache_bytes"] / wanted["dram_bytes"]
        notes.append(
            f"the cache is {wanted['cache_bytes'] / 1e6:.1f} MB, {share:.1f} % of the bytes that "
            "device memory must deliver or take"
        )
    return notes


_PIPES = ("tensor", "issue", "mufu", "fp32", "alu", "smem", "l2", "dram")


def _notes(result: Mapping, warps_per_sm: int) -> list[str]:
    """Returns the main findings as text; missing quantities are left out."""
    utilisation, quantities = result["utilisation_percent"], result["quantities"]
    notes = []
    known = {name: utilisation[name] for name in _PIPES if utilisation[name] is not None}
    if known:
        top = max(known, key=known.__getitem__)
        text = f"the busiest unit is {top}: {known[top]:.0f} % of its peak"
        if known[top] < 70:
            text += ": no roof is near, so latency or waiting decides, see the stalls"
        notes.append(text)
    tightest = _tightest_roof(result)
    notes += _roof_notes(result, tightest)
    wasted = 1 - result["ideal"]["flops"] / 2 / result["ideal"]["tile_macs"]
    if wasted > 0.1 and tightest != _DRAM:
        notes.append(
            f"{100 * wasted:.0f} % of the MMAs are for masked or padded scores: smaller tiles "
            "would waste less"
        )
    reasons = list(result["stalls"].items())[:3]
    if reasons:
        said = "; ".join(
            f"{reason} ({x['warps_per_issue']:.2f}): {x['waits_for'] or 'see the documentation'}"
            for reason, x in reasons
        )
        notes.append(f"warps wait, in warps per issue, for: {said}")
    conflicts = quantities["bank_conflict_percent"]
    if conflicts is not None and conflicts > 5:
        notes.append(f"{conflicts} % of the shared memory wavefronts repeat: bank conflicts")
    dram = quantities["dram_percent_of_ideal"]
    if dram is not None and dram > 150:
        notes.append(f"device memory moves {dram / 100:.1f} times the bytes that it has to")
    achieved = quantities["achieved_occupancy_percent"]
    possible = quantities["theoretical_occupancy_percent"]
    if achieved is not None and possible is not None:
        resident = achieved / 100 * warps_per_sm
        text = f"{resident:.1f} warps an SM of {possible / 100 * warps_per_sm:.0f} that fit"
        if achieved < 0.8 * possible:
            text += ": a short last wave, or uneven tiles"
        notes.append(text)
    if result["other_kernels"]:
        times = ", ".join(
            f"{x['kernel']} "
            + ("missing" if x["seconds"] is None else f"{1e6 * x['seconds']:.1f} us")
            for x in result["other_kernels"]
        )
        notes.append(f"other kernels of the call, under the profiler: {times}")
    return notes
