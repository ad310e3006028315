"""Faults planted into the code for KV caches, pages, split-KV and appends, in the form of
:mod:`mutants`."""

from __future__ import annotations

import dataclasses

from mutants import TWO_STAGES, Mutant
from mutants_sm90 import ASKING, DECODING

_PAGED_80 = dataclasses.replace(TWO_STAGES, paged=True)
_PAGED_90 = dataclasses.replace(ASKING, paged=True)
_WINDOWED = dataclasses.replace(DECODING, mask="local")  # its CTAs do not merge parts
_PLAN = "flash_plan_kernel.h"
_APPEND = "append_kvcache.h"
_SEGMENTS = "plan_segments.h"
_CTA_PLAN = "cta_plan.h"
_MERGE = "merge_parts_sm90.h"
_COMBINE = "flash_fwd_combine_kernel.h"
_EPILOGUE = "epilogue_fwd.h"
_TILE = "work_tile.h"
_SM80 = "mainloop_fwd_sm80.h"
_SM90 = "mainloop_fwd_sm90.h"
_PAGES = "paged_load_sm90.h"
_REST = "rest_sm90.h"


_OUTSIDE = "outside (every tensor|of )"


def _numerics(name, file, old, new, config=TWO_STAGES):
    return Mutant(name, file, old, new, "numerics", "", config)


def _simulator(name, file, old, new, report):
    return Mutant(name, file, old, new, "simulator", report, _PAGED_90)


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
        "a page too far, sm90",
        _PAGES,
        "maps.page(column, places[i].row, row + of_lane);",
        "maps.page(column, places[i].row, row + of_lane + (of_lane > 0) * params.page_size);",
        _PAGED_90,
    ),
    _numerics(
        "each box from its page's first row",
        _PAGES,
        "ragged_rows(steps, maps.box_rows, place.row,",
        "ragged_rows(steps, maps.box_rows, 0,",
        _PAGED_90,
    ),
    _numerics(
        "pages of the first part in every part",
        _SM90,
        "look_up(thread, params, maps, tile.batch_k, tile.row_k + row,",
        "look_up(thread, params, maps, tile.batch_k, row,",
        _PAGED_90,
    ),
    _numerics(
        "boxes of keys in the place of values",
        _SM90,
        "load_boxes(thread, params, maps, values ? maps.v : maps.k,",
        "load_boxes(thread, params, maps, maps.k,",
        _PAGED_90,
    ),
    _simulator(
        "boxes of one warp loaded by both",
        _PAGES,
        "thread % 32 * kWarps + warp(thread);",
        "thread % 32 * kWarps;",
        "is the destination of a copy under way",
    ),
    _simulator(
        "half of a block's boxes expected",
        _PAGES,
        "barrier_arrive_expect(full, bytes)",
        "barrier_arrive_expect(full, bytes / 2)",
        "transaction bytes",
    ),
    _numerics(
        "rows copied as if not swizzled",
        _PAGES,
        "Element *const to = &sX(row, col);",
        "Element *const to = buffer.data() + row * kSmemRow + col;",
        _PAGED_90,
    ),
    _numerics(
        "rows of a thread from one page",
        _PAGES,
        "__shfl_sync(0xffffffffu, address, source)",
        "__shfl_sync(0xffffffffu, address, lane / kLanes)",
        _PAGED_90,
    ),
    _numerics(
        "each row from its page's first row",
        _PAGES,
        "place.page * x.page_stride + place.row * x.row_stride",
        "place.page * x.page_stride",
        _PAGED_90,
    ),
    _simulator(
        "no zeros behind the keys",
        _PAGES,
        "return static_cast<unsigned>(place.page) < static_cast<unsigned>(params.num_pages);",
        "return true;",
        _OUTSIDE,
    ),
    _numerics(
        "rows of a page behind the last key",
        _PAGES,
        "any ? keys - box.row : 0",
        "any ? maps.box_rows : 0",
        _PAGED_90,
    ),
    _simulator(
        "copies without a fence",
        _SM90,
        "if (copies(maps)) sm90::fence_async_proxy();",
        "",
        "a wgmma reads byte .* without fence.proxy.async",
    ),
    _simulator(
        "fence before the wait for copied keys",
        _SM90,
        "sm90::barrier_wait(&storage.k_full[k.stage()], k.parity());\n            fence_copies();",
        "fence_copies();\n            sm90::barrier_wait(&storage.k_full[k.stage()], k.parity());",
        "a wgmma reads byte .* without fence.proxy.async",
    ),
    _simulator(
        "pages loaded into buffers in use",
        _SM90,
        "sm90::barrier_wait(empty, kv.parity() ^ 1);",
        "",
        "overwritten too early: (cp.async|TMA)|a wgmma reads byte|is the destination of a copy",
    ),
    _simulator(
        "copies of one warp awaited",
        _SM90,
        "copies(maps) ? 32 * Pages::kWarps",
        "copies(maps) ? 32",
        "one arrival more|is pending at|a wgmma reads byte",
    ),
    _simulator(
        "tile released before all warps that load have read it",
        _SM90,
        "C.paged ? 3 : 0;",
        "0;",
        "one arrival more|deadlock",
    ),
    _simulator(
        "tile never released by warps that load",
        _SM90,
        "sm90::barrier_arrive(&storage.tile_empty[tiles.stage()], thread % 32 == 0);",
        "",
        "deadlock",
    ),
    _numerics(
        "each lane takes a tile of its own",
        _SM90,
        "return __shfl_sync(0xffffffffu, leads() ? queue.next(index) : 0, 0);",
        "return queue.next(index);",
        _PAGED_90,
    ),
    _numerics(
        "a warpgroup with few rows at rest",
        _REST,
        "warpgroup * 64 < num_rows(",
        "warpgroup * 80 < num_rows(",
        _PAGED_90,
    ),
    _simulator(
        "turn kept by a warpgroup at rest", _REST, "consumer.pass_turn();", "", "deadlock|barrier"
    ),
    _simulator(
        "values never released by a warpgroup at rest",
        _REST,
        "Consumer::release(&storage.v_empty[consumer.v().stage()]);",
        "",
        "deadlock|barrier",
    ),
    _simulator(
        "queries never released by a warpgroup at rest",
        _REST,
        "Consumer::release(&storage.q_empty[consumer.warpgroup]);",
        "",
        "deadlock|barrier",
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
    _numerics(
        "sums of a row lost",
        _COMBINE,
        "add(total, 1.f, next);",
        "add(total, 0.f, next);",
        ASKING,  # a row of 128 columns has four sums
    ),
    _numerics("few parts lost", _COMBINE, "add(total, 1.f, of_part);", "add(total, 0.f, of_part);"),
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
        "    await_previous_kernel();\n",
        "",
        "simulator",
        "griddepcontrol.wait|status -11",  # SIGSEGV: it follows a plan that is still NaN
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
        "int const end = first + each + (part < more ? 1 : 0);",
        "int const end = first + each + (part + 1 < parts ? 1 : 0);",
    ),
    _numerics("parts that share their rows", _PLAN, "+= part * num_rows", "+= 0 * num_rows"),
    _numerics(
        "sequences that share their rows",
        _PLAN,
        "cute::min(rows_before,",
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
        _SEGMENTS,
        "params.seqlen_k) - tile.row_k;",
        "params.seqlen_k);",
        "simulator",
        _OUTSIDE,
    ),
    _numerics(
        "entry of another sequence",
        _SEGMENTS,
        "entries != nullptr ? entries[i] : i;",
        "i;",
    ),
)

# Faults in the plans that CTAs make for themselves, where all sequences have as many queries.
OF_CTA_PLANS = (
    _numerics(
        "a warp with few rows at rest",
        _SM80,
        "first_row < num_rows(params, tile.seqlen_q)",
        "first_row + 8 < num_rows(params, tile.seqlen_q)",
    ),
    _numerics(
        "own parts of a contiguous cache that share their rows",
        _CTA_PLAN,
        "rows * place.partial,",
        "0,",
    ),
    _numerics(
        "parts behind the first ones lost",
        _MERGE,
        "begin < parts; begin += kRound",
        "begin == 0; ++begin",
        DECODING,
    ),
    _numerics(
        "sums of a row lost where a CTA merges",
        _MERGE,
        "Merge::add(sums[0], 1.f, sums[g]);",
        "Merge::add(sums[0], 0.f, sums[g]);",
        DECODING,
    ),
    _numerics(
        "tiles of one head alone",
        "work_plan.h",
        "return {index / heads, index % heads};",
        "return {index / heads, 0};",
        DECODING,
    ),
    _numerics(
        "part off by one",
        _CTA_PLAN,
        "int part = index - first[low];",
        "int part = cute::max(index - first[low] - 1, 0);",
        _PAGED_80,
    ),
    _numerics(
        "the last split lost",
        _CTA_PLAN,
        "first[params.b] = (place.tiles + parts) * m_blocks;",
        "first[params.b] = (place.tiles + cute::max(parts - 1, 1)) * m_blocks;",
        DECODING,
    ),
    _numerics(
        "own parts that share their rows", _CTA_PLAN, "rows * place.partial,", "0,", _PAGED_80
    ),
    _numerics(
        "order of another sequence",
        _CTA_PLAN,
        "sequences[place.rank] = tile;",
        "sequences[i] = tile;",
        DECODING,
    ),
    _numerics(
        "no position listed",
        _CTA_PLAN,
        "any_split ? params.total_q : 0;",
        "0;",
        _PAGED_80,
    ),
    _numerics(
        "positions of the first sequence alone",
        _CTA_PLAN,
        "i % gridDim.x != blockIdx.x",
        "i != blockIdx.x",
        _WINDOWED,
    ),
    Mutant(
        "planned before the lengths are there",
        "flash_fwd_kernel_sm90.h",
        "        cudaGridDependencySynchronize();\n",
        "",
        "simulator",
        "griddepcontrol.wait",
        _WINDOWED,
    ),
    Mutant(
        "lengths read before the previous kernel has ended",
        "flash_fwd_kernel_sm80.h",
        "    await_previous_kernel();\n",
        "",
        "simulator",
        "griddepcontrol.wait",
        _PAGED_80,
    ),
    Mutant(
        "own plan read before it is complete",
        "flash_fwd_kernel_sm80.h",
        "        own->make(params, params.num_splits > 1);\n        __syncthreads();\n",
        "        own->make(params, params.num_splits > 1);\n",
        "racecheck",
        "data race",
        _PAGED_80,
    ),
    Mutant(
        "Q over the own plan",
        "flash_fwd_kernel_sm80.h",
        "        __syncthreads();  // Q takes the plan's bytes\n",
        "",
        "racecheck",
        "data race",
        _PAGED_80,
    ),
    _numerics(
        "merged by the last but one",
        _MERGE,
        "static_cast<unsigned>(tile.parts) - 1;",
        "static_cast<unsigned>(tile.parts) - 2;",
        DECODING,
    ),
    _numerics(
        "arrivals not counted anew",
        _MERGE,
        "if (last) atomicExch(stored, 0u);",
        "",
        DECODING,
    ),
    _numerics(
        "one counter for all sequences",
        _MERGE,
        "arrivals + tile.head * params.b + tile.row_q / params.seqlen_q;",
        "arrivals + tile.head * params.b;",
        DECODING,
    ),
    _numerics(
        "merged from the last part on",
        _MERGE,
        " + tile.partial_row - tile.part * rows;",
        " + tile.partial_row;",
        DECODING,
    ),
    Mutant(
        "counted before a part is stored",
        _MERGE,
        "        sm90::named_barrier_sync(barrier, Merge::kThreads);\n        if (threadIdx.x",
        "        if (threadIdx.x",
        "racecheck",
        "data race",
        DECODING,
    ),
)

OF_SEVERAL_TILES = (
    _numerics(
        "rows of the first tile in each",
        _CTA_PLAN,
        "            part -= tile.m_block * tile.part;\n",
        "            part -= tile.m_block * tile.part;\n            tile.m_block = 0;\n",
        DECODING,
    ),
    _numerics(
        "the last part where a tile is not the first",
        _CTA_PLAN,
        "part -= tile.m_block * tile.part;",
        "part = cute::min(part, tile.part - 1);",
        DECODING,
    ),
    _numerics(
        "sequences of one tile each",
        _CTA_PLAN,
        "first[place.rank] = place.tiles * m_blocks;",
        "first[place.rank] = place.tiles;",
        DECODING,
    ),
)

# Faults in the code that appends new tokens to the cache and rotates.
OF_APPENDS = (
    _numerics(
        "rotated the other way, eight at a time",
        _APPEND,
        "vec.x[i] = turn(vec.x[i], other.x[i], c.x[i], s.x[i], first);",
        "vec.x[i] = turn(vec.x[i], other.x[i], c.x[i], s.x[i], !first);",
    ),
    _numerics(
        "neighbours rotated by the table's first pairs of eight",
        _APPEND,
        "before == 0 ? s.x[i / 2] : s.x[kVec / 2 + i / 2];",
        "s.x[i / 2];",
    ),
    _numerics(
        "neighbours rotated by the table's first eight pairs",
        _APPEND,
        "c = load(cos + pair - before),",
        "c = load(cos),",
        DECODING,
    ),
    _numerics(
        "neighbours rotated the other way",
        _APPEND,
        "turn(own.x[i], own.x[i ^ 1], of_c, of_s, i % 2 == 0);",
        "turn(own.x[i], own.x[i ^ 1], of_c, of_s, i % 2 == 1);",
    ),
    _numerics(
        "no row after a thread's first",
        _APPEND,
        "            place.row += step_rows;\n",
        "            break;\n            place.row += step_rows;\n",
    ),
    _numerics(
        "each piece of a row its first",
        _APPEND,
        "int const within = cta % pieces * threads + threadIdx.x;",
        "int const within = threadIdx.x;",
        DECODING,
    ),
    _numerics(
        "one row of those that a CTA has threads for",
        _APPEND,
        "if (own_row >= at_once || vec >= vecs) {",
        "if (own_row >= 1 || vec >= vecs) {",
        DECODING,
    ),
    _numerics(
        "queries rotated for the next position",
        _APPEND,
        "tokens_before(params, place.batch) + place.row * params.rotary_q_step;",
        "tokens_before(params, place.batch) + place.row * params.rotary_q_step + 1;",
    ),
)
