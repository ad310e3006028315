"""The sm90 class's backward of every head dimension, dense and ragged, whether it is chosen or not.

These tests use no kernel of a forward, and build the backwards of only those head dimensions and
dtypes whose tests run. They are therefore the first to run on a GPU: ``tools/check_gpu.py`` runs
its phases ``bwd-build``, ``bwd-64``, ``bwd-96`` and so on each in a process of its own, as a kernel
that has never run may hang.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import math
import random

import pytest
import torch
from asked import Gpu
from building import build
from memory import needs_memory
from sanitize import computed_by
from scores import Scores
from test_cuda_bwd import check_that_nothing_else_is_written
from test_cuda_bwd_varlen import BUT_DQ, HOSTILE, NAMES, check, lengths_of, make_case
from test_cuda_varlen import Case, asked_of, bounds_of, starts

from flashcute import heuristics, jit, testing
from flashcute.config import DTYPES, HEAD_DIMS, MASKS, SEMAPHORE_ROWS, BwdConfig
from flashcute.jit import abi
from flashcute.reference import attention_ref
from flashcute.reference_varlen import attention_varlen_ref

CASES = 30  # of random lengths, for each kernel
REPEATS = 50
FAR = 2**32  # bytes
DTYPE_OF = {"fp16": torch.float16, "bf16": torch.bfloat16}
# The memory layouts that the operator takes.
STYLES = ("contiguous", "heads_outermost", "gaps", "gaps_permuted", "packed")
WINDOWS = ((31, 0), (0, 100), (64, 31), (128, 128), (5000, 3))

CONFIGS = [
    heuristics.sm90_bwd_config(dtype, head_dim, mask)
    for head_dim, dtype, mask in itertools.product(HEAD_DIMS, DTYPES, MASKS)
]
PLAIN = [config for config in CONFIGS if config.mask == "none"]
each = pytest.mark.parametrize("dense", CONFIGS, ids=lambda c: c.full_name)
NARROW = [config for config in CONFIGS if config.head_dim <= 128]
each_narrow = pytest.mark.parametrize("dense", NARROW, ids=lambda c: c.full_name)
each_plain = pytest.mark.parametrize("dense", PLAIN, ids=lambda c: c.full_name)


def ragged(config: BwdConfig) -> BwdConfig:
    return heuristics.bwd_with_options(config, varlen=True)


@pytest.fixture(scope="module", autouse=True)
def _built_kernels(request: pytest.FixtureRequest) -> None:
    """Builds in parallel the dense and ragged backwards, of all masks, that the collected tests of
    this file run, instead of all kernels that other files need."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")
    here = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params["dense"] for item in here}
    several = {dataclasses.replace(config, mask=mask) for config in asked for mask in MASKS}
    build(config for dense in several for config in (dense, ragged(dense)))


def tokens(config: BwdConfig, *shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = DTYPE_OF[config.dtype]
    return [torch.randn(x, device="cuda", dtype=dtype, generator=generator) for x in shapes]


def masked(config: BwdConfig) -> dict[str, object]:
    window = (100, 30) if config.mask == "local" else (-1, -1)
    return {"causal": config.mask == "causal", "window_size": window}


def backward(
    config: BwdConfig, tensors, dlse, options, lengths=(), deterministic: bool = False
) -> tuple[torch.Tensor, ...]:
    """Returns dq, dk, dv and dsinks of the kernel, computed by the operator.

    tensors: dout, q, k, v, out and lse. options: those of the reference. lengths: for a ragged
    batch cu_seqlens, seqused and max_seqlen, each of queries and of keys.
    """
    operators = torch.ops.flashcute
    operator = operators.bwd_varlen if config.varlen else operators.bwd
    sinks, scale = options.get("sinks"), tensors[1].shape[-1] ** -0.5
    wanted = (7 if sinks is None else 15) | deterministic << 4
    masks = options["causal"], *options["window_size"]
    return operator.default(*tensors, dlse, *lengths, scale, *masks, sinks, wanted)


def by_operator(config: BwdConfig, case: Case, leaves, dout, dlse, _options) -> dict:
    """Computes what :func:`test_cuda_bwd_varlen.gradients` does, by the operator and with the
    output of the reference."""
    q, k, v, *sinks = (x.detach() for x in leaves)
    options = {"causal": case.causal, "window_size": case.window_size}
    options["sinks"] = sinks[0] if sinks else None
    cu_q, cu_k, used_q, used_k = lengths_of(case)
    used = {"seqused_q": used_q, "seqused_k": used_k}
    out, lse, _ = attention_varlen_ref(q, k, v, cu_q, cu_k, **used, upcast=torch.float64, **options)
    lengths = cu_q.int(), cu_k.int(), used_q, used_k, *bounds_of(case)
    tensors = dout, q, k, v, out.to(q.dtype), lse.float()
    with computed_by(config):
        found = backward(config, tensors, dlse, options, lengths)
    return dict(zip(NAMES, found[: len(leaves)], strict=False))


@pytest.mark.parametrize("head_parts", [1, 2])
@each
def test_nothing_else_is_written(dense: BwdConfig, head_parts) -> None:
    check_that_nothing_else_is_written(dense, head_parts=head_parts)


@pytest.mark.parametrize("deterministic", [False, True])
@each
def test_query_heads_of_few_key_heads_are_divided(
    dense: BwdConfig, deterministic, poisoned_outputs
) -> None:
    """With fewer tiles than SMs and eight query heads of a key head, the gradients are right; dK
    and dV have the same bits in each repeat, dense and ragged."""
    n, m, h, h_k, d = 900, 500, 8, 1, dense.head_dim
    sizes = {"b": 2, "seqlen_q": n, "seqlen_k": m, "h": h, "h_k": h_k, "h_h_k_ratio": h // h_k}
    sizes |= {"d": d, "total_q": 2 * n, "total_k": 2 * m, "deterministic": deterministic}
    dout, q, k, v = tokens(dense, *[(2, n, h, d)] * 2, *[(2, m, h_k, d)] * 2)
    options = masked(dense)
    out, lse, _ = attention_ref(q, k, v, upcast=torch.float64, **options)
    tensors = dout, q, k, v, out.to(q.dtype)
    packed = *(x.flatten(0, 1) for x in tensors), lse.float().transpose(0, 1).flatten(1)
    lengths = starts([n] * 2), starts([m] * 2), None, None, n, m
    expected = None
    for config, given in ((dense, (*tensors, lse.float())), (ragged(dense), packed)):
        kernel = abi.FlashKernel.from_address(jit.get_kernel(config, "90").address)
        params = abi.FlashBwdParams(window_left=100, window_right=30, **sizes)
        launch = ctypes.cast(ctypes.byref(params), ctypes.POINTER(abi.FlashFwdParams))
        assert kernel.head_parts(launch) > 1
        asked = given, None, options, lengths if config.varlen else (), deterministic
        with computed_by(config):
            found = backward(config, *asked)[:3]
            if expected is None:
                expected = found
                named = dict(zip(NAMES, expected, strict=False))
                testing.check_backward(named, q, k, v, dout, **options)
            for _ in range(REPEATS):
                again = backward(config, *asked)[:3]
                for name, x, found in zip(NAMES, expected, again, strict=False):
                    y = found.view_as(x)
                    exact = name != "dq" or deterministic
                    assert x.equal(y) if exact else (x - y).abs().max() <= 2**-6 * x.abs().max()


@each
def test_equal_lengths_equal_a_dense_batch(dense: BwdConfig, poisoned_outputs) -> None:
    """They are equal bit for bit in each repeat, with more tiles than the GPU holds at once; dQ is
    where only two tiles of keys add to it. The gradients of the dense batch are right. All waves
    are full, so that no tiles are shared."""
    sms = torch.cuda.get_device_properties().multi_processor_count
    # Of two waves of tiles none stores dQ first.
    b, seqlen_q, h, h_k, d = sms // 2, 700, 2, 1, dense.head_dim
    options = masked(dense)
    for seqlen_k, exact in ((500, BUT_DQ[:2]), (dense.repeatable_keys, NAMES[:3])):
        of_q, of_k = (b, seqlen_q, h, d), (b, seqlen_k, h_k, d)
        dout, q, k, v = tokens(dense, of_q, of_q, of_k, of_k)
        dlse = torch.randn(b, h, seqlen_q, device="cuda")
        out, lse, _ = attention_ref(q, k, v, upcast=torch.float64, **options)
        tensors = dout, q, k, v, out.to(q.dtype)
        with computed_by(dense):
            found = backward(dense, (*tensors, lse.float()), dlse, options)
        expected = dict(zip(NAMES, found, strict=True))
        testing.check_backward(expected, q, k, v, dout, dlse=dlse, **options)
        lengths = starts([seqlen_q] * b), starts([seqlen_k] * b), None, None, seqlen_q, seqlen_k
        packed = [x.flatten(0, 1) for x in tensors]
        lse, dlse = (x.float().transpose(0, 1).flatten(1) for x in (lse, dlse))
        with computed_by(ragged(dense)):
            for _ in range(REPEATS):
                found = backward(ragged(dense), (*packed, lse), dlse, options, lengths)
                for name, x in zip(NAMES, found, strict=True):
                    assert name not in exact or x.equal(expected[name].flatten(0, 1)), name


@pytest.mark.parametrize("lengths", [(128, 256), (128, 130), (70, 100)], ids=str)
@each_narrow
def test_heads_owned_by_a_cta(dense: BwdConfig, lengths, poisoned_outputs) -> None:
    """With two heads for each SM, dQ has the same bits in each repeat, whatever number of tiles
    adds to it."""
    sms = torch.cuda.get_device_properties().multi_processor_count
    h_k = sms // 2
    ratio = 2 if lengths[0] < 128 else 1
    of_q, of_k = ((4, lengths[0], ratio * h_k), (4, lengths[1], h_k))
    shapes = [(*x, dense.head_dim) for x in (of_q, of_q, of_k, of_k)]
    dout, q, k, v = tokens(dense, *shapes)
    options = masked(dense)
    out, lse, _ = attention_ref(q, k, v, upcast=torch.float64, **options)
    tensors = dout, q, k, v, out.to(q.dtype), lse.float()
    with computed_by(dense):
        first = backward(dense, tensors, None, options)
        for _ in range(REPEATS):
            again = backward(dense, tensors, None, options)
            assert all(x.equal(y) for x, y in zip(first[:3], again, strict=False))
    found = dict(zip(NAMES[:3], first, strict=False))
    testing.check_backward(found, q, k, v, dout, **options)
    # CTAs do own heads: of the sums of dQ only the room of one head for each CTA is written.
    sums, *_ = check_that_nothing_else_is_written(dense, (4, *lengths, ratio * h_k, h_k))
    assert sums.view(4 * h_k, -1).isnan().all(1).tolist() == [False] * sms + [True] * sms


@pytest.mark.parametrize("lengths", [(300, 400), (130, 500), (700, 900)], ids=str)
@each
def test_first_tiles_store_dq(dense: BwdConfig, lengths, poisoned_outputs) -> None:
    """The other tiles add to what the first ones store. Heads are enough for four waves of tiles;
    their gradients equal those of each sequence alone, where all tiles add to zeros, except that
    the order of dQ's parts differs. With heads in groups dK and dV differ in this way, too, as a
    sequence alone divides a key head's query heads."""
    sms = torch.cuda.get_device_properties().multi_processor_count
    h_k, d = 3, dense.head_dim
    h = 3 if d > 64 and lengths[0] != 130 else 6  # small heads would be owned by CTAs
    b = -(-4 * sms // (h_k * -(-lengths[1] // 128)))
    b += b * h_k % sms == 0  # so that no CTA owns heads
    of_q, of_k = (b, lengths[0], h, d), (b, lengths[1], h_k, d)
    dout, q, k, v = tokens(dense, of_q, of_q, of_k, of_k)
    options = masked(dense)
    outputs = [attention_ref(q[i : i + 1], k[i : i + 1], v[i : i + 1], **options) for i in range(b)]
    out, lse = (torch.cat([x[i] for x in outputs]) for i in range(2))
    tensors = dout, q, k, v, out.to(q.dtype), lse.float()
    with computed_by(dense):
        alone = [backward(dense, [x[i : i + 1] for x in tensors], None, options) for i in range(b)]
        expected = [torch.cat(parts) for parts in zip(*alone, strict=True)][:3]
        found = dict(zip(NAMES, expected, strict=False))
        testing.check_backward(found, q, k, v, dout, **options)
        for _ in range(REPEATS):
            again = backward(dense, tensors, None, options)
            for name, x, y in zip(NAMES, expected, again, strict=False):
                close = (x - y).abs().max() <= 2**-6 * x.abs().max()
                assert x.equal(y) if name != "dq" and h == h_k else close, name
    if dense.mask != "local":  # then no sums of dQ start from zeros
        _, semaphores, _ = check_that_nothing_else_is_written(dense, (b, *lengths, h, h_k))
        step = dense.dkv.step // SEMAPHORE_ROWS
        blocks = -(-lengths[0] // dense.dkv.step)
        assert semaphores[..., ::step][..., :blocks].eq(dense.cluster).all()


@each
def test_1000_repeats_are_bitwise_equal_under_memory_pressure(
    dense: BwdConfig, busy_memory, poisoned_outputs, count_cases
) -> None:
    """Deterministic gradients of more tiles than the GPU holds at once, which add to dQ in a fixed
    order, repeat; a ragged batch of the same sequences has the same bits."""
    (b, n, m, h, h_k), d = (4, 500, 1100, 8, 4), dense.head_dim
    dout, q, k, v = tokens(dense, *[(b, n, h, d)] * 2, *[(b, m, h_k, d)] * 2)
    options = masked(dense)
    out, lse, _ = attention_ref(q, k, v, upcast=torch.float64, **options)
    tensors = dout, q, k, v, out.to(q.dtype)
    packed = *(x.flatten(0, 1) for x in tensors), lse.float().transpose(0, 1).flatten(1)
    lengths = starts([n] * b), starts([m] * b), None, None, n, m
    differences = torch.zeros((), device="cuda", dtype=torch.int64)
    for config, given in ((dense, (*tensors, lse.float())), (ragged(dense), packed)):
        asked = given, None, options, lengths if config.varlen else (), True
        with computed_by(config):
            if config == dense:
                expected = backward(config, *asked)[:3]
                found = dict(zip(NAMES, expected, strict=False))
                testing.check_backward(found, q, k, v, dout, **options)
            for repeat in range(1000):
                busy_memory()
                filler = torch.empty(1 + repeat * 4097, device="cuda")
                again = backward(config, *asked)[:3]
                differences += sum(
                    (x.flatten() != y.flatten()).any() for x, y in zip(expected, again, strict=True)
                )
                del filler
    assert differences.item() == 0
    count_cases("repeats of gradients", 2000)


@pytest.mark.parametrize("waves", [0, 1, 1.4], ids=["part of one", "one and few", "1.4"])
@each_plain
def test_tiles_of_the_last_wave_are_shared(dense: BwdConfig, waves, poisoned_outputs) -> None:
    """The gradients are right. dK and dV have the same bits in each repeat, and equal those of a
    head alone but for the order in which the parts of a tile are added."""
    sms = torch.cuda.get_device_properties().multi_processor_count
    tile, d = dense.cluster * dense.dkv.rows, dense.head_dim
    # waves 1: one tile a head, a few more than the GPU holds at once. waves 1.4: 3/8 more than it
    # holds, of two key heads, so that every CTA has a range and many ranges hold parts of two
    # tiles. waves 0: one tile a head, fewer than a quarter of the SMs.
    several = waves > 1
    h_k, tiles = (2, 11 * sms // 16) if several else (sms + 5 if waves else sms // 5, 1)
    h, seqlen_q, seqlen_k = (2 * h_k, 2200, tiles * tile - 28) if several else (h_k, 3000, 100)
    dout, q, k, v = tokens(dense, *[(1, seqlen_q, h, d)] * 2, *[(1, seqlen_k, h_k, d)] * 2)
    options = masked(dense)
    out, lse, _ = attention_ref(q, k, v, upcast=torch.float64, **options)
    tensors = dout, q, k, v, out.to(q.dtype), lse.float()
    with computed_by(dense):
        first = backward(dense, tensors, None, options)[:3]
        found = dict(zip(NAMES, first, strict=False))
        testing.check_backward(found, q, k, v, dout, **options)
        for _ in range(REPEATS):
            again = backward(dense, tensors, None, options)
            assert all(x.equal(y) for x, y in zip(first[1:], again[1:3], strict=True))
        of_q, of_k = slice(h // h_k), slice(1)
        heads = (of_q, of_q, of_k, of_k, of_q)
        one = [x[:, :, part] for x, part in zip(tensors, heads, strict=False)]
        alone = backward(dense, (*one, tensors[5][:, of_q].contiguous()), None, options)
        for x, y in zip(first[1:], alone[1:3], strict=True):
            assert (x[:, :, of_k] - y).abs().max() <= 2**-6 * y.abs().max()
    _, _, partial = check_that_nothing_else_is_written(dense, (1, seqlen_q, seqlen_k, h, h_k))
    left = ~partial.view(sms, -1).isnan()
    assert (left.all(1) == left.any(1)).all()
    assert left.any(1).sum() >= (5 if waves == 1 else sms // 2)


def case_of(config: BwdConfig, seed: int) -> Case:
    """Returns the case that other tests draw from this seed, changed to run this kernel."""
    rng = random.Random(seed)
    return dataclasses.replace(
        make_case(seed),
        dtype=DTYPE_OF[config.dtype],
        d=config.head_dim - 8 * (seed % 2),
        causal=config.mask == "causal",
        window_size=rng.choice(WINDOWS) if config.mask == "local" else (-1, -1),
        scores=Scores(),
        styles=tuple(rng.choice(STYLES) for _ in range(3)),
    )


def drawn(seed: int) -> Case:
    """Returns a case for one of the kernels, which depends on the seed."""
    return case_of(CONFIGS[seed // 2 % len(CONFIGS)], seed)


def config_of(case: Case) -> BwdConfig:
    """Returns the kernel of a case of :func:`drawn`."""
    return ragged(CONFIGS[case.seed // 2 % len(CONFIGS)])


def kernels_of(case: Case, gpu: Gpu) -> set:
    """Returns the kernel of a case of :func:`drawn`, with the mask that its lengths require."""
    chosen = asked_of(case).backward(gpu)
    return {dataclasses.replace(config_of(case), mask=config.mask) for config in chosen}


def check_drawn(case: Case) -> str | None:
    """Returns what is wrong with a case of :func:`drawn`, or None."""
    return check(case, BUT_DQ, functools.partial(by_operator, config_of(case)))


@each
def test_random_lengths(dense: BwdConfig, poisoned_outputs, count_cases) -> None:
    compute = functools.partial(by_operator, ragged(dense))
    first = CASES * CONFIGS.index(dense)
    cases = [case_of(dense, seed) for seed in range(first, first + CASES)]
    failures = [failure for case in cases if (failure := check(case, BUT_DQ, compute))]
    count_cases("gradients of ragged batches, sm90 class", CASES)
    assert not failures, f"{len(failures)} of {CASES}:\n" + "\n".join(failures)


@each_plain
def test_rows_far_from_the_first(dense: BwdConfig) -> None:
    """Sequences around an offset of 2^32 bytes, and the last one, have the bits they have alone."""
    needs_memory(48)  # seven tensors of 4.2 GiB, and sums of dQ
    h, d = 64, dense.head_dim
    length = dense.repeatable_keys - 28
    row_bytes = 2 * h * d
    b = math.ceil(1.05 * FAR / (length * row_bytes))
    rows = b * length
    q, k, v, dout = tokens(dense, *[(rows, h, d)] * 4)
    lse = torch.full((h, rows), math.log(length) + 0.5, device="cuda")
    options, bounds = masked(dense), (length, length)
    cu = starts([length] * b)
    with computed_by(ragged(dense)):
        tensors = dout, q, k, v, dout, lse
        lengths = cu, cu, None, None, *bounds
        found = backward(ragged(dense), tensors, None, options, lengths)[:3]
    across = FAR // row_bytes // length
    for i in (0, across, across + 1, b - 1):
        own = slice(i * length, (i + 1) * length)
        one = [x[None, own] for x in tensors[:5]]
        with computed_by(dense):
            expected = backward(dense, (*one, lse[None, :, own].contiguous()), None, options)[:3]
        for name, x, alone in zip(NAMES, found, expected, strict=False):
            assert x[own].equal(alone[0]), (name, i)


@pytest.mark.parametrize("lengths", HOSTILE, ids=str)
@each_plain
def test_no_lengths_reach_beyond_the_tensors(dense: BwdConfig, lengths) -> None:
    """Results are undefined then, but the device goes on and memory around tensors is unchanged."""
    h, d = 4, dense.head_dim
    block = torch.full((5, 400, h, d), 7.0, device="cuda", dtype=DTYPE_OF[dense.dtype])
    lse = torch.full((3, h, 200), 7.0, device="cuda")
    cu = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    options = {"causal": True, "window_size": (-1, -1)}
    with computed_by(ragged(dense)):
        for other in (cu, cu.flip(0)):
            tensors = *(x[100:300] for x in block), lse[1]
            backward(ragged(dense), tensors, None, options, (cu, other, None, None, 300, 300))
    torch.cuda.synchronize()
    assert (block == 7).all() and (lse == 7).all()
