"""Runs functions in several processes of one gloo group, on one host."""

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
# The process that all ranks are forked from imports these modules, so that no rank has to.
_context.set_forkserver_preload(["flashcute.distributed", "flashcute.testing"])


class Outcome(NamedTuple):
    """How one process ended.

    Attributes:
        value: What the function returned.
        error: The exception as text, with its traceback; "" where there was none.
        exitcode: 0, or minus the number of the signal that ended it; None if it was killed at
            the time limit.
        seconds: Seconds from the start of all processes until the function ended.
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
    """Runs ``function(rank, world, *args)`` in ``world`` processes and waits until all have ended.

    Args:
        function: A function of a module, not a local one; its result must be picklable.
        world: The number of processes.
        folder: An empty folder for the group's store.
        timeout: The group's timeout, in seconds.
        limit: The seconds after which all processes are killed.

    Returns:
        How each rank ended, in the order of ranks.
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
