"""Who is named where CUDA transfers do not end, with events and a clock of the test's own."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch.distributed as dist

from flashcute.distributed import watch as module
from flashcute.distributed.watch import Watch

TIMEOUT = 60.0


class Event:
    def __init__(self, done: bool):
        self.done = done

    def query(self) -> bool:
        return self.done


@pytest.fixture
def watches():
    store = dist.HashStore()
    return [Watch(store, rank, 3, TIMEOUT) for rank in range(3)]


def add(watch: Watch, event: Event | None) -> None:
    """A call that the host left, with its event; None: one that the host is in."""
    watch.begin("ring", 0.0).event = event


def run(watches, seconds: range, silent=()) -> None:
    for now in seconds:
        for rank, watch in enumerate(watches):
            if rank not in silent:
                watch.poll(float(now))


def test_a_rank_that_made_fewer_calls_is_named(watches, caplog):
    for rank, watch in enumerate(watches):
        add(watch, Event(True))
        if rank != 1:
            add(watch, Event(False))
    run(watches, range(2, 45))
    assert not caplog.records
    run(watches, range(45, 60))
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL] * 2
    for record in caplog.records:
        assert "ring: call 2 has waited" in record.getMessage()
        assert "lost rank 1, which made 1 calls. NCCL's" in record.getMessage()


def test_a_rank_that_is_silent_is_named(watches, caplog):
    for watch in watches:
        add(watch, Event(False))
    run(watches, range(1, 5))
    run(watches, range(5, 60), silent=[2])
    assert len(caplog.records) == 2
    assert "lost rank 2, silent for" in caplog.text
    assert "rank 0" not in caplog.text
    assert "rank 1" not in caplog.text


def test_slow_calls_that_end_are_no_reason(watches, caplog):
    events = [Event(False) for _ in range(4)]
    for watch in watches:
        for event in events:
            add(watch, event)
    for i, event in enumerate(events):
        run(watches, range(40 * i, 40 * i + 40))
        event.done = True
    run(watches, range(160, 400))
    assert not caplog.records


def test_where_all_are_alive_none_is_named(watches, caplog):
    for watch in watches:
        add(watch, Event(False))
    run(watches, range(1, 60))
    assert len(caplog.records) == 3
    assert "lost no rank: all have made it" in caplog.text


def test_a_call_counts_while_the_host_is_in_it(watches, caplog):
    """A kernel's first load may wait for the GPU, and that for a transfer from a lost rank."""
    for rank in (0, 2):
        add(watches[rank], None)
    run(watches, range(1, 60), silent=[1])
    assert len(caplog.records) == 2
    assert "ring: call 1 has waited" in caplog.text
    assert "lost rank 1, which made 0 calls" in caplog.text or "lost rank 1, silent" in caplog.text


def test_an_event_that_cannot_be_queried_is_queried_again(watches, caplog):
    class Captured(Event):
        def query(self) -> bool:
            if not self.done:
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            return True

    event = Captured(False)
    for watch in watches:
        add(watch, event)
    run(watches, range(1, 20))
    assert [len(watch._calls) for watch in watches] == [1, 1, 1]
    event.done = True
    run(watches, range(20, 100))
    assert [len(watch._calls) for watch in watches] == [0, 0, 0] and not caplog.records


def test_the_thread_goes_on_until_its_watch_is_gone(monkeypatch):
    """Its first query is permitted beside captures of the thread that makes the calls."""
    said = []
    found = Watch(dist.HashStore(), 0, 1, TIMEOUT)
    found.interval = 0.0
    reference = weakref.ref(found)
    monkeypatch.setattr(module.torch.cuda, "set_device", said.append)
    monkeypatch.setattr(module, "_permit_queries", lambda: said.append("permitted"))

    class Last(Event):
        def query(self) -> bool:
            said.append("queried")
            if said.count("queried") == 1:
                raise RuntimeError("not permitted")
            nonlocal found
            found = None
            return True

    found.begin("ring", 0.0).event = Last(False)
    module._poll(reference, 3)
    assert said == [3, "permitted", "queried", "permitted", "queried"]


def test_a_call_that_raised_is_not_waited_for(watches, caplog):
    for watch in watches:
        watch.begin("ring", 0.0).failed = True
    run(watches, range(1, 100))
    assert not caplog.records
