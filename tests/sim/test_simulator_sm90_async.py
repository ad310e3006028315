"""Hopper's asynchronous instructions in the simulator: results, counters and reports."""

import re

import pytest
from programs import program, race_of, run, with_racecheck


@pytest.fixture(scope="module")
def cases():
    return program("simulator_cases_sm90_async")


@pytest.mark.parametrize(
    "case",
    [
        *("dependent_late", "dependent_random", "dependent_eager", "dependent_by_mbarrier"),
        "dependent_by_asking",
        *("independent", "independent_never", "early_plain_load"),
        *("stmatrix", "epilogue", "epilogue_plain", "boxes_out"),
        *("store_late", "store_random", "store_eager", "store_visible", "store_only_read"),
        *("loaded_over", "loaded_over_each_arrives", "loaded_over_by_barrier"),
        "loaded_over_one_lane",
    ],
)
def test_result(cases, case):
    for seed in range(5):
        assert run(cases, case, seed)["code"] == "0"


def test_counters_of_an_epilogue(cases):
    swizzled, plain = run(cases, "epilogue"), run(cases, "epilogue_plain")
    for counters in (swizzled, plain):
        # 64 x 64 elements, four 8 x 8 matrices at a time.
        assert counters["stmatrix"] == str(64 * 64 // 256)
        assert counters["tma_stores"] == "1"
        assert counters["tma_store_bytes"] == str(64 * 64 * 2)
        assert counters["tma_store_outside_bytes"] == "0"
    assert swizzled["stmatrix_conflicts"] == "0"
    assert swizzled["stmatrix_wavefronts"] == str(4 * 16)
    # Rows of 128 bytes, unswizzled: the 8 rows of each matrix lie in the same 4 banks.
    assert plain["stmatrix_conflicts"] == str(7 * 4 * 16)
    assert plain["stmatrix_wavefronts"] == str(8 * 4 * 16)


_TOO_EARLY = "overwritten too early:"
_ITS_STORE = "a TMA store of warp 0, lane 0"
_LOADED = (
    rf"^block \(0, 0, 0\), warp 1, lane 0: {_TOO_EARLY} TMA for mbarrier 0 \(at byte 0\) writes "
    r"byte 1024, which a load of warpgroup 0, warp 0, lane {} reads; {}"
)
_UNFENCED = "no fence.proxy.async follows it in that thread"
_UNORDERED = "its thread is not ordered after the fence.proxy.async that follows the load"
_ANY = f"({_UNFENCED}|{_UNORDERED})"
_THREAD_40 = r"block \(\d, 0, 0\), warp 1, lane 8: programmatic dependent launch: "


@pytest.mark.parametrize(
    ("case", "code", "report"),
    [
        ("early_load", 719, rf"^{_THREAD_40}load of in before griddepcontrol.wait"),
        ("early_load_eager", 719, rf"^{_THREAD_40}load of in before griddepcontrol.wait"),
        ("early_store", 719, rf"^{_THREAD_40}store of out before griddepcontrol.wait"),
        ("early_plain_store", 719, r"^programmatic dependent launch: byte 160 of out was written"),
        ("early_async_copy", 719, rf"^{_THREAD_40}cp.async of in before griddepcontrol.wait"),
        ("early_box", 719, rf"^{_THREAD_40}TMA of boxes before griddepcontrol.wait"),
        ("early_atomic", 719, rf"^{_THREAD_40}atomic of counter before griddepcontrol.wait"),
        ("untold", 719, r"warp 1, lane \d+: programmatic dependent launch: load of in before"),
        ("never_waits", 719, r"programmatic dependent launch: load of in before"),
        ("idle", 719, r"^programmatic dependent launch: no thread executes griddepcontrol.wait"),
        ("stmatrix_outside", 700, r"stmatrix: 16 bytes at offset \d+ lie outside"),
        ("stmatrix_misaligned", 716, r"stmatrix: shared memory offset \d+ is not a multiple of 16"),
        ("stmatrix_missing_lane", 719, r"missing lane.*stmatrix"),
        ("store_without_fence", 719, r"a TMA store reads byte 0, stored by .* without fence"),
        ("store_unwritten", 719, r"a TMA store reads byte 0, which has not been written"),
        ("store_unawaited", 719, r"exits while a TMA store .* no cp.async.bulk.wait_group"),
        ("store_uncommitted", 719, r"exits while a TMA store .* no cp.async.bulk.commit_group"),
        ("store_weakly_awaited", 719, r"exits while a TMA store .* no cp.async.bulk.wait_group"),
        (
            "store_overwritten",
            719,
            rf"{_TOO_EARLY} byte \d+, which {_ITS_STORE} reads, has changed",
        ),
        ("store_overwritten_eager", 719, rf"{_TOO_EARLY} byte \d+, which {_ITS_STORE} reads"),
        ("store_loaded_over", 719, rf"{_TOO_EARLY} TMA for .* byte 128, which {_ITS_STORE}"),
        (
            "store_untold",
            719,
            rf"{_TOO_EARLY} TMA for .* byte 0, which {_ITS_STORE}|without having",
        ),
        ("store_of_unawaited_load", 719, r"a TMA store reads byte 0 without having waited for"),
        ("store_outside", 700, r"a TMA store writes outside every tensor"),
        ("loaded_over_unfenced", 719, _LOADED.format("0", _UNFENCED)),
        ("loaded_over_unfenced_lane", 719, _LOADED.format("5", _UNFENCED)),
        ("loaded_over_fence_before", 719, _LOADED.format("0", _UNFENCED)),
        ("loaded_over_fence_behind", 719, _LOADED.format("0", _ANY)),
        ("loaded_over_one_fences", 719, _LOADED.format("1", _UNFENCED)),
        ("loaded_over_unordered", 719, _LOADED.format("1", _ANY)),
        (
            "loaded_over_too_early",
            719,
            rf"{_LOADED.format('0', _ANY)}|ldmatrix at byte \d+ without having waited for",
        ),
    ],
)
def test_report(cases, case, code, report):
    for seed in range(5):
        found = run(cases, case, seed)
        assert found["code"] == str(code)
        assert re.search(report, found["error"]), found["error"]


def test_races_are_found():
    cases = with_racecheck("simulator_cases_sm90_async")
    assert race_of(cases, "epilogue") == ""
    assert race_of(cases, "dependent_late") == ""
    # The race is found in either order of the two accesses.
    assert "data race" in race_of(cases, "epilogue_unordered", seed=3)
