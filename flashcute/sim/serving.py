"""Runs a ragged batch over a cache of keys and values: what serving calls."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from ..config import FwdConfig
from ..jit import abi
from . import COPY_MODES, run


def run_serving(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seqused_k: torch.Tensor | int,
    config: FwdConfig,
    *,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    splits: abi.Splits = abi.NOT_SPLIT,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary: abi.Rotary | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    pack_heads: bool = False,
    window_size: tuple[int, int] = (0, 0),
    seed: int = 0,
    copy_mode: str = "late",
    checker: str = "none",
    sms: int = 3,
    launches: int = 1,
    plan: torch.Tensor | None = None,
    kernel: tuple[Path, str] | None = None,
    timeout: float = 300.0,
) -> run.SimResult:
    """Runs :func:`~flashcute.sim.run_varlen` for queries over a cache.

    It runs the plan, the kernel, and the kernel that combines split tiles.

    Args:
        q: (total_q, h, d), on the CPU, as in :func:`~flashcute.sim.run_varlen`.
        k, v: (num_pages, page_size, h_k, d): pages where the configuration is of a paged cache;
            else an entry of the cache is one page.
        seqused_k: (b,) int32: keys of each sequence, any values. An int is the number of keys of
            all sequences, which then have ``max_seqlen_q`` rows each.
        config: The kernel.
        max_seqlen_q: Rows of a sequence from this index on count as rows of no sequence.
        cu_seqlens_q: (b + 1,) int32; by default each sequence has ``max_seqlen_q`` rows.
        block_table: (b_k, columns) int32, of a paged cache: the pages of each row's keys.
        cache_batch_idx: (b,) int32: the entry of each sequence, or its row of the table.
        leftpad_k: (b,) int32, not of a paged cache: where the keys of a sequence begin.
        splits: How tiles are split.
        k_new, v_new: (b, seqlen_new, h_k, d), which are appended to the cache; without
            ``cu_seqlens_q``.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2), with ``k_new`` alone.
        rotary: How queries and pairs are rotated.
        plan: The plan among an earlier run's outputs, which is then not made again.

    The other arguments are those of :func:`~flashcute.sim.run_varlen`; so is the result, whose
    outputs also hold the workspaces ``o_partial`` and ``lse_partial`` of split tiles, and the
    ``k`` and ``v`` of a cache that is appended to.

    Raises:
        ValueError: for a table where the kernel takes none, or none where it takes one; otherwise
            as :func:`~flashcute.sim.run_fwd`.
    """
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    run._check({"q": q[None], "k": k[:1], "v": v[:1]}, config, scale, copy_mode, checker)
    if config.paged != (block_table is not None):
        raise ValueError(
            "sim.run_serving: expected block_table where the kernel is of a paged cache, got "
            f"block_table={'a tensor' if block_table is not None else None} for a kernel with "
            f"paged={config.paged}; pass what it was compiled for"
        )
    inputs = {"q": q, "k": k, "v": v}
    in_cache = seqused_k if isinstance(seqused_k, int) else None
    if in_cache is None:
        inputs["seqused_k"] = seqused_k
    optional = {"cu_seqlens_q": cu_seqlens_q, "seqused_q": seqused_q, "block_table": block_table}
    optional |= {"cache_batch_idx": cache_batch_idx, "leftpad_k": leftpad_k}
    optional |= {"sinks": sinks, "alibi_slopes": alibi_slopes, "rng_state": rng_state}
    inputs |= {name: x for name, x in optional.items() if x is not None}
    total_q, h, d = q.shape
    b = seqused_k.shape[0] if in_cache is None else total_q // max_seqlen_q
    run._check_scores(config, inputs, (b, h), pack_heads, softcap, dropout_p)
    outputs = {
        "o": q.new_full(q.shape, math.nan),
        "softmax_lse": q.new_full((h, total_q), math.nan, dtype=torch.float32),
    }
    if k_new is not None:
        inputs |= {"k_new": k_new, "v_new": v_new}
        outputs |= {name: inputs.pop(name).clone() for name in "kv"}
    if rotary_cos is not None:
        entries = q.view(-1, max_seqlen_q, h, d)
        inputs |= {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "q_unrotated": entries}
        outputs["q"] = torch.full_like(inputs.pop("q"), math.nan)
    params = abi.serving_params(
        {**inputs, **outputs},
        *(scale, max_seqlen_q, config.tile_m, splits, pack_heads, window_size, softcap, rotary),
        in_cache,
        dropout_p,
    )
    words = abi.plan_words(params.plan_capacity, params.b, total_q, splits.num_splits)
    if plan is None:
        outputs["plan"] = torch.full((words,), -1, dtype=torch.int32)
    else:
        inputs["plan"] = plan
    if splits.num_splits > 1:
        heads = params.h_k if params.pack_shift > 0 else h
        rows = q.new_full((heads, params.partial_rows, d + 1), math.nan, dtype=torch.float32)
        outputs["o_partial"] = rows[..., :d].contiguous()
        outputs["lse_partial"] = rows[..., d].contiguous()
    path, function = kernel or run._kernel(config, checker)
    settings = (seed, COPY_MODES.index(copy_mode), 227 * 1024, sms, launches, 0, 1 << 32)
    settings += (int(plan is None), config.min_ctas)
    program = [str(run._runner(checker)), str(path), function]
    return run.run_program(program, params, inputs, outputs, settings, timeout)
