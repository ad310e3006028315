"""The picture of docs/distributed.md: which rank computes what, and in which step of the ring."""

from __future__ import annotations

from svg import Canvas

from flashcute.distributed.zigzag import Layout

RANKS = 4
CHUNKS = 2 * RANKS
COLOURS = ("#8fd0c8", "#f2d58a", "#bcd6ee", "#f0b6ae")
HIDDEN = "#e8e8e8"


def owners(order: str) -> list[int]:
    """Returns the rank of each chunk of a sequence."""
    found = [0] * CHUNKS
    length = CHUNKS // RANKS
    for rank in range(RANKS):
        for x in Layout((length,), order, RANKS, (-1, 0)).segments(rank):
            found[x.start : x.start + x.length] = [rank] * x.length
    return found


def zigzag() -> Canvas:
    """Draws chunks of queries and keys under a causal mask, in both orders."""
    cell, top = 34, 84
    c = Canvas(900, 440, "Contiguous and zigzag order on four ranks")
    for left, order in ((50, "contiguous"), (390, "zigzag")):
        rank_of = owners(order)
        c.text(left, 28, f"{order} order", 14, bold=True)
        c.text(left, 50, "chunk of keys ->", 12)
        work = [0.0] * RANKS
        for i, rank in enumerate(rank_of):
            c.text(left - 8, top + i * cell + 21, str(i), 12, anchor="end")
            c.text(left + i * cell + cell / 2, 74, str(i), 12, anchor="middle")
            for j, owner in enumerate(rank_of):
                x, y = left + j * cell, top + i * cell
                c.rect(x, y, cell - 2, cell - 2, COLOURS[rank] if j <= i else HIDDEN)
                if j <= i:
                    work[rank] += 0.5 if i == j else 1.0
                    c.text(x + 16, y + 21, str((rank - owner) % RANKS), 12, anchor="middle")
        shares = ", ".join(f"{x:g}" for x in work)
        c.text(left, top + CHUNKS * cell + 22, f"work of ranks 0 to 3: {shares} chunks", 13)
    for rank, colour in enumerate(COLOURS):
        c.rect(700, 90 + 26 * rank, 14, 14, colour)
        c.text(722, 102 + 26 * rank, f"rank {rank} computes")
    c.rect(700, 90 + 26 * RANKS, 14, 14, HIDDEN)
    c.text(722, 102 + 26 * RANKS, "hidden by the mask")
    c.text(700, 102 + 26 * 6, "number: the step of the")
    c.text(700, 102 + 26 * 6 + 19, "ring that computes it")
    c.text(50, 424, "Row i is chunk i of the queries; a chunk on the diagonal counts half.", 12)
    return c
