"""The simulator on small kernels: results, counters and reports."""

import re

import pytest
from programs import UCONTEXT, program, run


@pytest.fixture(scope="module", params=["assembly", "ucontext"])
def cases(request):
    flags = UCONTEXT if request.param == "ucontext" else ()
    return program("simulator_cases", *flags)


@pytest.mark.parametrize(
    "case",
    [
        *("gemm_fp16", "gemm_bf16", "gemm_conflicts", "shuffles", "produce_consume"),
        *("fresh_smem", "copies_late", "copies_eager", "indices", "conversions", "smem_limits"),
    ],
)
def test_result(cases, case):
    for seed in range(5):
        assert run(cases, case, seed)["code"] == "0"


def test_counters_of_a_product(cases):
    swizzled, plain = run(cases, "gemm_fp16"), run(cases, "gemm_conflicts")
    # 64x64x64 in m16n8k16 steps; A in 16 ldmatrix.x4, B in 16 for each of the 4 warps.
    for counters in (swizzled, plain):
        assert counters["mma"] == str(4 * 8 * 4)
        assert counters["ldmatrix"] == str(16 + 4 * 16)
        assert counters["cp_async_bytes"] == str(2 * 64 * 64 * 2)
        assert counters["cp_async_sectors"] == str(2 * 64 * 64 * 2 // 32)
        assert counters["block_barriers"] == "1"
    assert swizzled["ldmatrix_conflicts"] == "0"
    # Rows of 128 bytes, unswizzled: the 8 rows of each matrix lie in the same 4 banks.
    assert plain["ldmatrix_conflicts"] == str(7 * 4 * (16 + 4 * 16))


@pytest.mark.parametrize(
    ("case", "code", "report"),
    [
        ("deadlock", 719, r"deadlock: warp 0 lanes 0xffffffff wait at barrier \d+; warp 1 lanes"),
        ("unequal_counts", 719, r"expects (64|32) threads, but one arrives that expects"),
        ("divergent_barrier", 719, r"block \(0, 0, 0\), warp \d, lane \d+: barrier divergence"),
        ("missing_lane", 719, r"warp 0, lane \d+: missing lane"),
        ("foreign_mask", 719, r"warp 0, lane 3: the lane is not in its own mask 0x00000007"),
        ("outside_smem", 700, r"ldmatrix: 16 bytes at offset \d+ lie outside the block's 64 bytes"),
        ("misaligned", 716, r"offset 8 is not a multiple of 16"),
        ("unmodelled", 801, r"not covered: .*SM80_16x8x16_F16F16F16F16_TN"),
        ("hang", 702, r"budget"),
    ],
)
def test_report(cases, case, code, report):
    for seed in range(5):
        found = run(cases, case, seed)
        assert found["code"] == str(code)
        assert re.search(report, found["error"]), found["error"]


def test_same_seed_same_report(cases):
    assert run(cases, "missing_lane", 7) == run(cases, "missing_lane", 7)
