"""The shipped forward kernels against the reference, on the backend that ``--backend`` names."""

import pytest
import torch

from flashcute.config import DTYPES, HEAD_DIMS
from flashcute.oracles import embed_in_nan
from flashcute.testing import check_forward

# (b, seqlen_q, seqlen_k, h, h_k, difference between the kernel's head dimension and d)
SHAPES = (
    (1, 128, 128, 1, 1, 0),  # whole tiles
    (1, 129, 193, 2, 1, 8),  # one past the edges of the tiles
    (2, 17, 130, 4, 2, 16),  # fewer queries than keys, grouped heads
    (1, 200, 63, 1, 1, 0),  # queries that see no key under the causal mask
    (1, 5, 0, 2, 2, 8),  # no keys at all
    (1, 1, 257, 8, 2, 0),  # one query
)
TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("causal", [False, True], ids=["none", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_forward(forward, head_dim, dtype, causal):
    for seed, (b, seqlen_q, seqlen_k, h, h_k, less) in enumerate(SHAPES):
        generator = torch.Generator().manual_seed(seed)
        d = head_dim - less
        sizes = ((b, seqlen_q, h, d), (b, seqlen_k, h_k, d), (b, seqlen_k, h_k, d))
        q, k, v = (torch.randn(size, generator=generator).to(TORCH_DTYPES[dtype]) for size in sizes)
        # Whatever lies between rows, heads and batch entries and around the tensors is NaN.
        placed = [embed_in_nan(x, "bshd" if seed % 2 else "bhsd").view for x in (q, k, v)]
        out, lse = forward(*placed, causal=causal, seed=seed)
        check_forward(out, lse, q, k, v, causal=causal)
