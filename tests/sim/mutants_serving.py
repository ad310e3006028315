"""Faults planted into what a cache, pages and splits add, in the form of :mod:`mutants`."""

from __future__ import annotations

import dataclasses

from mutants import TWO_STAGES, Mutant
from mutants_sm90 import ASKING

_PAGED_80 = dataclasses.replace(TWO_STAGES, paged=True)
_PAGED_90 = dataclasses.replace(ASKING, paged=True)
_PLAN = "flash_plan_kernel.h"
_COMBINE = "flash_fwd_combine_kernel.h"
_EPILOGUE = "epilogue_fwd.h"
_TILE = "work_tile.h"
_SM80 = "mainloop_fwd_sm80.h"
_SM90 = "mainloop_fwd_sm90.h"


_OUTSIDE = "outside (every tensor|of )"


def _numerics(name, file, old, new, config=TWO_STAGES):
    return Mutant(name, file, old, new, "numerics", "", config)


MUTANTS = (
    Mutant(
        "a page too far",
        _SM80,
        "int const column = row / params.page_size;",
        "int const column = row / params.page_size + 1;",
        "simulator",
        _OUTSIDE,
        _PAGED_80,
    ),
    _numerics(
        "a page too far, TMA",
        _SM90,
        "int const column = (row + first) / params.page_size;",
        "int const column = (row + first) / params.page_size + (first > 0);",
        _PAGED_90,
    ),
    _numerics(
        "each box from its page's first row",
        _SM90,
        "in_page = row + first - column * params.page_size;",
        "in_page = 0;",
        _PAGED_90,
    ),
    _numerics(
        "pages of the first part in every part",
        _SM90,
        "load_pages(params, map, full, empty, smem, ring, row_k + row,",
        "load_pages(params, map, full, empty, smem, ring, row,",
        _PAGED_90,
    ),
    Mutant(
        "half of a block's boxes expected",
        _SM90,
        "barrier_arrive_expect(&full[stage], kBytesKV)",
        "barrier_arrive_expect(&full[stage], kBytesKV / 2)",
        "simulator",
        "transaction bytes",
        _PAGED_90,
    ),
    Mutant(
        "each lane takes a tile of its own",
        _SM90,
        "return __shfl_sync(0xffffffffu, leads() ? queue.next(index) : 0, 0);",
        "return queue.next(index);",
        "simulator",
        "missing lane",
        _PAGED_90,
    ),
    _numerics("a split lost", _COMBINE, "position.parts, head,", "position.parts - 1, head,"),
    _numerics(
        "combine with an empty split",
        _COMBINE,
        "return max == -INFINITY ? 0.f : max;",
        "return max;",
    ),
    _numerics("parts not weighted", _COMBINE, "weight(lse[j], reference), x[j]", "1.f, x[j]"),
    _numerics(
        "sums of the other groups lost",
        _COMBINE,
        "add(total, 1.f, storage.sums[g][lane]);",
        "add(total, 0.f, storage.sums[g][lane]);",
    ),
    _numerics("sums of a row lost", _COMBINE, "add(total, 1.f, next);", "add(total, 0.f, next);"),
    _numerics("sink forgotten", _COMBINE, " + weight(sink, ref);", ";"),
    _numerics(
        "a sink in each part",
        _EPILOGUE,
        "load_sinks(params, tile.head_q, rows, !tile.is_part());",
        "load_sinks(params, tile.head_q, rows, true);",
        ASKING,
    ),
    _numerics(
        "packed heads merged from the first one",
        _COMBINE,
        "position.partial_row + within;",
        "position.partial_row;",
    ),
    Mutant(
        "merged before the parts are there",
        _COMBINE,
        "if constexpr (Traits::kConfig.arch == 90) cudaGridDependencySynchronize();",
        "",
        "simulator",
        "griddepcontrol.wait|status -11",  # it follows a plan of NaN
        ASKING,
    ),
    Mutant(
        "part masked from the sequence's begin",
        _TILE,
        "tile.seqlen_k -= first * tile_n;",
        "",
        "simulator",
        _OUTSIDE,
    ),
    _numerics("every part of the first keys", _TILE, "tile.row_k += first * tile_n;", ""),
    _numerics(
        "parts that overlap",
        _TILE,
        "int(int64_t(blocks.count) * part / parts);",
        "int(int64_t(blocks.count) * (part > 0 ? part - 1 : 0) / parts);",
    ),
    _numerics("parts that share their rows", _PLAN, "begin + part * rows;", "begin;"),
    _numerics(
        "sequences that share their rows",
        _PLAN,
        "cute::min(first[low].partial_rows,",
        "cute::min(0,",
    ),
    _numerics(
        "positions of every part listed",
        _PLAN,
        "tile.part >= PlanTile::kParts",
        "tile.part >= 2 * PlanTile::kParts",
    ),
    Mutant(
        "leftpad counted as keys",
        _PLAN,
        "params.seqlen_k) - tile.row_k;",
        "params.seqlen_k);",
        "simulator",
        _OUTSIDE,
    ),
    _numerics(
        "entry of another sequence",
        _PLAN,
        "entries != nullptr ? entries[i] : i;",
        "i;",
    ),
)
