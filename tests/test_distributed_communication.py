"""If a rank is lost, every other one gets an error that names it, within the group's timeout."""

from __future__ import annotations

import datetime
import functools
import os
import signal
import threading
import time

import pytest
import ranks
import torch
import torch.distributed as dist

from flashcute import distributed as fd
from flashcute.distributed import communication
from flashcute.distributed.communication import Communicator

LOST = 2


def wait_for_all(rank: int, world: int, what: str) -> None:
    """Returns when all ranks have called it, so that no rank is lost while others are in a call.

    Ranks wait through the store, as a barrier of the group itself could be broken.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{rank} {what}", "")
    store.wait([f"{other} {what}" for other in range(world)], datetime.timedelta(seconds=60.0))


def lose(rank: int, world: int, scheme: str, how: str) -> str:
    """Returns the error with which a rank ended after one of four was lost."""
    timeout = 8.0 if how == "hangs" else 60.0
    store = dist.distributed_c10d._get_default_store()
    others = [f"error of {other}" for other in range(world) if other != LOST]
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout))
    function = functools.partial(getattr(fd, f"{scheme}_flash_attn_func"), group=group, causal=True)
    x = torch.randn(1, 32, 2, 16, requires_grad=True)
    out = function(x, x, x)
    wait_for_all(rank, world, "has a result")
    message = ""
    if rank != LOST:
        try:
            function(x, x, x) if how == "hangs" else out.sum().backward()
            message = "no error"
        except RuntimeError as error:
            message = str(error)
            store.set(f"error of {rank}", "")
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hangs":
        until = time.monotonic() + 120
        while not store.check(others) and time.monotonic() < until:
            time.sleep(0.1)
        message = "it was given up by all others" if store.check(others) else "others wait"
    return message


@pytest.mark.parametrize(
    ("scheme", "how"),
    [("ring", "killed"), ("allgather", "killed"), ("ring", "hangs"), ("ring", "leaves")],
)
def test_the_lost_rank_is_named_on_all_others(tmp_path, scheme, how):
    outcomes = ranks.run(lose, 4, tmp_path, scheme, how)
    assert outcomes[LOST].exitcode == (-signal.SIGKILL if how == "killed" else 0)
    for rank, outcome in enumerate(outcomes):
        if rank != LOST:
            assert not outcome.error, outcome.error
            message = outcome.value
            name = f"{scheme}_flash_attn_func: lost rank {LOST} of the group"
            assert message.startswith(name), message
            assert "restart all its processes" in message
    if how == "hangs":
        assert outcomes[LOST].value == "it was given up by all others"


def compare_by_store(rank: int, world: int) -> list[str]:
    """Returns the results of calls of CUDA tensors that agree, differ, agree and lack a rank."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=4.0))
    comm = Communicator("f", group)
    said = []
    for description in ({"seqlen": 8}, {"seqlen": 8 + rank, "scale": 0.5}, {"causal": True}):
        try:
            comm.agree(description, torch.device("cuda"))
            said.append("agreed")
        except ValueError as error:
            said.append(str(error))
    comm.agree({"seqlen": 8}, torch.device("cuda"))  # is remembered
    if rank != LOST:
        try:
            comm.agree({"seqlen": 16}, torch.device("cuda"))
        except RuntimeError as error:
            said.append(str(error))
    else:
        time.sleep(6.0)  # this rank is alive, but late by more than the timeout
    return said


def test_calls_of_cuda_tensors_are_compared_before_nccl_connects(tmp_path):
    outcomes = ranks.run(compare_by_store, 4, tmp_path)
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, outcome.error
        first, differ, third, *lost = outcome.value
        assert (first, third) == ("agreed", "agreed")
        assert differ.startswith(
            "f: expected the same seqlen on all ranks of the group, got "
            "8 on rank 0, 9 on rank 1, 10 on rank 2, 11 on rank 3; "
        )
        if rank != LOST:
            (message,) = lost
            assert message.startswith(f"f: lost rank {LOST} of the group: expected to receive")


def test_comparisons_leave_a_bounded_number_of_keys_and_descriptions(monkeypatch):
    """Each step of packed sequences has new lengths to compare. Two threads act as two ranks."""
    monkeypatch.setattr(communication, "_MOST_DESCRIPTIONS", 8)
    store, compared = dist.HashStore(), [[], []]
    monkeypatch.setattr(communication, "group_store", lambda group: store)
    monkeypatch.setattr(communication, "group_timeout", lambda group: 20.0)
    device = torch.device("cuda")

    def rank(number: int) -> None:
        comm = object.__new__(Communicator)
        comm.fn, comm.rank, comm.world, comm.group = "f", number, 2, groups[number]
        for call in [*range(100), *range(92, 100), 3]:
            comm.agree({"lengths": call}, device)
            compared[number].append(communication._agreed[comm.group].comparisons)

    class Group:
        pass

    groups = Group(), Group()
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Both ranks remember the latest descriptions, and compare an older one again.
    expected = [*range(1, 101), *[100] * 8, 101]
    assert compared == [expected] * 2
    assert store.num_keys() <= 4
    assert [len(communication._agreed[group].descriptions) for group in groups] == [8, 8]


def without_a_backend(rank: int, world: int) -> tuple[str, bool]:
    """Returns the error of CPU tensors in a group for CUDA, and whether one rank alone computes."""
    x = torch.randn(1, 32, 2, 16)
    group = dist.new_group(backend="cuda:gloo")
    message = ""
    try:
        fd.ring_flash_attn_func(x, x, x, group=group)
    except ValueError as error:
        message = str(error)
    alone = [dist.new_group([peer], backend="cuda:gloo") for peer in range(world)][rank]
    return message, fd.ring_flash_attn_func(x, x, x, group=alone).shape == x.shape


def test_a_group_without_a_backend_for_the_tensors_is_named(tmp_path):
    for outcome in ranks.run(without_a_backend, 2, tmp_path):
        assert not outcome.error, outcome.error
        message, computes_alone = outcome.value
        assert message.startswith(
            "ring_flash_attn_func: expected a group with a backend for q.device=cpu, got one with "
            "'cuda:gloo'; "
        )
        assert 'with backend="cpu:gloo" among others' in message and computes_alone


def in_subgroup(rank: int, world: int) -> str:
    group = dist.new_group([1, 2])
    wait_for_all(rank, world, "has its group")
    x = torch.randn(1, 32, 2, 16)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        fd.ring_flash_attn_func(x, x, x, group=group)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


def test_a_group_of_some_processes(tmp_path):
    outcomes = ranks.run(in_subgroup, 3, tmp_path)
    for outcome in outcomes[:2]:
        assert not outcome.error, outcome.error
    assert "expected a group that this process belongs to" in outcomes[0].value
    assert "lost rank 1 of the group (rank 2 of all):" in outcomes[1].value
