"""Thousands of seeded cases against the reference: shapes, dtypes, masks and memory layouts.

Inputs lie between NaN margins and outputs are NaN before the call: reading past an input or leaving
an element of an output unwritten shows.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from asked import Asked, Gpu
from layouts import STYLES, nan_surrounded

import flashcute
from flashcute import testing

CHUNKS = 104
CASES_PER_CHUNK = 50

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (8, 16, 32, 40, 64, 72, 96, 104, 128, 160, 192, 224, 256)
SEQLENS = (
    1, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 113, 127, 128, 129, 143, 144, 145, 200, 203,
    217, 239, 255, 256, 257, 383, 384, 385, 512, 513, 799, 1023, 1024, 1025,
)  # fmt: skip
HEADS = ((1, 1), (2, 2), (3, 3), (2, 1), (4, 2), (6, 2), (6, 3), (8, 1))


@dataclasses.dataclass(frozen=True)
class Case:
    seed: int
    dtype: torch.dtype
    b: int
    seqlen_q: int
    seqlen_k: int
    h: int
    h_k: int
    d: int
    causal: bool
    softmax_scale: float | None
    styles: tuple[str, str, str]


def make_case(seed: int) -> Case:
    """Returns one case; head dimension, dtype and mask alternate with the seed, so that each
    combination has its share."""
    rng = random.Random(seed)
    h, h_k = rng.choice(HEADS)
    return Case(
        seed=seed,
        dtype=DTYPES[seed % 2],
        b=rng.choice((1, 1, 2, 3)),
        seqlen_q=rng.choice(SEQLENS),
        seqlen_k=rng.choice(SEQLENS),
        h=h,
        h_k=h_k,
        d=HEAD_DIMS[seed // 4 % len(HEAD_DIMS)],
        causal=seed // 2 % 2 == 1,
        softmax_scale=rng.choice((None, None, None, 0.03, 0.5)),
        styles=tuple(rng.choice(list(STYLES)) for _ in range(3)),
    )


def make_inputs(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = random.Random(case.seed)
    generator = torch.Generator(device).manual_seed(case.seed)
    q_shape = (case.b, case.seqlen_q, case.h, case.d)
    k_shape = (case.b, case.seqlen_k, case.h_k, case.d)
    return tuple(
        nan_surrounded(shape, style, case.dtype, generator, rng)
        for shape, style in zip((q_shape, k_shape, k_shape), case.styles, strict=True)
    )


def kernels_of(case: Case, gpu: Gpu) -> set:
    """Returns the kernels that the case uses."""
    sizes = case.b, case.seqlen_q, case.seqlen_k, case.h, case.h_k, case.d
    return Asked(case.dtype, *sizes, case.causal, (-1, -1)).forward(gpu)


@torch.no_grad()
def check(case: Case) -> str | None:
    """Returns what is wrong with this case, or None."""
    q, k, v = make_inputs(case, "cuda")
    options = {"causal": case.causal, "softmax_scale": case.softmax_scale}
    out, lse, _ = flashcute.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    if out.dtype != q.dtype or out.shape != q.shape:
        return f"{case}: out is {out.dtype} {tuple(out.shape)}"
    if lse.dtype != torch.float32 or lse.shape != (case.b, case.h, case.seqlen_q):
        return f"{case}: lse is {lse.dtype} {tuple(lse.shape)}"
    # With all keys or all values alike every row rounds alike, and nothing averages out.
    check_drift = "expanded_rows" not in case.styles[1:]
    try:
        testing.check_forward(out, lse, q, k, v, check_drift=check_drift, **options)
    except AssertionError as error:
        return f"{case}: {error}"
    return None


def test_sampling_covers_the_grid() -> None:
    cases = [make_case(seed) for seed in range(CHUNKS * CASES_PER_CHUNK)]
    assert len(cases) >= 3000
    for field, values in (
        ("dtype", DTYPES),
        ("d", HEAD_DIMS),
        ("seqlen_q", SEQLENS),
        ("seqlen_k", SEQLENS),
        ("causal", (False, True)),
    ):
        seen = [getattr(case, field) for case in cases]
        assert min(seen.count(value) for value in values) >= 100, field
    combinations = {(case.dtype, case.d, case.causal) for case in cases}
    assert len(combinations) == len(DTYPES) * len(HEAD_DIMS) * 2
    for position in range(3):
        assert {case.styles[position] for case in cases} == set(STYLES)
    assert sum(case.seqlen_q > case.seqlen_k and case.causal for case in cases) >= 500


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_grid(chunk: int, poisoned_outputs, count_cases) -> None:
    seeds = range(chunk * CASES_PER_CHUNK, (chunk + 1) * CASES_PER_CHUNK)
    failures = [failure for seed in seeds if (failure := check(make_case(seed)))]
    count_cases("grid", CASES_PER_CHUNK)
    assert not failures, f"{len(failures)} of {CASES_PER_CHUNK}:\n" + "\n".join(failures)
