"""Attention of sequences of different lengths in CPU tensors: a loop over :mod:`flashcute.cpu`.

Each sequence is a dense call of batch size 1, so it gets PyTorch's flash attention where a dense
call does, and its result does not depend on its neighbours. Tracers see one operator,
``flashcute::attend_varlen_cpu``, or of keys in pages ``flashcute::attend_varlen_paged_cpu``:
lengths and page numbers are data to them, and one graph holds for all lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from . import cpu
from .checks_kvcache import read_pages
from .checks_varlen import Lengths, Names, read_lengths, read_lengths_in_pages
from .config import NAMESPACE
from .cpu_kvcache import tokens
from .cpu_operator import Operator, draw_state

# A window of this size is unlimited in effect. Cutting longer ones to it keeps the operator's int
# arguments within 64 bits.
_MAX_WINDOW = 2**62


class Tensors(NamedTuple):
    """The tensors of :func:`attend`, checked by the caller but for the values of lengths.

    Attributes:
        q: (total_q, h, d), float16, bfloat16, float32 or float64.
        k: (total_k, h_k, d), or with a block_table (num_pages, page_size, h_k, d); as v.
        alibi_slopes: (h,) or (b, h).
        sinks: (h,).
        cu_seqlens_q: (b + 1,), int32 or int64; as cu_seqlens_k.
        seqused_q: (b,), int32; as seqused_k.
        rng_state: int64 (2,), of the dropout mask; None without dropout.
        block_table: (b, max_pages), int32: the pages of each sequence. Keys are then not packed;
            their number is seqused_k, or without it the difference of cu_seqlens_k.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    rng_state: Tensor | None
    block_table: Tensor | None = None


class Options(NamedTuple):
    """The options of :func:`attend` that are no tensors."""

    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    return_dmask: bool = False


_OPERATOR_NAMES = Names(f"{NAMESPACE}::attend_varlen_cpu")
_PAGED_NAMES = Names(f"{NAMESPACE}::attend_varlen_paged_cpu")


def attend(
    tensors: Tensors, options: Options, names: Names = _OPERATOR_NAMES
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes attention of each sequence, in float32 (float64 inputs: float64); differentiable.

    Returns:
        out, contiguous, in q's shape and dtype; the log-sum-exp in float32 (h, total_q); and dmask
        (b, h, max_seqlen_q, max_seqlen_k) as in ``cpu.attend``, zero beyond each sequence, or of
        shape (0,). Rows of no sequence have out 0 and log-sum-exp -inf.

    Raises:
        ValueError: for lengths that do not fit the tokens or max_seqlen_q and max_seqlen_k.
    """
    q, k, v, slopes = tensors[:4]
    b, total_q, h = tensors.cu_seqlens_q.shape[0] - 1, *q.shape[:2]
    lengths = _read(names, tensors, options)
    if b == 0:  # one sequence without tokens gives outputs that have gradients
        lengths, slopes = Lengths([0], [0], [0], [0]), None
    gaps, rows = _cut(total_q, lengths.start_q, lengths.used_q)
    ks, vs = (_keys(x, tensors.block_table, lengths) for x in (k, v))
    sequences = zip(_used(q, gaps, rows), ks, vs, strict=True)
    returns_dmask = options.return_dmask and tensors.rng_state is not None
    outs, lses, dmasks = [], [], []
    for i, (q_i, k_i, v_i) in enumerate(sequences):
        part = cpu.Tensors(
            q_i[None],
            k_i[None],
            v_i[None],
            alibi_slopes=slopes[i : i + 1] if slopes is not None and slopes.dim() == 2 else slopes,
            sinks=tensors.sinks,
            rng_state=tensors.rng_state,
        )
        out, lse, dmask = cpu.attend(part, cpu.Options(*options[2:]), i)
        outs += [q.new_zeros((gaps[i], *q.shape[1:])), out[0]]
        lses += [lse.new_full((h, gaps[i]), -torch.inf), lse[0]]
        if returns_dmask:
            beyond = (0, options[1] - k_i.shape[0], 0, options[0] - q_i.shape[0])
            dmasks.append(torch.nn.functional.pad(dmask, beyond))
    outs.append(q.new_zeros((gaps[-1], *q.shape[1:])))
    lses.append(lses[0].new_full((h, gaps[-1]), -torch.inf))
    dmask = torch.cat(dmasks)[:b] if returns_dmask else q.new_empty(0)
    return torch.cat(outs), torch.cat(lses, 1), dmask


def _read(names: Names, tensors: Tensors, options: Options) -> Lengths:
    q, k, table = tensors.q, tensors.k, tensors.block_table
    if table is None:
        totals = q.shape[0], k.shape[0]
        return read_lengths(names, totals, tensors[5:7], tensors[7:9], options[:2])
    room = table.shape[1] * k.shape[1]
    lengths = read_lengths_in_pages(
        names, q.shape[0], tensors[5:7], tensors[7:9], options[:2], room
    )
    read_pages(names.fn, table, lengths.used_k, k, names.k)
    return lengths


def check_lengths(names: Names, tensors: Tensors, options: Options) -> None:
    """Raises ValueError, in the words of ``names``, for lengths that :func:`attend` refuses."""
    _read(names, tensors, options)


def _keys(x: Tensor, table: Tensor | None, lengths: Lengths) -> Iterable[Tensor]:
    """Returns the keys or values of each sequence, (keys, h_k, d)."""
    if table is None:
        return _used(x, *_cut(x.shape[0], lengths.start_k, lengths.used_k))
    if table.shape[0] == 0:
        return (x[:0].flatten(0, 1),)
    return (tokens(x, row, 0, n) for row, n in zip(table, lengths.used_k, strict=True))


def _cut(total: int, starts: list[int], used: list[int]) -> tuple[list[int], list[int]]:
    """Returns how many rows of no sequence precede each sequence and the end, and ``used``."""
    ends = [0, *(start + n for start, n in zip(starts, used, strict=True))]
    return [start - end for start, end in zip([*starts, total], ends, strict=True)], used


def _used(x: Tensor, gaps: list[int], rows: list[int]) -> tuple[Tensor, ...]:
    """Returns the rows of each sequence by one split, as a slice's gradient is as large as x."""
    sizes = [*itertools.chain(*zip(gaps, rows, strict=False)), gaps[-1]]
    return x.split(sizes)[1::2]


def _parts(args: tuple) -> tuple[Tensors, Options]:
    """Splits the arguments of either operator, which have equally many options, at the end."""
    n = len(args) - len(Options._fields)
    return Tensors(*args[:n]), Options(*args[n:])


def _attend(*args):
    return attend(*_parts(args))


def _attend_pages(*args):
    return attend(*_parts(args), _PAGED_NAMES)


def _fake(*args):
    tensors, options = _parts(args)
    q, b = tensors.q, tensors.cu_seqlens_q.shape[0] - 1
    total_q, h, _ = q.shape
    returns_dmask = options.return_dmask and options.dropout_p > 0.0
    dmask = q.new_empty((b, h, *options[:2]) if returns_dmask else 0)
    return q.new_empty(q.shape), q.new_empty((h, total_q), dtype=torch.float32), dmask


_TENSORS = (
    *("Tensor q", "Tensor k", "Tensor v", "Tensor? alibi_slopes", "Tensor? sinks"),
    *("Tensor cu_seqlens_q", "Tensor cu_seqlens_k", "Tensor? seqused_q", "Tensor? seqused_k"),
    "Tensor? rng_state",
)
_OPTIONS = (
    *("SymInt max_seqlen_q", "SymInt max_seqlen_k", "float softmax_scale", "bool causal"),
    *("int window_left", "int window_right", "float softcap", "float dropout_p"),
    "bool return_dmask",
)
_operator = Operator("attend_varlen_cpu", _TENSORS, _OPTIONS, 5, _attend, _fake)
_paged_operator = Operator(
    *("attend_varlen_paged_cpu", (*_TENSORS, "Tensor block_table"), _OPTIONS, 5),
    *(_attend_pages, _fake),
)


def backward(dout, dlse, ddmask, wanted: int, tensors: Tensors, options: Options):
    """Returns gradients of the first five ``tensors``, as :func:`flashcute.cpu_ops.backward`."""
    return _operator.backward_op(dout, dlse, ddmask, wanted, *tensors[:-1], *options)


def attend_or_trace(
    names: Names, tensors: Tensors, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Calls :func:`attend`, or the operator where the call is traced; meta tensors give shapes.

    ``names`` are for messages. Where dropout has no random state, it is drawn here.
    """
    if options.dropout_p > 0.0 and tensors.rng_state is None:
        tensors = tensors._replace(rng_state=draw_state(tensors.q))
    left, right = (min(int(side), _MAX_WINDOW) for side in options[4:6])
    options = options._replace(window_left=left, window_right=right)
    eager = lambda: attend(tensors, options, names)  # noqa: E731
    if tensors.block_table is None:
        return _operator(eager, *tensors[:-1], *options)
    return _paged_operator(eager, *tensors, *options)
