"""The C structs of ``flash.h`` as ctypes sees them, and how they are filled from tensors.

``tests/test_jit_abi.py`` compares sizes and offsets with those of a C++ compiler.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..config import ROW_STATS_MULTIPLE, SEMAPHORE_ROWS

if TYPE_CHECKING:
    import torch

ABI_VERSION = 22  # flash::kAbiVersion

# The leading dimensions of each tensor, in the struct's order, whose strides are in the struct.
_STRIDES = {
    **dict.fromkeys("qkvo", ("batch", "row", "head")),
    "softmax_lse": ("batch", "head"),
    "alibi_slopes": ("batch",),
    "block_table": ("batch",),
    **dict.fromkeys(("k_new", "v_new", "q_unrotated"), ("batch", "row", "head")),
}
_BWD_STRIDES = {
    "do": ("batch", "row", "head"),
    "dlse": ("batch", "head"),
    **dict.fromkeys(("dq", "dk", "dv"), ("batch", "row", "head")),
}
_SIZES = [
    (name, ctypes.c_int32)
    for name in (
        *("b", "seqlen_q", "seqlen_k", "h", "h_k", "d", "h_h_k_ratio", "pack_shift"),
        *("total_q", "total_k", "plan_capacity", "b_k", "num_pages", "page_size", "partial_rows"),
        *("is_cache", "seqlen_new"),
        *("seqlen_rotary", "rotary_dim", "rotary_q_step", "rotary_interleaved"),
        *("num_splits", "split_blocks", "split_ctas", "window_left", "window_right"),
    )
]


class FlashFwdParams(ctypes.Structure):
    """``flash::Flash_fwd_params``."""

    __slots__ = ()  # a misspelt field is an error
    _fields_ = [
        ("q_ptr", ctypes.c_void_p),
        ("k_ptr", ctypes.c_void_p),
        ("v_ptr", ctypes.c_void_p),
        ("o_ptr", ctypes.c_void_p),
        ("softmax_lse_ptr", ctypes.c_void_p),
        ("sinks_ptr", ctypes.c_void_p),
        ("alibi_slopes_ptr", ctypes.c_void_p),
        ("rng_state_ptr", ctypes.c_void_p),
        ("cu_seqlens_q_ptr", ctypes.c_void_p),
        ("cu_seqlens_k_ptr", ctypes.c_void_p),
        ("seqused_q_ptr", ctypes.c_void_p),
        ("seqused_k_ptr", ctypes.c_void_p),
        ("plan_ptr", ctypes.c_void_p),
        ("cache_batch_idx_ptr", ctypes.c_void_p),
        ("leftpad_k_ptr", ctypes.c_void_p),
        ("block_table_ptr", ctypes.c_void_p),
        ("k_new_ptr", ctypes.c_void_p),
        ("v_new_ptr", ctypes.c_void_p),
        ("rotary_cos_ptr", ctypes.c_void_p),
        ("rotary_sin_ptr", ctypes.c_void_p),
        ("q_unrotated_ptr", ctypes.c_void_p),
        ("o_partial_ptr", ctypes.c_void_p),
        ("lse_partial_ptr", ctypes.c_void_p),
        *(
            (f"{tensor}_{dim}_stride", ctypes.c_int64)
            for tensor, dims in _STRIDES.items()
            for dim in dims
        ),
        *_SIZES,
        ("scale_softmax", ctypes.c_float),
        ("scale_softmax_log2", ctypes.c_float),
        ("scale_softcap", ctypes.c_float),
        ("alibi_scale", ctypes.c_float),
        ("dropout_bound", ctypes.c_uint32),
        ("dropout_flip", ctypes.c_uint32),
        ("dropout_scale", ctypes.c_float),
        ("plan_in_order", ctypes.c_int32),
    ]


class FlashBwdParams(FlashFwdParams):
    """``flash::Flash_bwd_params``."""

    __slots__ = ()
    _fields_ = [
        *(
            (f"{name}_ptr", ctypes.c_void_p)
            for name in (
                *("do", "dlse", "dq", "dk", "dv", "dsinks"),
                *("row_stats", "dq_accum", "dq_semaphore", "dkv_partial"),
            )
        ),
        *(
            (f"{tensor}_{dim}_stride", ctypes.c_int64)
            for tensor, dims in _BWD_STRIDES.items()
            for dim in dims
        ),
        ("seqlen_q_rounded", ctypes.c_int32),
        ("deterministic", ctypes.c_int32),
        ("stores_first", ctypes.c_int32),
        ("head_parts", ctypes.c_int32),
        ("heads_in_group", ctypes.c_int32),
    ]


class FlashKernel(ctypes.Structure):
    """``flash::Flash_kernel``, and ``flash::Flash_bwd_kernel``, whose parameters differ."""

    _fields_ = [
        ("abi_version", ctypes.c_int32),
        ("params_size", ctypes.c_int32),
        ("name", ctypes.c_char_p),
        ("threads", ctypes.c_int32),
        ("smem_bytes", ctypes.c_int32),
        ("tile_m", ctypes.c_int32),
        ("dq_accum", ctypes.c_int32),
        *(
            (
                name,
                ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(FlashFwdParams), ctypes.c_void_p),
            )
            for name in ("launch", "plan")
        ),
        ("error_string", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int32)),
        ("head_parts", ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(FlashFwdParams))),
        ("dkv_partial", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(FlashFwdParams))),
    ]


def fwd_params(
    tensors: Mapping[str, torch.Tensor],
    softmax_scale: float,
    pack_heads: bool = False,
    window_size: tuple[int, int] = (0, 0),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
) -> FlashFwdParams:
    """Returns the arguments of a forward launch; nothing is checked.

    Args:
        tensors: By the names of their pointers without ``_ptr``, on a GPU or the CPU, with the
            shapes that ``flash.h`` gives: q, k, v, o, softmax_lse, sinks, alibi_slopes, rng_state.
            A pointer without a tensor is null. The struct holds addresses only: the tensors have to
            outlive it.
        softmax_scale: Factor on the scores.
        pack_heads: Whether the query heads of a key head share tiles.
        window_size: (left, right) of a kernel with the mask ``"local"``, both >= 0.
        softcap: > 0 for a kernel with softcap, else 0.0.
        dropout_p: > 0 for a kernel with dropout, else 0.0; ``pack_heads`` is False then.
    """
    params = FlashFwdParams()
    _fill(params, tensors, softmax_scale, window_size, softcap, dropout_p)
    if pack_heads:
        params.pack_shift = (params.h_h_k_ratio - 1).bit_length()
    return params


def bwd_params(
    tensors: Mapping[str, torch.Tensor],
    softmax_scale: float,
    window_size: tuple[int, int] = (0, 0),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
) -> FlashBwdParams:
    """Returns the arguments of a backward launch; nothing is checked.

    Args:
        tensors: As in :func:`fwd_params`, and do, dlse, dq, dk, dv, dsinks, row_stats, whose third
            dimension is the rounded length of the queries, dq_accum, dq_semaphore, flat, and
            dkv_partial.
        softmax_scale: Factor on the scores.
        window_size: (left, right) of kernels with the mask ``"local"``, both >= 0.
        softcap: > 0 for kernels with softcap, else 0.0.
        dropout_p: > 0 for kernels with dropout, else 0.0.
    """
    params = FlashBwdParams(seqlen_q_rounded=tensors["row_stats"].shape[2])
    _fill(params, tensors, softmax_scale, window_size, softcap, dropout_p)
    return params


def dropout_bound(threshold: int) -> tuple[int, bool]:
    """Returns which of the 2**16 patterns of 16 bits drop a weight: ``DropoutBound``, flash.h.

    Args:
        threshold: How many of them, less than 2**16.

    Returns:
        The bits of a float16 bound, and a flag: False if the patterns less than it as float16 drop,
        True if all others do, NaN among them.
    """
    inf = 0x7C00  # so many negative patterns, -inf included, are less than 0
    flips = threshold == inf + 1 or threshold > 2 * inf + 1
    less = 2**16 - threshold if flips else threshold
    return 0x8000 | inf - less if less <= inf else less - inf - 1, flips


def _fill(
    params: FlashFwdParams,
    tensors: Mapping[str, torch.Tensor],
    softmax_scale: float,
    window_size: tuple[int, int],
    softcap: float = 0.0,
    dropout_p: float = 0.0,
) -> None:
    b, seqlen_q, h, d = tensors["q"].shape
    seqlen_k, h_k = tensors["k"].shape[1:3]
    unit = softcap or softmax_scale  # of the scores
    threshold = round(dropout_p * 2**16)
    bound, flips = dropout_bound(threshold)
    values = {
        "b": b,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "h": h,
        "h_k": h_k,
        "d": d,
        "h_h_k_ratio": h // h_k,
        "window_left": window_size[0],
        "window_right": window_size[1],
        "scale_softmax": softmax_scale,
        "scale_softmax_log2": unit * math.log2(math.e),
        "scale_softcap": softmax_scale / unit,
        "alibi_scale": 1 / unit,
        "dropout_bound": bound * 0x10001,
        "dropout_flip": 0xFFFFFFFF if flips else 0,
        "dropout_scale": 1 / (1 - threshold / 2**16),
    }
    for name, value in values.items():
        setattr(params, name, value)
    strides = {**_STRIDES, **_BWD_STRIDES}
    for name, tensor in tensors.items():
        setattr(params, f"{name}_ptr", tensor.data_ptr())
        for i, dim in enumerate(strides.get(name, ())):
            # The kernels never use the stride of a dimension of size 1, which may be any number.
            stride = tensor.stride(i) if tensor.shape[i] > 1 else 0
            setattr(params, f"{name}_{dim}_stride", stride)


@dataclasses.dataclass(frozen=True)
class Splits:
    """How the keys of a ragged batch's tiles are split, as in ``flash.h``.

    Attributes:
        num_splits: Most parts of a tile, 1 to 256.
        blocks: Fewest key blocks of a part.
        ctas: If not 0, tiles are split into fewer, longer parts, as few as keep so many CTAs busy;
            0: as ``num_splits`` and ``blocks`` say, so that a sequence is split the same in any
            batch.
    """

    num_splits: int = 1
    blocks: int = 1
    ctas: int = 0


NOT_SPLIT = Splits()
_SPLIT_WAVES = 4  # kSplitWaves of flash.h


def plan_capacity(
    total_rows: int, b: int, tile_m: int, splits: Splits = NOT_SPLIT, grid_heads: int = 1
) -> int:
    """Computes ``flash::plan_capacity()``."""
    more = (splits.num_splits - 1) * (total_rows // tile_m + b)
    if splits.ctas > 0:
        more = min(more, _SPLIT_WAVES * splits.ctas // grid_heads + 1)
    return total_rows // tile_m + 2 * b + 1 + more


def plan_words(capacity: int, b: int, total_q: int = 0, num_splits: int = 1) -> int:
    """Computes ``flash::plan_words()``."""
    return 4 + 8 * capacity + 16 * b + 8 + (4 * total_q if num_splits > 1 else 0)


def partial_rows(total_rows: int, tile_m: int, splits: Splits, grid_heads: int) -> int:
    """Computes ``flash::partial_rows()``."""
    most = splits.num_splits * total_rows if splits.num_splits > 1 else 0
    if splits.ctas > 0:
        return min(most, total_rows + tile_m * (_SPLIT_WAVES * splits.ctas // grid_heads + 1))
    return most


def bwd_plan_words(total_q: int, total_k: int, b: int) -> int:
    """Computes ``flash::bwd_plan_words()``."""
    return plan_words(plan_capacity(max(total_q, total_k), b, 64), b)


def semaphores(heads: int, rows: int) -> int:
    """Returns the words of ``dq_semaphore_ptr``, for so many heads and rows of statistics."""
    return heads * rows // SEMAPHORE_ROWS + 1


def row_stats_rows(total_q: int, b: int) -> int:
    """Computes ``flash::row_stats_rows()``."""
    return (total_q // ROW_STATS_MULTIPLE + b + 2) * ROW_STATS_MULTIPLE


# Tensors of a ragged batch that are passed as those of a single batch entry.
_PACKED = (*"qkvo", "softmax_lse", "do", "dlse", "dq", "dk", "dv", "row_stats", "dq_accum")


def _as_one_entry(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x[None] if name in _PACKED else x for name, x in tensors.items()}


def _set_totals(
    params: FlashFwdParams, tensors: Mapping[str, torch.Tensor], max_seqlen_q: int
) -> None:
    params.b = tensors["cu_seqlens_q"].shape[0] - 1
    params.total_q, params.total_k = params.seqlen_q, params.seqlen_k
    params.seqlen_q = max_seqlen_q


def varlen_params(
    tensors: Mapping[str, torch.Tensor],
    softmax_scale: float,
    max_seqlen_q: int,
    capacity: int,
    pack_heads: bool = False,
    window_size: tuple[int, int] = (0, 0),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
) -> FlashFwdParams:
    """Returns :func:`fwd_params` of a ragged batch.

    Args:
        tensors: q (total_q, h, d), k and v (total_k, h_k, d), o as q, softmax_lse (h, total_q),
            cu_seqlens_q and cu_seqlens_k (b + 1,), plan; sinks, seqused_q and seqused_k (b,).
        max_seqlen_q: Rows of a sequence from this index on count as rows of no sequence.
        capacity: Capacity of the plan.
    """
    options = pack_heads, window_size, softcap, dropout_p
    params = fwd_params(_as_one_entry(tensors), softmax_scale, *options)
    _set_totals(params, tensors, max_seqlen_q)
    params.plan_capacity = capacity
    params.num_splits = params.split_blocks = 1
    return params


def varlen_bwd_params(
    tensors: Mapping[str, torch.Tensor],
    softmax_scale: float,
    max_seqlen_q: int,
    window_size: tuple[int, int] = (0, 0),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
) -> FlashBwdParams:
    """Returns :func:`bwd_params` of a ragged batch.

    Args:
        tensors: As in :func:`varlen_params`, plan of :func:`bwd_plan_words` words; do, dq, dk and
            dv as q, k and v, dlse (h, total_q), row_stats (h, row_stats_rows(), 2); with fused
            dq_accum (h, row_stats_rows(), dq_accum of the configuration) and dq_semaphore.
        max_seqlen_q: As in :func:`varlen_params`.
    """
    options = window_size, softcap, dropout_p
    params = bwd_params(_as_one_entry(tensors), softmax_scale, *options)
    _set_totals(params, tensors, max_seqlen_q)
    return params


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The options of rotary embedding in ``flash.h``, beside its tables.

    Attributes:
        q_step: 1, or 0 if all queries of a sequence are rotated alike.
        interleaved: Whether the elements of a pair are neighbours.
    """

    q_step: int = 1
    interleaved: bool = True


def serving_params(
    tensors: Mapping[str, torch.Tensor],
    softmax_scale: float,
    max_seqlen_q: int,
    tile_m: int,
    splits: Splits = NOT_SPLIT,
    pack_heads: bool = False,
    window_size: tuple[int, int] = (0, 0),
    softcap: float = 0.0,
    rotary: Rotary | None = None,
    in_cache: int | None = None,
    dropout_p: float = 0.0,
) -> FlashFwdParams:
    """Returns :func:`fwd_params` of a ragged batch over a cache, without pointers to workspace.

    Args:
        tensors: q (total_q, h, d), o as q, softmax_lse (h, total_q); k and v
            (num_pages, page_size, h_k, d), seqused_k (b,); cu_seqlens_q (b + 1,), where sequences
            have different lengths, else each has ``max_seqlen_q`` rows; sinks, alibi_slopes,
            rng_state (2,), seqused_q, cache_batch_idx, leftpad_k (b,); block_table (b_k, columns)
            of a paged cache; k_new and v_new (b, seqlen_new, h_k, d), which are appended;
            rotary_cos and rotary_sin (seqlen_rotary, rotary_dim / 2), and then q_unrotated
            (b, seqlen_q, h, d).
        max_seqlen_q: As in :func:`varlen_params`.
        tile_m: Query rows of the kernel's tile.
        rotary: How queries and pairs are rotated.
        in_cache: Without seqused_k: tokens of every sequence before an append.

    Returns:
        The struct, which includes the sizes that ``plan_words()`` and the workspace take:
        ``plan_capacity`` and ``partial_rows``.
    """
    cache, table = tensors["k"], tensors.get("block_table")
    dense = dict(tensors)
    for name in ("q", "o", "softmax_lse"):
        if name in dense:
            dense[name] = dense[name][None]
    params = fwd_params(dense, softmax_scale, pack_heads, window_size, softcap, dropout_p)
    params.b = params.seqlen_q // max_seqlen_q
    if "seqused_k" in tensors:
        params.b = tensors["seqused_k"].shape[0]
    params.total_q, params.seqlen_q = params.seqlen_q, max_seqlen_q
    params.is_cache = 1
    params.num_pages, params.page_size = cache.shape[:2]
    params.b_k = params.num_pages if table is None else table.shape[0]
    params.seqlen_k = params.page_size * (1 if table is None else table.shape[1])
    params.num_splits, params.split_blocks = splits.num_splits, splits.blocks
    params.split_ctas = splits.ctas
    if "k_new" in tensors:
        params.seqlen_new = tensors["k_new"].shape[1]
    if in_cache is not None:
        params.seqlen_k = in_cache + params.seqlen_new
    if "rotary_cos" in tensors:
        params.seqlen_rotary = tensors["rotary_cos"].shape[0]
        params.rotary_dim = 2 * tensors["rotary_cos"].shape[1]
        rotary = rotary or Rotary()
        params.rotary_q_step, params.rotary_interleaved = rotary.q_step, rotary.interleaved
    heads = params.h_k if pack_heads and params.h > params.h_k else params.h
    rows = params.total_q << params.pack_shift
    params.plan_capacity = plan_capacity(rows, params.b, tile_m, splits, heads)
    params.partial_rows = partial_rows(rows, tile_m, splits, heads)
    return params
