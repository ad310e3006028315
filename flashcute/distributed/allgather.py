"""Attention to gathered keys: each rank gets all keys that it sees at once, some heads at a time.

The keys of the next heads arrive while these are computed, and so leave the gradients of the last
ones, of which the owner of the keys adds up one from each rank, in the order of the ranks. (That is
a reduce-scatter in pairs of ranks: it leaves out what a rank does not see, repeats bit for bit, and
names the rank that is lost.) Each row sees all of its keys in one call, so nothing is merged; in
return a rank holds the keys of the whole sequence, of two groups of heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .communication import Message
from .local import Gradient, accumulator_dtype, attend
from .ring import Job, pack, unpack
from .zigzag import Layout

# Into so many groups key heads are split where their number allows: all transfers but the first
# one, and in the backward the last one, are under compute.
_GROUPS = 4


def head_groups(h: int, h_k: int) -> list[tuple[slice, slice]]:
    """Query heads and key heads of each group."""
    count = next(n for n in range(min(_GROUPS, h_k), 0, -1) if h_k % n == 0)
    step, step_k = h // count, h_k // count
    return [
        (slice(i * step, (i + 1) * step), slice(i * step_k, (i + 1) * step_k)) for i in range(count)
    ]


class _Gather:
    """The keys of one group of heads on their way to all ranks that see them."""

    def __init__(self, job: Job, k: Tensor, v: Tensor):
        """Starts the transfer of k and v, (b, seqlen, heads, d)."""
        self._job, comm, layout = job, job.comm, job.layout
        self._own = pack(layout, comm.rank, k, v)
        self._theirs: dict[tuple[int, int], Tensor] = {}
        messages = []
        for peer in range(comm.world):
            for part, own in enumerate(self._own):
                if peer == comm.rank:
                    self._theirs[peer, part] = own
                    continue
                if layout.needs(peer, comm.rank, part):
                    messages.append(Message(True, peer, own, "keys"))
                if layout.needs(comm.rank, peer, part):
                    self._theirs[peer, part] = torch.empty_like(own)
                    messages.append(Message(False, peer, self._theirs[peer, part], "keys"))
        self._started = comm.exchange(messages)

    def finish(self) -> Tensor:
        """Keys and values in the order of the sequences, (2, b, tokens of all ranks, heads, d).

        Those that this rank does not see are not filled.
        """
        layout = self._job.layout
        self._job.comm.wait(self._started)
        first = self._own[0]
        shape = list(first.shape)
        shape[2] = sum(layout.lengths) * layout.world
        found = first.new_empty(shape)
        for (peer, part), message in self._theirs.items():
            for here, there in _places(layout, peer, part):
                found[:, :, here] = message[:, :, there]
        self._theirs.clear()
        return found


class _Scatter:
    """The gradients of one group's keys on their way to the owners of the keys."""

    def __init__(self, job: Job, gradients: Tensor):
        """Starts the transfer of gradients of all ranks' keys, laid out as :meth:`_Gather.finish`
        does."""
        self._job, comm, layout = job, job.comm, job.layout
        self._parts: dict[tuple[int, int], Tensor] = {}
        self._sent = []
        messages = []
        for peer in range(comm.world):
            for part, tokens in enumerate(layout.parts):
                shape = list(gradients.shape)
                shape[2] = tokens
                if peer == comm.rank or layout.needs(comm.rank, peer, part):
                    mine = gradients.new_empty(shape)
                    for here, there in _places(layout, peer, part):
                        mine[:, :, there] = gradients[:, :, here]
                    if peer == comm.rank:
                        self._parts[peer, part] = mine
                        continue
                    messages.append(Message(True, peer, mine, "gradients of keys"))
                if peer != comm.rank and layout.needs(peer, comm.rank, part):
                    self._parts[peer, part] = gradients.new_empty(shape)
                    x = Message(False, peer, self._parts[peer, part], "gradients of keys")
                    messages.append(x)
        self._messages = messages  # what is sent lives until it has arrived
        self._started = comm.exchange(messages)

    def finish(self, dk: Tensor, dv: Tensor) -> None:
        """Adds the gradients of all ranks to dk and dv, (b, seqlen, heads, d)."""
        self._job.comm.wait(self._started)
        for (_, part), message in self._parts.items():
            unpack(self._job.layout, self._job.comm.rank, part, message, dk, dv)
        self._parts.clear()
        self._messages.clear()


def _places(layout: Layout, rank: int, part: int) -> list[tuple[slice, slice]]:
    """Where a message's tokens are among those of all ranks, and in the message."""
    starts = [0]
    for length in layout.lengths:
        starts.append(starts[-1] + length * layout.world)
    return [
        (
            slice(starts[x.sequence] + x.start, starts[x.sequence] + x.start + x.length),
            slice(x.offset, x.offset + x.length),
        )
        for x in layout.segments(rank)
        if x.part == part
    ]


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`flashcute.distributed.ring.forward`."""
    b, seqlen, h, _ = q.shape
    out = torch.zeros_like(q)
    lse = q.new_full((b, h, seqlen), -torch.inf, dtype=torch.float32)
    groups = head_groups(h, k.shape[2])
    following = _Gather(job, k[:, :, groups[0][1]], v[:, :, groups[0][1]])
    for i, (heads, _) in enumerate(groups):
        gather = following
        keys, values = gather.finish()
        if i + 1 < len(groups):
            key_heads = groups[i + 1][1]
            following = _Gather(job, k[:, :, key_heads], v[:, :, key_heads])
        for piece in job.layout.gathered(job.comm.rank):
            found = attend(piece, q[:, :, heads], keys, values, job.scale)
            out[:, piece.rows, heads], lse[:, heads, piece.rows] = found
    return out, lse


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
    """As :func:`flashcute.distributed.ring.backward`."""
    dtype = accumulator_dtype(q)
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
    groups = head_groups(q.shape[2], k.shape[2])
    following = _Gather(job, k[:, :, groups[0][1]], v[:, :, groups[0][1]])
    scatter, before = None, slice(0)
    for i, (heads, key_heads) in enumerate(groups):
        keys, values = following.finish()
        if i + 1 < len(groups):
            next_heads = groups[i + 1][1]
            following = _Gather(job, k[:, :, next_heads], v[:, :, next_heads])
        rows = dout[:, :, heads], q[:, :, heads], out[:, :, heads], lse[:, heads]
        dlse_of_heads = None if dlse is None else dlse[:, heads]
        gradient = Gradient(*rows, dlse_of_heads, job.scale, job.deterministic)
        sums = torch.zeros((2, *keys.shape), dtype=dtype, device=q.device)
        for piece in job.layout.gathered(job.comm.rank):
            gradient.add(piece, keys, values, *sums)
        dq[:, :, heads] = gradient.dq
        if scatter is not None:
            scatter.finish(dk[:, :, before], dv[:, :, before])
        scatter, before = _Scatter(job, sums), key_heads
    if scatter is not None:
        scatter.finish(dk[:, :, before], dv[:, :, before])
    return dq, dk.to(k.dtype), dv.to(v.dtype)
