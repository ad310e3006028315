"""Ring attention: keys travel from rank to rank while each computes what it holds.

In step t rank r computes with the keys of rank r - t. Meanwhile the keys of step t + 1 arrive, and
in the backward the gradients of step t's keys, summed over the ranks that had these keys before. A
rank neither gets nor passes on a segment of which it sees nothing; the segment's next user then
gets it from its owner. Keys and gradients have two buffers each, which take turns, so memory is
that of a few messages.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .communication import Communicator, Message
from .local import Gradient, Result, Sum, accumulator_dtype, attend
from .zigzag import Layout, Piece


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
        number: Index of the segment among a rank's.
        own: Whether the keys that are sent are this rank's own, or the gradients that arrive are
            those of this rank's own keys.
    """

    send: bool
    peer: int
    number: int
    own: bool


def key_transfers(layout: Layout, rank: int, round_: int) -> Iterator[Transfer]:
    """Yields what rank ``rank`` sends and gets before step ``round_``, from 1 on."""
    world, needs = layout.world, layout.needs
    if not 0 < round_ < world:
        return
    before, after = (rank - 1) % world, (rank + 1) % world
    for number in range(len(layout.segments(rank))):
        owner = (rank - round_) % world
        if needs(rank, owner, number):
            has = round_ == 1 or needs(before, owner, number)
            yield Transfer(False, before if has else owner, number, False)
        owner = (rank - round_ + 1) % world
        if round_ > 1 and needs(rank, owner, number) and needs(after, owner, number):
            yield Transfer(True, after, number, False)
        user = (rank + round_) % world
        if needs(user, rank, number) and (
            round_ == 1 or not needs((user - 1) % world, rank, number)
        ):
            yield Transfer(True, user, number, True)


def gradient_transfers(layout: Layout, rank: int, round_: int) -> Iterator[Transfer]:
    """Yields what rank ``rank`` sends and gets during step ``round_``, 2 to the number of ranks.

    Sums travel with their keys; a rank that passes the keys on to nobody sends the sum to their
    owner.
    """
    world, needs = layout.world, layout.needs
    if not 1 < round_ <= world:
        return
    before, after = (rank - 1) % world, (rank + 1) % world
    last = round_ == world
    for number in range(len(layout.segments(rank))):
        owner = (rank - round_ + 1) % world
        if needs(rank, owner, number):
            passed = not last and needs(after, owner, number)
            yield Transfer(True, after if passed else owner, number, False)
        owner = (rank - round_) % world
        if not last and needs(rank, owner, number) and needs(before, owner, number):
            yield Transfer(False, before, number, False)
        user = (rank + round_ - 1) % world
        passed = not last and needs((user + 1) % world, rank, number)
        if needs(user, rank, number) and not passed:
            yield Transfer(False, user, number, True)


def keys_and_values(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns k and v, (b, tokens, h_k, d), as views of the tensor that messages are cut from.

    That tensor is (tokens, 2, b, h_k, d), so that neighbouring tokens are one piece of memory.
    """
    k, v = tokens.unbind(1)
    return k.transpose(0, 1), v.transpose(0, 1)


def pack(k: Tensor, v: Tensor) -> Tensor:
    """Packs keys and values into the layout that messages are cut from, (tokens, 2, b, h_k, d)."""
    b, tokens, h_k, d = k.shape
    found = k.new_empty((tokens, 2, b, h_k, d))
    for target, source in zip(keys_and_values(found), (k, v), strict=True):
        target.copy_(source)
    return found


def _key_messages(job: Job, step: int, own: Tensor, held: list[Tensor]) -> Iterator[Message]:
    """Yields the round during ``step``: keys of that step leave, keys of the next one arrive."""
    for x in key_transfers(job.layout, job.comm.rank, step + 1):
        tokens = own if x.own else held[(step + (not x.send)) % 2]
        yield Message(x.send, x.peer, tokens[job.layout.rows(x.number)], "keys")


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Computes attention of this rank's queries to the keys of all ranks.

    Args:
        q: (b, seqlen, h, d), what this rank holds.
        k, v: (b, seqlen, h_k, d), what this rank holds.

    Returns:
        out like q, and the log-sum-exp (b, h, seqlen) in float32.
    """
    comm, layout = job.comm, job.layout
    own = pack(k, v) if comm.world > 1 else k.new_empty(0)
    held = [torch.empty_like(own) for _ in range(2)]
    result = Result(q)
    for step in range(comm.world):
        started = comm.exchange(list(_key_messages(job, step, own, held)))
        if step == 0:
            for piece in layout.own(comm.rank):
                result.add(piece.rows, *attend(piece, q, k, v, job.scale))
        else:
            keys, values = keys_and_values(held[step % 2])
            for piece in layout.foreign(comm.rank, (comm.rank - step) % comm.world):
                result.add(piece.rows, *attend(piece, q, keys, values, job.scale))
        comm.wait(started)
    return result.finish()


@functools.lru_cache(maxsize=4096)
def most_terms(layout: Layout, rank: int) -> int:
    """Returns the largest number of pieces that a query of this rank is in."""
    others = (n for n in range(layout.world) if n != rank)
    pieces = [*layout.own(rank), *(x for n in others for x in layout.foreign(rank, n))]
    edges = [edge for x in pieces for edge in ((x.rows.start, 1), (x.rows.stop, -1))]
    return max(itertools.accumulate(change for _, change in sorted(edges)), default=0)


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
    """Computes the gradients of this rank's q, k and v, from those of its output and LSE."""
    comm, layout = job.comm, job.layout
    dtype = accumulator_dtype(q)
    gradient = Gradient(dout, q, out, lse, dlse, job.scale, job.deterministic)
    own = pack(k, v) if comm.world > 1 else k.new_empty(0)
    held = [torch.empty_like(own) for _ in range(2)]
    sums, (passed, home) = ([torch.empty_like(own, dtype=dtype) for _ in range(2)] for _ in "ab")
    dq = Sum(q, most_terms(layout, comm.rank))
    dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (k, v))

    def add(piece: Piece, keys: Tensor, values: Tensor, to_dk: Tensor, to_dv: Tensor) -> None:
        found = gradient.of(piece, keys, values)
        dq.add(piece.rows, found[0])
        to_dk[:, piece.keys] += found[1]
        to_dv[:, piece.keys] += found[2]

    for step in range(comm.world + 1):
        transfers = list(gradient_transfers(layout, comm.rank, step))
        messages = list(_key_messages(job, step, own, held))
        for x in transfers:
            tokens = sums[(step - 1) % 2] if x.send else home if x.own else passed
            part = tokens[layout.rows(x.number)]
            messages.append(Message(x.send, x.peer, part, "gradients of keys"))
        started = comm.exchange(messages)
        if step == 0:
            for piece in layout.own(comm.rank):
                add(piece, k, v, dk, dv)
        elif step < comm.world:
            owner = (comm.rank - step) % comm.world
            if layout.foreign(comm.rank, owner):
                sums[step % 2].zero_()
            for piece in layout.foreign(comm.rank, owner):
                add(piece, *keys_and_values(held[step % 2]), *keys_and_values(sums[step % 2]))
        comm.wait(started)
        for x in transfers:
            rows = layout.rows(x.number)
            if not x.send and x.own:
                for total, part in zip((dk, dv), keys_and_values(home[rows]), strict=True):
                    total[:, rows] += part
            elif not x.send:
                sums[step % 2][rows] += passed[rows]
    return dq.finish(), dk.to(k.dtype), dv.to(v.dtype)
