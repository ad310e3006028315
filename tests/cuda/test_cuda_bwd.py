"""Gradients on a GPU against float64: seeded cases, exact properties, extremes, repeats."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import random
from collections.abc import Iterable

import conditions
import pytest
import torch
from asked import Asked, Gpu
from layouts import STYLES, nan_surrounded

from flashcute import autograd, flash_attn_func, heuristics, jit, oracles, testing
from flashcute.config import (
    DTYPES,
    HEAD_DIMS,
    MASKS,
    ROW_STATS_MULTIPLE,
    BwdConfig,
)
from flashcute.jit import abi
from flashcute.reference import attention_ref, visible_keys

pytestmark = pytest.mark.usefixtures("backward_kernels")

CHUNKS = 10
CASES_PER_CHUNK = 100

SEQLENS = (1, 2, 7, 16, 33, 63, 64, 65, 127, 128, 129, 200, 257, 384, 500, 777)
SIDES = (-1, -1, -1, 0, 1, 31, 64, 100, 127, 300, 5000)
HEADS = ((1, 1), (4, 4), (4, 2), (6, 2), (10, 2), (8, 1))
# Every instantiated head dimension and below it; 20 and 100 are padded.
D = (8, 20, 32, 40, 64, 72, 96, 100, 128, 136, 192, 200, 256)
# Equal rows of K or V make gradients that are 0 but for rounding errors; the baseline has fewer of
# these, as it does not round the output in between.
KEY_STYLES = tuple(style for style in STYLES if style != "expanded_rows")
DTYPE_OF = {"fp16": torch.float16, "bf16": torch.bfloat16}
ROUNDINGS = 16


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
    dlse: bool
    styles: tuple[str, str, str, str]  # of q, k, v and dout
    factor: float  # on q: larger scores


def enough_heads(
    h: int, h_k: int, lengths: Iterable[tuple[int, int]], alike: bool = False
) -> tuple[int, int]:
    """Returns h and h_k, or a multiple of both, so that dQ and dK have errors of many roundings.

    Between n queries and m keys at least min(n, m) pairs see each other, and as many roundings of
    dS are independent. With scores alike (scores.Scores.alike), whose dS is mostly 0, one rounding
    for 256 pairs is. FlashAttention's formula in float64, with O, P, dS and the results rounded,
    exceeds the tolerance in some draws of few roundings:

    - One query, one key and a sink exceed the rule of the mean in 8 of 300 draws with one head and
      in 3 with three, and come to at most 0.76 of it with eight.
    - Two queries, three keys and scores times 8 exceed the rule of the largest error in 41 of 800
      draws with eight heads, in 4 of 300 with 16 and in none of 300 with 64; two queries and 129
      keys do so in 68 of 3,000 draws with one head and in none of 800 with eight.
    - One query, one key, a softcap of 0.01 and a gradient of the log-sum-exp exceed the rule of the
      mean in 75 of 3,000 draws with 16 heads, by a factor of up to 15. With scores times 8 they
      exceed that of the largest error in 1 of 300 draws with 1,024 heads; with 4,096 heads they
      exceed neither in 300.
    """
    pairs = list(lengths)
    roundings = h_k * sum(map(min, pairs))
    if alike:
        roundings = min(roundings, h_k * sum(map(math.prod, pairs)) / 256)
    times = math.ceil(ROUNDINGS / roundings) if roundings else 1
    return times * h, times * h_k


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    h, h_k = rng.choice(HEADS)
    case = Case(
        seed=seed,
        dtype=(torch.float16, torch.bfloat16)[seed % 2],
        b=rng.choice((1, 1, 2, 3)),
        seqlen_q=rng.choice((0, *SEQLENS)),
        seqlen_k=rng.choice((0, *SEQLENS)),
        h=h,
        h_k=h_k,
        d=rng.choice(D),
        causal=rng.random() < 0.4,
        window_size=(rng.choice(SIDES), rng.choice(SIDES)),
        sinks=rng.random() < 0.5,
        dlse=rng.random() < 0.5,
        styles=(
            rng.choice(list(STYLES)),
            rng.choice(KEY_STYLES),
            rng.choice(KEY_STYLES),
            rng.choice(list(STYLES)),
        ),
        factor=rng.choice((1.0, 1.0, 1.0, 4.0)),
    )
    h, h_k = enough_heads(h, h_k, [(case.seqlen_q, case.seqlen_k)] * case.b)
    return dataclasses.replace(case, h=h, h_k=h_k)


def make_tensors(case: Case) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """Returns q, k, v and sinks, which require gradients; dout; the gradient of the log-sum-exp."""
    rng = random.Random(case.seed)
    generator = torch.Generator("cuda").manual_seed(case.seed)
    q_shape = (case.b, case.seqlen_q, case.h, case.d)
    k_shape = (case.b, case.seqlen_k, case.h_k, case.d)
    q, k, v, dout = (
        nan_surrounded(shape, style, case.dtype, generator, rng)
        for shape, style in zip((q_shape, k_shape, k_shape, q_shape), case.styles, strict=True)
    )
    if "expanded" not in case.styles[0]:
        q.mul_(case.factor)  # in place, so that q stays between its NaN margins
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    if case.sinks:
        sinks = 3 * torch.randn(case.h, device="cuda", generator=generator)
        inputs.append(sinks.requires_grad_())
    shape = (case.b, case.h, case.seqlen_q)
    dlse = torch.randn(shape, device="cuda", generator=generator) if case.dlse else None
    return inputs, dout, dlse


def gradients(inputs, dout, dlse, **options) -> dict[str, torch.Tensor]:
    q, k, v, *sinks = inputs
    options["sinks"] = sinks[0] if sinks else None
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    outputs, given = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    found = torch.autograd.grad(outputs, inputs, given)
    return dict(zip(("dq", "dk", "dv", "dsinks"), found, strict=False))


def kernels_of(case: Case, gpu: Gpu) -> set:
    """Returns the kernels that the case uses."""
    sizes = case.b, case.seqlen_q, case.seqlen_k, case.h, case.h_k, case.d
    asked = Asked(case.dtype, *sizes, case.causal, case.window_size)
    return asked.forward(gpu) | asked.backward(gpu)


def check(case: Case) -> str | None:
    """Returns what is wrong with this case, or None."""
    inputs, dout, dlse = make_tensors(case)
    options = {"causal": case.causal, "window_size": case.window_size}
    found = gradients(inputs, dout, dlse, **options)
    q, k, v, *sinks = (x.detach() for x in inputs)
    for x, grad in zip(inputs, found.values(), strict=True):
        if (grad.shape, grad.dtype) != (x.shape, x.dtype):
            return f"{case}: a gradient of {tuple(x.shape)} {x.dtype} is {tuple(grad.shape)}"
    options["sinks"] = sinks[0] if sinks else None
    try:
        testing.check_backward(found, q, k, v, dout, dlse=dlse, **options)
    except AssertionError as error:
        return f"{case}: {error}"
    again = gradients(inputs, dout, dlse, causal=case.causal, window_size=case.window_size)
    most = _config_of(case.d).repeatable_keys
    repeat = [name for name in found if name != "dq" or case.seqlen_k <= most]
    differing = [name for name in repeat if not torch.equal(found[name], again[name])]
    return f"{case}: {differing} differ when repeated" if differing else None


def _config_of(d: int) -> BwdConfig:
    """Returns the backward of calls that do not ask for deterministic gradients."""
    head_dim = heuristics.instantiated_head_dim(d)
    capability = torch.cuda.get_device_capability()
    return heuristics.bwd_configs_in_use("bf16", head_dim, False, capability)[0]


def test_sampling_covers_the_options() -> None:
    cases = [make_case(seed) for seed in range(CHUNKS * CASES_PER_CHUNK)]
    for field, values in (("h", {h for h, _ in HEADS}), ("d", D), ("seqlen_q", (0, 1, 129))):
        seen = [getattr(case, field) for case in cases]
        assert min(seen.count(value) for value in values) >= 30, field
    windows = [case for case in cases if case.window_size != (-1, -1)]
    assert len(windows) >= 500 and sum(case.sinks and case.dlse for case in windows) >= 100
    assert sum(case.causal and case.seqlen_q > case.seqlen_k for case in cases) >= 100


def test_poisoned_outputs_ask_for_no_other_kernel(poisoned_outputs) -> None:
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16)
    assert torch.empty_like(q).isnan().all()
    assert autograd._wanted(True, True, True, False) == 7


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_gradients(chunk: int, kernel_class: str, poisoned_outputs, count_cases) -> None:
    seeds = range(chunk * CASES_PER_CHUNK, (chunk + 1) * CASES_PER_CHUNK)
    failures = [failure for seed in seeds if (failure := check(make_case(seed)))]
    count_cases(f"gradients of class {kernel_class}", CASES_PER_CHUNK)
    assert not failures, f"{len(failures)} of {CASES_PER_CHUNK}:\n" + "\n".join(failures)


def _problem(
    sizes: tuple[int, ...], dtype: torch.dtype, factor: float = 1.0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns q, k and v, which require gradients, and dout; the sizes are those of
    ``oracles.Shape``."""
    shape = oracles.Shape(*sizes)
    q, k, v = oracles.make_qkv(shape, dtype, "cuda")
    dout = oracles.make_qkv(shape, dtype, "cuda", seed=1)[0]
    return [(factor * q).requires_grad_(), k.requires_grad_(), v.requires_grad_()], dout


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tiles(dtype: str, head_dim: int, causal: bool, kernel_class, poisoned_outputs):
    """Gradients of more CTAs than the GPU holds at once are right, with heads in groups;
    deterministic ones have the same bits ten times."""
    inputs, dout = _problem((4, 1100, 1030, 16, 4, head_dim), DTYPE_OF[dtype])
    found = gradients(inputs, dout, None, causal=causal)
    some = [x.detach()[:1] for x in inputs]
    first = {name: x[:1] for name, x in found.items()}
    testing.check_backward(first, *some, dout[:1], causal=causal)
    for _ in range(5):
        again = gradients(inputs, dout, None, causal=causal)
        assert all(torch.equal(found[name], again[name]) for name in ("dk", "dv"))
    found = gradients(inputs, dout, None, causal=causal, deterministic=True)
    for _ in range(10):
        again = gradients(inputs, dout, None, causal=causal, deterministic=True)
        assert all(torch.equal(x, again[name]) for name, x in found.items())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(dtype: str, head_dim: int, kernel_class, poisoned_outputs) -> None:
    """Scores are some hundreds, so that P is 0 or 1 nearly everywhere."""
    inputs, dout = _problem((1, 200, 300, 4, 2, head_dim), DTYPE_OF[dtype], factor=16)
    for causal in (False, True):
        found = gradients(inputs, dout, None, causal=causal)
        testing.check_backward(found, *(x.detach() for x in inputs), dout, causal=causal)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_behind_the_last_one_do_not_count(
    dtype: str, head_dim: int, kernel_class, poisoned_outputs
) -> None:
    """All scores are far below 0, so that exp(0 - LSE), for a row of zeros behind the last key, is
    infinite."""
    (q, k, v), dout = _problem((1, 129, 150, 2, 1, head_dim), DTYPE_OF[dtype])
    inputs = [x.detach().requires_grad_() for x in (q / 8 + 5, k / 8 - 5, v)]
    for causal in (False, True):
        found = gradients(inputs, dout, None, causal=causal)
        testing.check_backward(found, *(x.detach() for x in inputs), dout, causal=causal)


@pytest.mark.parametrize("scale", [1e-3, 1e-1, 3.0])
def test_scale(scale: float, kernel_class, poisoned_outputs) -> None:
    inputs, dout = _problem((2, 130, 200, 4, 2, 64), torch.bfloat16)
    found = gradients(inputs, dout, None, softmax_scale=scale)
    testing.check_backward(found, *(x.detach() for x in inputs), dout, softmax_scale=scale)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_and_keys_without_partners_have_zero_gradients(
    head_dim: int, kernel_class, poisoned_outputs
) -> None:
    """The gradients are exactly 0, whatever the gradient of the log-sum-exp is, NaN included."""
    inputs, dout = _problem((2, 300, 170, 4, 2, head_dim), torch.float16)
    dlse = torch.randn(2, 4, 300, device="cuda")
    dlse[:, :, : 300 - 170] = math.nan
    found = gradients(inputs, dout, dlse, causal=True)
    assert not found["dq"][:, : 300 - 170].any()
    assert all(x.isfinite().all() for x in found.values())
    inputs, dout = _problem((2, 60, 300, 4, 2, head_dim), torch.float16)
    window = (40, 0)
    found = gradients(inputs, dout, None, window_size=window)
    unseen = ~visible_keys(60, 300, window_size=window, device="cuda").any(0)
    assert unseen.sum() == 300 - 60 - 40
    for name in ("dk", "dv"):
        assert not found[name][:, unseen].any() and found[name][:, ~unseen].any(-1).all()


@pytest.mark.parametrize("head_parts", [1, 2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_nothing_else_is_written(head_dim: int, mask: str, head_parts: int) -> None:
    for config in conditions.sm80_backwards("bf16", head_dim, mask):
        check_that_nothing_else_is_written(config, head_parts=head_parts)


def check_that_nothing_else_is_written(
    config: BwdConfig,
    shape: tuple[int, int, int, int, int] = (2, 133, 150, 4, 2),
    head_parts: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the kernels themselves on gradients and a workspace surrounded by NaN.

    shape: b, seqlen_q, seqlen_k, h, h_k. head_parts: parts of the query heads of a key head.
    Returns the sums of dQ, flat; the semaphores, (b, h, words); and the sums of dK and dV that CTAs
    leave to others, flat.
    """
    target = "".join(map(str, torch.cuda.get_device_capability()))
    kernel = abi.FlashKernel.from_address(jit.get_kernel(config, target).address)
    (b, seqlen_q, seqlen_k, h, h_k), d = shape, config.head_dim - 8
    inputs, dout = _problem((b, seqlen_q, seqlen_k, h, h_k, d), DTYPE_OF[config.dtype])
    q, k, v = (x.detach() for x in inputs)
    masks = {"none": {}, "causal": {"causal": True}, "local": {"window_size": (40, 10)}}
    options, sinks = masks[config.mask], torch.randn(h, device="cuda")
    out, lse, _ = attention_ref(q, k, v, sinks=sinks, upcast=torch.float64, **options)
    out, lse = out.to(q.dtype), lse.float()
    given = {
        name: oracles.embed_in_nan(torch.zeros_like(x))
        for name, x in zip("qkv", (q, k, v), strict=True)
    }
    written = {f"d{name}": x for name, x in given.items()}
    rounded = -(-seqlen_q // ROW_STATS_MULTIPLE) * ROW_STATS_MULTIPLE
    margin = torch.full((3, b * h * rounded * 2), math.nan, device="cuda")
    small = torch.full((3, 4 * h), math.nan, device="cuda")
    tensors = {"q": q, "k": k, "v": v, "o": out, "do": dout, "softmax_lse": lse, "sinks": sinks}
    tensors |= {name: x.view for name, x in written.items()}
    tensors |= {"row_stats": margin[1].view(b, h, rounded, 2), "dsinks": small[1, :h]}
    sums = torch.full((3, b * h * rounded * config.dq_accum), math.nan, device="cuda")
    words = abi.semaphores(b * h, rounded)
    semaphores = torch.full((3, words), 7, device="cuda", dtype=torch.int32)
    if config.dq_accum:
        tensors["dq_accum"] = sums[1].view(b, h, rounded, config.dq_accum)
        tensors["dq_semaphore"] = semaphores[1]
    params = abi.bwd_params(tensors, d**-0.5, options.get("window_size", (0, 0)))
    params.head_parts = head_parts
    launch = ctypes.cast(ctypes.byref(params), ctypes.POINTER(abi.FlashFwdParams))
    partial = torch.full((3, kernel.dkv_partial(launch) if kernel.dkv_partial else 0), math.nan)
    partial = partial.cuda()
    if partial.numel():
        params.dkv_partial_ptr = partial[1].data_ptr()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert kernel.launch(launch, stream) == 0
    torch.cuda.synchronize()
    assert all(x.untouched() for x in written.values()) and partial[::2].isnan().all()
    assert sums[::2].isnan().all() and (semaphores[::2] == 7).all()
    assert margin[::2].isnan().all() and small[::2].isnan().all() and small[1, h:].isnan().all()
    found = {name: x.view for name, x in written.items()} | {"dsinks": small[1, :h]}
    testing.check_backward(found, q, k, v, dout, sinks=sinks, **options)
    assert head_parts == 1 or not partial[1].isnan().any()
    return sums[1], semaphores[1, :-1].view(b, h, -1), partial[1]


@pytest.mark.parametrize("which", range(1, 16))
def test_each_gradient_is_the_same_alone(which: int, kernel_class, poisoned_outputs) -> None:
    inputs, dout = _problem((2, 130, 200, 4, 2, 64), torch.bfloat16)
    inputs.append(torch.randn(4, device="cuda").requires_grad_())
    dlse = torch.randn(2, 4, 130, device="cuda")

    def compute(which: int) -> dict[int, torch.Tensor]:
        some = [x.detach().requires_grad_(bool(which >> i & 1)) for i, x in enumerate(inputs)]
        q, k, v, sinks = some
        options = {"causal": True, "deterministic": True, "return_attn_probs": True}
        out, lse, _ = flash_attn_func(q, k, v, sinks=sinks, **options)
        wanted = {i: x for i, x in enumerate(some) if x.requires_grad}
        found = torch.autograd.grad([out, lse], [*wanted.values()], [dout, dlse])
        return dict(zip(wanted, found, strict=True))

    # In the sm80 class the gradients of one side alone are computed by other kernels.
    most = 15
    if kernel_class == "80" and not (which & 1 and which & 6):
        most = 9 if which & 1 else 14
    expected, found = compute(most), compute(which)
    assert all(torch.equal(x, expected[i]) for i, x in found.items())


def test_linear_in_the_gradient_of_the_output(kernel_class) -> None:
    """Twice dO and dLSE give exactly twice every gradient, in bf16, whose range no value leaves."""
    inputs, dout = _problem((2, 130, 200, 4, 2, 128), torch.bfloat16)
    inputs.append(torch.randn(4, device="cuda").requires_grad_())
    dlse = torch.randn(2, 4, 130, device="cuda")
    once = gradients(inputs, dout, dlse)
    twice = gradients(inputs, 2 * dout, 2 * dlse)
    assert all(torch.equal(2 * x, twice[name]) for name, x in once.items())


def test_a_window_wider_than_the_keys_and_a_sink_of_minus_infinity_equal_none(kernel_class) -> None:
    inputs, dout = _problem((2, 90, 50, 4, 2, 128), torch.bfloat16)
    plain = gradients(inputs, dout, None, causal=True)
    none = [*inputs, torch.full((4,), -math.inf, device="cuda").requires_grad_()]
    for found in (
        gradients(inputs, dout, None, window_size=(1000, 0)),
        gradients(none, dout, None, causal=True),
    ):
        assert all(torch.equal(x, found[name]) for name, x in plain.items())
        assert not found.get("dsinks", torch.zeros(1)).any()
