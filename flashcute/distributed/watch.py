"""Names the rank that CUDA transfers wait for, before NCCL's watchdog ends the process.

The host does not wait for transfers of CUDA tensors, so no call can raise an error where one never
ends: after the group's timeout, NCCL's watchdog aborts the process, and names no rank. A thread of
each process counts the calls of :mod:`flashcute.distributed` that it began, keeps that number in
the group's store, and looks whether the GPU finished them. Where one takes most of the timeout, it
logs which ranks have not made that call or have stopped counting.

A call counts from its begin on, since the host may wait, too: loading a kernel or allocating memory
can wait for the GPU, and then for a transfer that never ends.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist

from .communication import group_store, group_timeout

logger = logging.getLogger("flashcute")

_KEY = "flashcute/calls"
_SHARE = 0.8  # of the timeout, after which a call counts as stuck
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@dataclasses.dataclass
class _Call:
    fn: str
    start: float
    event: torch.cuda.Event | None = None  # or anything with query(); None: the host is in the call
    failed: bool = False

    def ended(self) -> bool:
        if self.failed or self.event is None:
            return self.failed
        try:
            return self.event.query()
        except RuntimeError:
            return False  # CUDA does not tell now; it is asked again


class Watch:
    """The calls of one process in one group."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: float):
        """Takes the group's store and its timeout in seconds; starts nothing."""
        self.interval = min(max(timeout / 60, 0.2), 10.0)
        self._store, self._rank, self._world = store, rank, world
        self._limit = _SHARE * timeout
        self._calls: collections.deque[_Call] = collections.deque()
        self._made = self._beats = 0
        self._progress = 0.0  # when a call ended last
        self._seen: dict[int, tuple[str, float]] = {}  # what each rank wrote last, and since when
        self._reported = False

    def begin(self, fn: str, now: float) -> _Call:
        """A call that begins; whoever makes it sets ``event``, with which its work ends."""
        call = _Call(fn, now)
        self._calls.append(call)
        self._made += 1
        return call

    def poll(self, now: float) -> None:
        """Looks at the oldest call; to be called each :attr:`interval` seconds."""
        self._beats += 1
        self._store.set(f"{_KEY}/{self._rank}", f"{self._made} {self._beats}")
        while self._calls and self._calls[0].ended():
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
        number = self._made - len(self._calls) + 1  # of the call that is stuck
        found = []
        for rank, (text, since) in sorted(self._seen.items()):
            made = int(text.split()[0])
            if rank == self._rank:
                continue
            if now - since > 3 * self.interval:
                found.append(f"rank {rank}, silent for {now - since:.0f} s")
            elif made < number:
                found.append(f"rank {rank}, which made {made} calls")
        lost = "; ".join(found) or "no rank: all have made it and are alive, so a transfer hangs"
        return (
            f"{call.fn}: call {number} has waited {waited:.0f} s for other ranks; lost {lost}. "
            "NCCL's watchdog will end this process: restart all of the group, from a checkpoint"
        )


_watches: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def watch(fn: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Counts the block as a call, whose work is what the current CUDA stream holds at its end."""
    if torch.cuda.is_current_stream_capturing():
        yield
        return
    found = _watches.get(group)
    if found is None:
        found = Watch(group_store(group), group.rank(), group.size(), group_timeout(group))
        _watches[group] = found
        thread = threading.Thread(
            target=_poll,
            args=(weakref.ref(found), torch.cuda.current_device()),
            name="flashcute watch",
            daemon=True,
        )
        thread.start()
    call = found.begin(fn, time.monotonic())
    try:
        yield
    except BaseException:
        call.failed = True
        raise
    event = torch.cuda.Event()
    event.record()
    call.event = event


def _permit_queries() -> None:
    """Lets this thread query events while others capture CUDA graphs.

    In the mode that a thread begins in, its query breaks every capture of the default mode that is
    under way. The driver's function, since the runtime's would make a context on device 0.
    """
    mode = ctypes.c_int(_THREAD_LOCAL)  # the mode before, after the call
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _poll(reference: weakref.ref, device: int) -> None:
    """Until the group is gone, or its store."""
    torch.cuda.set_device(device)  # a thread begins on device 0
    while (found := reference()) is not None:
        _permit_queries()  # each time: a thread without a context gets one by its first query
        try:
            found.poll(time.monotonic())
        except RuntimeError:
            return
        interval = found.interval
        del found
        time.sleep(interval)
