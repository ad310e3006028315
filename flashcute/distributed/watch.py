"""Names the rank that CUDA transfers wait for, before NCCL's watchdog ends the process.

The host does not wait for transfers of CUDA tensors, so no call can raise an error where one never
ends: after the group's timeout, NCCL's watchdog aborts the process, and names no rank. A thread of
each process counts the calls of :mod:`flashcute.distributed` that it began, keeps that number in
the group's store, and looks whether the GPU finished them. Where one takes most of the timeout, it
logs which ranks have not made that call or have stopped counting.

A call counts from its begin on, since the host may wait, too: loading a kernel or allocating memory
can wait for the GPU, and then for a transfer that never ends. The thread calls no CUDA function: it
would wait behind such a call while it holds Python's lock, and would break the capture of a graph.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from .communication import group_store, group_timeout

logger = logging.getLogger("flashcute")

_KEY = "flashcute/calls"
_SHARE = 0.8  # of the timeout, after which a call counts as stuck
_SLOTS = 4096  # calls in flight whose ends can be told apart


@dataclasses.dataclass
class _Call:
    fn: str
    start: float
    number: int  # from 1 on
    left: bool = False  # whether the host has left the call
    failed: bool = False


class Ends:
    """Tells which calls the GPU has finished: at its end each copies its number to host memory."""

    def __init__(self):
        # An inference tensor could not be written to outside of that mode.
        with torch.inference_mode(False):
            self._numbers = torch.zeros(_SLOTS, dtype=torch.int64, device="cpu", pin_memory=True)

    def enqueue(self, number: int) -> None:
        """Enqueues the copy of ``number`` on the current stream, behind all that it holds."""
        slot = self._numbers[number % _SLOTS]
        slot.copy_(torch.full((), number, dtype=torch.int64, device="cuda"), non_blocking=True)

    def __call__(self, number: int) -> bool:
        return int(self._numbers[number % _SLOTS]) >= number


class Watch:
    """The calls of one process in one group."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        timeout: float,
        has_ended: Callable[[int], bool],
    ):
        """Takes the group's store and its timeout in seconds; starts nothing.

        ``has_ended`` tells for the number of a call that the host has left whether its work is
        done.
        """
        self.interval = min(max(timeout / 60, 0.2), 10.0)
        self._store, self._rank, self._world = store, rank, world
        self._limit = _SHARE * timeout
        self._has_ended = has_ended
        self._calls: collections.deque[_Call] = collections.deque()
        self._made = self._beats = 0
        self._progress = 0.0  # when a call last ended
        self._seen: dict[int, tuple[str, float]] = {}  # what each rank wrote last, and since when
        self._reported = False

    def begin(self, fn: str, now: float) -> _Call:
        """Registers a call that begins; its caller sets ``left`` or ``failed`` on the result."""
        self._made += 1
        call = _Call(fn, now, self._made)
        self._calls.append(call)
        return call

    def _is_over(self, call: _Call) -> bool:
        return call.failed or (call.left and self._has_ended(call.number))

    def poll(self, now: float) -> None:
        """Looks at the oldest call; must be called every :attr:`interval` seconds."""
        self._beats += 1
        self._store.set(f"{_KEY}/{self._rank}", f"{self._made} {self._beats}")
        while self._calls and self._is_over(self._calls[0]):
            self._calls.popleft()
            self._progress = now
        if not self._calls:
            return
        waited = now - max(self._calls[0].start, self._progress)
        if waited > self._limit / 2:
            self._read(now)
        if waited > self._limit and not self._reported:
            self._reported = True
            logger.critical(self._report(waited, now))

    def _read(self, now: float) -> None:
        for rank in range(self._world):
            key = f"{_KEY}/{rank}"
            text = self._store.get(key).decode() if self._store.check([key]) else "0 0"
            if self._seen.get(rank, ("", 0.0))[0] != text:
                self._seen[rank] = text, now

    def _report(self, waited: float, now: float) -> str:
        call = self._calls[0]
        found = []
        for rank, (text, since) in sorted(self._seen.items()):
            made = int(text.split()[0])
            if rank == self._rank:
                continue
            if now - since > 3 * self.interval:
                found.append(f"rank {rank}, silent for {now - since:.0f} s")
            elif made < call.number:
                found.append(f"rank {rank}, which made {made} calls")
        lost = "; ".join(found) or "no rank: all have made it and are alive, so a transfer hangs"
        return (
            f"{call.fn}: call {call.number} has waited {waited:.0f} s for other ranks; lost "
            f"{lost}. NCCL's watchdog will end this process: restart all of the group, from a "
            "checkpoint"
        )


_watches: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def watch(fn: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Counts the block as a call, whose work is what the current CUDA stream holds at its end."""
    if torch.cuda.is_current_stream_capturing():
        yield
        return
    if group not in _watches:
        ends = Ends()
        store, timeout = group_store(group), group_timeout(group)
        _watches[group] = Watch(store, group.rank(), group.size(), timeout, ends), ends
        threading.Thread(
            target=_poll,
            args=(weakref.ref(_watches[group][0]),),
            name="flashcute watch",
            daemon=True,
        ).start()
    found, ends = _watches[group]
    call = found.begin(fn, time.monotonic())
    try:
        yield
        ends.enqueue(call.number)
    except BaseException:
        call.failed = True
        raise
    call.left = True


def _poll(reference: weakref.ref) -> None:
    """Polls a watch until the group or its store is gone."""
    while (found := reference()) is not None:
        try:
            found.poll(time.monotonic())
        except RuntimeError:
            return
        interval = found.interval
        del found
        time.sleep(interval)
