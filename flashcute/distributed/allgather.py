"""Attention to gathered keys: each rank first gets all keys that it sees.

Of long sequences it gets some heads at a time.

While one group of heads is computed, the keys of the next group arrive and the gradients of the
previous group leave. The owner of the keys adds up one gradient from each rank, in the order of the
ranks. (This is a reduce-scatter in pairs of ranks: it leaves out what a rank does not see, repeats
bit for bit, and names the rank that is lost.) Each row sees all of its keys in one call, so nothing
is merged; in return a rank holds the keys of the whole sequence for two groups of heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .communication import Message
from .local import Gradient, accumulator_dtype, attend
from .ring import Job, keys_and_values
from .zigzag import Layout, Segment

# Most groups that key heads are split into. All transfers but the first one, and in the backward
# the last one, overlap with compute. Each further group adds a set of calls, which cost more than
# small transfers.
_GROUPS = 4
_GROUP_BYTES = 2**26  # least size of a group: keys and values of all ranks


def head_groups(h: int, h_k: int, size: int) -> list[tuple[slice, slice]]:
    """Returns query heads and key heads of each group; all keys and values have ``size`` bytes."""
    most = max(min(_GROUPS, h_k, size // _GROUP_BYTES), 1)
    count = next(n for n in range(most, 0, -1) if h_k % n == 0)
    step, step_k = h // count, h_k // count
    return [
        (slice(i * step, (i + 1) * step), slice(i * step_k, (i + 1) * step_k)) for i in range(count)
    ]


def _groups(job: Job, q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    size = 2 * k.numel() * k.element_size() * job.comm.world
    return head_groups(q.shape[2], k.shape[2], size)


def _seen(layout: Layout, rank: int, owner: int) -> list[Segment]:
    """Returns the segments of ``owner`` that ``rank`` sees; each segment is a message."""
    return [x for i, x in enumerate(layout.segments(owner)) if layout.needs(rank, owner, i)]


class _Gather:
    """The keys of one group of heads on their way to all ranks that see them.

    All ranks' tokens lie in the order of the sequences, so that each message is one contiguous
    piece of memory.
    """

    def __init__(self, job: Job, k: Tensor, v: Tensor):
        """Starts the transfer of k and v, (b, seqlen, heads, d)."""
        self._comm, layout, rank = job.comm, job.layout, job.comm.rank
        b, tokens, heads, d = k.shape
        self._tokens = k.new_empty((tokens * layout.world, 2, b, heads, d))
        for x in layout.segments(rank):
            for target, source in zip(keys_and_values(self._tokens), (k, v), strict=True):
                target[:, layout.place(x)] = source[:, x.rows]
        messages = []
        for peer in range(layout.world):
            if peer != rank:
                for send, found in ((True, _seen(layout, peer, rank)),
                                    (False, _seen(layout, rank, peer))):  # fmt: skip
                    messages += [
                        Message(send, peer, self._tokens[layout.place(x)], "keys") for x in found
                    ]
        self._started = self._comm.exchange(messages)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Returns k and v of all ranks, (b, tokens, heads, d), in the order of the sequences.

        It waits for them. Tokens that this rank does not see are not filled.
        """
        self._comm.wait(self._started)
        return keys_and_values(self._tokens)


class _Scatter:
    """The gradients of one group's keys on their way to the owners of the keys."""

    def __init__(self, job: Job, gradients: Tensor):
        """Starts the transfer of gradients of all ranks' keys.

        They are laid out as the keys in :class:`_Gather`.
        """
        self._comm = job.comm
        self._gradients = gradients  # what is sent lives until it has arrived
        # Gradients of this rank's keys, in order of the ranks.
        self._parts: list[tuple[Segment, Tensor]] = []
        layout, rank = job.layout, job.comm.rank
        messages = []
        for peer in range(layout.world):
            if peer == rank:
                self._parts += [(x, gradients[layout.place(x)]) for x in layout.segments(rank)]
                continue
            for x in _seen(layout, rank, peer):
                part = gradients[layout.place(x)]
                messages.append(Message(True, peer, part, "gradients of keys"))
            for x in _seen(layout, peer, rank):
                part = gradients.new_empty((x.length, *gradients.shape[1:]))
                self._parts.append((x, part))
                messages.append(Message(False, peer, part, "gradients of keys"))
        self._started = self._comm.exchange(messages)

    def finish(self, dk: Tensor, dv: Tensor) -> None:
        """Adds the gradients of all ranks to dk and dv, (b, seqlen, heads, d)."""
        self._comm.wait(self._started)
        for x, part in self._parts:
            for target, source in zip((dk, dv), keys_and_values(part), strict=True):
                target[:, x.rows] += source
        del self._parts, self._gradients


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Computes :func:`flashcute.distributed.ring.forward` with gathered keys."""
    b, seqlen, h, _ = q.shape
    out = torch.zeros_like(q)
    lse = q.new_full((b, h, seqlen), -torch.inf, dtype=torch.float32)
    groups = _groups(job, q, k)
    following = _Gather(job, k[:, :, groups[0][1]], v[:, :, groups[0][1]])
    for i, (heads, _) in enumerate(groups):
        keys, values = following.finish()
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
    """Computes :func:`flashcute.distributed.ring.backward` with gathered keys."""
    dtype = accumulator_dtype(q)
    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
    groups = _groups(job, q, k)
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
        b, tokens, h_k, d = keys.shape
        sums = torch.zeros((tokens, 2, b, h_k, d), dtype=dtype, device=q.device)
        to_dk, to_dv = keys_and_values(sums)
        for piece in job.layout.gathered(job.comm.rank):
            found = gradient.of(piece, keys, values)
            dq[:, piece.rows, heads] = found[0]
            to_dk[:, piece.keys] += found[1]
            to_dv[:, piece.keys] += found[2]
        if scatter is not None:
            scatter.finish(dk[:, :, before], dv[:, :, before])
        scatter, before = _Scatter(job, sums), key_heads
    if scatter is not None:
        scatter.finish(dk[:, :, before], dv[:, :, before])
    return dq, dk.to(k.dtype), dv.to(v.dtype)
