"""Queries over a cache on a GPU: seeded cases of both kernel classes."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from asked import Asked, Gpu
from building import build, of_both_classes
from test_checks_kvcache import CACHE, CASES, arguments
from test_checks_kvcache import Case as OddCase

from flashcute import (
    KVCachePlan,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    heuristics,
    testing,
)
from flashcute.config import MASKS
from flashcute.dropout import draw_state, dropout_mask
from flashcute.rotary import apply_rotary_emb

CHUNKS = 10
CASES_PER_CHUNK = 50

# Each head dimension has one data type, and softcap or ALiBi comes with a causal mask only, so that
# few kernels are needed.
DTYPES = {64: torch.float16, 128: torch.bfloat16, 256: torch.float16}
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 100, 129, 300, 1000)
PAGE_SIZES = (0, 0, 1, 2, 3, 16, 64, 100, 256)  # 0: a contiguous cache
HEADS = ((4, 4), (4, 2), (6, 2), (8, 1))
SIDES = (-1, 0, 31, 5000)
LARGE, SMALL = 2**31 - 1, -(2**31)


@dataclasses.dataclass(frozen=True)
class Case:
    seed: int
    d: int
    page_size: int
    heads_first: bool
    lengths: tuple[int, ...]  # before anything is appended
    leftpad: bool
    seqlen_q: int
    seqlen_new: int
    rotary_dim: int
    interleaved: bool
    h: int
    h_k: int
    causal: bool
    window_size: tuple[int, int]
    sinks: bool
    scores: bool
    num_splits: int


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    h, h_k = rng.choice(HEADS)
    d = rng.choice((64, 128, 128, 256))
    page_size = rng.choice(PAGE_SIZES)
    scores = d < 256 and rng.random() < 0.25
    windowed = not scores and rng.random() < 0.3
    seqlen_new = rng.choice((0, 0, 1, 3, 70))
    return Case(
        seed=seed,
        d=d,
        page_size=page_size,
        heads_first=rng.random() < 0.5,
        lengths=tuple(rng.choice(LENGTHS) for _ in range(rng.choice((1, 1, 2, 5, 40)))),
        leftpad=page_size == 0 and rng.random() < 0.5,
        seqlen_q=rng.choice((1, 1, 1, 2, 5, 130)),
        seqlen_new=seqlen_new,
        rotary_dim=rng.choice((0, 12, 32, d)) if seqlen_new else 0,
        interleaved=rng.random() < 0.5,
        h=h,
        h_k=h_k,
        causal=scores or rng.random() < 0.4,
        window_size=(rng.choice(SIDES), rng.choice(SIDES)) if windowed else (-1, -1),
        sinks=rng.random() < 0.3,
        scores=scores,
        num_splits=rng.choice((0, 0, 1, 2, 7, 128)),
    )


@dataclasses.dataclass
class Problem:
    """The arguments of a call, and the attention that they stand for.

    Attributes:
        q: The rotated queries.
        tokens: Keys and values, (total, h_k, d), of one sequence after the other, without padding,
            appended ones included.
        counts: Number of tokens of each sequence.
        places: Where each token is in the cache: its entry or page, and its row there.
    """

    arguments: dict[str, object]
    q: torch.Tensor
    tokens: tuple[torch.Tensor, torch.Tensor]
    counts: list[int]
    places: tuple[torch.Tensor, torch.Tensor]


def room_of(case: Case, rng: random.Random) -> int:
    return max(case.lengths) + case.seqlen_new + rng.choice((1, 40))


def kernels_of(case: Case, gpu: Gpu) -> set:
    """Returns the kernels that the case uses."""
    room, dtype = room_of(case, random.Random(case.seed)), DTYPES[case.d]
    if case.page_size:
        room = -(-room // case.page_size) * case.page_size
    sizes = len(case.lengths), case.seqlen_q, room, case.h, case.h_k, case.d
    scores = {"softcap" if dtype == torch.float16 else "alibi": case.scores}
    of_cache = {"cache": True, "page_size": case.page_size, "num_splits": case.num_splits}
    asked = Asked(dtype, *sizes, case.causal, case.window_size, **scores, **of_cache)
    return asked.forward(gpu)


def make(case: Case) -> Problem:
    generator = torch.Generator("cuda").manual_seed(case.seed)
    rng, dtype, b = random.Random(case.seed), DTYPES[case.d], len(case.lengths)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    def int32(numbers) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device="cuda")

    room = room_of(case, rng)
    page_size = case.page_size or room
    columns = -(-room // page_size)
    pages = b * columns + 2
    shape = (pages, case.h_k, page_size) if case.heads_first else (pages, page_size, case.h_k)
    cache = [torch.full((*shape, case.d), torch.nan, device="cuda", dtype=dtype) for _ in "kv"]
    if case.heads_first:
        cache = [x.transpose(1, 2) for x in cache]
    # Indices are made on the host, as 40 sequences take hundreds of small operations.
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(case.seed))
    table = order[: b * columns].view(b, columns)
    arguments = {"cache_seqlens": int32(case.lengths), "num_splits": case.num_splits}
    pads = [rng.randint(0, n) if case.leftpad else 0 for n in case.lengths]
    if case.leftpad:
        arguments["cache_leftpad"] = int32(pads)
    if case.page_size:
        used = [-(-(n + case.seqlen_new) // page_size) for n in case.lengths]
        garbage = torch.tensor([rng.choice((-1, pages, LARGE, SMALL)) for _ in range(columns)])
        rows = [torch.cat((x[:n], garbage[n:])) for x, n in zip(table, used, strict=True)]
        arguments["block_table"] = torch.stack(rows).int().cuda()
    else:
        arguments["cache_batch_idx"] = table[:, 0].int().cuda()

    q, new = randn(b, case.seqlen_q, case.h, case.d), None
    if case.seqlen_new:
        new = [randn(b, case.seqlen_new, case.h_k, case.d) for _ in "kv"]
        arguments |= dict(zip("kv", new, strict=True))
    rotated = q
    if case.rotary_dim:
        sizes = columns * page_size, case.rotary_dim // 2
        angles = 6.3 * torch.rand(sizes, device="cuda", generator=generator)
        tables = angles.cos().to(dtype), angles.sin().to(dtype)
        arguments |= dict(zip(("rotary_cos", "rotary_sin"), tables, strict=True))
        arguments["rotary_interleaved"] = case.interleaved
        offsets = arguments["cache_seqlens"]
        if case.causal or case.window_size != (-1, -1):
            rotated = apply_rotary_emb(q, *tables, case.interleaved, seqlen_offsets=offsets)
        else:
            flat = q.flatten(1, 2)[:, None]  # all queries rotate by the position of the first
            flat = apply_rotary_emb(flat, *tables, case.interleaved, seqlen_offsets=offsets)
            rotated = flat.view_as(q)
        new[0] = apply_rotary_emb(new[0], *tables, case.interleaved, seqlen_offsets=offsets)

    spans = [range(pad, n + case.seqlen_new) for n, pad in zip(case.lengths, pads, strict=True)]
    token = torch.cat([torch.arange(span.start, span.stop) for span in spans])
    sequence = torch.arange(b).repeat_interleave(torch.tensor([len(span) for span in spans]))
    places = table[sequence, token // page_size].cuda(), (token % page_size).cuda()
    is_new = token >= torch.tensor(case.lengths)[sequence]
    before, appended = (x.nonzero().flatten().cuda() for x in (~is_new, is_new))
    tokens = tuple(randn(len(token), case.h_k, case.d) for _ in "kv")
    for i, (x, values) in enumerate(zip(cache, tokens, strict=True)):
        x[places[0][before], places[1][before]] = values[before]
        if new is not None:
            values[appended] = new[i].flatten(0, 1)
    arguments |= {"q": q, "k_cache": cache[0], "v_cache": cache[1]}
    return Problem(arguments, rotated, tokens, [len(span) for span in spans], places)


def options_of(case: Case) -> dict[str, object]:
    generator = torch.Generator("cuda").manual_seed(case.seed)
    options = {"causal": case.causal, "window_size": case.window_size}
    if case.sinks:
        options["sinks"] = 3 * torch.randn(case.h, device="cuda", generator=generator)
    if case.scores and DTYPES[case.d] == torch.float16:
        options["softcap"] = 3.0
    elif case.scores:
        slopes = torch.rand(len(case.lengths), case.h, device="cuda", generator=generator)
        options["alibi_slopes"] = slopes if case.seed % 2 else slopes[0]
    return options


@torch.no_grad()
def check(case: Case) -> str | None:
    """Returns what is wrong with this case, or None."""
    problem, options = make(case), options_of(case)
    caches = [problem.arguments[name] for name in ("k_cache", "v_cache")]
    out, lse = flash_attn_with_kvcache(**problem.arguments, **options, return_softmax_lse=True)
    slopes = options.pop("alibi_slopes", None)
    split = (x.split(problem.counts) for x in problem.tokens)
    for i, (keys, values) in enumerate(zip(*split, strict=True)):
        one = problem.q[i : i + 1], keys[None], values[None]
        if slopes is not None:
            options["alibi_slopes"] = slopes[i] if slopes.dim() == 2 else slopes
        try:
            testing.check_forward(out[i : i + 1], lse[i : i + 1], *one, **options)
        except AssertionError as error:
            return f"{case}: sequence {i}: {error}"
    # The rotation of the kernel has a fused multiply-add, which rounds once instead of twice.
    of_keys = 2**-7 if case.rotary_dim else 0
    for x, expected, rtol in zip(caches, problem.tokens, (of_keys, 0), strict=True):
        if not torch.allclose(x[problem.places], expected, rtol=rtol, atol=rtol / 4):
            return f"{case}: the cache holds something else"
        x[problem.places] = torch.nan
        if not x.isnan().all():
            return f"{case}: written where nothing belongs"
    return None


@pytest.fixture(scope="module", autouse=True)
def _built_kernels() -> None:
    capability = torch.cuda.get_device_capability()
    configs = set()
    for d, dtype in DTYPES.items():
        name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
        for mask, page_size, rows in itertools.product(MASKS, (0, 64), (1, 5, 130)):
            problem = heuristics.FwdProblem(
                name, mask == "causal", 1, rows, 1000, 4, 4, d, cache=True, page_size=page_size,
                window=(31, 31) if mask == "local" else None, num_splits=0,
            )  # fmt: skip
            asked = [problem]
            if mask == "causal" and d < 256:
                score = {"softcap": True} if name == "fp16" else {"alibi": True}
                asked.append(dataclasses.replace(problem, **score))
            for one in asked:
                configs.add(heuristics.choose_fwd(one, capability))
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("FLASHCUTE_ARCH", "80")
                    configs.add(heuristics.choose_fwd(one, capability))
    build(configs | of_both_classes(kernels_of, map(make_case, range(CHUNKS * CASES_PER_CHUNK))))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_kvcache(chunk: int, kernel_class: str, poisoned_outputs, count_cases) -> None:
    seeds = range(chunk * CASES_PER_CHUNK, (chunk + 1) * CASES_PER_CHUNK)
    failures = [failure for seed in seeds if (failure := check(make_case(seed)))]
    count_cases(f"caches of class {kernel_class}", CASES_PER_CHUNK)
    assert not failures, f"{len(failures)} of {CASES_PER_CHUNK}:\n" + "\n".join(failures)


def test_sampling_covers_the_options() -> None:
    cases = [make_case(seed) for seed in range(CHUNKS * CASES_PER_CHUNK)]
    for seen in (
        sum(case.page_size == 1 for case in cases),
        sum(case.rotary_dim > 0 and case.page_size > 1 for case in cases),
        sum(case.leftpad for case in cases),
        sum(0 in case.lengths for case in cases),
        sum(case.scores and case.page_size > 0 for case in cases),
        sum(case.num_splits > 1 for case in cases),
        sum(case.h > case.h_k and case.seqlen_q == 1 for case in cases),
        sum(case.window_size != (-1, -1) for case in cases),
    ):
        assert seen >= 30


def pages_of(lengths, page_size, h_k=2, d=128, dtype=torch.bfloat16):
    """Returns a cache in pages with normal numbers, and its table."""
    generator = torch.Generator("cuda").manual_seed(0)
    columns = -(-max(lengths) // page_size)
    table = torch.randperm(len(lengths) * columns, device="cuda", generator=generator).int()
    shape = (len(lengths) * columns, page_size, h_k, d)
    cache = [torch.randn(shape, device="cuda", generator=generator).to(dtype) for _ in "kv"]
    return cache, table.view(len(lengths), columns)


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_prefill_decoding_and_speculation_in_one_batch(kernel_class: str, page_size: int) -> None:
    """Ragged queries run over pages, under a causal mask that ends with each sequence. With a given
    number of splits each sequence has the bits that it has alone."""
    lengths_q, lengths_k = (300, 1, 4, 0, 1), (700, 900, 77, 50, 0)
    (k, v), table = pages_of(lengths_k, page_size)
    q = torch.randn(sum(lengths_q), 8, 128, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, *itertools.accumulate(lengths_q)], device="cuda").int()
    used = torch.tensor(lengths_k, device="cuda").int()
    for num_splits in (0, 1, 5):
        out, lse, _ = flash_attn_varlen_func(
            q, k, v, cu, None, 300, 900, causal=True, block_table=table, seqused_k=used,
            return_attn_probs=True, num_splits=num_splits,
        )  # fmt: skip
        for i, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
            rows = slice(int(cu[i]), int(cu[i + 1]))
            if not n_q:
                continue
            keys = [x[table[i].long()].flatten(0, 1)[None, :n_k] for x in (k, v)]
            testing.check_forward(out[None, rows], lse[None, :, rows], q[None, rows], *keys,
                                  causal=True)  # fmt: skip
            if num_splits:
                alone = flash_attn_varlen_func(
                    q[rows], k, v, cu[:2] * 0 + torch.tensor([0, n_q], device="cuda").int(), None,
                    n_q, n_k, causal=True, block_table=table[i : i + 1],
                    seqused_k=used[i : i + 1], num_splits=num_splits,
                )  # fmt: skip
                assert torch.equal(alone, out[rows]), (i, num_splits)


def test_weights_of_keys_in_pages_are_dropped(kernel_class: str) -> None:
    lengths_q, lengths_k, p = (70, 1, 130), (200, 77, 130), 0.25
    (k, v), table = pages_of(lengths_k, 16)
    q = torch.randn(sum(lengths_q), 8, 128, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, *itertools.accumulate(lengths_q)], device="cuda").int()
    used = torch.tensor(lengths_k, device="cuda").int()
    torch.manual_seed(5)
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, cu, None, 130, 200, p, causal=True, block_table=table, seqused_k=used,
        return_attn_probs=True,
    )  # fmt: skip
    torch.manual_seed(5)
    mask = dropout_mask(draw_state(q.device), 3, 8, 130, 200, p)
    for i, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows = slice(int(cu[i]), int(cu[i + 1]))
        keys = [x[table[i].long()].flatten(0, 1)[None, :n_k] for x in (k, v)]
        testing.check_forward(out[None, rows], lse[None, :, rows], q[None, rows], *keys,
                              causal=True, dropout_p=p,
                              dropout_mask=mask[i : i + 1, :, :n_q, :n_k])  # fmt: skip


@pytest.mark.parametrize(("d", "h_k"), [(64, 16), (128, 8)])
def test_a_large_cache_is_read_right(d: int, h_k: int) -> None:
    """512 MiB, whose keys have another priority in L2, and NaN in unused slots."""
    b, room, h = 64, 2048, 32
    generator = torch.Generator("cuda").manual_seed(1)
    used = torch.randint(0, room + 1, (b,), device="cuda", generator=generator, dtype=torch.int32)
    q, k, v = (
        torch.randn(b, n, heads, d, device="cuda", generator=generator).bfloat16()
        for n, heads in ((1, h), (room, h_k), (room, h_k))
    )
    for x in (k, v):
        x[torch.arange(room, device="cuda") >= used[:, None]] = torch.nan
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=used, return_softmax_lse=True)
    for i, n in enumerate(used.tolist()):
        one = slice(i, i + 1)
        testing.check_forward(out[one], lse[one], q[one], k[one, :n], v[one, :n])


@pytest.mark.parametrize("garbage", [LARGE, SMALL, -1, 0])
@pytest.mark.parametrize("page_size", [0, 1, 64])
def test_no_number_reaches_beyond_the_tensors(
    kernel_class: str, page_size: int, garbage: int
) -> None:
    """Results are undefined then, but the device goes on and memory around tensors is unchanged."""
    block = torch.full((2, 12, page_size or 64, 2, 128), 7.0, device="cuda", dtype=torch.bfloat16)
    k_cache, v_cache = (x[4:8] for x in block)
    q = torch.full((3, 2, 4, 128), 7.0, device="cuda", dtype=torch.bfloat16)
    new = q[:, :, :2]
    wrong = torch.full((3,), garbage, dtype=torch.int32, device="cuda")
    good = torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda")
    for lengths, places in ((wrong, good), (good, wrong), (wrong, wrong)):
        where = {"cache_batch_idx": places, "cache_leftpad": places}
        if page_size:
            where = {"block_table": places[:, None].expand(3, 5).contiguous()}
        for num_splits in (0, 3):
            flash_attn_with_kvcache(
                q, k_cache, v_cache, new, new, cache_seqlens=lengths, causal=True,
                num_splits=num_splits, **where,
            )  # fmt: skip
    torch.cuda.synchronize()
    assert (block == 7).all()


@pytest.mark.parametrize("page_size", [1, 64])
def test_keys_in_a_cache_without_pages_are_zeros(kernel_class: str, page_size: int) -> None:
    """An empty tensor has no address."""
    q = torch.randn(2, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    cache = q.new_empty(0, page_size, 2, 128)
    used = torch.tensor([100, 5], dtype=torch.int32, device="cuda")
    table = torch.full((2, 100), 7, dtype=torch.int32, device="cuda")
    out = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=used, block_table=table)
    torch.cuda.synchronize()
    assert (out == 0).all()


def test_one_graph_serves_growing_sequences(kernel_class: str) -> None:
    """A graph reads lengths and tables when it runs, and its next run sees what it has appended."""
    lengths = (100, 64, 3)
    (k, v), table = pages_of((400, 400, 400), 64)
    again = [x.clone() for x in (k, v)]
    q = torch.randn(3, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    new = torch.randn(2, 3, 1, 2, 128, device="cuda", dtype=torch.bfloat16)
    used = torch.tensor(lengths, device="cuda").int()

    def step(k, v, used):
        return flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=used, block_table=table)

    step(k, v, used)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(k, v, used)
        used += 1
    used.copy_(torch.tensor(lengths))
    for x, y in zip((k, v), again, strict=True):
        x.copy_(y)
    for n in range(80):
        graph.replay()
        expected = step(*again, torch.tensor(lengths, device="cuda").int() + n)
        assert torch.equal(out, expected), n
    assert all(torch.equal(x, y) for x, y in zip((k, v), again, strict=True))


@pytest.mark.parametrize("b", [3, 300])
@pytest.mark.parametrize("num_splits", [0, 2])
def test_one_plan_and_one_graph_serve_layers_and_growing_sequences(
    kernel_class: str, b: int, num_splits: int
) -> None:
    layers = [pages_of((200,) * b, 16)[0] for _ in range(2)]
    for x in layers[1]:
        x.normal_()
    _, table = pages_of((200,) * b, 16)
    q = torch.randn(b, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    used = torch.arange(b, device="cuda").int() % 190
    options = {"cache_seqlens": used, "block_table": table, "num_splits": num_splits}
    plan = KVCachePlan(**options)

    def step():
        plan.renew()
        return [plan(q, *cache) for cache in layers]

    step()
    assert plan._number
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
        used += 1
    used.copy_(torch.arange(b) % 190)
    for n in range(10):
        expected = [flash_attn_with_kvcache(q, *cache, **options) for cache in layers]
        graph.replay()
        assert all(map(torch.equal, outs, expected)), n
    q = q[:, :, :4]
    with pytest.raises(ValueError, match="expected q as in the plan's first call"):
        plan(q, *layers[0])


@pytest.mark.parametrize("sinks", [None, torch.float32, torch.bfloat16])
def test_every_graph_of_a_plan_lays_out_its_tiles(kernel_class: str, sinks) -> None:
    """The first graph never runs. Calls between replays have the lengths that the replays leave."""
    cache, table = pages_of((200,) * 300, 16)
    q = torch.randn(300, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    used = torch.arange(300, device="cuda").int() % 190
    options = {"cache_seqlens": used, "block_table": table}
    if sinks is not None:
        options["sinks"] = torch.randn(8, device="cuda").to(sinks)
    flash_attn_with_kvcache(q, *cache, **options)
    torch.cuda.synchronize()
    plan = KVCachePlan(**options)
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = plan(q, *cache)
            used += 1
    for n in range(3):
        expected = flash_attn_with_kvcache(q, *cache, **options)
        graph.replay()
        assert torch.equal(out, expected), n
        if sinks is torch.bfloat16:  # the plan is of a call outside of captures: it has to be told
            plan.renew()
        assert torch.equal(plan(q, *cache), flash_attn_with_kvcache(q, *cache, **options)), n
    assert plan._number


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("n_new", [1, 3])
@pytest.mark.parametrize("num_splits", [0, 2])
def test_a_plan_appends_to_the_caches_of_layers(
    kernel_class: str, n_new: int, rotates: bool, num_splits: int
) -> None:
    """Steps of two layers, eager and as one graph, give what calls without a plan give."""
    layers = [pages_of((400,) * 3, 16)[0] for _ in range(2)]
    for x in layers[1]:
        x.normal_()
    again = [[x.clone() for x in cache] for cache in layers]
    _, table = pages_of((400,) * 3, 16)
    q = torch.randn(2, 3, n_new, 8, 128, device="cuda", dtype=torch.bfloat16)
    new = torch.randn(2, 2, 3, n_new, 2, 128, device="cuda", dtype=torch.bfloat16)
    used = torch.tensor([0, 17, 300], device="cuda").int()
    options = {"cache_seqlens": used, "block_table": table, "num_splits": num_splits}
    options["causal"] = True
    if rotates:
        angles = torch.rand(400, 32, device="cuda")
        options |= {"rotary_cos": angles.cos().to(q.dtype), "rotary_sin": angles.sin().to(q.dtype)}
        options["rotary_interleaved"] = False
    plan = KVCachePlan(**options)

    def step():
        plan.renew()
        return [plan(x, *cache, *y) for x, cache, y in zip(q, layers, new, strict=True)]

    def check(outs, n):
        zipped = zip(outs, q, again, new, strict=True)
        for out, x, cache, y in zipped:
            assert torch.equal(out, flash_attn_with_kvcache(x, *cache, *y, **options)), n
        for cache, expected in zip(layers, again, strict=True):
            assert all(map(torch.equal, cache, expected)), n

    for n in range(3):
        check(step(), n)
        used += n_new
    assert plan._number
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    for n in range(10):
        new.normal_()
        graph.replay()
        check(outs, n)
        used += n_new
    with pytest.raises(ValueError, match="expected k as in the plan's first call"):
        plan(q[0], *layers[0])


def test_compiled_calls_write_to_the_cache(kernel_class: str) -> None:
    (k, v), table = pages_of((200, 200), 16)
    again = [x.clone() for x in (k, v)]
    q = torch.randn(2, 1, 4, 128, device="cuda", dtype=torch.bfloat16)
    new = torch.randn(2, 2, 1, 2, 128, device="cuda", dtype=torch.bfloat16)
    used = torch.tensor([5, 90], device="cuda").int()

    def step(k, v):
        return flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=used, block_table=table) + 1

    assert torch.equal(torch.compile(step, fullgraph=True)(k, v), step(*again))
    assert all(torch.equal(x, y) for x, y in zip((k, v), again, strict=True))


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("n_new", [0, 2])
def test_an_int_is_the_length_of_all(kernel_class: str, page_size: int, n_new: int) -> None:
    """No tensor holds the length then: it is given as the bound of the keys."""
    (k, v), table = pages_of((400, 400, 400), page_size or 400)
    where = {"block_table": table} if page_size else {}
    q = torch.randn(3, 2, 8, 128, device="cuda", dtype=torch.bfloat16)
    options = {"causal": True, **where}
    if n_new:
        new = torch.randn(2, 3, n_new, 2, 128, device="cuda", dtype=torch.bfloat16)
        angles = torch.rand(400, 64, device="cuda")
        options |= {"k": new[0], "v": new[1]}
        options |= {"rotary_cos": angles.cos().to(k.dtype), "rotary_sin": angles.sin().to(k.dtype)}
    for n in (0, 1, 64, 397):
        caches = [[x.clone() for x in (k, v)] for _ in range(2)]
        lengths = torch.full((3,), n, device="cuda").int()
        for num_splits in (0, 3):
            options["num_splits"] = num_splits
            expected, found = (
                flash_attn_with_kvcache(
                    q, *cache, cache_seqlens=x, return_softmax_lse=True, **options
                )
                for cache, x in zip(caches, (lengths, n), strict=True)
            )
            assert all(map(torch.equal, found, expected)), (n, num_splits)
            assert all(map(torch.equal, *caches)), (n, num_splits)
            alone = flash_attn_with_kvcache(q, *caches[1], cache_seqlens=n, **options)
            assert torch.equal(alone, found[0])


ODD = [case for case in CASES if {"meta", "fake_cuda"} & set(case.on)]


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_odd_input_to_an_eager_call(case: OddCase) -> None:
    """The binding refuses it, and Python words the error."""
    flash_attn_with_kvcache(**arguments(CACHE, "cuda"))  # a good call loads the binding
    case = case._replace(pattern=case.pattern.replace("on meta", "on cuda:0"))
    failure = case.failure("cuda")
    assert failure is None, failure
