"""Faults planted into the sm90 class, in the form of :mod:`mutants`."""

from __future__ import annotations

import dataclasses

from mutants import Mutant

from flashcute.config import FwdConfig

# ASKING has two consumer warpgroups with the ping-pong schedule and work stealing; STRIDING has
# three without either, and narrower swizzled pages.
ASKING = FwdConfig(90, "fp16", 128, "causal", 128, 32, 8, 2, 3, 1, True)
WINDOW = dataclasses.replace(ASKING, mask="local")
# One consumer warpgroup and several CTAs an SM, as for queries over a KV cache.
DECODING = FwdConfig(90, "bf16", 64, "none", 64, 32, 4, 2, 0, 2, False)
STRIDING = FwdConfig(90, "bf16", 96, "none", 192, 48, 12, 2, 6, 1, False)

_MAINLOOP = "mainloop_fwd_sm90.h"
_PIPELINE = "pipeline_sm90.h"
_KERNEL = "flash_fwd_kernel_sm90.h"
_TRAITS = "kernel_traits_sm90.h"
_MMA = "mma_traits_sm90.h"
_MAPS = "tensor_maps_sm90.h"
_SCHEDULER = "tile_scheduler.h"

_AWAIT_K_STEP = "await_k();\n                wait_turn"
_AWAIT_V_STEP = """\
await_v();
                issue_pv();
                pass_turn();
                sm90::wgmma_wait<1>"""
_AWAIT_S_STEP = """\
                sm90::wgmma_wait<1>();
                release_k(rS, false, n == 0);
"""
_AWAIT_O_STEP = """\
                sm90::wgmma_wait<0>();
                release_v();
                k.advance();
"""
_LAST_PV = """\
                sm90::wgmma_wait<0>();
                release_v();
                Epilogue::finish"""
_RELEASE_K = "release(&storage.k_empty[k.stage()]);"
_AWAIT_EMPTY = "sm90::barrier_wait(empty, ring.parity() ^ 1);"
_AWAIT_Q_EMPTY = "sm90::barrier_wait(&storage.q_empty[wg], q_parity ^ 1);"
_AWAIT_Q = "sm90::barrier_wait(&storage.q_full[warpgroup], q_parity);"
_TAKE_Q = "load_q_fragments(tSrQreg);"
_RELEASE_Q = "if (first || !kAllInRegs) release(&storage.q_empty[warpgroup], kAllInRegs || last);"
_RELEASE_ALL_Q = "release(&storage.q_empty[warpgroup]);"
_FENCE_Q = "fence_async_proxy();\n        __syncwarp();"
_AWAIT_TILE_EMPTY = "sm90::barrier_wait(&storage.tile_empty[tiles.stage()], tiles.parity() ^ 1);"
_AWAIT_TILE = """\
while (true) {
                sm90::barrier_wait(&storage.tile_full[tiles.stage()], tiles.parity());"""
_FIRST_TURN = """\
            if (warpgroup == kWarpgroups - 1) {
                pass_turn();
            }
"""

_UNAWAITED = r"warpgroup \d: a wgmma reads byte \d+ without having waited for phase \d+ of mbarrier"
_UNAWAITED_Q = rf"{_UNAWAITED}|lane \d+: ldmatrix.* without having waited for phase"
_OVERWRITTEN = r"block \(.*overwritten too early: TMA for mbarrier .* of warpgroup \d"
_LOADED = (
    r"block \(.*overwritten too early: TMA for mbarrier .* which a load of warpgroup \d, warp \d"
)
_UNFENCED = rf"{_LOADED}.*; no fence.proxy.async follows it in that thread"
_UNORDERED = rf"{_LOADED}.*; its thread is not ordered after the fence.proxy.async"
_ARRIVES_TWICE = r"block \(.*one arrival more than the \d+ of a phase of mbarrier \d+"
_DEADLOCK = r"block \(.*deadlock: .*wait for parity \d of mbarrier.*bytes due"
_IN_FLIGHT = r"block \(.*warpgroup \d, thread \d+: a register of a wgmma in flight was written"


def _simulator(name: str, file: str, old: str, new: str, report: str) -> Mutant:
    return Mutant(name, file, old, new, "simulator", report, ASKING)


def _numerics(name: str, file: str, old: str, new: str, mode: str = "late") -> Mutant:
    return Mutant(name, file, old, new, f"numerics/{mode}", "", ASKING)


def _behind_its_use(wait: str) -> str:
    """Returns the text with its first line, a wait, moved behind its second."""
    first, second, *rest = wait.splitlines(keepends=True)
    return "".join((second, first, *rest))


_PHASES = (
    _simulator(
        "ring that never flips its phase",
        _PIPELINE,
        "return uses / kStages % 2;",
        "return 0;",
        f"{_UNAWAITED}|{_OVERWRITTEN}|{_ARRIVES_TWICE}|{_DEADLOCK}",
    ),
    _simulator(
        "ring that flips its phase at each use",
        _PIPELINE,
        "return uses / kStages % 2;",
        "return uses % 2;",
        f"{_UNAWAITED}|{_OVERWRITTEN}|{_ARRIVES_TWICE}|{_DEADLOCK}",
    ),
    _simulator(
        "phase of Q not flipped by the consumers",
        _MAINLOOP,
        f"{_AWAIT_Q}\n            q_parity ^= 1;",
        _AWAIT_Q,
        f"{_UNAWAITED_Q}|{_OVERWRITTEN}|{_DEADLOCK}",
    ),
    _simulator(
        "phase of Q not flipped by the loader",
        _MAINLOOP,
        "            }\n            q_parity ^= 1;\n        }",
        "            }\n        }",
        f"{_OVERWRITTEN}|{_UNAWAITED}|{_DEADLOCK}",
    ),
    _simulator(
        "empty buffers awaited with the parity of full ones",
        _MAINLOOP,
        _AWAIT_EMPTY,
        _AWAIT_EMPTY.replace(" ^ 1", ""),
        _DEADLOCK,
    ),
)

_COUNTS = (
    _simulator(
        "too few transaction bytes",
        _MAINLOOP,
        "kBytesKV = kTileN *",
        "kBytesKV = kTileN / 2 *",
        r"transaction bytes: phase \d+ of mbarrier .* bytes of its copies are under way",
    ),
    dataclasses.replace(
        _simulator(
            "too few transaction bytes, copies landing at once",
            _MAINLOOP,
            "kBytesKV = kTileN *",
            "kBytesKV = kTileN / 2 *",
            r"transaction bytes: copies bring \d+ bytes more than phase",
        ),
        finder="simulator/eager",
    ),
    _simulator(
        "too many transaction bytes",
        _MAINLOOP,
        "kBytesQ = 64 *",
        "kBytesQ = kTileM *",
        _DEADLOCK,
    ),
    _simulator(
        "too few arrivals before a buffer counts as empty",
        _MAINLOOP,
        "kReleases = 4;",
        "kReleases = 3;",
        f"{_OVERWRITTEN}|{_ARRIVES_TWICE}",
    ),
    _simulator(
        "more arrivals expected than come",
        _MAINLOOP,
        "kReleases = 4;",
        "kReleases = 5;",
        _DEADLOCK,
    ),
    _simulator(
        "all lanes load",
        _KERNEL,
        "threadIdx.x < 32 && sm90::elect_one()",
        "threadIdx.x < 32",
        _ARRIVES_TWICE,
    ),
    _simulator(
        "named barrier with another count on the other side",
        _MAINLOOP,
        "named_barrier_sync(1 + warpgroup, 256)",
        "named_barrier_sync(1 + warpgroup, 128)",
        r"barrier \d expects \d+ threads, but one arrives that expects",
    ),
)

_RELEASES = (
    _simulator(
        "K released before its product is waited for",
        _MAINLOOP,
        _AWAIT_S_STEP,
        _behind_its_use(_AWAIT_S_STEP),
        _OVERWRITTEN,
    ),
    _simulator(
        "V released before its product is waited for",
        _MAINLOOP,
        _AWAIT_O_STEP,
        _behind_its_use(_AWAIT_O_STEP),
        _OVERWRITTEN,
    ),
    _simulator("K never released", _MAINLOOP, _RELEASE_K, "", _DEADLOCK),
    _simulator(
        "Q released with every block",
        _MAINLOOP,
        "kAllInRegs || last);",
        "true);",
        f"{_OVERWRITTEN}|{_ARRIVES_TWICE}|{_UNAWAITED}|{_DEADLOCK}",
    ),
    Mutant(
        "Q released before its fragments are in registers",
        _MAINLOOP,
        _TAKE_Q,
        f"{_RELEASE_ALL_Q}\n{_TAKE_Q}",
        "simulator",
        f"{_LOADED}|{_UNAWAITED_Q}|{_ARRIVES_TWICE}",
        STRIDING,
    ),
    Mutant(
        "Q in registers released without a fence for the asynchronous proxy",
        _MMA,
        _FENCE_Q,
        "__syncwarp();",
        "simulator",
        _UNFENCED,
        STRIDING,
    ),
    _simulator(
        "Q partly in registers released without a fence for the asynchronous proxy",
        _MMA,
        _FENCE_Q,
        "__syncwarp();",
        _UNFENCED,
    ),
    Mutant(
        "Q in registers released by a lane that knows of no other's fence",
        _MMA,
        _FENCE_Q,
        "fence_async_proxy();",
        "simulator",
        _UNORDERED,
        STRIDING,
    ),
    Mutant(
        "Q in registers never released",
        _MAINLOOP,
        _RELEASE_Q,
        "",
        "simulator",
        _DEADLOCK,
        STRIDING,
    ),
    _simulator(
        "buffers filled without waiting for them to be empty",
        _MAINLOOP,
        _AWAIT_EMPTY,
        "",
        f"{_OVERWRITTEN}|{_ARRIVES_TWICE}",
    ),
    _simulator(
        "Q loaded without waiting for the last tile's readers",
        _MAINLOOP,
        _AWAIT_Q_EMPTY,
        "",
        f"{_OVERWRITTEN}|{_UNAWAITED}|{_ARRIVES_TWICE}",
    ),
    Mutant(
        "next tile written over the one not yet read",
        _MAINLOOP,
        _AWAIT_TILE_EMPTY,
        "",
        "racecheck",
        f"data race|{_DEADLOCK}|{_ARRIVES_TWICE}|ends while copies are under way",
        ASKING,
    ),
    Mutant(
        "next tile read before it is written",
        _MAINLOOP,
        _AWAIT_TILE,
        "while (true) {",
        "racecheck",
        "data race|SEGV on unknown address",  # from an uninitialised index
        ASKING,
    ),
)

_WAITS = (
    _simulator("K read without waiting for it", _MAINLOOP, _AWAIT_K_STEP, "wait_turn", _UNAWAITED),
    _simulator(
        "V read without waiting for it",
        _MAINLOOP,
        _AWAIT_V_STEP,
        _AWAIT_V_STEP.split(maxsplit=1)[1],
        _UNAWAITED,
    ),
    _simulator("Q read without waiting for it", _MAINLOOP, _AWAIT_Q, "", _UNAWAITED_Q),
    _simulator(
        "scores used while their product is in flight",
        _MAINLOOP,
        _AWAIT_S_STEP,
        _AWAIT_S_STEP.replace("<1>", "<2>"),
        f"{_IN_FLIGHT}|{_OVERWRITTEN}",
    ),
    Mutant(
        "scores read while the product is under way",
        _MAINLOOP,
        "sm90::wgmma_wait<1>();",
        "",
        "memcheck",
        r"block \(.*a register of a wgmma in flight was touched, that of warpgroup \d, thread \d+",
        ASKING,
    ),
    _simulator(
        "P overwritten while its product is in flight",
        _MAINLOOP,
        _AWAIT_O_STEP,
        _AWAIT_O_STEP.replace("<0>", "<1>"),
        f"{_IN_FLIGHT}|{_OVERWRITTEN}",
    ),
    _simulator(
        "last product not waited for",
        _MAINLOOP,
        _LAST_PV,
        _LAST_PV.replace("<0>", "<1>"),
        f"{_IN_FLIGHT}|{_OVERWRITTEN}|in flight",
    ),
    _simulator(
        "wgmmas without a fence",
        _MMA,
        "    wgmma_fence();\n",
        "",
        "a wgmma without wgmma.fence since the last wait",
    ),
    _simulator(
        "wgmmas in no group",
        _MMA,
        "    wgmma_commit();\n",
        "",
        f"{_IN_FLIGHT}|{_OVERWRITTEN}|in flight",
    ),
    _simulator(
        "barriers not fenced for the asynchronous proxy",
        _MAINLOOP,
        "sm90::fence_barrier_init();",
        "",
        "no fence.mbarrier_init after the initialisation of mbarrier",
    ),
    _simulator(
        "barriers used before they are initialised",
        _KERNEL,
        "    __syncthreads();\n",
        "",
        "there is no mbarrier at byte|the thread is not ordered after the initialisation",
    ),
)

_REGISTERS_AND_TURNS = (
    _simulator(
        "register pool overdrawn",
        _TRAITS,
        " / kMmaWarpgroups / 8 * 8,\n        kMaxRegisters);",
        " / kMmaWarpgroups / 8 * 8,\n        kMaxRegisters) + 8;",
        r"deadlock: .*wait for registers at setmaxnreg.inc.*168 registers, wants 248",
    ),
    _simulator(
        "registers not given up",
        _KERNEL,
        "        sm90::registers_lower<Traits::kLoadRegisters>();\n",
        "",
        r"deadlock: .*wait for registers at setmaxnreg.inc.*; 0 registers free",
    ),
    _simulator(
        "nobody has the first turn",
        _MAINLOOP,
        _FIRST_TURN,
        "",
        r"deadlock: .*wait at barrier 1.*barrier 1: \d+ of 256 arrived",
    ),
    _simulator(
        "turn not passed on",
        _MAINLOOP,
        "pass_turn();\n                sm90::wgmma_wait<1>",
        "sm90::wgmma_wait<1>",
        r"deadlock: .*wait at barrier \d",
    ),
)

_TILES = (
    _numerics("tile counter not set back", _SCHEDULER, "atomicExch(counter, 0u);", ""),
    dataclasses.replace(
        _numerics(
            "tile counter set back too early",
            _SCHEDULER,
            "number == static_cast<unsigned>(numbers) - 1",
            "number == static_cast<unsigned>(numbers) - 2",
        ),
        finder="counters",
    ),
    _numerics(
        "tile left out",
        _SCHEDULER,
        "draw(tiles) + workers",
        "draw(tiles) + workers + 1",
    ),
    dataclasses.replace(
        _numerics(
            "tiles dealt with the wrong stride",
            _SCHEDULER,
            "? index + workers",
            "? index + workers + 1",
        ),
        config=STRIDING,
    ),
)

_DEPENDENCY = (
    _simulator(
        "kernel before not awaited",
        _MAINLOOP,
        "if (first) cudaGridDependencySynchronize();",
        "",
        "programmatic dependent launch: .* before griddepcontrol.wait",
    ),
)

_OPERANDS = (
    _numerics(
        "each step's fragments of Q those of the first",
        _MMA,
        "cute::copy(copy_a, tCsA(cute::_, cute::_, k),",
        "cute::copy(copy_a, tCsA(cute::_, cute::_, 0),",
    ),
    _numerics(
        "product of Q in registers lost",
        _MAINLOOP,
        "Traits::kQSteps, (kQRegSteps > 0)>",
        "Traits::kQSteps, false>",
    ),
    _numerics(
        "descriptor strides of V for pages in the other order",
        _TRAITS,
        "Shape<Int<kHeadDim>, Int<kTileN>>{}, Step<_2, _1>{}",
        "Shape<Int<kHeadDim>, Int<kTileN>>{}, Step<_1, _2>{}",
    ),
    _numerics(
        "V as if stored transposed",
        _TRAITS,
        "sm90::GMMA::Layout_MN_SW128_Atom<Element>",
        "sm90::GMMA::Layout_MN_INTER_Atom<Element>",
    ),
    _numerics(
        "boxes not swizzled",
        _MAPS,
        "Traits::kSmemRow == 64 ? CU_TENSOR_MAP_SWIZZLE_128B",
        "Traits::kSmemRow == 64 ? CU_TENSOR_MAP_SWIZZLE_NONE",
    ),
    dataclasses.replace(
        _simulator(
            "swizzle narrower than the box",
            _MAPS,
            "CU_TENSOR_MAP_SWIZZLE_64B",
            "CU_TENSOR_MAP_SWIZZLE_32B",
            "cuTensorMapEncodeTiled: the box's rows are longer than the swizzle's span",
        ),
        config=STRIDING,
    ),
    _numerics(
        "tensor map with the strides of rows and heads exchanged",
        _MAPS,
        "{of_entry, row_stride}, {params.h_k, head_stride}",
        "{of_entry, head_stride}, {params.h_k, row_stride}",
    ),
    _numerics("tensor map without the last row", _MAPS, "y_size = 1 + ", "y_size = "),
    _numerics(
        "keys of another batch entry",
        _MAPS,
        "head * steps.head + batch * steps.batch",
        "head * steps.head + batch * steps.row",
    ),
    dataclasses.replace(
        _numerics(
            "keys and values of different blocks in a window",
            _MAINLOOP,
            "load_kv(hint, tile, true, tile.blocks.template block<C.mask>(n), ring);",
            "load_kv(hint, tile, true, tile.blocks.template block<C.mask>(\n"
            "    tile.blocks.count - 1 - n), ring);",
        ),
        config=WINDOW,
    ),
    dataclasses.replace(
        _numerics(
            "mask of another block in a window",
            _MAINLOOP,
            "return tile.blocks.template block<C.mask>(visit);",
            "return tile.blocks.begin + visit;",
        ),
        config=WINDOW,
    ),
    _numerics(
        "tile without a key without its sinks",
        "epilogue_fwd.h",
        "load_sinks(params, tile.head_q, rows, tile.in_sequence() && !tile.is_part());",
        "[] { Tensor x = make_tensor<float>(Shape<_2>{}); fill(x, -INFINITY); return x; }();",
    ),
    _numerics(
        "packed heads laid out behind each other",
        _MAPS,
        "{Traits::kSmemRow, 64 / positions, positions, 1, 1}",
        "{Traits::kSmemRow, 1, 64, 1, 1}",
    ),
    _simulator(
        "padding of packed heads inside the tensor map",
        _MAPS,
        "{params.d, packed, kRaggedRows,",
        "{params.d, packed + 1, kRaggedRows,",
        r"TMA for mbarrier \d+ .* reads outside every tensor",
    ),
    _numerics(
        "rows of another head in a packed tile",
        _MAINLOOP,
        "tile.seqlen_q - position, tile.head,",
        "tile.seqlen_q - position, tile.head_q,",
    ),
    _simulator(
        "page that lands beside its place",
        _MAINLOOP,
        "kTileN * Traits::kSmemRow, rows.x, rows.y,",
        "kTileM * Traits::kSmemRow, rows.x, rows.y,",
        f"{_OVERWRITTEN}|copy under way|{_UNAWAITED}",
    ),
    _simulator(
        "rows of the wrong warpgroup",
        _MAINLOOP,
        "mma_qk.get_slice(warpgroup * 128)",
        "mma_qk.get_slice((kWarpgroups - 1 - warpgroup) * 128)",
        _UNAWAITED,
    ),
    _numerics(
        "scores added to what the registers held",
        _MMA,
        "kAccumulate ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero",
        "GMMA::ScaleOut::One",
    ),
    _numerics(
        "output added to that of the last tile",
        _MAINLOOP,
        "clear(rO);",
        "",
    ),
    _numerics(
        "masked scores of a first block not kept from minus infinity minus itself",
        "softmax.h",
        "bounded_offset(tSrS, c);\n        row_sum",
        "row_offset;\n        row_sum",
    ),
    _numerics(
        "output not rescaled, two warpgroups",
        "softmax.h",
        "if (raised) {",
        "if (raised && false) {",
    ),
    _numerics(
        "block not computed again with its maximum, two warpgroups",
        "softmax.h",
        "        if (exceeds_range(sum)) {\n            RowTensor factor;",
        "        if (false) {\n            RowTensor factor;",
    ),
    _numerics(
        "mask forgotten in the last block that needs it, two warpgroups",
        _MAINLOOP,
        "bool const masked = n >= unmasked;",
        "bool const masked = n > unmasked;",
    ),
)

MUTANTS = (
    *(*_PHASES, *_COUNTS, *_RELEASES, *_WAITS),
    *(*_REGISTERS_AND_TURNS, *_TILES, *_DEPENDENCY, *_OPERANDS),
)
