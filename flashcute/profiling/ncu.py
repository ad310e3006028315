"""Runs Nsight Compute on the kernels of one call and reads its report.

Clocks are not locked, so that a profile shows the GPU as users run it. Figures in clocks or percent
of a peak do not depend on the clock rate.
"""

from __future__ import annotations

import csv
import dataclasses
import glob
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..benchmarking import Shape
from ..config import BwdConfig, FwdConfig
from .disassembly import ToolError

WARM_UP = 2  # calls before the one that is profiled
USUAL_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
_KERNELS = "regex:^flash_"
_NAME = re.compile(r"flash_\w+")  # names of other programs have template arguments and more
_MAIN = re.compile(r"flash_(fwd|bwd)_kernel_sm\d+")
_SECTIONS = (
    *("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "Occupancy"),
    *("LaunchStats", "SchedulerStats", "WarpStateStats"),
)
# Requested by name, as sections differ between releases; metrics that a release lacks are left out.
_METRICS = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_bytes.sum",
    "lts__t_sectors_srcunit_tex.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_active",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "sm__inst_executed_pipe_tensor_op_hmma.sum",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__cycles_active.avg",
    "sm__cycles_elapsed.max",
    "smsp__inst_executed.sum",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
)
_SCALES = {
    **{f"{p}byte": s for p, s in (("", 1), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))},
    **{"s": 1, "second": 1, "ms": 1e-3, "msecond": 1e-3, "us": 1e-6, "usecond": 1e-6},
    **{"ns": 1e-9, "nsecond": 1e-9},
    **{"hz": 1, "Khz": 1e3, "Mhz": 1e6, "Ghz": 1e9, "KHz": 1e3, "MHz": 1e6, "GHz": 1e9},
    **{"cycle/second": 1, "cycle/usecond": 1e6, "cycle/nsecond": 1e9, "cycle/s": 1},
    **{"cycle/us": 1e6, "cycle/ns": 1e9},
}
Metrics = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Report:
    """One profiled call: its main kernel and every number, in bytes, seconds, hertz or percent.

    Attributes:
        kernel: Name of the main kernel, which has the products.
        metrics: Its metrics.
        others: (name, metrics) of the call's other kernels, in order.
    """

    kernel: str
    metrics: Metrics
    others: Sequence[tuple[str, Metrics]] = ()


def find_ncu() -> Path:
    """Finds ncu on PATH, in ``CUDA_HOME`` or where NVIDIA's installers put it, the newest there.

    Raises:
        ToolError: where there is none.
    """
    on_path = shutil.which("ncu")
    if on_path:
        return Path(on_path)
    home = os.environ.get("CUDA_HOME")
    candidates = [Path(home) / "bin" / "ncu"] if home else []
    candidates += [Path(x) for place in USUAL_PLACES for x in sorted(glob.glob(place))[::-1]]
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    raise ToolError(
        "flashcute profile: expected Nsight Compute's program ncu, got none on PATH, in CUDA_HOME "
        "or in /opt/nvidia/nsight-compute; install Nsight Compute, or say --static, which needs "
        "neither it nor a GPU"
    )


def _known_metrics(ncu: Path, environment: Mapping[str, str]) -> list[str]:
    """Returns the :data:`_METRICS` that this release knows on the GPU here."""
    done = subprocess.run(
        [str(ncu), "--query-metrics"],
        capture_output=True,
        text=True,
        check=False,
        env=dict(environment),
    )
    names = set(re.findall(r"^(\w+__\w+)", done.stdout, re.MULTILINE))
    return [name for name in _METRICS if not names or name.partition(".")[0] in names]


def command(ncu: Path, metrics: list[str], report: Path, workload: list[str]) -> list[str]:
    """Returns the command line that profiles one call of ``workload`` into ``report``.

    The workload says where that call begins and ends, by the CUDA runtime's profiler control.
    """
    sections = [word for section in _SECTIONS for word in ("--section", section)]
    return [
        *(str(ncu), "--export", str(report), "--force-overwrite"),
        *("--kernel-name-base", "function", "--kernel-name", _KERNELS),
        *("--profile-from-start", "off"),
        *("--clock-control", "none", "--replay-mode", "kernel", "--cache-control", "all"),
        *sections,
        *("--metrics", ",".join(metrics)),
        *workload,
    ]


def run(config: FwdConfig | BwdConfig, shape: Shape, report: Path, seconds: float = 600) -> None:
    """Profiles one call with ``config`` on ``shape`` and writes ``report`` (.ncu-rep).

    Raises:
        ToolError: where ncu is missing, may not read the counters, or profiled nothing.
    """
    ncu = find_ncu()
    settings = {
        "config": dataclasses.asdict(config),
        "shape": dataclasses.asdict(shape),
        "calls": WARM_UP + 1,
    }
    workload = [sys.executable, "-m", "flashcute.profiling.workload", json.dumps(settings)]
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    line = command(ncu, _known_metrics(ncu, environment), report, workload)
    report.unlink(missing_ok=True)  # ncu can fail with exit status 0 and keep an older report
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, check=False, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise ToolError(
            f"flashcute profile: expected ncu to finish within {seconds:g} s, it did not; "
            "profile a smaller shape"
        ) from error
    if done.returncode == 0 and report.is_file():
        return
    said = f"{done.stdout}\n{done.stderr}".strip()
    hint = ""
    if "ERR_NVGPUCTRPERM" in said:
        hint = (
            "; this user may not read the GPU's counters: see "
            "https://developer.nvidia.com/ERR_NVGPUCTRPERM, or say --static"
        )
    raise ToolError(
        f"flashcute profile: expected ncu to profile {config.full_name}, got exit status "
        f"{done.returncode}{hint}\n{said[-3000:]}"
    )


def read(report: Path) -> Report:
    """Reads the call in a .ncu-rep file, by NVIDIA's package ``ncu_report`` or ncu's CSV output.

    Raises:
        ToolError: where neither can read it, or it holds no launch of our kernels.
    """
    try:
        import ncu_report
    except ImportError:  # not installed, or its library does not load here
        return _read_through_csv(report)
    try:
        return _read_module(ncu_report, report)
    except (RuntimeError, OSError) as error:
        raise ToolError(
            f"flashcute profile: expected a report of Nsight Compute in {report}, got: {error}"
        ) from error


def _read_through_csv(report: Path) -> Report:
    line = [str(find_ncu()), "--import", str(report), "--csv", "--page", "raw"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise ToolError(
            f"flashcute profile: expected a report of Nsight Compute in {report}, got from ncu: "
            f"{(done.stderr or done.stdout).strip()[-2000:]}"
        )
    return parse_csv(done.stdout)


def _read_module(module, report: Path) -> Report:
    context = module.load_report(str(report))
    found = []
    for index in range(context.num_ranges()):
        launches = context.range_by_idx(index)
        for number in range(launches.num_actions()):
            action = launches.action_by_idx(number)
            metrics = {}
            for name in action.metric_names():
                metric = action[name]
                value = metric.value()
                if isinstance(value, int | float) and math.isfinite(value):
                    metrics[name] = _scaled(value, metric.unit() or "")
            found.append((action.name(), metrics))
    return _call(found)


def _call(launches: Iterable[tuple[str, Metrics]]) -> Report:
    """Returns the report of a call from its launches, which may be among those of others."""
    main, others = None, []
    for name, metrics in launches:
        ours = _NAME.search(name)
        if main is None and _MAIN.search(name):
            main = name, metrics
        elif ours:
            others.append((ours[0], metrics))
    if main is None:
        raise _no_launch()
    return Report(*main, others)


def _no_launch() -> ToolError:
    return ToolError(
        "flashcute profile: expected a launch of a flash_fwd_kernel or flash_bwd_kernel in the "
        "report, got none; profile again, or say --static"
    )


def _scaled(value: float, unit: str) -> float:
    # A rate is scaled by its numerator: Gbyte/second by Gbyte.
    scale = _SCALES.get(unit, _SCALES.get(unit.partition("/")[0], 1))
    return float(value) * scale


def _number(text: str) -> float | None:
    """Parses a number of ncu, thousands in groups; None for text, "n/a", "nan" and nothing."""
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def parse_csv(text: str) -> Report:
    """Parses a call of ours in the output of ``ncu --csv --page raw``.

    The output has a line with names, one with units and one for each launch; ncu's own messages may
    precede them. Metrics that ncu could not measure are left out: missing is not 0.

    Raises:
        ToolError: where there is no launch of a main kernel.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise _no_launch()
    names, units, *launches = csv.reader(io.StringIO("\n".join(lines[start:])))
    place = names.index("Kernel Name")
    found = []
    for launch in launches:
        if len(launch) != len(names):
            continue
        metrics: dict[str, float] = {}
        for name, unit, value in zip(names, units, launch, strict=True):
            number = _number(value)
            if "__" in name and number is not None:
                metrics[name] = _scaled(number, unit)
        found.append((launch[place], metrics))
    return _call(found)
