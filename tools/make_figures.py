"""Draws the pictures of the documents: `python tools/make_figures.py [--check]`.

Masks and tiles are computed from the reference's mask, lanes from the kernel's layout, traffic from
the shapes. The files are text and the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import figures_backward
from svg import BLUE, GREEN, GREY, INK, LINE, RED, STRONG, WHITE, YELLOW, Canvas

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import figures_distributed  # noqa: E402 - which imports flashcute, too

from flashcute.reference import visible_keys  # noqa: E402 - from this checkout, installed or not

FIGURES = ROOT / "docs" / "figures"


def call() -> Canvas:
    """Draws one call from Python to machine code."""
    c = Canvas(900, 850, "One call, from Python to SASS")
    x, w, mid = 30, 400, 230
    right, rw = 500, 370

    def spine(y: float, h: float, lines: list[str], file: str, fill: str) -> None:
        c.box(x, y, w, h, lines, file=file, fill=fill)

    c.text(x, 28, "every call", bold=True)
    spine(
        40,
        66,
        ["flash_attn_func(q, k, v, causal=True)", "checks types, shapes, strides, values"],
        "flashcute/flash_attn_interface.py",
        BLUE,
    )
    spine(
        140,
        66,
        ["torch.ops.flashcute.fwd", "checks what memory safety needs"],
        "csrc/flash_attn/flash_api.cpp",
        YELLOW,
    )
    spine(240, 48, ["table: problem -> kernel"], "KernelTable in kernel_table.h", YELLOW)
    spine(
        424,
        66,
        ["launch(params, stream)", "sm80: a CTA for each tile; sm90: persistent"],
        "flash_fwd_launch_template*.h",
        YELLOW,
    )
    for top, bottom in ((106, 140), (206, 240), (288, 424)):
        c.arrow([(mid, top), (mid, bottom)])
    c.text(mid + 10, 360, "known problem: no Python runs")
    c.text(right, 28, "CPU tensors, tracing", bold=True)
    c.box(right, 40, rw, 48, ["CPU: cpu.py; fake, meta: shapes"], file="cpu.py, ops.py")
    c.arrow([(x + w, 64), (right, 64)])

    c.text(right, 128, "once for each problem", bold=True)
    steps = [
        (140, ["shapes and GPU -> FwdConfig"], "heuristics.py, config.py"),
        (222, ["loaded, prebuilt or cached?"], "jit/kernels.py, jit/cache.py"),
        (304, ["else build: .cu -> nvcc -> .so"], "jit/sources.py, jit/build.py"),
        (386, ["load, check flash_kernel()"], "jit/kernels.py, jit/abi.py"),
    ]
    for y, lines, file in steps:
        c.box(right, y, rw, 50, lines, file=file, fill=BLUE)
    for y, *_ in steps[1:]:
        c.arrow([(right + rw / 2, y - 32), (right + rw / 2, y)])
    c.arrow([(x + w, 264), (465, 264), (465, 165), (right, 165)])
    c.text(x + w + 6, 258, "new", 11)
    c.arrow([(right, 411), (465, 411), (465, 320), (mid, 320)])
    c.text(300, 313, "its address", 12)

    c.text(
        mid + 14,
        530,
        "on the GPU, for each tile of queries (sm80 class: a tile is a CTA)",
        bold=True,
    )
    c.rect(x, 542, 840, 296, "#f6f6f6", LINE, 8)
    c.arrow([(mid, 490), (mid, 556)])
    c.box(
        50,
        556,
        360,
        48,
        ["Q tile -> shared memory"],
        file="mainloop_fwd_sm*.h: LDGSTS or UTMALDG",
        fill=GREEN,
    )
    c.box(
        50,
        776,
        360,
        50,
        ["O / l, LSE -> device memory"],
        file="epilogue_fwd.h: STG.E.128",
        fill=GREEN,
    )
    c.text(440, 572, "for each block of keys, right to left", bold=True)
    loop = [
        (580, "K, V -> shared memory", "mainloop_fwd_sm*.h: LDGSTS or UTMALDG"),
        (630, "S = Q K^T", "utils.h: HMMA or mma_traits_sm90.h: HGMMA"),
        (680, "mask, in blocks that an edge cuts", "mask.h: ISETP, FSEL"),
        (730, "P = exp2(S - reference), row sum", "softmax.h: FFMA, MUFU.EX2; rarely FMNMX"),
        (780, "O += P V", "utils.h: HMMA or mma_traits_sm90.h: HGMMA"),
    ]
    for y, text, file in loop:
        c.box(450, y, 380, 44, [text], file=file, fill=GREEN)
    c.arrow([(410, 580), (430, 580), (430, 602), (450, 602)])
    c.line([(830, 802), (850, 802), (850, 602)], stroke_width=1.5)
    c.arrow([(850, 602), (830, 602)])
    c.arrow([(450, 802), (410, 802)])
    c.text(230, 690, "O, the rows' references and sums", anchor="middle")
    c.text(230, 710, "stay in registers; S and P are", anchor="middle")
    c.text(230, 730, "never written to memory", anchor="middle")
    return c


def traffic() -> Canvas:
    """Draws the bytes between device memory and the SMs, with and without the score matrix."""
    c = Canvas(900, 300, "Device memory traffic of one head")
    s, d, item = 4096, 128, 2
    tensor, scores = s * d * item / 2**20, s * s * item / 2**20  # MiB
    rows = [
        ("S = Q K^T", [("Q, K", 2 * tensor, BLUE), ("S written", scores, RED)]),
        ("P = softmax(S)", [("S read", scores, RED), ("P written", scores, RED)]),
        ("O = P V", [("P read", scores, RED), ("V, O", 2 * tensor, BLUE)]),
        ("one kernel", [("Q, K, V, O", 4 * tensor, BLUE)]),
    ]
    scale, left = 9.5, 175
    c.text(20, 28, f"one head, s = {s}, d = {d}, 16-bit elements, MiB moved", 14, bold=True)
    total = 0.0
    for i, (name, parts) in enumerate(rows):
        y = 50 + 48 * i + (24 if i == 3 else 0)
        c.text(left - 12, y + 22, name, anchor="end")
        x = left
        for label, size, fill in parts:
            c.rect(x, y, size * scale, 32, fill, LINE)
            if size * scale > 120:
                c.text(x + size * scale / 2, y + 21, f"{label}: {size:.0f}", anchor="middle")
            x += size * scale
        small = [f"{label}: {size:.0f}" for label, size, _ in parts if size * scale <= 120]
        c.text(x + 8, y + 21, ", ".join(small))
        total += sum(size for _, size, _ in parts) if i < 3 else 0
    c.line([(20, 200), (880, 200)], LINE, stroke_dasharray="4 4")
    c.text(880, 192, f"three kernels: {total:.0f}", anchor="end", bold=True)
    c.text(880, 245, f"FlashAttention: {4 * tensor:.0f}", anchor="end", bold=True)
    reread = -(-s // 128) * 2 * tensor
    c.text(
        left,
        284,
        f"K and V are read again by each of the {-(-s // 128)} query tiles, {reread:.0f} MiB, "
        "but mostly from the L2 cache",
    )
    return c


def loops() -> Canvas:
    """Draws the order in which the two algorithms visit the tiles of S."""
    c = Canvas(900, 400, "The two loop orders")
    m, n, cell = 4, 5, 56

    def grid(left: float, title: str, number: Callable[[int, int], int], notes: list[str]) -> None:
        c.text(left, 28, title, 14, bold=True)
        c.text(left + n * cell / 2, 58, "keys", anchor="middle")
        c.text(left - 12, 70 + m * cell / 2, "queries", anchor="end")
        for i in range(m):
            for j in range(n):
                shade = (GREEN, BLUE, YELLOW, RED, GREY)[i if "outside: Q" in title else j]
                c.rect(left + j * cell, 70 + i * cell, cell - 3, cell - 3, shade)
                c.text(
                    left + j * cell + cell / 2 - 2,
                    75 + i * cell + cell / 2,
                    str(number(i, j)),
                    15,
                    anchor="middle",
                )
        for k, note in enumerate(notes):
            c.text(left, 322 + 20 * k, note)

    grid(
        110,
        "FlashAttention, outside: K and V",
        lambda i, j: j * m + i + 1,
        [
            "one CTA per head; a column shares a K/V tile",
            "each visit reads and writes O, l and m",
            f"of its rows in memory: {m * n} visits, {m * n} round trips",
        ],
    )
    grid(
        550,
        "FlashAttention-2, outside: Q",
        lambda i, j: n - j,
        [
            "a CTA for each row of tiles, all at once;",
            "O, l and m stay in registers: one write",
            "per row. Here from right to left",
        ],
    )
    return c


def masks() -> Canvas:
    """Draws the causal mask aligned to the bottom-right corner, element by element."""
    c = Canvas(900, 360, "The causal mask for three shapes")
    cell = 26
    left = 50
    for seqlen_q, seqlen_k, note in (
        (6, 6, ["equal lengths:", "the usual triangle"]),
        (3, 8, ["new tokens after a cache:", "the last query sees all keys"]),
        (8, 3, ["more queries than keys:", "the first 5 rows see nothing"]),
    ):
        visible = visible_keys(seqlen_q, seqlen_k, causal=True).tolist()
        c.text(left, 28, f"seqlen_q = {seqlen_q}, seqlen_k = {seqlen_k}", 14, bold=True)
        c.text(left, 54, "key j ->", 12)
        for i, row in enumerate(visible):
            for j, sees in enumerate(row):
                fill = GREEN if sees else GREY
                c.rect(left + j * cell, 64 + i * cell, cell - 2, cell - 2, fill)
            if not any(row):
                c.text(left + seqlen_k * cell + 6, 64 + i * cell + 17, "out 0, LSE -inf", 12)
        c.text(left - 8, 81, "i", 12, anchor="end")
        for k, text in enumerate(note):
            c.text(left, 64 + seqlen_q * cell + 24 + 19 * k, text)
        left += 300
    c.rect(50, 334, 14, 14, GREEN)
    c.text(72, 346, "visible: j <= i + seqlen_k - seqlen_q")
    c.rect(420, 334, 14, 14, GREY)
    c.text(442, 346, "hidden: the score becomes -inf")
    return c


def _visits(seqlen_q: int, seqlen_k: int, window: tuple[int, int], m: int) -> list[int]:
    """Returns the key blocks of row block m in the order of visits: BlockRange of work_tile.h."""
    left, right = window
    shift = seqlen_k - seqlen_q
    first, last = m * TILE_M + shift, min((m + 1) * TILE_M, seqlen_q) - 1 + shift
    begin, end = max(first - left, 0) // TILE_N, -(-min(last + right + 1, seqlen_k) // TILE_N)
    whole = range(
        -(-max(last - left, 0) // TILE_N), max(min(first + right + 1, seqlen_k), 0) // TILE_N
    )
    order = (range(whole.stop, end), range(begin, whole.start), whole) if whole else None
    return [n for part in order or (range(begin, end),) for n in reversed(part)]


TILE_M, TILE_N = 128, 64


def _tile_map(c: Canvas, top: float, lengths: tuple[int, int], window: tuple[int, int]) -> float:
    """Draws the tiles of a problem; returns where the drawing ends.

    It shows the order in which each row of tiles is visited, and which tiles need the mask.
    """
    seqlen_q, seqlen_k = lengths
    scale, left = 1.1, 130
    visible = visible_keys(seqlen_q, seqlen_k, window_size=window)
    m_blocks, n_blocks = -(-seqlen_q // TILE_M), -(-seqlen_k // TILE_N)
    count = {GREEN: 0, YELLOW: 0, GREY: 0}
    for m in range(m_blocks):
        y = top + m * TILE_M * scale
        rows = visible[m * TILE_M : (m + 1) * TILE_M]
        c.text(left - 12, y + 66, f"m_block {m}", anchor="end", bold=True)
        last = min((m + 1) * TILE_M, seqlen_q) - 1
        c.text(left - 12, y + 86, f"rows {m * TILE_M}..{last}", 11, anchor="end")
        visits = _visits(seqlen_q, seqlen_k, window, m)
        for n in range(n_blocks):
            tile = rows[:, n * TILE_N : (n + 1) * TILE_N]
            if tile.any().item() != (n in visits):
                raise ValueError(f"block {n} of row block {m} is visited in vain or left out")
            whole = tile.all().item() and (n + 1) * TILE_N <= seqlen_k
            fill = GREEN if whole else YELLOW if n in visits else GREY
            count[fill] += 1
            x = left + n * TILE_N * scale
            c.rect(x, y, TILE_N * scale - 3, TILE_M * scale - 3, fill)
            if n in visits:
                c.text(x + 20, y + 76, str(visits.index(n) + 1), 16, anchor="middle")
    y = top + m_blocks * TILE_M * scale + 22
    for fill, meaning in (
        (GREEN, "whole: no mask code runs"),
        (YELLOW, "cut by the mask or by the end of the keys: masked"),
        (GREY, "hidden from every row: never loaded"),
    ):
        c.rect(left, y - 12, 14, 14, fill)
        c.text(left + 22, y, f"{count[fill]} tiles {meaning}")
        y += 21
    c.text(left + 500, y - 42, "numbers: order of visits", 13)
    return y


def tiles() -> Canvas:
    """Draws the tiles that a causal kernel visits, their order, and which of them need the mask."""
    seqlen_q, seqlen_k, scale, left, top = 500, 610, 1.1, 130, 66
    c = Canvas(900, 720, "Tiles of a causal problem")
    title = (
        f"seqlen_q = {seqlen_q}, seqlen_k = {seqlen_k}, tiles of {TILE_M} queries x {TILE_N} keys"
    )
    c.text(20, 28, title, 14, bold=True)
    _tile_map(c, top, (seqlen_q, seqlen_k), (seqlen_k, 0))
    corner = (left + seqlen_k * scale, top + seqlen_q * scale)
    c.line([(left + (seqlen_k - seqlen_q) * scale, top), corner], STRONG, stroke_width=2)
    c.line(
        [(left, corner[1]), corner, (corner[0], top)],
        STRONG,
        stroke_width=2,
        stroke_dasharray="5 4",
    )
    c.text(left, 56, "keys ->", 12)
    c.text(corner[0] - 6, corner[1] + 20, "the bottom-right corner", 12, anchor="end", fill=STRONG)
    return c


def windows() -> Canvas:
    """Draws what :func:`tiles` does, under a sliding window."""
    seqlen, window = 610, (280, 0)
    c = Canvas(900, 860, "Tiles of a sliding window")
    title = (
        f"seqlen_q = seqlen_k = {seqlen}, window_size = {window}, tiles of 128 queries x 64 keys"
    )
    c.text(20, 28, title, 14, bold=True)
    c.text(130, 56, "keys ->", 12)
    _tile_map(c, 66, (seqlen, seqlen), window)
    return c


# Maxima of successive key blocks for one row whose scores rise far, in powers of two.
BLOCK_MAXIMA = (
    3.1,
    5.0,
    4.2,
    8.8,
    7.5,
    11.0,
    13.9,
    12.1,
    16.4,
    15.0,
    20.6,
    18.0,
    22.0,
    21.2,
    19.5,
    24.1,
)
MAX_SUM = 15.0  # log2 of Softmax::kMaxSum in softmax.h


def rescale() -> Canvas:
    """Draws the running maximum, and the reference that the kernel subtracts and updates rarely."""
    c = Canvas(900, 440, "Rescaling every time or only when it matters")
    left, bottom, dx, dy = 80, 370, 44, 12

    def at(block: float, value: float) -> tuple[float, float]:
        return left + block * dx, bottom - value * dy

    for value in range(0, 29, 4):
        c.line([at(0, value), at(len(BLOCK_MAXIMA), value)], "#dddddd")
        c.text(left - 8, at(0, value)[1] + 4, str(value), 12, anchor="end")
    c.text(14, 20, "score * log2(e), in powers of two", 13, bold=True)
    running, used = [], []
    steps = [0, 0]
    for j, block_max in enumerate(BLOCK_MAXIMA):
        running.append(max([*running[-1:], block_max]))
        if not used or block_max - used[-1] > MAX_SUM:
            used.append(running[-1])
            steps[1] += 1
            c.text(at(j + 0.5, 0)[0], bottom + 38, "rescale", 11, anchor="middle", fill=STRONG)
        else:
            used.append(used[-1])
        steps[0] += j == 0 or running[-1] > running[-2]
        c.text(at(j + 0.5, 0)[0], bottom + 20, str(j + 1), 12, anchor="middle")
    c.text(left, bottom + 60, "block of keys, in the order of visits ->", 12)

    def staircase(values: list[float], stroke: str, **attributes: object) -> None:
        points = [at(j + k, value) for j, value in enumerate(values) for k in (0, 1)]
        c.line(points, stroke, **attributes)

    staircase(running, "#2a7f78", stroke_width=2.5)
    staircase(used, STRONG, stroke_width=2.5)
    first = [value for value in used if value == used[0]]
    limit = [value + MAX_SUM for value in [*first, first[-1]]]
    staircase(limit, STRONG, stroke_width=1.5, stroke_dasharray="4 3")
    for j, block_max in enumerate(BLOCK_MAXIMA):
        x, y = at(j + 0.5, block_max)
        c.rect(x - 3.5, y - 3.5, 7, 7, INK, r=3.5)
    x, y = 100, 50
    c.rect(x, y, 350, 86, WHITE)
    c.rect(x + 11, y + 9, 7, 7, INK, r=3.5)
    c.text(x + 30, y + 17, "maximum of the block", 12)
    c.line([(x + 6, y + 33), (x + 24, y + 33)], "#2a7f78", stroke_width=2.5)
    c.text(x + 30, y + 37, f"running maximum: {steps[0]} rescales", 12)
    c.line([(x + 6, y + 53), (x + 24, y + 53)], STRONG, stroke_width=2.5)
    c.text(x + 30, y + 57, f"number subtracted: {steps[1]} rescales, one of them of zeros", 12)
    c.line([(x + 6, y + 72), (x + 24, y + 72)], STRONG, stroke_width=1.5, stroke_dasharray="4 3")
    c.text(x + 30, y + 76, f"one score above it, and a sum exceeds 2^{MAX_SUM:.0f}", 12)
    return c


def fragment() -> Canvas:
    """Draws the lane that holds each score, and why P is already in place as the next operand."""
    c = Canvas(900, 560, "Accumulator and operand of m16n8k16")
    cell_w, cell_h, top = 22, 26, 84
    quads = (GREEN, BLUE, YELLOW, RED)
    lane = 5
    c.text(40, 28, "S: two n8 accumulators, 16 rows x 16 keys", 14, bold=True)
    c.text(40, 50, f"a number is the lane that holds the score; lane {lane} is framed", 12)
    c.text(500, 28, "P as A operand of the k16 step, 16 x 16", 14, bold=True)
    c.text(500, 50, f"the eight elements of lane {lane} in the order of its registers", 12)
    for half in range(2):
        c.text(40 + (half + 0.5) * 8 * cell_w, 76, f"n8 step {half}", 12, anchor="middle")
    for row in range(16):
        for col in range(16):
            owner = row % 8 * 4 + col % 8 // 2
            x, y = 40 + col * cell_w, top + row * cell_h
            c.rect(x, y, cell_w - 1, cell_h - 1, quads[owner % 4])
            c.text(x + cell_w / 2, y + 17, str(owner), 11, anchor="middle")
            if owner == lane:
                c.rect(x, y, cell_w - 1, cell_h - 1, "none", STRONG)
            x += 460
            c.rect(x, y, cell_w - 1, cell_h - 1, quads[owner % 4] if owner == lane else GREY)
            if owner == lane:
                # a0..a7 of PTX: rows r and r + 8 alternate every two, columns jump after four.
                register = col % 2 + 2 * (row >= 8) + 4 * (col >= 8)
                c.text(x + cell_w / 2, y + 17, f"a{register}", 11, anchor="middle")
    y = top + 16 * cell_h + 26
    c.text(40, y, f"lane {lane}: rows 1 and 9; four lanes share a row,", 12)
    c.text(40, y + 18, "so a row's maximum takes two shuffles", 12)
    c.text(500, y, "the same elements in the same lane: the scores", 12)
    c.text(500, y + 18, "are rounded in place and multiplied with V", 12)
    return c


def pipeline() -> Canvas:
    """Draws one step of the main loop with one and with two K/V buffers."""
    c = Canvas(900, 400, "One step of the main loop")
    left, width = 130, 740
    c.text(20, 26, "one step for block n (schematic, not to scale)", 14, bold=True)

    def lane(y: float, name: str, bars: list[tuple[float, float, str, str]]) -> None:
        c.text(left - 10, y + 20, name, anchor="end")
        c.line([(left, y + 30), (left + width, y + 30)], "#dddddd")
        for start, end, text, fill in bars:
            c.box(
                left + start * width, y, (end - start) * width - 3, 28, [text], fill=fill, size=12
            )

    def barriers(y: float, places: list[float]) -> None:
        for place in places:
            x = left + place * width - 2
            c.line([(x, y - 6), (x, y + 104)], STRONG, stroke_width=1.5, stroke_dasharray="4 3")

    c.text(20, 60, "stages = 1: K is overwritten as soon as S is done", bold=True)
    lane(74, "cp.async", [(0.0, 0.36, "V(n)", BLUE), (0.4, 0.98, "K(n-1)", BLUE)])
    lane(108, "tensor cores", [(0.0, 0.3, "S = Q K^T", GREEN), (0.72, 1.0, "O += P V", GREEN)])
    lane(142, "FP32, MUFU", [(0.4, 0.72, "mask, softmax", YELLOW)])
    barriers(74, [0.0, 0.4])
    c.text(20, 228, "stages = 2: twice the shared memory, one barrier", bold=True)
    lane(242, "cp.async", [(0.0, 0.9, "K(n-1) and V(n-1) into the other buffers", BLUE)])
    lane(276, "tensor cores", [(0.0, 0.3, "S = Q K^T", GREEN), (0.62, 0.9, "O += P V", GREEN)])
    lane(310, "FP32, MUFU", [(0.3, 0.62, "mask, softmax", YELLOW)])
    barriers(242, [0.0])
    c.line([(20, 370), (44, 370)], STRONG, stroke_width=1.5, stroke_dasharray="4 3")
    c.text(
        52,
        375,
        "wait for copies and __syncthreads; the tensor cores idle during a softmax unless",
        12,
    )
    c.text(52, 392, "another CTA of the SM has matrix products to do, hence two CTAs an SM", 12)
    return c


def warpgroups() -> Canvas:
    """Draws the sm90 class: a producer, and two consumers with the ping-pong schedule."""
    c = Canvas(900, 330, "The sm90 class: one producer, two consumers, ping-pong schedule")
    left, unit = 150, 73

    def lane(y: float, name: str, bars: list[tuple[float, float, str, str]]) -> None:
        c.text(left - 10, y + 20, name, anchor="end")
        c.line([(left, y + 30), (left + 10 * unit, y + 30)], "#dddddd")
        for start, end, text, fill in bars:
            c.box(left + start * unit, y, (end - start) * unit - 3, 28, [text], fill=fill, size=12)

    c.text(20, 26, "steps for blocks n and n-1 (schematic, not to scale)", 14, bold=True)
    for turn in range(5):
        x = left + turn * 2.5 * unit - 2
        c.line([(x, 90), (x, 246)], STRONG, stroke_width=1.5, stroke_dasharray="4 3")
    loads = ["K(n-1)", "V(n)", "K(n-2)", "V(n-1)"]
    lane(44, "producer, TMA", [(2.5 * i, 2.5 * i + 2.2, x, BLUE) for i, x in enumerate(loads)])
    first = [("S(n)", 0.0, 1.2), ("P V(n+1)", 1.2, 2.5), ("S(n-1)", 5.0, 6.2), ("P V(n)", 6.2, 7.5)]
    lane(94, "consumer 1: MMA", [(a, b, x, GREEN) for x, a, b in first])
    softmax = [(2.5, 4.9, "softmax(n)", YELLOW), (7.5, 9.9, "softmax(n-1)", YELLOW)]
    lane(128, "FP32, MUFU", softmax)
    lane(178, "consumer 2: MMA", [(a + 2.5, b + 2.5, x, GREEN) for x, a, b in first])
    second = [(0.0, 2.4, "softmax(n+1)", YELLOW), (5.0, 7.4, "softmax(n)", YELLOW)]
    lane(212, "FP32, MUFU", second)
    c.line([(20, 274), (44, 274)], STRONG, stroke_width=1.5, stroke_dasharray="4 3")
    c.text(
        52,
        279,
        "ping_pong: the other consumer issues its products; the tensor cores are always busy",
        12,
    )
    c.text(
        52,
        299,
        "S(n) and P V(n+1) are issued together; the softmax of n overwrites P, the operand of",
        12,
    )
    c.text(
        52,
        316,
        "P V(n+1), so it waits for it; it overlaps with the products of the other consumer",
        12,
    )
    return c


DRAWINGS: dict[str, Callable[[], Canvas]] = {
    "call.svg": call,
    "traffic.svg": traffic,
    "loops.svg": loops,
    "masks.svg": masks,
    "tiles.svg": tiles,
    "windows.svg": windows,
    "rescale.svg": rescale,
    "fragment.svg": fragment,
    "pipeline.svg": pipeline,
    "warpgroups.svg": warpgroups,
    **figures_backward.DRAWINGS,
    "zigzag.svg": figures_distributed.zigzag,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if outdated")
    args = parser.parse_args(argv)
    outdated = []
    for name, draw in DRAWINGS.items():
        path, text = FIGURES / name, draw().svg()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            outdated.append(name)
            if not args.check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    strangers = sorted({path.name for path in FIGURES.glob("*")} - set(DRAWINGS))
    if strangers:
        print(f"no drawing makes {', '.join(strangers)}; remove it", file=sys.stderr)
    if args.check and outdated:
        print(
            f"outdated: {', '.join(outdated)}; run: python tools/make_figures.py", file=sys.stderr
        )
    return 1 if strangers or (args.check and outdated) else 0


if __name__ == "__main__":
    sys.exit(main())
