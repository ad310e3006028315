"""FlashAttention-2's loop in Python, compiled for the GPU by Numba (``pip install numba``).

This kernel has the idea of rung 2 with rung 3's statistics, in fp32. A CTA of 16 x 16 threads
computes 16 query rows and reads 16 keys at a time. Thread (lane, row) computes one score and keeps
d / 16 columns of its row's output in registers. A row's maximum and sum are tree reductions over
its 16 threads. A tile at the end of the sequence is padded with zeros, whose scores are masked.

Run it on a GPU, or without one in Numba's CUDA simulator; it compares itself with the reference:

    NUMBA_ENABLE_CUDASIM=1 python -m examples.ladder.numba_rung
"""

from __future__ import annotations

import functools
import math
import sys

import numpy
import torch
from numba import config as numba_config
from numba import cuda, float32

from flashcute import testing

TILE = 16  # query rows and keys of a block
# Numba types a plain 0.0 as a double, and with it every sum that it enters.
ZERO, LOWEST = numpy.float32(0), numpy.float32(-numpy.inf)
PROBLEMS = ((16, 32, False), (21, 37, True), (19, 7, True), (3, 0, False))


@functools.cache
def make_kernel(d: int, causal: bool):
    """Returns the kernel for one head dimension and mask, which are compile-time constants."""
    columns = d // TILE  # output columns of one thread

    @cuda.jit
    def forward(q, k, v, out, lse, scale):
        lane, row = cuda.threadIdx.x, cuda.threadIdx.y
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        tiles = (seqlen_q + TILE - 1) // TILE
        batch_head, tile = cuda.blockIdx.x // tiles, cuda.blockIdx.x % tiles
        batch, head = batch_head // q.shape[2], batch_head % q.shape[2]
        head_k = head // (q.shape[2] // k.shape[2])
        query = tile * TILE + row
        # First keys that the row and the tile do not see; the causal diagonal ends in the
        # bottom-right corner.
        key_end, tile_key_end = seqlen_k, seqlen_k
        if causal:
            key_end = min(seqlen_k, query + 1 + seqlen_k - seqlen_q)
            tile_key_end = min(seqlen_k, (tile + 1) * TILE + seqlen_k - seqlen_q)

        tile_q = cuda.shared.array((TILE, d), float32)
        tile_k = cuda.shared.array((TILE, d + 1), float32)  # + 1: lanes read different banks
        tile_v = cuda.shared.array((TILE, d), float32)
        p = cuda.shared.array((TILE, TILE), float32)
        tree = cuda.shared.array((TILE, TILE + 1), float32)
        acc = cuda.local.array(columns, float32)
        for c in range(columns):
            acc[c] = ZERO
            x = lane + c * TILE
            tile_q[row, x] = q[batch, query, head, x] if query < seqlen_q else ZERO
        row_max = LOWEST
        row_sum = ZERO

        for first_key in range(0, tile_key_end, TILE):
            key = first_key + row
            for c in range(columns):
                x = lane + c * TILE
                tile_k[row, x] = k[batch, key, head_k, x] if key < seqlen_k else ZERO
                tile_v[row, x] = v[batch, key, head_k, x] if key < seqlen_k else ZERO
            cuda.syncthreads()
            score = ZERO
            for x in range(d):
                score += tile_q[row, x] * tile_k[lane, x]
            score = score * scale if first_key + lane < key_end else LOWEST

            tree[row, lane] = score
            step = TILE // 2
            while step > 0:
                cuda.syncthreads()
                if lane < step:
                    tree[row, lane] = max(tree[row, lane], tree[row, lane + step])
                step //= 2
            cuda.syncthreads()
            new_max = max(row_max, tree[row, 0])
            cuda.syncthreads()
            # A row that has seen no key has maximum -inf; 0 in its place avoids (-inf) - (-inf).
            base = new_max if new_max > LOWEST else ZERO
            p[row, lane] = math.exp(score - base)
            tree[row, lane] = p[row, lane]
            step = TILE // 2
            while step > 0:
                cuda.syncthreads()
                if lane < step:
                    tree[row, lane] += tree[row, lane + step]
                step //= 2
            cuda.syncthreads()
            factor = math.exp(row_max - base)
            row_sum = row_sum * factor + tree[row, 0]
            row_max = new_max
            for c in range(columns):
                acc[c] *= factor
                for j in range(TILE):
                    acc[c] += p[row, j] * tile_v[j, lane + c * TILE]
            cuda.syncthreads()

        if query < seqlen_q:  # a row without keys gets output 0 and log-sum-exp -inf
            for c in range(columns):
                out[batch, query, head, lane + c * TILE] = (
                    acc[c] / row_sum if row_sum > ZERO else ZERO
                )
            if lane == 0:
                lse[batch, head, query] = row_max + math.log(row_sum) if row_sum > ZERO else LOWEST

    return forward


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention by the Numba kernel; arguments and results as in :func:`ladder.attention`.

    Takes any floating-point dtype and head dimension that is a multiple of 16, on a GPU, or on the
    CPU under Numba's CUDA simulator. Computes in float32.

    Raises:
        ValueError: for a head dimension that is not a multiple of 16.
    """
    b, seqlen_q, h, d = q.shape
    if d % TILE:
        raise ValueError(f"ladder: expected a head dimension that is a multiple of 16, got d={d}")
    tensors = [x.float() for x in (q, k, v)]
    out = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
    lse = tensors[0].new_empty((b, h, seqlen_q))
    if out.numel():
        arrays = [x.numpy() if x.device.type == "cpu" else x for x in (*tensors, out, lse)]
        blocks = b * h * ((seqlen_q + TILE - 1) // TILE)
        scale = d**-0.5 if softmax_scale is None else softmax_scale
        make_kernel(d, causal)[blocks, (TILE, TILE)](*arrays, numpy.float32(scale))
    return out.to(q.dtype), lse


def main() -> int:
    """Compares a few small problems with the reference; returns 0 if all are right."""
    if not numba_config.ENABLE_CUDASIM and not torch.cuda.is_available():
        print("expected a GPU or NUMBA_ENABLE_CUDASIM=1, found neither", file=sys.stderr)
        return 1
    device = "cpu" if numba_config.ENABLE_CUDASIM else "cuda"
    generator = torch.Generator().manual_seed(0)
    right = True
    for seqlen_q, seqlen_k, causal in PROBLEMS:
        sizes = ((1, seqlen_q, 2, 32), (1, seqlen_k, 1, 32), (1, seqlen_k, 1, 32))
        q, k, v = (torch.randn(s, generator=generator).half().to(device) for s in sizes)
        out, lse = attention(q, k, v, causal=causal)
        report = testing.compare_forward(out, lse, q, k, v, causal=causal)
        right &= report.ok
        mask = "causal" if causal else "full"
        print(f"{seqlen_q} x {seqlen_k} {mask}: {'right' if report.ok else 'WRONG'}")
        print(*([] if report.ok else [report]), sep="", end="")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
