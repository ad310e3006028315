"""The rank that is named if CUDA transfers do not end, with simulated events and clock."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch
import torch.distributed as dist

from flashcute.distributed import watch as module
from flashcute.distributed.watch import Watch

TIMEOUT = 60.0


class Call:
    """A call whose work on the GPU is done or not."""

    def __init__(self, done: bool):
        self.done = done


@pytest.fixture
def watches():
    store = dist.HashStore()
    found = []
    for rank in range(3):
        calls: dict[int, Call] = {}
        found.append(Watch(store, rank, 3, TIMEOUT, lambda n, calls=calls: calls[n].done))
        found[-1].calls = calls
    return found


def add(watch: Watch, call: Call | None) -> None:
    """Adds a call that the host has left, or with None one that the host is in."""
    begun = watch.begin("ring", 0.0)
    begun.left = call is not None
    watch.calls[begun.number] = call


def run(watches, seconds: range, silent=()) -> None:
    for now in seconds:
        for rank, watch in enumerate(watches):
            if rank not in silent:
                watch.poll(float(now))


def test_a_rank_that_made_fewer_calls_is_named(watches, caplog):
    for rank, watch in enumerate(watches):
        add(watch, Call(True))
        if rank != 1:
            add(watch, Call(False))
    run(watches, range(2, 45))
    assert not caplog.records
    run(watches, range(45, 60))
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL] * 2
    for record in caplog.records:
        assert "ring: call 2 has waited" in record.getMessage()
        assert "lost rank 1, which made 1 calls. NCCL's" in record.getMessage()


def test_a_rank_that_is_silent_is_named(watches, caplog):
    for watch in watches:
        add(watch, Call(False))
    run(watches, range(1, 5))
    run(watches, range(5, 60), silent=[2])
    assert len(caplog.records) == 2
    assert "lost rank 2, silent for" in caplog.text
    assert "rank 0" not in caplog.text
    assert "rank 1" not in caplog.text


def test_slow_calls_that_end_are_no_reason(watches, caplog):
    calls = [Call(False) for _ in range(4)]
    for watch in watches:
        for call in calls:
            add(watch, call)
    for i, call in enumerate(calls):
        run(watches, range(40 * i, 40 * i + 40))
        call.done = True
    run(watches, range(160, 400))
    assert not caplog.records


def test_where_all_are_alive_none_is_named(watches, caplog):
    for watch in watches:
        add(watch, Call(False))
    run(watches, range(1, 60))
    assert len(caplog.records) == 3
    assert "lost no rank: all have made it" in caplog.text


def test_a_call_counts_while_the_host_is_in_it(watches, caplog):
    """A kernel's first load may wait for the GPU, which may wait for a transfer of a lost rank."""
    for rank in (0, 2):
        add(watches[rank], None)
    run(watches, range(1, 60), silent=[1])
    assert len(caplog.records) == 2
    assert "ring: call 1 has waited" in caplog.text
    assert "lost rank 1, which made 0 calls" in caplog.text or "lost rank 1, silent" in caplog.text


def test_the_thread_goes_on_until_its_watch_is_gone():
    """The thread also calls nothing of CUDA, as it runs here without."""
    asked = []
    found = Watch(dist.HashStore(), 0, 1, TIMEOUT, lambda number: asked.append(number) or last())

    def last() -> bool:
        nonlocal found
        if len(asked) < 3:
            return False
        found = None
        return True

    found.interval = 0.0
    found.begin("ring", 0.0).left = True
    module._poll(weakref.ref(found))
    assert asked == [1, 1, 1]


def test_calls_from_several_streams_end_in_any_order(watches, caplog):
    calls = [Call(False) for _ in range(3)]
    for call in calls:
        add(watches[0], call)
    for call in reversed(calls):
        assert len(watches[0]._calls) == 3
        call.done = True
        if call is not calls[0]:
            watches[0].poll(1.0)
    watches[0].poll(2.0)
    assert not watches[0]._calls


def test_an_end_is_told_by_its_number(monkeypatch):
    """The test runs on the CPU, whose copies are done at once. Slots are used again."""

    def on_the_cpu(make):
        def call(*args, device, pin_memory=False, **options):
            return make(*args, **options)

        return call

    for name in ("zeros", "full"):
        monkeypatch.setattr(torch, name, on_the_cpu(getattr(torch, name)))
    with torch.inference_mode():
        ends = module.Ends()
    assert not ends(1)
    ends.enqueue(1)
    assert ends(1) and not ends(2) and not ends(1 + module._SLOTS)
    with torch.inference_mode():
        ends.enqueue(1 + module._SLOTS)
    assert ends(1 + module._SLOTS) and ends(1) and not ends(1 + 2 * module._SLOTS)


def test_a_call_that_raised_is_not_waited_for(watches, caplog):
    for watch in watches:
        watch.begin("ring", 0.0).failed = True
    run(watches, range(1, 100))
    assert not caplog.records
