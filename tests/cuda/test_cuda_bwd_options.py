"""Gradients on a GPU of dense batches: windows, sinks, softcap, ALiBi and dropout together."""

from __future__ import annotations

import dataclasses
import random

import pytest
import scores
import test_cuda_options as forward
import torch
from asked import Gpu
from building import build, of_both_classes
from layouts import STYLES, nan_surrounded
from test_cuda_bwd import KEY_STYLES, enough_heads

from flashcute import flash_attn_func, testing

CHUNKS = 6
CASES_PER_CHUNK = 50
NAMES = ("dq", "dk", "dv", "dsinks")
SEQLENS = (1, 2, 16, 33, 64, 65, 127, 128, 129, 200, 257, 500, 777)


@dataclasses.dataclass(frozen=True)
class Case(forward.Case):
    dlse: bool
    deterministic: bool
    style_of_dout: str


def make_case(seed: int) -> Case:
    """Returns a case of the forward with shorter sequences, fewer heads, and keys and rows of dout
    that differ. Slopes are small: with large ones a row sees only one key, and its gradients are 0
    but for the rounding errors of fp32."""
    rng, case = random.Random(f"gradients {seed}"), forward.make_case(seed)
    fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
    fields["seqlen_q"], fields["seqlen_k"] = rng.choice((0, *SEQLENS)), rng.choice((0, *SEQLENS))
    lengths = [(fields["seqlen_q"], fields["seqlen_k"])] * case.b
    h, h_k = (3, 3) if case.h == 71 else (case.h, case.h_k)
    fields["h"], fields["h_k"] = enough_heads(h, h_k, lengths, case.scores.alike)
    fields["styles"] = rng.choice(list(STYLES)), rng.choice(KEY_STYLES), rng.choice(KEY_STYLES)
    fields["scores"] = dataclasses.replace(case.scores, slopes=min(case.scores.slopes, 0.5))
    return Case(
        **fields,
        dlse=rng.random() < 0.5,
        deterministic=rng.random() < 0.3,
        style_of_dout=rng.choice(KEY_STYLES),
    )


def kernels_of(case: Case, gpu: Gpu) -> set:
    """Returns the kernels that the case uses."""
    asked = forward.asked_of(case)
    return asked.forward(gpu) | asked.backward(gpu)


def gradients(case: Case, leaves, dout, dlse, options) -> dict[str, torch.Tensor]:
    q, k, v, *sinks = leaves
    torch.manual_seed(case.seed)
    out, lse, _ = flash_attn_func(
        *(q, k, v, case.scores.dropout_p),
        sinks=sinks[0] if sinks else None,
        deterministic=case.deterministic,
        return_attn_probs=True,
        **options,
    )
    outputs, given = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    return dict(zip(NAMES, torch.autograd.grad(outputs, leaves, given), strict=False))


def check(case: Case) -> str | None:
    """Returns what is wrong with this case, or None."""
    rng = random.Random(case.seed)
    generator = torch.Generator("cuda").manual_seed(case.seed)
    q_shape = (case.b, case.seqlen_q, case.h, case.d)
    k_shape = (case.b, case.seqlen_k, case.h_k, case.d)
    q, k, v, dout = (
        nan_surrounded(shape, style, case.dtype, generator, rng)
        for shape, style in zip(
            (q_shape, k_shape, k_shape, q_shape), (*case.styles, case.style_of_dout), strict=True
        )
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if case.sinks:
        sinks = 3 * torch.randn(case.h, device="cuda", generator=generator)
        leaves.append(sinks.requires_grad_())
    shape = (case.b, case.h, case.seqlen_q)
    dlse = torch.randn(shape, device="cuda", generator=generator) if case.dlse else None
    options = {"causal": case.causal, "window_size": case.window_size}
    options |= case.scores.options(case.b, case.h, case.d, generator)
    found = gradients(case, leaves, dout, dlse, options)
    for x, grad in zip(leaves, found.values(), strict=True):
        if (grad.shape, grad.dtype) != (x.shape, x.dtype):
            return f"{case}: a gradient of {tuple(x.shape)} {x.dtype} is {tuple(grad.shape)}"
    if case.deterministic:
        again = gradients(case, leaves, dout, dlse, options)
        differing = [name for name in found if not found[name].equal(again[name])]
        if differing:
            return f"{case}: {differing} differ when repeated"
    if options["softcap"] > 1e4:  # caps nothing, but the 16-bit baseline cannot compute with it
        options["softcap"] = 0.0
    options |= case.scores.dropout(case.seed, case.b, case.h, case.seqlen_q, case.seqlen_k)
    q, k, v, *sinks = (x.detach() for x in leaves)
    options["sinks"] = sinks[0] if sinks else None
    try:
        testing.check_backward(found, q, k, v, dout, dlse=dlse, **options)
    except AssertionError as error:
        return f"{case}: {error}"
    return None


@pytest.fixture(scope="module", autouse=True)
def _built_kernels() -> None:
    build(of_both_classes(kernels_of, map(make_case, range(CHUNKS * CASES_PER_CHUNK))))


def test_sampling_covers_the_options() -> None:
    cases = [make_case(seed) for seed in range(CHUNKS * CASES_PER_CHUNK)]
    for asked in {asked for several in scores.ASKED.values() for asked in several}:
        assert sum(case.scores.asked == asked for case in cases) >= 30
    scored = [case for case in cases if case.scores.any]
    for seen in (
        sum(case.window_size != (-1, -1) for case in scored),
        sum(case.sinks and case.dlse for case in scored),
        sum(case.h > case.h_k for case in scored),
        sum(case.deterministic for case in scored),
        sum(case.causal and case.seqlen_q > case.seqlen_k for case in scored),
    ):
        assert seen >= 20


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_gradients(chunk: int, kernel_class: str, poisoned_outputs, count_cases) -> None:
    seeds = range(chunk * CASES_PER_CHUNK, (chunk + 1) * CASES_PER_CHUNK)
    failures = [failure for seed in seeds if (failure := check(make_case(seed)))]
    count_cases(f"gradients with options of class {kernel_class}", CASES_PER_CHUNK)
    assert not failures, f"{len(failures)} of {CASES_PER_CHUNK}:\n" + "\n".join(failures)
