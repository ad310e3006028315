"""Reading reports of ncu.

tests/data/ncu/raw.csv has the form of `ncu --csv --page raw`: a line of names, one of units, and
one for each launch, here of a foreign kernel and of ours.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from pathlib import Path

import pytest

from flashcute.profiling import ncu
from flashcute.profiling.disassembly import ToolError

RAW = Path(__file__).parent / "data" / "ncu" / "raw.csv"


def test_csv_gives_our_launch_in_plain_units():
    report = ncu.parse_csv(RAW.read_text())
    assert report.kernel == "flash_fwd_kernel_sm80"
    expected = {
        "gpu__time_duration.sum": 1482.3e-6,
        "dram__bytes_read.sum": 201.33e6,
        "lts__t_bytes.sum": 2.61e9,
        "gpc__cycles_elapsed.avg.per_second": 1.71e9,
        "launch__shared_mem_per_block_dynamic": 49150.0,
        "launch__grid_size": 2048.0,
        "lts__t_sector_hit_rate.pct": 91.24,
    }
    assert {name: report.metrics[name] for name in expected} == pytest.approx(expected)


def test_what_was_not_measured_is_not_there():
    metrics = ncu.parse_csv(RAW.read_text()).metrics
    assert "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active" not in metrics
    assert metrics["sm__inst_executed_pipe_tensor_op_gmma.sum"] == 0  # this one was measured: 0


def test_other_kernels_of_the_call_are_kept_with_their_metrics():
    """ncu gives names with return type, template arguments and parameters, which are removed."""
    row = RAW.read_text().splitlines()[-1]
    plan = row.replace("flash_fwd_kernel_sm80", "void flash::flash_plan_kernel<X>(flash::P)")
    combine = row.replace("flash_fwd_kernel_sm80", "flash_fwd_combine_kernel<X>")
    header = RAW.read_text().removesuffix(row + "\n")
    assert row not in header
    report = ncu.parse_csv(
        "\n".join([header.rstrip(), plan.replace("1,482.30", "4.5"), row, combine])
    )
    assert report.kernel == "flash_fwd_kernel_sm80"
    assert [name for name, _ in report.others] == ["flash_plan_kernel", "flash_fwd_combine_kernel"]
    assert report.others[0][1]["gpu__time_duration.sum"] == pytest.approx(4.5e-6)
    with pytest.raises(ToolError, match="expected a launch of a flash_fwd_kernel"):
        ncu.parse_csv(f"{header}{plan}\n{combine}")


@pytest.mark.parametrize("text", ["", "==ERROR== nothing\n", '"ID","Kernel Name"\n"",""\n'])
def test_a_report_without_our_kernel_is_an_error(text):
    with pytest.raises(ToolError, match="expected a launch of a flash_fwd_kernel"):
        ncu.parse_csv(text)


class Metric:
    def __init__(self, value, unit):
        self.value, self.unit = lambda: value, lambda: unit


class Action(dict):
    def __init__(self, name, **metrics):
        super().__init__(metrics)
        self.name, self.metric_names = lambda: name, lambda: list(metrics)


def test_the_module_is_read_the_same_way(monkeypatch, tmp_path):
    ours = Action(
        "flash_fwd_kernel_sm90",
        gpu__time_duration=Metric(2500, "nsecond"),
        launch__func=Metric("f", ""),
        dram__bytes=Metric(None, "byte"),
        sm__ratio=Metric(float("nan"), "%"),
    )
    plan = Action("flash_plan_kernel", gpu__time_duration=Metric(3, "usecond"))
    launches = [Action("fill"), plan, ours]
    ranges = types.SimpleNamespace(
        num_actions=lambda: len(launches), action_by_idx=launches.__getitem__
    )
    context = types.SimpleNamespace(num_ranges=lambda: 1, range_by_idx=lambda index: ranges)
    module = types.SimpleNamespace(load_report=lambda path: context)
    monkeypatch.setitem(sys.modules, "ncu_report", module)
    report = ncu.read(tmp_path / "any.ncu-rep")
    assert report.kernel == "flash_fwd_kernel_sm90"
    assert report.metrics == {"gpu__time_duration": pytest.approx(2.5e-6)}
    ((name, metrics),) = report.others
    assert name == "flash_plan_kernel"
    assert metrics == {"gpu__time_duration": pytest.approx(3e-6)}


def test_no_report_file(monkeypatch, tmp_path):
    if importlib.util.find_spec("ncu_report") is None:
        pytest.skip("NVIDIA's package ncu-report is not installed")
    with pytest.raises(ToolError, match="does not exist"):
        ncu.read(tmp_path / "none.ncu-rep")


def test_no_ncu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(ncu, "USUAL_PLACES", ())
    with pytest.raises(ToolError, match=r"expected Nsight Compute's program ncu.*--static"):
        ncu.find_ncu()
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    with pytest.raises(ToolError, match="expected Nsight Compute's program ncu"):
        ncu.read(tmp_path / "any.ncu-rep")


def test_the_newest_ncu_is_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    for version in ("2024.1.0", "2025.3.1"):
        program = tmp_path / version / "ncu"
        program.parent.mkdir()
        program.write_text("")
        program.chmod(0o755)
    monkeypatch.setattr(ncu, "USUAL_PLACES", (str(tmp_path / "*" / "ncu"),))
    assert ncu.find_ncu() == tmp_path / "2025.3.1" / "ncu"


def test_the_command_profiles_one_call_of_ours_and_leaves_clocks_alone():
    line = ncu.command(Path("ncu"), ["a.sum", "b.sum"], Path("x.ncu-rep"), ["python", "-m", "w"])
    words = dict(itertools.pairwise(line))
    assert words["--clock-control"] == "none"
    assert words["--kernel-name"] == "regex:^flash_"
    assert words["--profile-from-start"] == "off"
    assert words["--metrics"] == "a.sum,b.sum"
    assert line[-3:] == ["python", "-m", "w"]
