"""Gradients on a GPU of ragged batches, and of dense ones with softcap, ALiBi and dropout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import scores
import test_cuda_varlen as ragged
import torch
from asked import Gpu
from building import build, of_both_classes
from conditions import sm80_backwards
from test_cuda_bwd import enough_heads
from test_cuda_varlen import (
    Case,
    _built_kernels_of_both_classes,  # noqa: F401 - of the forward, used here, too
    asked_of,
    bounds_of,
    make_qkv,
    rows_in_use,
    starts,
)

import flashcute
from flashcute import flash_attn_func, flash_attn_varlen_func, heuristics, testing
from flashcute.config import (
    DTYPES,
    HEAD_DIMS,
    MASKS,
)
from flashcute.testing_varlen import check_backward_varlen

CHUNKS = 20
CASES_PER_CHUNK = 50
NAMES = ("dq", "dk", "dv", "dsinks")
BUT_DQ = NAMES[1:]
DTYPE_OF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def configs() -> list:
    """Returns the sm80 class's kernels for ragged batches, and for dense ones with options."""
    found = []
    for dtype in DTYPES:
        asked = [(head_dim, (False,) * 3) for head_dim in HEAD_DIMS]
        asked += [
            (head_dim, options)
            for options in scores.ASKED[DTYPE_OF[dtype]][1:]
            for head_dim in scores.HEAD_DIMS[DTYPE_OF[dtype]]
        ]
        for head_dim, options in asked:
            plain = [c for mask in MASKS for c in sm80_backwards(dtype, head_dim, mask)]
            found += [heuristics.bwd_with_options(c, *options, varlen=True) for c in plain]
            found += [heuristics.bwd_with_options(c, *options) for c in plain if any(options)]
    return found


@pytest.fixture(scope="module", autouse=True)
def _built_backwards() -> None:
    cases = map(make_case, range(CHUNKS * CASES_PER_CHUNK))
    build([*configs(), *of_both_classes(kernels_of, cases)])


def make_case(seed: int) -> Case:
    """Returns a case of the forward, with small slopes: with large ones a row sees only one key,
    and its gradients are 0 but for the rounding errors of fp32. The rule of the largest error must
    hold for each sequence, so there are heads enough for the shortest."""
    case = ragged.make_case(seed)
    used = zip(case.used_q or case.lengths_q, case.used_k or case.lengths_k, strict=True)
    pairs = sorted(filter(all, used), key=min)
    h, h_k = enough_heads(case.h, case.h_k, pairs[:1])
    if case.scores.alike:  # for the rule of the mean, which holds for all sequences together
        h, h_k = enough_heads(h, h_k, pairs, alike=True)
    scores_of = dataclasses.replace(case.scores, slopes=min(case.scores.slopes, 0.5))
    return dataclasses.replace(case, h=h, h_k=h_k, scores=scores_of)


def make_leaves(case: Case) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """Returns q, k, v and sinks, which require gradients, dout, and dlse; rows of no sequence are
    NaN."""
    q, k, v = make_qkv(case)
    generator = torch.Generator("cuda").manual_seed(case.seed + 1)
    unused = torch.ones(q.shape[0], dtype=torch.bool, device="cuda")
    for rows in rows_in_use(case.lengths_q, case.used_q):
        unused[rows] = False
    dout = torch.randn(q.shape, device="cuda", generator=generator).to(case.dtype)
    dout[unused] = torch.nan
    dlse = torch.randn(case.h, q.shape[0], device="cuda", generator=generator)
    dlse[:, unused] = torch.nan
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if case.sinks:
        sinks = 3 * torch.randn(case.h, device="cuda", generator=generator)
        leaves.append(sinks.requires_grad_())
    return leaves, dout, dlse if case.seed % 3 else None


def lengths_of(case: Case) -> tuple[torch.Tensor | None, ...]:
    used = (
        None if x is None else torch.tensor(x, dtype=torch.int32, device="cuda")
        for x in (case.used_q, case.used_k)
    )
    return starts(case.lengths_q, case.index), starts(case.lengths_k, case.index), *used


def gradients(case: Case, leaves, dout, dlse, options) -> dict[str, torch.Tensor]:
    q, k, v, *sinks = leaves
    cu_q, cu_k, used_q, used_k = lengths_of(case)
    bounds = bounds_of(case)
    torch.manual_seed(case.seed)
    out, lse, _ = flash_attn_varlen_func(
        *(q, k, v, cu_q, cu_k, *bounds, case.scores.dropout_p),
        seqused_q=used_q,
        seqused_k=used_k,
        sinks=sinks[0] if sinks else None,
        return_attn_probs=True,
        **options,
    )
    outputs, given = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    return dict(zip(NAMES, torch.autograd.grad(outputs, leaves, given), strict=False))


def kernels_of(case: Case, gpu: Gpu) -> set:
    """Returns the kernels that the case uses."""
    asked = asked_of(case)
    return asked.forward(gpu) | asked.backward(gpu)


def check(
    case: Case, repeatable: Sequence[str] | None = None, compute: Callable = gradients
) -> str | None:
    """Returns what is wrong with this case, or None.

    repeatable: gradients that must repeat bitwise. By default dq is among them for odd seeds only.
    """
    if repeatable is None:
        repeatable = NAMES if case.seed % 2 else BUT_DQ
    leaves, dout, dlse = make_leaves(case)
    generator = torch.Generator("cuda").manual_seed(case.seed)
    b = len(case.lengths_q)
    options = {"causal": case.causal, "window_size": case.window_size}
    options |= case.scores.options(b, case.h, case.d, generator)
    options["deterministic"] = "dq" in repeatable
    found = compute(case, leaves, dout, dlse, options)
    for x, grad in zip(leaves, found.values(), strict=True):
        if (grad.shape, grad.dtype) != (x.shape, x.dtype):
            return f"{case}: a gradient of {tuple(x.shape)} {x.dtype} is {tuple(grad.shape)}"
    again = compute(case, leaves, dout, dlse, options)
    differing = [
        name for name in found.keys() & set(repeatable) if not found[name].equal(again[name])
    ]
    if differing:
        return f"{case}: {differing} differ when repeated"
    del options["deterministic"]
    if options["softcap"] > 1e4:  # caps nothing, but the 16-bit baseline cannot compute with it
        options["softcap"] = 0.0
    options |= case.scores.dropout(case.seed, b, case.h, *bounds_of(case))
    q, k, v, *sinks = (x.detach() for x in leaves)
    options["sinks"] = sinks[0] if sinks else None
    try:
        check_backward_varlen(found, q, k, v, dout, lengths_of(case), dlse=dlse, **options)
    except AssertionError as error:
        return f"{case}: {error}"
    if b == 0 and sinks and found["dsinks"].any():
        return f"{case}: sinks of no sequence have a gradient"
    return None


def test_sampling_covers_the_options() -> None:
    cases = [make_case(seed) for seed in range(CHUNKS * CASES_PER_CHUNK)]
    for seen in (
        sum(0 in case.lengths_q for case in cases),
        sum(case.used_k is not None for case in cases),
        sum(case.sinks and case.seed % 3 > 0 for case in cases),
        sum(case.scores.asked == (True, True, True) for case in cases),
        sum(case.scores.softcap > 0 and case.h > case.h_k for case in cases),
        sum(case.scores.slopes > 0 and case.scores.of_each for case in cases),
        sum(case.scores.dropout_p > 0 and case.causal for case in cases),
    ):
        assert seen >= 30


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_gradients(chunk: int, kernel_class: str, poisoned_outputs, count_cases) -> None:
    """Half of the cases ask for deterministic gradients."""
    seeds = range(chunk * CASES_PER_CHUNK, (chunk + 1) * CASES_PER_CHUNK)
    failures = [failure for seed in seeds if (failure := check(make_case(seed)))]
    count_cases("gradients of ragged batches", CASES_PER_CHUNK)
    assert not failures, f"{len(failures)} of {CASES_PER_CHUNK}:\n" + "\n".join(failures)


# Softcap, ALiBi and dropout of dense batches; each is one of scores.ASKED.
ASKED = [(dtype, asked) for dtype, several in scores.ASKED.items() for asked in several]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "asked"), ASKED, ids=str)
def test_equal_lengths_equal_a_dense_batch(dtype, asked, causal, kernel_class, poisoned_outputs):
    """They are equal bit for bit, and the gradients of the dense batch are right."""
    # The lengths are not short, so that both batches take the same kernels.
    b, seqlen_q, seqlen_k, h, h_k, d = 3, 290, 270, 4, 2, 64
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = (b, seqlen_q, h, d), (b, seqlen_k, h_k, d), (b, seqlen_k, h_k, d), (b, seqlen_q, h, d)
    q, k, v, dout = (
        torch.randn(size, device="cuda", generator=generator).to(dtype) for size in sizes
    )
    softcap, alibi, dropout = asked
    asked_of = scores.Scores(2.0 * softcap, 0.5 * alibi, True, 1.0, 0.25 * dropout)
    options = {"causal": causal, **asked_of.options(b, h, d, generator)}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(3)
    out = flash_attn_func(*leaves, asked_of.dropout_p, deterministic=True, **options)
    found = torch.autograd.grad(out, leaves, dout)
    torch.manual_seed(3)
    cu_q, cu_k = starts((seqlen_q,) * b), starts((seqlen_k,) * b)
    flat = flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in leaves),
        *(cu_q, cu_k, seqlen_q, seqlen_k, asked_of.dropout_p),
        deterministic=True,
        **options,
    )
    for ours, dense in zip(
        torch.autograd.grad(flat, leaves, dout.flatten(0, 1)), found, strict=True
    ):
        assert torch.equal(ours, dense)
    options |= asked_of.dropout(3, b, h, seqlen_q, seqlen_k)
    named = dict(zip(NAMES, found, strict=False))
    testing.check_backward(named, *(x.detach() for x in leaves), dout, **options)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_many_sequences_and_the_packed_forms(head_dim: int, kernel_class: str) -> None:
    """There are more sequences than the planner has threads, of many lengths; the packed functions
    give the same bits."""
    lengths = (*(i % 5 for i in range(1500)), 2000)
    total, cu = sum(lengths), starts(lengths)
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(total, 3, 2, head_dim, device="cuda", generator=generator).bfloat16()
    dout = torch.randn(total, 2, head_dim, device="cuda", generator=generator).bfloat16()
    qkv.requires_grad_()
    options = {"causal": True, "deterministic": True}
    out = flashcute.flash_attn_varlen_qkvpacked_func(qkv, cu, 2000, **options)
    (packed,) = torch.autograd.grad(out, qkv, dout)
    q, kv = (x.detach().requires_grad_() for x in (qkv[:, 0], qkv[:, 1:]))
    out = flashcute.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 2000, 2000, **options)
    dq, dkv = torch.autograd.grad(out, (q, kv), dout)
    assert torch.equal(packed[:, 0], dq) and torch.equal(packed[:, 1:], dkv)
    found = dict(zip(NAMES, packed[None, -2000:].unbind(2), strict=False))
    long = [x[None, -2000:].detach() for x in qkv.unbind(1)]
    testing.check_backward(found, *long, dout[None, -2000:], causal=True)


def test_nothing_waits_for_the_device(kernel_class: str) -> None:
    """A captured step replays with lengths that are written after its capture."""
    q = torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cu, other = starts((100, 50, 150)), starts((7, 200, 93))

    def step(lengths: torch.Tensor) -> torch.Tensor:
        options = {"causal": True, "deterministic": True}
        out = flash_attn_varlen_func(q, q, q, lengths, lengths, 300, 300, **options)
        return torch.autograd.grad(out.float().square().sum(), q)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = step(other)
        step(cu)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step(cu)
    cu.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


HOSTILE = [
    (0, 150, 30, 90),
    (-7, -3, 60, 90),
    (0, 150, 400, ragged.LARGE),
    (ragged.SMALL, 7, -5, 9),
]


@pytest.mark.parametrize("lengths", HOSTILE, ids=str)
def test_no_lengths_reach_beyond_the_tensors(kernel_class: str, lengths) -> None:
    """Results are undefined then, but the device goes on and memory around tensors is unchanged."""
    block = torch.full((3, 400, 4, 64), 7.0, device="cuda", dtype=torch.float16)
    q, k, v = (x[100:300].detach().requires_grad_() for x in block)
    cu = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    for other in (cu, cu.flip(0)):
        out = flash_attn_varlen_func(q, k, v, cu, other, 300, 300, causal=True)
        torch.autograd.grad(out.sum(), (q, k, v))
    torch.cuda.synchronize()
    assert (block == 7).all()
