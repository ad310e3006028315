"""Attention of sequences that are split over the ranks of a process group."""

from __future__ import annotations

import contextlib
import itertools
import zlib

import torch
from torch import Tensor

from .. import checks, loading
from ..checks import UNLIMITED
from ..checks_varlen import Names, check_packed_tokens
from ..features import VECTOR
from . import allgather, ring
from .communication import Communicator
from .ring import Job
from .watch import watch
from .zigzag import ORDERS, Layout, read_ends

_SCHEMES = {"ring": ring, "gather": allgather}
_DISABLED = (
    "flashcute.distributed compares shapes between processes, then exchanges tensors in an order "
    "that depends on the rank"
)


class _Attend(torch.autograd.Function):
    """One scheme's forward and backward; the log-sum-exp has a gradient, too."""

    @staticmethod
    def forward(ctx, q, k, v, scheme, job):
        out, lse = _SCHEMES[scheme].forward(job, q, k, v)
        ctx.scheme, ctx.job = scheme, job
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"{ctx.job.comm.fn}: expected first derivatives, got a backward with "
                "create_graph=True; leave it out, or compute the whole sequence in one process, on "
                "the CPU"
            )
        q, k, v, out, lse = ctx.saved_tensors
        # Even if neither output has a gradient, the other ranks wait for this one.
        dout = torch.zeros_like(out) if dout is None else dout
        with _watched(q, ctx.job.comm):
            found = _SCHEMES[ctx.scheme].backward(ctx.job, dout, q, k, v, out, lse, dlse)
        return *found, None, None


def _watched(q: Tensor, comm: Communicator) -> contextlib.AbstractContextManager:
    return watch(comm.fn, comm.group) if q.is_cuda else contextlib.nullcontext()


def _check_order(fn: str, order) -> None:
    if order not in ORDERS:
        raise ValueError(
            f"{fn}: expected order to be one of {', '.join(ORDERS)}, got order={order!r}; pass the "
            "order that q, k and v were split in"
        )


def _layout(fn: str, lengths: tuple[int, ...], order: str, world: int, window) -> Layout:
    """Returns how the sequences are split; without a mask positions do not matter."""
    if window == UNLIMITED:
        return Layout(lengths, "contiguous", world, window)
    odd = [length for length in lengths if length % 2]
    if order == "zigzag" and odd:
        raise ValueError(
            f"{fn}: expected an even number of tokens of each sequence on a rank in zigzag order, "
            f"got {odd[0]}; pad sequences to a multiple of 2 * world_size, as zigzag_split needs, "
            "or pass order='contiguous'"
        )
    return Layout(lengths, order, world, window)


def _attend(
    fn: str,
    scheme: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    group,
    softmax_scale,
    causal,
    window_size,
    order,
    deterministic,
) -> tuple[Tensor, Tensor]:
    """Computes attention of checked q, k and v, (b, tokens, heads, head_dim)."""
    d = q.shape[3]
    if torch._C._are_functorch_transforms_active() or checks.has_tangent(q, k, v):
        raise NotImplementedError(
            f"{fn}: expected no transform of torch.func and no derivative in forward mode, got a "
            "call inside one; use torch.autograd.grad, and a batch dimension in place of vmap"
        )
    scale = checks.check_scale(fn, softmax_scale, d)
    causal = checks.check_flag(fn, "causal", causal)
    deterministic = checks.check_flag(fn, "deterministic", deterministic)
    left, right = checks.check_window(fn, window_size)
    _check_order(fn, order)
    if q.is_cpu:
        checks.check_dtype(fn, "q.dtype", q.dtype, q.device)
    elif q.is_cuda:
        checks.check_for_kernels(fn, "q", q, d, scale)
    else:
        raise NotImplementedError(
            f"{fn}: expected tensors on the CPU or on CUDA, got q.device={q.device}; move them "
            "there, as ranks exchange values"
        )
    comm = Communicator(fn, group)
    comm.check_device(q.device)
    reach = max(lengths, default=0) * comm.world - 1
    window = -1 if left >= reach else left, 0 if causal else -1 if right >= reach else right
    layout = _layout(fn, lengths, order, comm.world, window)
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    b, tokens, h, _ = q.shape
    description = {
        "scheme": scheme,
        "batch size": b,
        "number of tokens on a rank": tokens,
        "query heads": h,
        "key heads": k.shape[2],
        "head_dim": d,
        "dtype": str(q.dtype).removeprefix("torch."),
        "softmax_scale": scale,
        "causal": causal,
        "left side of the window": window[0],
        "right side of the window": window[1],
        "choice of the zigzag order": layout.order == "zigzag",
        "deterministic": deterministic,
        "checksum of the sequences' lengths": zlib.crc32(repr(lengths).encode()),
        "need of a gradient": wants_gradient,
    }
    with _watched(q, comm):
        comm.agree(description, q.device)
        if q.is_cuda:
            prepare = loading.padded if d % VECTOR else loading.loadable
            names = zip(("q", "k", "v"), (q, k, v), strict=True)
            q, k, v = (prepare(fn, name, x) for name, x in names)
        job = Job(comm, layout, scale, deterministic)
        out, lse = _Attend.apply(q, k, v, scheme, job)
    return (out[..., :d] if out.shape[3] != d else out), lse


def _dense(fn: str, scheme: str, q, k, v, return_lse, *options):
    checks.check_tensors(fn, ("q", "k", "v"), q, k, v)
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{fn}: expected as many keys as queries on a rank, got q.shape={tuple(q.shape)} and "
            f"k.shape={tuple(k.shape)}; split both alike"
        )
    return_lse = checks.check_flag(fn, "return_lse", return_lse)
    out, lse = _attend(fn, scheme, q, k, v, (q.shape[1],), *options)
    return (out, lse) if return_lse else out


def _varlen(fn: str, scheme: str, q, k, v, cu_seqlens, return_lse, *options):
    check_packed_tokens(Names(fn), q, k, v)
    return_lse = checks.check_flag(fn, "return_lse", return_lse)
    ends = read_ends(fn, cu_seqlens)
    total = q.shape[0]
    if k.shape[0] != total or len(ends) < 2 or ends[0] != 0 or ends != sorted(ends):
        raise ValueError(
            f"{fn}: expected as many keys as queries, and cu_seqlens that rises from 0, got "
            f"q.shape={tuple(q.shape)}, k.shape={tuple(k.shape)} and cu_seqlens={ends}; pass the "
            "running sum of the lengths that the sequences have on one rank"
        )
    if ends[-1] != total:
        raise ValueError(
            f"{fn}: expected cu_seqlens to end at the number of tokens on this rank, {total}, got "
            f"cu_seqlens={ends}; divide those of whole sequences by the number of ranks"
        )
    lengths = tuple(b - a for a, b in itertools.pairwise(ends))
    q, k, v = (x[None] for x in (q, k, v))
    out, lse = _attend(fn, scheme, q, k, v, lengths, *options)
    return (out[0], lse[0]) if return_lse else out[0]


@torch.compiler.disable(reason=_DISABLED)
def ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group=None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    order: str = "zigzag",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of sequences that are split over ranks; keys travel round the ring.

    Each rank holds the same number of tokens of every sequence, computes what it holds, and merges
    the results by their log-sum-exp in float32, while the next keys arrive. Besides its own keys a
    rank holds buffers for the keys of three ranks, and in the backward float32 gradients of five
    ranks' keys. All ranks of the group make the same call, and the same backward.

    Ranks that see nothing of a message, under a mask or a window, neither get it nor pass it on.
    Compared with :func:`flashcute.flash_attn_func` of the whole sequence there are no dropout,
    softcap, ALiBi and sinks, and first derivatives only. Under torch.compile it breaks the graph.

    Args:
        q: (b, seqlen / world_size, h, head_dim), this rank's tokens: float16 or bfloat16 on CUDA,
            also float32 and float64 on the CPU, float64 with float32's exactness.
        k: (b, seqlen / world_size, h_k, head_dim), of the same tokens; h is a multiple of h_k.
        v: As k.
        group: A ``ProcessGroup``, a ``DeviceMesh`` of one dimension, or None for all processes.
            NCCL for CUDA tensors, gloo for those of the CPU.
        softmax_scale: Factor on the scores; None for 1 / sqrt(head_dim).
        causal: Whether to mask keys after the query, by positions in the whole sequence.
        window_size: (left, right): the query at position p sees keys p - left to p + right; -1 for
            unlimited.
        order: How the sequence was split: ``"zigzag"`` (:func:`zigzag_split`), with the same work
            on all ranks under a causal mask, or ``"contiguous"``, where rank r holds the r-th part:
            for windows, where a rank then needs its neighbours' keys only.
        deterministic: Ask for bitwise repeatable gradients, as
            ``torch.use_deterministic_algorithms(True)`` does, too.
        return_lse: Also return the log-sum-exp.

    Returns:
        out: Like q. With ``return_lse`` also the natural log-sum-exp of each row's scores, float32
        (b, h, seqlen / world_size), differentiable.

    Raises:
        TypeError: for a wrong type or dtype, or a mesh of several dimensions.
        ValueError: for a wrong value or shape; on all ranks, before the first transfer, where their
            shapes, dtypes or options differ. On CUDA ranks compare them once for each distinct
            call of the latest 1,024, through the group's store.
        RuntimeError: where a rank has ended or is behind for longer than the group's timeout, with
            its number; the group cannot be used any more. On CUDA, where the host does not wait for
            transfers, NCCL's watchdog ends the process instead; before it does, the logger
            ``flashcute`` names the rank.
        NotImplementedError: for what is not supported on the tensors' device.

    Source: Liu et al., Ring Attention, arXiv:2310.01889; zigzag order after Brandon et al., Striped
    Attention, arXiv:2311.09431.
    """
    options = group, softmax_scale, causal, window_size, order, deterministic
    return _dense("ring_flash_attn_func", "ring", q, k, v, return_lse, *options)


@torch.compiler.disable(reason=_DISABLED)
def allgather_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group=None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    order: str = "zigzag",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes :func:`ring_flash_attn_func` by gathering: each rank gets all keys that it sees.

    One call computes all keys of a row, so there is nothing to merge, and short sequences are
    faster. Long sequences are gathered some key heads at a time, while the heads before are
    computed: in up to four groups, whose number divides h_k and each of which has at least 64 MiB
    of all ranks' keys and values. In one group nothing overlaps. A rank holds the keys of the whole
    sequence for up to two groups of heads, and in the backward up to three float32 gradients of a
    group's keys.

    Arguments, result and errors are those of :func:`ring_flash_attn_func`.
    """
    options = group, softmax_scale, causal, window_size, order, deterministic
    return _dense("allgather_flash_attn_func", "gather", q, k, v, return_lse, *options)


@torch.compiler.disable(reason=_DISABLED)
def ring_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens,
    *,
    group=None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    order: str = "zigzag",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes :func:`ring_flash_attn_func` of packed sequences, each split over all ranks.

    The sequences may have different lengths. Each is a message or two and a call of its own, on
    CUDA also in the backward, so this is for a few long sequences. Many short ones are better kept
    whole, each on one rank.

    Args:
        q: (total / world_size, h, head_dim), this rank's part of every sequence, one after the
            other; ``zigzag_split(x, rank, world_size, dim=0, cu_seqlens=...)`` splits so.
        k: (total / world_size, h_k, head_dim), of the same tokens.
        v: As k.
        cu_seqlens: (b + 1,) ints, a sequence or a tensor: where each sequence starts among the
            tokens of one rank, and where the last one ends; the same on all ranks. The host reads
            it: a CUDA tensor makes it wait.

    The other arguments and the errors are those of :func:`ring_flash_attn_func`.

    Returns:
        out: Like q. With ``return_lse`` also the log-sum-exp, float32 (h, total / world_size).
    """
    options = group, softmax_scale, causal, window_size, order, deterministic
    fn = "ring_flash_attn_varlen_func"
    return _varlen(fn, "ring", q, k, v, cu_seqlens, return_lse, *options)


@torch.compiler.disable(reason=_DISABLED)
def allgather_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens,
    *,
    group=None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    order: str = "zigzag",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`ring_flash_attn_varlen_func` by the scheme of :func:`allgather_flash_attn_func`."""
    options = group, softmax_scale, causal, window_size, order, deterministic
    fn = "allgather_flash_attn_varlen_func"
    return _varlen(fn, "gather", q, k, v, cu_seqlens, return_lse, *options)
