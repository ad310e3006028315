"""Small kernels with Hopper's instructions in the simulator: results, counters and reports."""

import re

import pytest
from programs import program, run

from flashcute.jit import sources
from flashcute.sim.build import simulator_dir


@pytest.fixture(scope="module")
def cases():
    return program("simulator_cases_sm90")


@pytest.mark.parametrize(
    "case",
    [
        *("k_128", "k_64", "k_32", "k_none", "mn_128", "mn_64", "mn_32", "mn_none"),
        *("registers_256", "registers_32", "product_eager", "product_late", "read_in_flight"),
        *("boxes", "encoding", "ring", "elect", "registers_fit", "numbers"),
        *("sums", "floats"),
    ],
)
def test_result(cases, case):
    for seed in range(5):
        assert run(cases, case, seed)["code"] == "0"


def test_counters_of_a_product(cases):
    assert run(cases, "k_128")["wgmma"] == str(2 * 64 // 16)


@pytest.mark.parametrize("case", ["numbers", "more_blocks_than_run"])
def test_atomics_of_blocks_take_turns_by_seed(cases, case):
    orders = [[run(cases, case, seed)["order"] for _ in range(3)] for seed in range(6)]
    assert all(len(set(of_one_seed)) == 1 for of_one_seed in orders)
    assert all(sorted(order) == list("00112233") for order, *_ in orders)
    assert len({order for order, *_ in orders}) > 1


def test_sums_of_blocks_are_added_up_in_the_order_of_the_seed(cases):
    orders = [[run(cases, "sums", seed)["order"] for _ in range(3)] for seed in range(8)]
    assert all(len(set(of_one_seed)) == 1 for of_one_seed in orders)
    assert len({order for order, *_ in orders}) > 1


_AT_BARRIER_0 = r"mbarrier 0 \(at byte 0\)"
_UNAWAITED = r"lane \d+: {} at byte \d+ without having waited for phase 1 of mbarrier 0"


@pytest.mark.parametrize(
    ("case", "code", "report"),
    [
        ("no_proxy_fence", 719, r"warpgroup 0: a wgmma reads byte \d+, stored .* without fence"),
        ("write_in_flight", 719, r"warpgroup 0, thread \d+: a register of a wgmma in flight"),
        ("write_a_in_flight", 719, r"warpgroup 0, thread \d+: a register of a wgmma in flight"),
        ("no_wgmma_fence", 719, r"warpgroup 0: a wgmma without wgmma.fence since the last wait"),
        ("no_commit", 719, r"the block ends while wgmmas of warpgroup 0 are in flight"),
        ("different_wgmmas", 719, r"warpgroup 0: its threads issue different wgmmas"),
        ("unwritten", 719, r"warpgroup 0: a wgmma reads byte \d+, which has not been written"),
        ("overlapping_shapes", 719, r"accumulators overlap those of one of another shape"),
        ("uninitialised", 719, r"mbarrier.arrive: there is no mbarrier at byte 0"),
        ("unsynchronised", 719, r"no mbarrier at byte 0|the thread is not ordered after"),
        ("initialised_twice", 719, rf"mbarrier.init: {_AT_BARRIER_0} is there already"),
        ("overwritten", 719, rf"{_AT_BARRIER_0} has been overwritten"),
        ("arrives_twice", 719, rf"one arrival more than the 1 of a phase of {_AT_BARRIER_0}"),
        (
            "never_completes",
            719,
            r"deadlock: .*warp 1 lanes 0xffffffff wait for parity 1 of mbarrier 0.*"
            rf"{_AT_BARRIER_0}: in phase 2, 0 of 32 arrived, 0 bytes due, 32 threads wait",
        ),
        (
            "never_completes_asking",
            719,
            r"deadlock: 65536 tests of mbarriers in a row without progress; .*"
            rf"{_AT_BARRIER_0}: in phase 2, 0 of 32 arrived, 0 bytes due",
        ),
        *((f"unawaited_load{mode}", 719, _UNAWAITED.format("load")) for mode in ("", "_eager")),
        *(
            (f"unawaited_ldmatrix{mode}", 719, _UNAWAITED.format("ldmatrix"))
            for mode in ("", "_eager")
        ),
        ("no_descriptor", 719, r"TMA: not a descriptor of cuTensorMapEncodeTiled"),
        (
            "registers_overdrawn",
            719,
            r"deadlock: .*wait for registers.*warpgroup 0: 32 registers.*"
            r"168 registers, wants 240.*; \d+ registers free",
        ),
        ("registers_raised_to_less", 719, r"setmaxnreg.inc to 160: warpgroup \d has 168"),
        ("registers_lowered_to_more", 719, r"setmaxnreg.dec to 176: warpgroup 0 has 168"),
        ("half_a_warpgroup", 719, r"missing threads?: .*warpgroup \d"),
        ("sums_misaligned", 716, r"red of 16 bytes at a global address that is no multiple"),
    ],
)
def test_report(cases, case, code, report):
    for seed in range(5):
        found = run(cases, case, seed)
        assert found["code"] == str(code)
        assert re.search(report, found["error"]), found["error"]


@pytest.mark.parametrize("header", ["arch_sm90.h", "wgmma_sm90.h"])
def test_header_offers_what_the_one_it_stands_for_does(header):
    names = [
        set(re.findall(r"(?:CUTE_DEVICE|inline|^)[\w ]* (\w+)\([^)]*\) ?\{", text, re.MULTILINE))
        for folder in (sources.kernel_include_dir(), simulator_dir() / "include")
        for text in [(folder / header).read_text()]
    ]
    assert len(names[0]) >= 4
    of_ptx = {"ss", "rs", "smem_address_at"}  # operands
    assert names[0] - of_ptx == names[1] - of_ptx
