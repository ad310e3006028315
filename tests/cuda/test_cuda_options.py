"""Windows, sinks, softcap, ALiBi, dropout and packed heads on a GPU: seeded cases, both classes."""

from __future__ import annotations

import dataclasses
import random

import pytest
import scores
import torch
from asked import Asked, Gpu
from building import build, of_both_classes
from layouts import STYLES, nan_surrounded

from flashcute import dropout, flash_attn_func, heuristics, ops, testing
from flashcute.config import DTYPES, HEAD_DIMS

CHUNKS = 10
CASES_PER_CHUNK = 100

SEQLENS = (1, 2, 7, 16, 33, 64, 65, 127, 128, 129, 200, 257, 384, 500, 777, 1024)
SIDES = (-1, 0, 1, 31, 64, 100, 127, 128, 300, 5000)
HEADS = ((1, 1), (4, 4), (4, 2), (6, 2), (10, 2), (8, 1), (71, 1))
# For each class a head dimension at which kernels with an option have the tile of those without, so
# that results can have the same bits; tests/test_heuristics.py checks it.
SAME_TILE = {"80": 64, "90": 128}


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
    window_size: tuple[int, int]
    sinks: bool
    scores: scores.Scores
    styles: tuple[str, str, str]


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    h, h_k = rng.choice(HEADS)
    dtype = (torch.float16, torch.bfloat16)[seed % 2]
    asked = scores.draw(rng, dtype)
    head_dims = (16, 32, 64, 96, 128, 200, 256)
    if asked.any:
        head_dims = scores.head_dims(seed, dtype)
    return Case(
        seed=seed,
        dtype=dtype,
        b=rng.choice((1, 1, 2, 3)),
        seqlen_q=rng.choice(SEQLENS),
        seqlen_k=rng.choice((0, *SEQLENS)),
        h=h,
        h_k=h_k,
        d=rng.choice(head_dims),
        causal=rng.random() < 0.3,
        window_size=(rng.choice(SIDES), rng.choice(SIDES)),
        sinks=rng.random() < 0.5,
        scores=asked,
        styles=tuple(rng.choice(list(STYLES)) for _ in range(3)),
    )


def asked_of(case: Case) -> Asked:
    sizes = case.b, case.seqlen_q, case.seqlen_k, case.h, case.h_k, case.d
    return Asked(case.dtype, *sizes, case.causal, case.window_size, *case.scores.asked)


def kernels_of(case: Case, gpu: Gpu) -> set:
    """Returns the kernels that the case uses."""
    return asked_of(case).forward(gpu)


@torch.no_grad()
def check(case: Case) -> str | None:
    """Returns what is wrong with this case, or None."""
    rng = random.Random(case.seed)
    generator = torch.Generator("cuda").manual_seed(case.seed)
    q_shape = (case.b, case.seqlen_q, case.h, case.d)
    k_shape = (case.b, case.seqlen_k, case.h_k, case.d)
    q, k, v = (
        nan_surrounded(shape, style, case.dtype, generator, rng)
        for shape, style in zip((q_shape, k_shape, k_shape), case.styles, strict=True)
    )
    sinks = None
    if case.sinks:
        sinks = 3 * torch.randn(case.h, device="cuda", generator=generator)
    options = {"causal": case.causal, "window_size": case.window_size, "sinks": sinks}
    options |= case.scores.options(case.b, case.h, case.d, generator)
    torch.manual_seed(case.seed)
    out, lse, dmask = flash_attn_func(
        q, k, v, case.scores.dropout_p, return_attn_probs=True, **options
    )
    dropped = case.scores.dropout(case.seed, case.b, case.h, case.seqlen_q, case.seqlen_k)
    options |= dropped
    if dropped and not torch.equal(~torch.signbit(dmask), dropped["dropout_mask"]):
        return f"{case}: the pattern that is returned is another one"
    check_drift = "expanded_rows" not in case.styles[1:] and not case.scores.alike
    try:
        testing.check_forward(out, lse, q, k, v, check_drift=check_drift, **options)
    except AssertionError as error:
        return f"{case}: {error}"
    return None


@pytest.fixture(scope="module", autouse=True)
def _built_window_kernels() -> None:
    capability = torch.cuda.get_device_capability()
    tiles = [
        config
        for dtype in DTYPES
        for head_dim in HEAD_DIMS
        for config in (
            heuristics.fwd_config(dtype, head_dim, False, capability),
            *(heuristics.sm90_configs(dtype, head_dim, False) if capability == (9, 0) else ()),
        )
    ]
    windowed = [dataclasses.replace(config, mask="local") for config in tiles]
    asked = of_both_classes(kernels_of, map(make_case, range(CHUNKS * CASES_PER_CHUNK)))
    build([*windowed, *scores.kernels(capability), *asked])


def test_sampling_covers_the_options() -> None:
    cases = [make_case(seed) for seed in range(CHUNKS * CASES_PER_CHUNK)]
    for field, values in (("window_size", None), ("h", {h for h, _ in HEADS}), ("d", {64, 128})):
        seen = [getattr(case, field) for case in cases]
        assert values is None or min(seen.count(value) for value in values) >= 50
    assert len({case.window_size for case in cases}) == len(SIDES) ** 2
    packed = [case for case in cases if case.h > case.h_k and case.seqlen_q * case.h < 128]
    assert len(packed) >= 20 and sum(case.sinks for case in packed) >= 10
    for dtype, choices in scores.ASKED.items():
        for asked in choices[1:]:
            of_dtype = [c for c in cases if c.dtype == dtype and c.scores.asked == asked]
            assert len(of_dtype) >= 100 and len({c.d for c in of_dtype}) >= 3
            assert sum(c in packed for c in of_dtype) >= 3
    unlimited = [case for case in cases if set(case.window_size) <= {-1, 5000}]
    assert sum(case.scores.any for case in unlimited) >= 15


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_options(chunk: int, kernel_class: str, poisoned_outputs, count_cases) -> None:
    seeds = range(chunk * CASES_PER_CHUNK, (chunk + 1) * CASES_PER_CHUNK)
    failures = [failure for seed in seeds if (failure := check(make_case(seed)))]
    count_cases(f"options of class {kernel_class}", CASES_PER_CHUNK)
    assert not failures, f"{len(failures)} of {CASES_PER_CHUNK}:\n" + "\n".join(failures)


def make_qkv(d: int, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    shapes = (2, 150, 4, d), (2, 170, 2, d), (2, 170, 2, d)
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
def test_slopes_of_zero_and_a_cap_beyond_all_scores_equal_none(kernel_class: str, causal) -> None:
    """Slopes of zero equal none bit for bit, in any memory layout; the cap does within rounding."""
    q, k, v = make_qkv(SAME_TILE[kernel_class], torch.bfloat16)
    plain = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    for slopes in (torch.zeros(4), torch.zeros(2, 4), torch.zeros(8, 2)[::2].mT):
        found = flash_attn_func(
            q, k, v, causal=causal, alibi_slopes=slopes.cuda(), return_attn_probs=True
        )
        assert all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, softcap=1e6, return_attn_probs=True)
    testing.check_forward(out, lse, q, k, v, causal=causal)


def test_dropout_repeats_with_a_seed_and_draws_anew_without(kernel_class: str) -> None:
    qkv = make_qkv(SAME_TILE[kernel_class])
    torch.manual_seed(1)
    first, second = (flash_attn_func(*qkv, 0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(flash_attn_func(*qkv, 0.5), first)
    assert not torch.equal(first, second)
    _, lse, _ = flash_attn_func(*qkv, 0.5, return_attn_probs=True)
    assert torch.equal(lse, flash_attn_func(*qkv, return_attn_probs=True)[1])


def test_a_probability_that_rounds_to_zero_equals_none(kernel_class: str) -> None:
    qkv = make_qkv(128)
    assert torch.equal(flash_attn_func(*qkv, 2.0**-18), flash_attn_func(*qkv))


def test_dropout_is_that_of_the_cpu(kernel_class: str) -> None:
    """Every bit of the mask is the same for one state, which heads with unit vectors as values
    show."""
    seqlen, d = 200, 64
    h = -(-seqlen // d)
    q = torch.zeros(2, seqlen, h, d, device="cuda", dtype=torch.float16)
    v = torch.nn.functional.pad(torch.eye(seqlen), (0, h * d - seqlen)).view(1, seqlen, h, d)
    v = v.expand(2, -1, -1, -1).contiguous().to(q)
    state = dropout.draw_state(q.device)
    options = 0.125, True, (-1, -1), None, 0.0, None, False
    out, lse = ops.attend(q, q, v, *options, state, 0.3)
    expected = ops.attend(q.cpu(), q.cpu(), v.cpu(), *options, state.cpu(), 0.3)
    assert torch.equal(out.cpu() != 0, expected[0] != 0)
    torch.testing.assert_close(out.cpu(), expected[0], rtol=2e-3, atol=0)
    torch.testing.assert_close(lse.cpu(), expected[1], rtol=1e-4, atol=1e-4)


def test_a_graph_draws_dropout_anew_in_each_replay(kernel_class: str) -> None:
    qkv = make_qkv(128)
    flash_attn_func(*qkv, 0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(*qkv, 0.5)
    # PyTorch has written the seed on the capturing stream, for which a replay does not wait.
    torch.cuda.synchronize()
    results = []
    for seed in (1, None, 1):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        results.append(out.clone())
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])


def test_a_graph_reads_the_state_that_is_there_when_it_runs(kernel_class: str) -> None:
    options = 0.125, False, (-1, -1), None, 0.0, None, False
    qkv, state = make_qkv(128), torch.tensor([1, 2], device="cuda")
    first, _ = ops.attend(*qkv, *options, state, 0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = ops.attend(*qkv, *options, state, 0.5)
    for other in (torch.tensor([-1, 2**40]), torch.tensor([1, 3]), torch.tensor([1, 2])):
        state.copy_(other)
        graph.replay()
        assert torch.equal(out, ops.attend(*qkv, *options, other.cuda(), 0.5)[0])
        assert torch.equal(out, first) == (other.tolist() == [1, 2])


# Numbers of dropped 16-bit patterns, divided by 2^16. Kernels compare the patterns as fp16 numbers
# with a bound, which is of every kind here: 31745 are dropped as those that are not less, with
# 31746 the bound is the smallest subnormal number, with 32768 the largest.
_EXACT = [x / 2**16 for x in (1, 66, 6554, 31744, 31745, 31746, 32768, 64225, 65535)]


@pytest.mark.parametrize("dropout_p", _EXACT)
def test_weights_are_dropped_exactly_where_the_mask_says(kernel_class: str, dropout_p) -> None:
    """With equal scores and the identity as V, each number of the output is one weight."""
    b, seqlen_q, h, d = 2, 130, 64, 64
    q = torch.zeros(b, seqlen_q, h, d, device="cuda", dtype=torch.half)
    v = torch.eye(d, device="cuda", dtype=torch.half)[None, :, None].expand(b, d, h, d)
    torch.manual_seed(7)
    out = flash_attn_func(q, torch.zeros_like(v), v, dropout_p)
    torch.manual_seed(7)
    state = dropout.draw_state(torch.device("cuda"))
    mask = dropout.dropout_mask(state, b, h, seqlen_q, d, dropout_p)  # (b, h, seqlen_q, seqlen_k)
    assert torch.equal(out.transpose(1, 2) != 0, mask)


@pytest.mark.parametrize("side", [(-1, -1), (-1, 0), (100, 0), (60, 60)])
def test_window_wider_than_the_keys_equals_none(kernel_class: str, side) -> None:
    """The results are equal bit for bit, and a sink of -inf equals none."""
    q = torch.randn(2, 90, 4, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(2, 50, 2, 128, device="cuda", dtype=torch.bfloat16)
    causal = side[1] == 0
    wide = tuple(1000 if x not in (0, -1) else x for x in side)
    sinks = torch.full((4,), -torch.inf, device="cuda")
    plain = flash_attn_func(q, k, k, causal=causal, return_attn_probs=True)
    for s in (None, sinks):
        found = flash_attn_func(
            q, k, k, causal=causal, window_size=wide, sinks=s, return_attn_probs=True
        )
        assert all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))
