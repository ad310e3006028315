"""flash-attn 2's functions for sequences of different lengths, packed without padding.

CUDA tensors go to the kernels, CPU tensors to :mod:`flashcute.cpu_varlen`, which takes every
argument and is differentiable; meta tensors get shapes.
"""

from __future__ import annotations

import torch

from . import loading, ops, ops_kvcache
from .autograd import check_pages, check_slopes, wants_gradient
from .checks import (
    UNLIMITED,
    bounded_window,
    check_alibi,
    check_dropout,
    check_dtype,
    check_flag,
    check_for_kernels,
    check_kernel_scores,
    check_no_tangent,
    check_scale,
    check_sinks,
)
from .checks_kvcache import check_packed_queries, check_table
from .checks_varlen import (
    Names,
    check_bounds,
    check_lengths,
    check_packed_together,
    check_packed_tokens,
)
from .cpu_operator import draw_state
from .cpu_varlen import Options, Tensors, attend_or_trace
from .features import VECTOR
from .flash_attn_kvcache import options_of

_NAMES = Names("flash_attn_varlen_func")


def _launch(names: Names, tensors: Tensors, options: Options, num_splits: int, deterministic: bool):
    """Returns out and log-sum-exp of CUDA tensors, computed by the kernels."""
    q, k, v, alibi_slopes, sinks, *lengths, rng_state, block_table = tensors
    d, names_of_qkv = q.shape[2], names[1:4]
    prepare = loading.padded if d % VECTOR else loading.loadable
    q, k, v = (prepare(names.fn, *x) for x in zip(names_of_qkv, (q, k, v), strict=True))
    lengths = [x if x is None else x.int().contiguous() for x in lengths]
    if sinks is not None:
        sinks = sinks.float().contiguous()
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.contiguous()
    if block_table is not None and block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    window_size = bounded_window((options.window_left, options.window_right))
    out, lse = ops.attend_varlen(
        q, k, v, lengths, options[:2], options.softmax_scale, options.causal, window_size, sinks,
        options.softcap, alibi_slopes, rng_state, options.dropout_p, block_table, num_splits,
        deterministic,
    )  # fmt: skip
    if d % VECTOR:
        out = out.narrow(2, 0, d).clone(memory_format=torch.contiguous_format)
    return out, lse


def _attend(
    names: Names,
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size,
    softcap,
    alibi_slopes,
    deterministic,
    return_attn_probs,
    seqused_q,
    seqused_k,
    sinks,
    block_table=None,
    num_splits=0,
):
    fn = names.fn
    o = options_of(fn, softmax_scale, causal, window_size, softcap, num_splits)
    scale, causal, left, right, softcap, _, num_splits = o
    if deterministic is not False:
        deterministic = check_flag(fn, "deterministic", deterministic)
    if return_attn_probs is not False:
        return_attn_probs = check_flag(fn, "return_attn_probs", return_attn_probs)
    if type(dropout_p) is not float or dropout_p != 0.0:
        asked, dropout_p = dropout_p, check_dropout(fn, dropout_p)
        if dropout_p != 0.0 and num_splits > 1:
            raise NotImplementedError(
                f"{fn}: expected num_splits <= 1 with dropout, got num_splits={num_splits} and "
                f"dropout_p={asked}; leave num_splits at 0"
            )
    is_cuda = not torch.compiler.is_compiling() and type(q) is torch.Tensor and q.is_cuda
    if is_cuda and dropout_p == 0.0:
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
        given = q, k, v, sinks, alibi_slopes, block_table
        found = ops_kvcache.launch_varlen_unchecked(given, lengths, o, return_attn_probs)
        if found is not None:
            return (*found, q.new_empty(0)) if return_attn_probs else found[0]
    if block_table is None:
        d = check_packed_tokens(names, q, k, v)
    else:
        d = check_packed_queries(names, q, k, v)
        if cu_seqlens_k is None and seqused_k is None:
            raise ValueError(
                f"{fn}: expected seqused_k or cu_seqlens_k with a block_table, got neither; "
                "pass how many keys each sequence has"
            )
        if cu_seqlens_k is None:
            cu_seqlens_k = cu_seqlens_q  # has the right shape; seqused_k is read instead
    b = check_lengths(names, q, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    check_table(fn, block_table, q, b)
    max_seqlen_q, max_seqlen_k = check_bounds(names, max_seqlen_q, max_seqlen_k)
    scale = check_scale(fn, scale, d)
    if alibi_slopes is not None:
        check_alibi(fn, alibi_slopes, q, b)
    if sinks is not None:
        check_sinks(fn, sinks, q)
    if q.is_cpu:
        check_dtype(fn, f"{names.q}.dtype", q.dtype, q.device)
    else:
        check_for_kernels(fn, names.q, q, d, scale)
        check_kernel_scores(fn, scale, softcap, alibi_slopes is not None)
        named = (*names[1:4], "sinks", "alibi_slopes")
        check_no_tangent(fn, named, q, k, v, sinks, alibi_slopes)
        check_slopes(fn, alibi_slopes)
        if wants_gradient(q, k, v, sinks):
            check_pages(fn, block_table)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    tensors = Tensors(q, k, v, alibi_slopes, sinks, *lengths, None, block_table)
    bounds = (max_seqlen_q, max_seqlen_k)
    options = Options(*bounds, scale, causal, left, right, softcap, dropout_p, return_attn_probs)
    if not (q.is_cpu or q.is_meta):
        if dropout_p != 0.0:
            tensors = tensors._replace(rng_state=draw_state(q))
        out, lse = _launch(names, tensors, options, num_splits, deterministic)
        if not return_attn_probs:
            return out
        # The reference computes dmask, as kernels never hold all weights.
        dropped = dropout_p != 0.0
        dmask = attend_or_trace(names, tensors, options)[2] if dropped else q.new_empty(0)
        return out, lse, dmask
    outputs = attend_or_trace(names, tensors, options)
    return outputs if return_attn_probs else outputs[0]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes :func:`flash_attn_func` for each of b packed sequences of different lengths.

    Tokens of all sequences follow one another without padding; sequence i has queries
    ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]`` and keys ``cu_seqlens_k[i]:cu_seqlens_k[i + 1]``. Masks,
    windows and ALiBi are aligned to the bottom-right corner of each. A sequence's result does not
    depend on the others. Sequences may be empty, on either side.

    A padded batch is packed by ``flashcute.bert_padding.unpad_input``. A ``torch.nested`` tensor of
    layout jagged, (b, j, h, head_dim), is packed already: pass ``q.values()`` and ``q.offsets()``
    (of ``q.contiguous()`` where ``q.lengths()`` is not None, which means holes), and wrap the
    result with ``torch.nested.nested_tensor_from_jagged``.

    On CUDA calls are as those of :func:`flash_attn_func`, and the host never waits for the device;
    keys in pages have no gradient. A backward's workspace has, for each head, the rows of q and 128
    more rows for each sequence. A row has 2 floats, and head_dim floats as accumulators of dq,
    rounded up and left out as in :func:`flash_attn_func`, and also left out for sequences shorter
    than 256 on average. The CPU supports every argument and is differentiable. Meta tensors give
    shapes.

    Args:
        q: (total_q, h, head_dim).
        k: (total_k, h_k, head_dim), of q's dtype and device; h is a multiple of h_k.
        v: As k.
        cu_seqlens_q: int32 or int64 (b + 1,), on q's device: where each sequence of queries starts,
            and where the last one ends. From 0 on, non-decreasing, at most total_q. The host does
            not read it on CUDA: there wrong values give undefined results, but nothing outside the
            tensors is read or written. Rows from the last value on are in no sequence: their output
            is 0, their log-sum-exp -inf.
        cu_seqlens_k: int32 or int64 (b + 1,): as cu_seqlens_q, for keys and values. None only with
            block_table and seqused_k.
        max_seqlen_q: The longest sequence of queries, or more, which costs nothing but time. A
            longer sequence is an error on the CPU; on CUDA its first max_seqlen_q rows are
            computed, as with seqused_q. An integer tensor of one element is read back, for which
            the host waits.
        max_seqlen_k: As max_seqlen_q, for the keys; but kernels read all keys of a sequence.
        dropout_p: As in :func:`flash_attn_func`, as are the arguments that follow.
        softmax_scale: Factor on the scores; None for 1 / sqrt(head_dim).
        causal: Whether to mask keys after the query.
        window_size: (left, right), -1 for unlimited.
        softcap: 0.0 for none.
        alibi_slopes: float32 (h,) or (b, h).
        deterministic: Ask for bitwise repeatable gradients, as in :func:`flash_attn_func`.
        return_attn_probs: Also return the log-sum-exp and the dropout pattern.
        block_table: int32 (b, max_pages), for keys and values in the pages of a cache, each of k
            and v of shape (num_pages, page_size, h_k, head_dim), of any page_size from 1 on and any
            strides: key n of sequence i is row n % page_size of page
            ``block_table[i, n // page_size]``. Pages may be in any order and shared. Sequence i has
            ``seqused_k[i]`` keys; then cu_seqlens_k is not read and may be None. Without seqused_k
            it has ``cu_seqlens_k[i + 1] - cu_seqlens_k[i]``. Pages behind those in use, and what
            they hold behind the last key, are not read. The host does not read CUDA tensors: a
            page that does not exist counts as zeros.
        seqused_q: int32 (b,): how many queries of each sequence are computed, from its first one
            on; it is aligned as if it ended there. The other rows have output 0 and log-sum-exp
            -inf. max_seqlen_q then bounds seqused_q. None for all.
        seqused_k: int32 (b,): how many keys of each sequence are used, from its first one on.
        sinks: As in :func:`flash_attn_func`; rows of a sequence without keys have log-sum-exp sink.
        num_splits: Into how many parts the keys of a sequence are split at most, to be computed at
            the same time; at most 128. 0 for a choice by shape, which is 1 without a block_table.
            With any other number a sequence's result is the same, bit for bit, in any batch. Not
            above 1 with dropout. On the CPU keys are never split.

    Returns:
        out: In q's shape and dtype, contiguous. With ``return_attn_probs`` also ``softmax_lse``,
        float32 (h, total_q), and ``S_dmask``: the attention weights with a minus sign where
        dropped, (b, h, max_seqlen_q, max_seqlen_k), zero beyond each sequence, or of shape (0,)
        without dropout. It is for tests: it reads the lengths, and costs a further computation.

    Raises:
        TypeError: for a wrong type or dtype, and for a tensor that is not dense.
        ValueError: for a wrong value, shape or device; for values of CPU tensors of lengths that
            are out of order or range. A compiled function raises it when it runs.
        NotImplementedError: for what is not supported on the tensors' device yet.
    """
    return _attend(
        _NAMES,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        seqused_q,
        seqused_k,
        sinks,
        block_table,
        num_splits,
    )


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes :func:`flash_attn_varlen_func` of k and v stored together, without copying them.

    Args:
        q: (total_q, h, head_dim).
        kv: (total_k, 2, h_k, head_dim), k first.

    The other arguments, the result and the errors are those of :func:`flash_attn_varlen_func`.
    """
    fn = "flash_attn_varlen_kvpacked_func"
    check_packed_together(fn, "kv", kv, 2)
    k, v = kv.unbind(1)
    return _attend(
        Names(fn, k="kv[:, 0]", v="kv[:, 1]"),
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        seqused_q,
        seqused_k,
        sinks,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes :func:`flash_attn_varlen_func` of q, k and v stored together, without a copy.

    Args:
        qkv: (total, 3, h, head_dim), in the order q, k, v.
        cu_seqlens: int32 or int64 (b + 1,): cu_seqlens_q and cu_seqlens_k.
        max_seqlen: max_seqlen_q and max_seqlen_k.

    The other arguments, the result and the errors are those of :func:`flash_attn_varlen_func`.
    """
    fn = "flash_attn_varlen_qkvpacked_func"
    check_packed_together(fn, "qkv", qkv, 3)
    q, k, v = qkv.unbind(1)
    lengths = ("cu_seqlens", "cu_seqlens", "max_seqlen", "max_seqlen")
    return _attend(
        Names(fn, "qkv[:, 0]", "qkv[:, 1]", "qkv[:, 2]", *lengths),
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        seqused_q,
        seqused_k,
        sinks,
    )
