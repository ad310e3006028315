"""A profile as text for a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..benchmarking import Shape, format_table

_WORDS = {
    "tensor": "tensor cores",
    "issue": "instruction issue",
    "mufu": "MUFU (exp2)",
    "fp32": "fp32 pipe",
    "alu": "ALU (max, convert)",
    "smem": "shared memory port",
    "l2": "L2 cache",
    "dram": "device memory",
}


def word(resource: str) -> str:
    """Returns the name of a resource in tables and pictures."""
    return _WORDS.get(resource, resource)


def dash(value: object) -> object:
    """Returns the value, or a dash for None: a missing value is never shown as 0."""
    return "-" if value is None else value


def _resource_lines(report: Mapping) -> list[str]:
    resources = report["resources"]
    pools = resources["register_pools"]
    registers = f"{resources['registers']}"
    if pools:
        registers += f" at launch, {dash(pools.get('released'))} kept by warps that release some, "
        registers += f"{dash(pools.get('claimed'))} held by those that claim more"
    lines = [
        f"registers           {registers}",
        f"spilled bytes       {dash(resources['spill_bytes'])}",
        f"stack bytes         {resources['stack_bytes']}",
        f"threads per CTA     {dash(resources['threads'])}",
        f"shared memory       {dash(resources['smem_bytes'])} bytes per CTA",
    ]
    if report["occupancy"] is not None:
        fit = report["occupancy"]
        lines.append(
            f"occupancy           {fit['ctas_per_sm']} CTAs and {fit['warps_per_sm']} warps per SM "
            f"({fit['percent']} %), limited by {fit['limit']}"
        )
    return lines


def static_report(report: Mapping) -> str:
    """Formats one static profile: resources, the loop's instructions, the roofs."""
    head = [
        f"kernel              {report['kernel']}",
        f"machine code        {report['target']}, {report['resources']['instructions']} "
        "instructions",
    ]
    parts = ["\n".join([*head, *_resource_lines(report)])]
    loop, estimate = report["loop"], report["estimate"]
    if loop is not None:
        mma = ", ".join(f"{count} {kind}" for kind, count in loop["mma"].items())
        parts.append(
            f"main loop at {loop['address']}: {loop['instructions']} instructions an iteration, "
            f"{loop['instructions_at_most']} if every branch is taken,\nfor "
            f"{loop['score_elements_per_warp']:g} score elements of a warp; {mma}"
        )
        rows = [[name, value] for name, value in loop["mix_per_element"].items() if value >= 0.01]
        totals = {"all": loop["per_element"], "every branch": loop["per_element_at_most"]}
        groups = loop["groups_per_element"] | totals
        parts.append(
            format_table(["thread-instructions per score element", ""], list(groups.items()))
        )
        parts.append(format_table(["by opcode", ""], rows))
    if estimate is not None:
        rows = [
            [
                word(name),
                clocks,
                estimate["clocks_at_most"][name],
                estimate["percent_of_tensor_peak_time"][name],
            ]
            for name, clocks in estimate["clocks"].items()
        ]
        header = ["clocks of a subpartition", "always", "every branch", "% of tensor peak time"]
        parts.append(format_table(header, rows))
    parts += report["notes"]
    return "\n\n".join(parts)


def _flatten(value: object, path: str = "") -> dict[str, object]:
    """Flattens nested mappings into one, with keys joined by dots; lists are left out."""
    if isinstance(value, Mapping):
        found: dict[str, object] = {}
        for key, inner in value.items():
            found |= _flatten(inner, f"{path}.{key}" if path else str(key))
        return found
    return {} if isinstance(value, Sequence) and not isinstance(value, str) else {path: value}


def comparison(reports: Sequence[Mapping]) -> str:
    """Formats two profiles side by side: every figure that differs, with the ratio of numbers."""
    left_out = ("machine", "metrics")  # differs in every run; hundreds of raw counters
    kept = [{k: v for k, v in report.items() if k not in left_out} for report in reports]
    first, second = map(_flatten, kept)
    rows = []
    for key in dict.fromkeys([*first, *second]):
        a, b = first.get(key), second.get(key)
        if a == b:
            continue
        numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
        rows.append([key, dash(a), dash(b), f"{b / a:.3f}" if numbers and a else "-"])
    return format_table(["figure", "A", "B", "B / A"], rows) if rows else "no figure differs"


def _figure(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, float) and (abs(value) >= 1e6 or 0 < abs(value) < 1e-3):
        return f"{value:.4g}"
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _problem(shape: Mapping) -> str:
    sizes = [f"{field.name}={shape[field.name]}" for field in dataclasses.fields(Shape)]
    sizes[-1] = "causal" if shape["causal"] else "full"
    if "page_size" in shape:
        size = shape["page_size"]
        sizes.append(f"over a cache in pages of {size}" if size else "over a contiguous cache")
    return " ".join(sizes)


def counters_report(report: Mapping) -> str:
    """Formats one profile of Nsight Compute: utilisation, roofs, traffic, occupancy, stalls."""
    quantities = report["quantities"]
    head = [
        f"kernel              {report['kernel']}",
        f"problem             {_problem(report['shape'])}",
        f"under the profiler  {_figure(quantities['seconds'])} s, {_figure(quantities['tflops'])} "
        f"TFLOP/s, {_figure(quantities['cycles'])} clocks",
    ]
    parts = ["\n".join(head)]
    wanted = report.get("expected_percent", {})
    busy = [
        [word(name), _figure(value), dash(wanted.get(name))]
        for name, value in report["utilisation_percent"].items()
    ]
    parts.append(format_table(["unit", "% of its peak", "from the machine code"], busy))
    if report["roofs"]:
        rows = [
            [name, _figure(roof["least_cycles"]), _figure(roof["percent_reached"])]
            for name, roof in report["roofs"].items()
        ]
        parts.append(format_table(["roof", "least clocks", "% reached"], rows))
    shown = [[name, _figure(value)] for name, value in quantities.items()]
    parts.append(format_table(["quantity", "value"], shown))
    waiting = [
        [reason, x["warps_per_issue"], dash(x["waits_for"])]
        for reason, x in report["stalls"].items()
        if x["warps_per_issue"] >= 0.01
    ]
    if waiting:
        parts.append(format_table(["stall", "warps per issue", "waits for"], waiting))
    parts += report["notes"]
    if report.get("static"):
        parts.append("from its machine code:\n\n" + static_report(report["static"]))
    return "\n\n".join(parts)


def report_text(report: Mapping) -> str:
    """Formats a profile of either kind."""
    return static_report(report) if report["kind"] == "static" else counters_report(report)
