"""Which key tiles each query tile visited, seen from the copies that the kernel issued."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from ..config import FwdConfig

# State of a tile -> its colour and its text in the legend. The last two are faults.
STATES = {
    "full": ("#2a9d8f", "visited, no score masked"),
    "masked": ("#e9c46a", "visited, some scores masked"),
    "skipped": ("#e8e8e8", "skipped, all scores masked"),
    "wasted": ("#9b5de5", "visited, although all scores are masked"),
    "missed": ("#d62828", "skipped, although some scores are not masked"),
}
_CELL = 22  # pixels
_MARGIN = 70


@dataclasses.dataclass(frozen=True)
class TileMap:
    """The tiles of one batch entry and head.

    Attributes:
        states: One row per query tile, one of the keys of :data:`STATES` per key tile.
        tile_m: Query rows of a tile.
        tile_n: Keys of a tile.
    """

    states: tuple[tuple[str, ...], ...]
    tile_m: int
    tile_n: int

    def count(self, state: str) -> int:
        """Counts the tiles in ``state``."""
        return sum(row.count(state) for row in self.states)


def _coordinates(offsets: torch.Tensor, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns batch, row and head of each byte offset into a tensor of shape (b, s, h, d)."""
    rest = offsets // tensor.element_size()
    found = [torch.zeros_like(rest)] * 3
    by_stride = sorted(
        (i for i in range(3) if tensor.shape[i] > 1), key=lambda i: -tensor.stride(i)
    )
    for i in by_stride:
        found[i] = rest // tensor.stride(i)
        rest = rest % tensor.stride(i)
    return tuple(found)


def _visits(
    trace: torch.Tensor, q: torch.Tensor, k: torch.Tensor, config: FwdConfig, place: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """Yields the pairs (query tile, key tile) that a block of this (batch, head) loaded."""
    of_q = trace[trace[:, 1] == 0]
    batch, row, head = _coordinates(of_q[:, 2], q)
    here = (batch == place[0]) & (head == place[1])
    tile_of_block = dict(
        zip(of_q[here, 0].tolist(), (row[here] // config.tile_m).tolist(), strict=True)
    )
    of_k = trace[trace[:, 1] == 1]
    _, key, _ = _coordinates(of_k[:, 2], k)
    for block, tile in set(zip(of_k[:, 0].tolist(), (key // config.tile_n).tolist(), strict=True)):
        if block in tile_of_block:
            yield tile_of_block[block], tile


def tile_map(
    trace: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    config: FwdConfig,
    *,
    batch: int = 0,
    head: int = 0,
) -> TileMap:
    """Returns the map of one batch entry and query head.

    Args:
        trace: The trace of a :class:`~flashcute.sim.SimResult`, from a run with ``trace=True`` and,
            in the sm90 class, as many SMs as there are query tiles, so that each block has one.
        q: (b, seqlen_q, h, d), as in that run; rows must not overlap in memory.
        k: (b, seqlen_k, h_k, d), as in that run; rows must not overlap in memory.
        config: As in that run.
        batch: Batch entry.
        head: Query head.
    """
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    visited = set(_visits(trace, q, k, config, (batch, head)))

    def state(m: int, n: int) -> str:
        first_row, last_row = m * config.tile_m, min((m + 1) * config.tile_m, seqlen_q) - 1
        first_key, end_key = n * config.tile_n, (n + 1) * config.tile_n
        shift = seqlen_k - seqlen_q if config.mask == "causal" else seqlen_k
        seen_by_last = min(last_row + 1 + shift, seqlen_k)
        seen_by_first = min(first_row + 1 + shift, seqlen_k)
        if (m, n) not in visited:
            return "missed" if first_key < seen_by_last else "skipped"
        if first_key >= seen_by_last:
            return "wasted"
        return "full" if end_key <= seen_by_first else "masked"

    rows, columns = -(-seqlen_q // config.tile_m), -(-seqlen_k // config.tile_n)
    states = tuple(tuple(state(m, n) for n in range(columns)) for m in range(rows))
    return TileMap(states, config.tile_m, config.tile_n)


def write_svg(tiles: TileMap, path: Path, title: str) -> None:
    """Draws the map: query tiles downwards, key tiles to the right, a legend below."""
    rows, columns = len(tiles.states), len(tiles.states[0]) if tiles.states else 0
    legend_top = 2 * _CELL + rows * _CELL + _CELL
    # A sans-serif letter of 12 px is at most about 8 px wide on average.
    width = max(_MARGIN + columns * _CELL + _CELL, 8 * len(title) + 16, 420)
    height = legend_top + (len(STATES) + 1) * _CELL
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="16">{title}</text>',
    ]
    for m, row in enumerate(tiles.states):
        y = 2 * _CELL + m * _CELL
        parts.append(f'<text x="8" y="{y + 15}">row {m * tiles.tile_m}</text>')
        parts += [
            f'<rect x="{_MARGIN + n * _CELL}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" '
            f'fill="{STATES[state][0]}"><title>rows {m * tiles.tile_m}.., keys '
            f"{n * tiles.tile_n}..: {STATES[state][1]}</title></rect>"
            for n, state in enumerate(row)
        ]
    for i, (state, (colour, meaning)) in enumerate(STATES.items()):
        y = legend_top + i * _CELL
        parts.append(f'<rect x="8" y="{y}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="30" y="{y + 12}">{tiles.count(state)} tiles {meaning}</text>')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>", ""]))
