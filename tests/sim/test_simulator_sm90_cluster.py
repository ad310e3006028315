"""Clusters in the simulator: barrier.cluster, other blocks' shared memory, multicast."""

import re

import pytest
from programs import program, race_of, run, with_racecheck


@pytest.fixture(scope="module")
def cases():
    return program("simulator_cases_sm90_cluster")


@pytest.mark.parametrize(
    "case",
    [
        *("identity", "sizes", "exchange", "send_late", "send_random", "send_eager"),
        *("deliver_late", "deliver_random", "deliver_eager"),
        *("arrive", "arrive_polled", "arrive_last", "atomics", "dependent"),
        *("multicast_late", "multicast_random", "multicast_eager", "multicast_4"),
        "multicast_loads",
    ],
)
def test_result(cases, case):
    for seed in range(5):
        found = run(cases, case, seed)
        assert found["code"] == "0", found["error"]


@pytest.mark.parametrize(("case", "blocks"), [("multicast_late", 2), ("multicast_4", 4)])
def test_counters_of_a_multicast(cases, case, blocks):
    clusters, rounds, tile = 2, 3, 64 * 64 * 2
    counters = run(cases, case)
    assert counters["tma_loads"] == str(clusters * rounds * blocks)
    # Each cluster reads a tile once a round; all of its blocks receive it.
    assert counters["tma_bytes"] == str(clusters * rounds * tile)
    assert counters["tma_multicast_bytes"] == str(clusters * rounds * tile * (blocks - 1))
    assert counters["wgmma"] == str(clusters * rounds * blocks * 64 // 16)
    assert counters["cluster_barriers"] == str(clusters * 2)


def test_counters_of_an_exchange(cases):
    assert run(cases, "exchange")["cluster_bytes"] == str(2 * 8 * 64 * 4)
    assert run(cases, "send_late")["cluster_bytes"] == str(64 * 4)
    assert run(cases, "deliver_late")["cluster_bytes"] == str(64 * 4)


def test_same_seed_same_run(cases):
    assert run(cases, "multicast_released_early", 3) == run(cases, "multicast_released_early", 3)


_ENDED = "has ended, and its shared memory with it"


@pytest.mark.parametrize(
    ("case", "report"),
    [
        ("exchange_not_begun", r"mapa: the thread is not ordered after the start of the block"),
        ("exchange_ended", rf"block \((0|8), 0, 0\), .*: the block of rank 1 {_ENDED}"),
        ("exchange_outside", r"mapa: there is no block of rank 8 in a cluster of 8"),
        ("send_too_many_bytes", r"transaction bytes: .* mbarrier 0 \(at byte 0 of rank 1\)"),
        ("send_to_nobody", r"st.async: there is no block of rank 2 in a cluster of 2"),
        ("deliver_unfenced", r"fence.proxy.async"),
        ("deliver_overwritten", r"overwritten too early: the source of a copy for mbarrier 0"),
        ("deliver_unexpected", r"transaction bytes: .* mbarrier 0"),
        ("deliver_to_nobody", r"cp.async.bulk: there is no block of rank 2 in a cluster of 2"),
        (
            "arrive_unawaited",
            rf"rank 0 {_ENDED}|not ordered after the accesses .* by warp 0 of the block of rank \d",
        ),
        ("arrive_outside", r"mbarrier.arrive: there is no block of rank 4 in a cluster of 4"),
        (
            "arrive_unfenced",
            r"mbarrier.(arrive|try_wait): the thread is not ordered after the init",
        ),
        ("barrier_twice", r"barrier.cluster: the thread arrives twice without waiting"),
        ("barrier_unarrived", r"barrier.cluster: the thread waits without having arrived"),
        ("barrier_missing_lane", r"deadlock: .*wait at __syncwarp.*wait at barrier.cluster.arrive"),
        (
            "barrier_elsewhere",
            r"deadlock: rank 0: .*wait at barrier.cluster.*\. Rank 1: .*wait at barrier 3.*"
            r"The cluster's barrier: 96 of 128 threads arrived",
        ),
        ("multicast_released_early", r"overwritten too early: TMA .* of rank \d\) .* a wgmma of"),
        ("dependent_untold", r"block \(1, 0, 0\), .*: load of in before griddepcontrol.wait"),
        (
            "multicast_loads_unfenced",
            r"overwritten too early: TMA .* of rank \d\) .* a load of warpgroup 0, warp \d, lane 0 "
            r"reads; no fence.proxy.async follows it in that thread",
        ),
        ("multicast_outside", r"TMA multicast: there is no block of rank 2 in a cluster of 2"),
        ("multicast_nowhere", r"TMA multicast: to no block"),
        ("multicast_unawaited", rf"ends while copies are under way|{_ENDED}"),
        ("multicast_unexpected", r"deadlock: rank 0: .*\. Rank 1: .* 0 of 1 arrived, -8192 bytes"),
    ],
)
def test_report(cases, case, report):
    for seed in range(5):
        found = run(cases, case, seed)
        assert found["code"] == "719"
        assert re.search(report, found["error"]), found["error"]


def test_races_between_blocks_are_found():
    cases = with_racecheck("simulator_cases_sm90_cluster")
    assert race_of(cases, "exchange") == ""
    assert "data race" in race_of(cases, "exchange_unordered")
    # No race is reported in any order of the SMs.
    assert all(race_of(cases, "published", seed) == "" for seed in range(5))
    assert "data race" in race_of(cases, "unpublished")
