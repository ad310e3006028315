"""Functions in several processes of one gloo group, on one host."""

from __future__ import annotations

import datetime
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_context = multiprocessing.get_context("forkserver")
# Imported once, by the process that the others are forked from.
_context.set_forkserver_preload(["flashcute.distributed", "flashcute.testing"])


class Outcome(NamedTuple):
    """What became of one process.

    Attributes:
        value: What the function returned.
        error: The exception as text, with its traceback; "" where there was none.
        exitcode: 0, or minus the number of the signal that ended it; None where the time was up.
        seconds: From the start of all until it returned.
    """

    value: object
    error: str
    exitcode: int | None
    seconds: float


def _main(function, rank: int, world: int, path: str, timeout: float, pipe, args) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout),
    )
    try:
        pipe.send((function(rank, world, *args), "", time.time()))
        dist.destroy_process_group()
    except Exception:
        pipe.send((None, traceback.format_exc(), time.time()))
    pipe.close()
    sys.stdout.flush()


def run(
    function: Callable, world: int, folder: Path, *args, timeout: float = 60.0, limit: float = 240.0
) -> list[Outcome]:
    """``function(rank, world, *args)`` in ``world`` processes, which all end before this returns.

    Args:
        function: Of a module; what it returns must be picklable.
        world: Processes.
        folder: Empty, for the group's store.
        timeout: Of the group, in seconds.
        limit: After so many seconds all are killed.
    """
    start = time.time()
    processes, pipes = [], []
    for rank in range(world):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_main,
            args=(function, rank, world, str(folder / "store"), timeout, theirs, args),
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    found = []
    for process, pipe in zip(processes, pipes, strict=True):
        value, error, end = None, "", start + limit
        try:
            if pipe.poll(max(start + limit - time.time(), 0.0)):
                value, error, end = pipe.recv()
        except EOFError:
            end = time.time()
        process.join(max(start + limit - time.time(), 1.0))
        exitcode = process.exitcode
        if exitcode is None:
            process.kill()
            process.join()
        found.append(Outcome(value, error, exitcode, end - start))
    return found
