"""Ring attention: keys travel from rank to rank while each computes what it holds.

In step t rank r computes with the keys of rank r - t. Meanwhile the keys of step t + 1 arrive, and
in the backward the gradients of those of step t, summed over the ranks that had them before. A
message that a rank sees nothing of it neither gets nor passes on: then its next user gets it from
its owner. Both buffers of a kind take turns, so memory is that of a few messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .communication import Communicator, Message
from .local import Gradient, Result, accumulator_dtype, attend
from .zigzag import Layout


class Job(NamedTuple):
    """One call, as its forward and its backward need it.

    Attributes:
        comm: The ranks.
        layout: Who holds what and sees what.
        scale: Factor on the scores.
        deterministic: Whether gradients must repeat bit for bit.
    """

    comm: Communicator
    layout: Layout
    scale: float
    deterministic: bool


class Transfer(NamedTuple):
    """A message of a round.

    Attributes:
        send: Whether it leaves this rank.
        peer: The other rank.
        part: Which of a rank's messages.
        own: Of keys that are sent: this rank's own. Of gradients that arrive: of this rank's own
            keys.
    """

    send: bool
    peer: int
    part: int
    own: bool


def key_transfers(layout: Layout, rank: int, round_: int) -> Iterator[Transfer]:
    """What rank ``rank`` sends and gets before step ``round_``, from 1 on."""
    world, needs = layout.world, layout.needs
    if not 0 < round_ < world:
        return
    before, after = (rank - 1) % world, (rank + 1) % world
    for part in range(len(layout.parts)):
        owner = (rank - round_) % world
        if needs(rank, owner, part):
            has = round_ == 1 or needs(before, owner, part)
            yield Transfer(False, before if has else owner, part, False)
        owner = (rank - round_ + 1) % world
        if round_ > 1 and needs(rank, owner, part) and needs(after, owner, part):
            yield Transfer(True, after, part, False)
        user = (rank + round_) % world
        if needs(user, rank, part) and (round_ == 1 or not needs((user - 1) % world, rank, part)):
            yield Transfer(True, user, part, True)


def gradient_transfers(layout: Layout, rank: int, round_: int) -> Iterator[Transfer]:
    """What rank ``rank`` sends and gets during step ``round_``, from 2 to the number of ranks.

    Sums go the way of their keys; whoever passes the keys on to nobody sends the sum to their
    owner.
    """
    world, needs = layout.world, layout.needs
    if not 1 < round_ <= world:
        return
    before, after = (rank - 1) % world, (rank + 1) % world
    last = round_ == world
    for part in range(len(layout.parts)):
        owner = (rank - round_ + 1) % world
        if needs(rank, owner, part):
            passed = not last and needs(after, owner, part)
            yield Transfer(True, after if passed else owner, part, False)
        owner = (rank - round_) % world
        if not last and needs(rank, owner, part) and needs(before, owner, part):
            yield Transfer(False, before, part, False)
        user = (rank + round_ - 1) % world
        passed = not last and needs((user + 1) % world, rank, part)
        if needs(user, rank, part) and not passed:
            yield Transfer(False, user, part, True)


def pack(layout: Layout, rank: int, k: Tensor, v: Tensor) -> list[Tensor]:
    """A rank's keys and values as messages, (2, b, tokens, h_k, d) each, contiguous."""
    both = k, v
    if len(layout.parts) == 1:
        return [torch.stack(both)]
    b, _, h_k, d = k.shape
    found = [k.new_empty((2, b, tokens, h_k, d)) for tokens in layout.parts]
    for x in layout.segments(rank):
        for target, source in zip(found[x.part], both, strict=True):
            rows = slice(x.row, x.row + x.length)
            target[:, x.offset : x.offset + x.length] = source[:, rows]
    return found


def unpack(layout: Layout, rank: int, part: int, message: Tensor, k: Tensor, v: Tensor) -> None:
    """Adds a message to the rows of k and v, (b, tokens, h_k, d), that it was packed from."""
    for x in layout.segments(rank):
        if x.part == part:
            for target, source in zip((k, v), message, strict=True):
                target[:, x.row : x.row + x.length] += source[:, x.offset : x.offset + x.length]


def _two_sets(messages: list[Tensor], dtype: torch.dtype) -> list[list[Tensor]]:
    return [[torch.empty_like(x, dtype=dtype) for x in messages] for _ in range(2)]


def _key_messages(job: Job, step: int, own: list[Tensor], held: list[list[Tensor]]):
    """The round during ``step``: keys of that step leave, keys of the next one arrive."""
    for x in key_transfers(job.layout, job.comm.rank, step + 1):
        buffers = own if x.own else held[(step + (not x.send)) % 2]
        yield Message(x.send, x.peer, buffers[x.part], "keys")


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        q: (b, seqlen, h, d), what this rank holds.
        k: (b, seqlen, h_k, d), v likewise.

    Returns:
        out like q, and the log-sum-exp (b, h, seqlen) in float32.
    """
    comm, layout = job.comm, job.layout
    result = Result(q)
    own = pack(layout, comm.rank, k, v) if comm.world > 1 else []
    held = _two_sets(own, q.dtype)
    for step in range(comm.world):
        started = comm.exchange(list(_key_messages(job, step, own, held)))
        if step == 0:
            for piece in layout.own(comm.rank):
                result.add(piece.rows, *attend(piece, q, k, v, job.scale))
        else:
            owner = (comm.rank - step) % comm.world
            for part, message in enumerate(held[step % 2]):
                for piece in layout.foreign(comm.rank, owner, part):
                    result.add(piece.rows, *attend(piece, q, *message, job.scale))
        comm.wait(started)
    return result.out.to(q.dtype), result.lse


def backward(
    job: Job,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's q, k and v, from those of its output and log-sum-exp."""
    comm, layout = job.comm, job.layout
    dtype = accumulator_dtype(q)
    gradient = Gradient(dout, q, out, lse, dlse, job.scale, job.deterministic)
    dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
    own = pack(layout, comm.rank, k, v) if comm.world > 1 else []
    held = _two_sets(own, q.dtype)
    sums = _two_sets(own, dtype)
    passed, home = _two_sets(own, dtype)
    for step in range(comm.world + 1):
        transfers = list(gradient_transfers(layout, comm.rank, step))
        messages = list(_key_messages(job, step, own, held))
        for x in transfers:
            buffers = sums[(step - 1) % 2] if x.send else home if x.own else passed
            messages.append(Message(x.send, x.peer, buffers[x.part], "gradients of keys"))
        started = comm.exchange(messages)
        if step == 0:
            for piece in layout.own(comm.rank):
                gradient.add(piece, k, v, dk, dv)
        elif step < comm.world:
            owner = (comm.rank - step) % comm.world
            for part, message in enumerate(held[step % 2]):
                pieces = layout.foreign(comm.rank, owner, part)
                if pieces:
                    sums[step % 2][part].zero_()
                for piece in pieces:
                    gradient.add(piece, *message, *sums[step % 2][part])
        comm.wait(started)
        for x in transfers:
            if not x.send and x.own:
                unpack(layout, comm.rank, x.part, home[x.part], dk, dv)
            elif not x.send:
                sums[step % 2][x.part] += passed[x.part]
    return gradient.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
