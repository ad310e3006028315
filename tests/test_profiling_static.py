"""The static model: the cost of an instruction for each unit, and of a whole loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashcute import heuristics
from flashcute.profiling import machine, sass, static, text
from flashcute.profiling.disassembly import Binary

DATA = Path(__file__).parent / "data" / "sass"
H100 = machine.machine((9, 0))


def binary(name, target, registers=168, stack_bytes=0):
    (function,) = sass.parse((DATA / f"{name}.sass").read_text())
    return Binary(target, function, registers, 1024, stack_bytes)


def instruction(opcode, operands=""):
    return sass.Instruction(0, "", opcode, operands)


@pytest.mark.parametrize(
    ("opcode", "operands", "clocks"),
    [
        ("LDSM.16.M88.4", "R4, [R8]", 4),
        ("LDSM.16.MT88.4", "R4, [R8]", 4),
        ("LDSM.16.M88", "R4, [R8]", 1),
        ("STSM.16.M88.2", "[R8], R4", 2),
        ("LDS.128", "R4, [R8]", 4),
        ("LDS", "R4, [R8]", 1),
        ("STS.64", "[R8], R4", 2),
        ("LDGSTS.E.BYPASS.LTC128B.128", "[R1], [R2.64]", 4),
        ("FFMA", "R1, R2, R3, R4", 0),
    ],
)
def test_shared_memory_clocks(opcode, operands, clocks):
    assert static.smem_clocks(instruction(opcode, operands)) == clocks


@pytest.mark.parametrize("n", [64, 128, 192, 256])
def test_wgmma_reads_what_the_operands_hold(n):
    # Four warps issue the instruction; at the tensor cores' peak it takes n / 2 clocks of the SM.
    both = instruction(f"HGMMA.64x{n}x16.F32.BF16", "R24, gdesc[UR16], R24")
    b_only = instruction(f"HGMMA.64x{n}x16.F32.BF16", "R56, R24, gdesc[UR12], R56")
    assert 4 * static.smem_clocks(both) * 128 / (n / 2) == pytest.approx(64 + 4096 / n)
    assert 4 * static.smem_clocks(b_only) * 128 / (n / 2) == pytest.approx(64)


def test_clocks_of_units():
    code = [
        instruction("MUFU.EX2", "R0, R1"),
        instruction("FFMA.FTZ", "R0, R1, R2, R3"),
        instruction("FMNMX", "R0, R1, R2, PT"),
        instruction("HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR16], R24"),
        instruction("UIADD3", "UR4, UR4, 0x1, URZ"),
    ]
    clocks = static.loop_clocks(code, H100)
    # Four warps run on the 16, 128 and 64 lanes of an SM. 64 x 128 x 16 multiply-adds run at 2048 a
    # clock, and the wgmma reads 2 KB of A and 4 KB of B at 128 bytes a clock.
    assert clocks == {
        **{"tensor": 64.0, "issue": 5.0, "mufu": 8.0, "fp32": 1.0, "alu": 2.0},
        "smem": pytest.approx(2 * (64 + 128) * 16 / 128),
    }


def test_fillers_cost_an_issue_slot_only():
    clocks = static.loop_clocks([sass.Instruction(0, "!PT", "LDS", "RZ, [RZ]")], H100)
    assert {name: value for name, value in clocks.items() if value} == {"issue": 1.0}


def test_mma_sync_has_a_lower_roof_on_hopper():
    code = [instruction("HMMA.16816.F32.BF16", "R4, R8, R12, R4")]
    ampere = static.loop_clocks(code, machine.machine((8, 0)))["tensor"]
    hopper = static.loop_clocks(code, H100)["tensor"]
    assert ampere == 8
    assert hopper == pytest.approx(4 / 0.63)


def test_profile_of_the_wgmma_loop():
    report = static.profile(binary("wgmma_loop", "sm_90a"), (9, 0), head_dim=64)
    loop, estimate = report["loop"], report["estimate"]
    assert loop["score_elements_per_warp"] == 16 * 64
    assert loop["mix_per_element"]["MUFU"] == 1.0
    assert loop["mix_per_element"]["F2FP"] == 0.5
    assert sum(loop["groups_per_element"].values()) == pytest.approx(loop["per_element"], abs=0.01)
    # With d = 64 the 4 d FLOPs of a score at 2048 x 2 a clock take as long as its exponential at 16
    # a clock.
    assert estimate["percent_of_tensor_peak_time"]["tensor"] == 100
    assert estimate["percent_of_tensor_peak_time"]["mufu"] == 100
    assert estimate["percent_of_tensor_peak_time"]["smem"] == 75
    assert "mufu" in report["notes"][-1]
    assert report["occupancy"] is None
    assert report["resources"]["spill_bytes"] is None
    printed = text.static_report(report)
    assert "240 held by those that claim more" in printed
    assert "spilled bytes       -" in printed


def test_profile_of_an_sm80_kernel():
    config = heuristics.fwd_config("fp16", 32, False, (8, 0))
    kernel = binary("flash_fwd_hdim32_fp16_sm80_loop", "sm_80", registers=128, stack_bytes=8)
    report = static.profile(kernel, (8, 0), 32, config, spill_bytes=8, log="")
    assert report["kernel"] == config.full_name
    assert report["loop"]["score_elements_per_warp"] == 32 * config.tile_n
    assert report["occupancy"]["ctas_per_sm"] == 4
    # A warp has 1024 scores of 2 x 32 multiply-adds. An A100's tensor cores and its MUFU both take
    # 256 clocks for them, and the shared memory 4 x 4 for each of 12 ldmatrix and 2 copies.
    clocks = report["estimate"]["clocks"]
    assert (clocks["tensor"], clocks["mufu"], clocks["smem"]) == (256.0, 256.0, 16.0 * (12 + 2))
    assert clocks["issue"] == report["loop"]["instructions"]
    assert report["estimate"]["bound_by"] == "issue"
    assert report["notes"][-1].endswith("kept busy at once: tensor, mufu, smem")
    assert report["notes"][0].startswith("local memory is used: 8 bytes of stack, 8 bytes")


def test_what_ptxas_says_of_wgmma_is_passed_on():
    kernel = binary("wgmma_loop", "sm_90a")
    log = "ptxas info    : (C7510) Potential Performance Loss: wgmma is serialized\n"
    report = static.profile(kernel, (9, 0), 64, log=log)
    assert report["notes"][0] == log.strip()


def test_a_gpu_without_known_rates_gets_no_estimate():
    report = static.profile(binary("wgmma_loop", "sm_90a"), (12, 0), 64)
    assert report["estimate"] is None
    assert report["loop"] is not None
    assert "clocks of a subpartition" not in text.static_report(report)


def test_code_without_a_loop_is_said():
    function = sass.Function("f", (instruction("EXIT"),))
    report = static.profile(Binary("sm_90", function, 32, 0, 0), (9, 0), 64)
    assert report["loop"] is None
    assert report["notes"] == ["no loop holds a matrix instruction"]
    assert "main loop" not in text.static_report(report)


def test_comparison_shows_what_differs():
    a = static.profile(binary("wgmma_loop", "sm_90a", registers=168), (9, 0), 64)
    b = static.profile(binary("wgmma_loop", "sm_90a", registers=240), (9, 0), 64)
    assert text.comparison([a, a]) == "no figure differs"
    (row,) = [x for x in text.comparison([a, b]).splitlines() if "resources" in x]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *("resources.registers", "168", "240", "1.429")
    ]
