"""The pictures of the backward pass, for tools/make_figures.py."""

from __future__ import annotations

from svg import BLUE, GREEN, GREY, LINE, RED, STRONG, YELLOW, Canvas


def products() -> Canvas:
    """Draws the five products of the backward and what is between them."""
    c = Canvas(900, 420, "The five products of the backward pass")
    c.text(
        20, 28, "one tile of queries and keys; the scale of the scores is left out", 14, bold=True
    )

    def box(x: float, y: float, w: float, lines: list[str], fill: str) -> None:
        c.box(x, y, w, 26 + 20 * (len(lines) - 1), lines, fill=fill)

    box(20, 60, 90, ["Q, K"], BLUE)
    box(160, 60, 150, ["1: S = Q K^T"], GREEN)
    box(375, 50, 225, ["P = exp(S - LSE)", "computed once more"], YELLOW)
    box(665, 60, 205, ["2: dV = P^T dO"], GREEN)
    box(20, 200, 90, ["dO, V"], BLUE)
    box(160, 200, 150, ["3: dP = dO V^T"], GREEN)
    box(375, 190, 225, ["dS = P * (dP - D)", "D = rowsum(dO * O)"], YELLOW)
    box(665, 150, 205, ["5: dK = dS^T Q"], GREEN)
    box(665, 250, 205, ["4: dQ = dS K"], RED)
    for y in (73, 213):
        c.arrow([(110, y), (160, y)])
        c.arrow([(310, y), (375, y)])
    c.arrow([(600, 73), (665, 73)])
    c.arrow([(487, 96), (487, 190)])
    c.line([(600, 213), (632, 213)], stroke_width=1.5)
    for y in (163, 263):
        c.arrow([(632, 213), (632, y), (665, y)])
    c.text(375, 262, "LSE and D: one fp32 number a row,", 12)
    c.text(375, 279, "from the forward and a small kernel", 12)
    c.text(665, 112, "sum over queries, as dK is", 12)
    c.text(665, 302, "sum over keys; it crosses CTAs", 12)
    c.text(665, 319, "where they own keys", 12)
    y = 350
    for fill, meaning in (
        (BLUE, "read from device memory; so is O once, for D"),
        (GREEN, "a product on tensor cores, whose sum stays with its CTA"),
        (
            RED,
            "a product whose sum crosses CTAs, unless a kernel of its own has the queries outside",
        ),
        (YELLOW, "element by element, in registers; S, P, dP and dS never leave the SM"),
    ):
        c.rect(20, y - 12, 14, 14, fill, LINE)
        c.text(42, y, meaning, 12)
        y += 19
    return c


def reduction() -> Canvas:
    """Draws where the sums of the backward are, in one kernel and in two."""
    c = Canvas(900, 420, "Where the sums of the backward are")
    shades = (GREEN, BLUE, YELLOW, GREY)

    def grid(left: float, top: float, cell: float, owns_keys: bool) -> None:
        for i in range(4):
            for j in range(4):
                x, y = left + j * cell, top + i * cell
                c.rect(x, y, cell - 3, cell - 3, shades[j if owns_keys else i])

    c.text(20, 28, "both classes, as a rule: one kernel, a CTA owns keys", 14, bold=True)
    left, top, cell = 100, 76, 50
    c.text(left + 2 * cell, 62, "keys: a colour is a CTA", anchor="middle")
    c.text(left - 10, top + 2 * cell, "queries", anchor="end")
    grid(left, top, cell, owns_keys=True)
    for j in range(4):
        x = left + j * cell + cell / 2 - 2
        c.arrow([(x, top + 4 * cell), (x, top + 4 * cell + 26)])
    c.text(left + 2 * cell, top + 4 * cell + 44, "dK, dV: in registers", anchor="middle")
    for i in range(4):
        y = top + i * cell + cell / 2 - 2
        c.arrow([(left + 4 * cell, y), (left + 4 * cell + 26, y)], STRONG)
    c.rect(left + 4 * cell + 26, top, 104, 4 * cell - 3, RED, LINE, 6)
    lines = ["dQ in fp32 in", "device memory", ""]
    lines += ["red.global or", "cp.reduce.async", "in any order"]
    for k, line in enumerate(lines):
        x = left + 4 * cell + 78
        c.text(x, top + 44 + 22 * k, line, 11, anchor="middle", mono="." in line)
    notes = (
        "5 products for each pair of blocks; 4 d bytes a query",
        "of workspace, set to zero before, rounded to 16 bits by",
        "a last kernel. The order of the additions, and so the last",
        "bits of dQ, vary from run to run unless tiles keep one.",
    )
    for k, note in enumerate(notes):
        c.text(20, 346 + 20 * k, note, 12)

    c.line([(448, 20), (448, 408)], LINE, stroke_dasharray="4 4")
    c.text(465, 28, "two kernels, both loop orders", 14, bold=True)
    cell = 40
    for left, owns_keys, owner, result in (
        (500, False, "a CTA owns queries", "dQ"),
        (705, True, "a CTA owns keys", "dK, dV"),
    ):
        c.text(left + 2 * cell, 62, owner, anchor="middle")
        grid(left, top, cell, owns_keys)
        for k in range(4):
            middle = k * cell + cell / 2 - 2
            if owns_keys:
                x, y = left + middle, top + 4 * cell
                c.arrow([(x, y), (x, y + 26)])
            else:
                x, y = left + 4 * cell, top + middle
                c.arrow([(x, y), (x + 22, y)])
        x = left + 2 * cell
        c.text(x, top + 4 * cell + 44, f"{result}: in registers", anchor="middle")
    for x, products_of in ((500, "S, dP, dQ: 3 products"), (705, "S, dP, dV, dK: 4 products")):
        c.text(x + 2 * cell, 316, products_of, 12, anchor="middle")
    notes = (
        "7 products for each pair of blocks (8 from d = 192, where",
        "dK and dV have a kernel each): S and dP are computed",
        "again. No sum crosses CTAs, so every bit repeats. These are",
        "of the sm80 class, on every GPU.",
    )
    for k, note in enumerate(notes):
        c.text(465, 346 + 20 * k, note, 12)
    return c


DRAWINGS = {"products.svg": products, "reduction.svg": reduction}
