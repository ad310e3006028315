from __future__ import annotations

import dataclasses
import itertools

import pytest

from flashcute import heuristics
from flashcute.config import (
    BWD_OPTIONS,
    DTYPES,
    HEAD_DIMS,
    MASKS,
    MAX_HEAD_DIM,
    MAX_SMEM_BYTES,
)
from flashcute.heuristics import FwdProblem
from flashcute.occupancy import ctas_per_sm
from flashcute.problem import rounded, rounded_length, typical_length

ALL = list(itertools.product(DTYPES, HEAD_DIMS, (False, True), MAX_SMEM_BYTES))
PROBLEM = FwdProblem("bf16", True, b=2, seqlen_q=512, seqlen_k=512, h=8, h_k=2, d=128)
OF_HOPPER = list(itertools.product(DTYPES, HEAD_DIMS, (False, True)))
# The GPUs that cannot run kernels of Hopper's class.
OTHERS = [capability for capability in MAX_SMEM_BYTES if capability != (9, 0)]


@pytest.fixture(autouse=True)
def _newest_class(monkeypatch):
    monkeypatch.delenv("FLASHCUTE_ARCH", raising=False)


@pytest.mark.parametrize(("dtype", "head_dim", "causal", "capability"), ALL)
def test_every_configuration_fits_the_gpu(dtype, head_dim, causal, capability):
    config = heuristics.fwd_config(dtype, head_dim, causal, capability)
    assert (config.dtype, config.head_dim) == (dtype, head_dim)
    assert config.mask == ("causal" if causal else "none")
    assert config.smem_bytes <= MAX_SMEM_BYTES[capability]
    # min_ctas is what __launch_bounds__ promises: that many CTAs must fit the register file with
    # at most 255 registers a thread, and at least what the accumulators alone take.
    registers = min(255, 65536 // (config.threads * config.min_ctas))
    accumulators = config.tile_m * (config.tile_n + config.head_dim) // config.threads
    assert accumulators < registers
    # As many CTAs must fit into the shared memory, or registers are left unused.
    found = ctas_per_sm(config.threads, registers, config.smem_bytes, capability)
    assert found.ctas >= config.min_ctas, found


@pytest.mark.parametrize("d", range(8, MAX_HEAD_DIM + 1, 8))
def test_head_dim_is_the_smallest_that_holds_d(d):
    found = heuristics.instantiated_head_dim(d)
    assert found in HEAD_DIMS and found >= d
    assert not [hd for hd in HEAD_DIMS if d <= hd < found]


def test_choice_follows_the_problem():
    assert heuristics.choose_fwd(PROBLEM, (8, 0)) == heuristics.fwd_config(
        "bf16", 128, True, (8, 0)
    )
    wider = dataclasses.replace(PROBLEM, d=136, dtype="fp16", causal=False)
    assert heuristics.choose_fwd(wider, (8, 0)) == heuristics.fwd_config("fp16", 192, False, (8, 0))
    config = heuristics.choose_fwd(wider, (9, 0))
    assert (config.arch, config.dtype, config.head_dim, config.mask) == (90, "fp16", 192, "none")


@pytest.mark.parametrize(("dtype", "head_dim", "causal"), OF_HOPPER)
def test_every_configuration_of_the_sm90_class_fits_the_gpu(dtype, head_dim, causal):
    found = heuristics.sm90_configs(dtype, head_dim, causal)
    for config in found:
        assert (config.arch, config.dtype, config.head_dim) == (90, dtype, head_dim)
        assert config.mask == ("causal" if causal else "none")
        assert config.smem_bytes <= MAX_SMEM_BYTES[9, 0]
        # A thread of the MMA warps holds O, S and, in 16 bits, P at the same time.
        registers = {(4, 4): 104, (4, 3): 136, (8, 1): 240, (12, 1): 160}[
            config.warps, config.min_ctas
        ]
        assert config.head_dim // 2 + config.tile_n // 2 + config.tile_n // 4 < registers
    assert len(set(found)) == len(found)


def test_few_tiles_are_spread_over_the_sms():
    """96 tiles of 192 rows leave 36 of 132 SMs idle; 128 of 128 rows leave 4."""
    problem = FwdProblem("bf16", False, 1, 512, 8192, 32, 8, 128)
    assert heuristics.choose_fwd(problem, (9, 0), sms=132).tile_m == 128
    assert heuristics.choose_fwd(problem, (9, 0), sms=96).tile_m == 192


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 0), (700, 1), (1, 2**31 - 1024)])
def test_every_length_has_a_tile(seqlen_q, seqlen_k):
    for dtype, head_dim, causal in OF_HOPPER:
        problem = FwdProblem(dtype, causal, 1, seqlen_q, seqlen_k, 2, 1, head_dim)
        chosen = heuristics.choose_fwd(problem, (9, 0))
        assert chosen in heuristics.sm90_configs(dtype, head_dim, causal and seqlen_q > 1)


def test_class_is_the_newest_that_the_gpu_runs():
    assert heuristics.kernel_class((9, 0)) == 90
    assert {heuristics.kernel_class(capability) for capability in OTHERS} == {80}
    assert {heuristics.choose_fwd(PROBLEM, capability).arch for capability in OTHERS} == {80}


@pytest.mark.parametrize("capability", MAX_SMEM_BYTES)
def test_older_class_runs_everywhere_when_asked_for(monkeypatch, capability):
    monkeypatch.setenv("FLASHCUTE_ARCH", "80")
    assert heuristics.kernel_class(capability) == 80
    chosen = heuristics.choose_fwd(PROBLEM, capability)
    assert chosen == heuristics.fwd_config("bf16", 128, True, capability)
    assert heuristics.configs_in_use("bf16", 128, True, capability) == [chosen]


@pytest.mark.parametrize("capability", OTHERS)
def test_class_that_the_gpu_cannot_run_is_refused(monkeypatch, capability):
    monkeypatch.setenv("FLASHCUTE_ARCH", "90")
    assert heuristics.kernel_class((9, 0)) == 90
    with pytest.raises(ValueError, match=r"expected FLASHCUTE_ARCH=80 .*_ARCH=90; unset it"):
        heuristics.choose_fwd(PROBLEM, capability)


def test_class_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv("FLASHCUTE_ARCH", "100")
    with pytest.raises(ValueError, match="expected FLASHCUTE_ARCH to be 80 or 90"):
        heuristics.choose_fwd(PROBLEM, (9, 0))


@pytest.mark.parametrize("capability", MAX_SMEM_BYTES)
def test_configurations_in_use_are_those_that_are_chosen(capability):
    """The kernels that are built ahead are those that calls ask for."""
    lengths = sorted({2**i + extra for i in range(1, 15) for extra in (0, 1)} | {77, 197})
    for dtype, head_dim, causal in OF_HOPPER:
        problem = dataclasses.replace(PROBLEM, dtype=dtype, causal=causal, d=head_dim, b=64, h_k=8)
        chosen = {
            heuristics.choose_fwd(dataclasses.replace(problem, seqlen_q=n, seqlen_k=m), capability)
            for n in lengths
            for m in (n, 77)
        }
        assert chosen == set(heuristics.configs_in_use(dtype, head_dim, causal, capability))


@pytest.mark.parametrize("window", [None, (100, 0)])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_softcap_alibi_and_dropout_are_kernels_of_their_own(capability, window):
    problem = dataclasses.replace(PROBLEM, causal=window is None, window=window)
    plain = heuristics.choose_fwd(problem, capability)
    names = "softcap", "alibi", "dropout"
    assert not any(getattr(plain, name) for name in names)
    for flags in itertools.product((False, True), repeat=3):
        asked = dict(zip(names, flags, strict=True))
        config = heuristics.choose_fwd(dataclasses.replace(problem, **asked), capability)
        assert {name: getattr(config, name) for name in names} == asked
        assert config == heuristics.with_options(plain, **asked)
        assert config.tile_m == plain.tile_m and config.mask == plain.mask


@pytest.mark.parametrize(("arch", "d"), [("80", 64), ("90", 128)])
@pytest.mark.parametrize("option", ["alibi", "softcap", "dropout"])
@pytest.mark.parametrize("causal", [False, True])
def test_an_option_keeps_the_tile(arch, d, option, causal, monkeypatch):
    """tests/cuda/test_cuda_options.py compares results with and without an option bit for bit."""
    monkeypatch.setenv("FLASHCUTE_ARCH", arch)
    for dtype in DTYPES:
        plain = FwdProblem(dtype, causal, 2, 150, 170, 4, 2, d)
        with_option = dataclasses.replace(plain, **{option: True})
        chosen = heuristics.choose_fwd(with_option, (9, 0))
        assert dataclasses.replace(chosen, **{option: False}) == heuristics.choose_fwd(
            plain, (9, 0)
        )


def test_heads_are_not_packed_with_dropout():
    problem = dataclasses.replace(PROBLEM, causal=False, seqlen_q=1, h=32, h_k=4)
    config = heuristics.choose_fwd(problem, (9, 0))
    assert heuristics.packs_heads(problem, config)
    assert not heuristics.packs_heads(dataclasses.replace(problem, dropout=True), config)


def test_tiles_that_would_spill_with_options_are_others():
    eighty = heuristics.fwd_config("bf16", 128, False, (9, 0))
    for options in ({"softcap": True, "alibi": True}, {"dropout": True}):
        assert heuristics.with_options(eighty, **options).tile_n < eighty.tile_n
    wide = dataclasses.replace(heuristics.sm90_configs("bf16", 64, False)[0], mask="local")
    assert heuristics.with_options(wide, True, False).tile_n < wide.tile_n
    plain = heuristics.sm90_configs("bf16", 64, True)[0]
    both = heuristics.with_options(plain, True, True)
    assert both.tile_n < heuristics.with_options(plain, True, False).tile_n == plain.tile_n
    plain = heuristics.sm90_configs("bf16", 96, True)[0]
    for alibi in (False, True):
        assert heuristics.with_options(plain, True, alibi).tile_n == 80 < plain.tile_n
    assert heuristics.with_options(plain, False, True).tile_n == plain.tile_n
    narrow = heuristics.bwd_config("bf16", 32)
    assert heuristics.bwd_with_options(narrow, softcap=True).dkv.step < narrow.dkv.step
    for d, softcap, alibi in ((32, False, True), (64, True, False), (192, True, True)):
        passes = heuristics.bwd_config("bf16", d, "causal")
        assert heuristics.bwd_with_options(passes, softcap, alibi, False).dkv == passes.dkv
        fewer = heuristics.bwd_with_options(passes, softcap, alibi, True)
        assert fewer.dkv.step == 32 < passes.dkv.step
    wide = heuristics.bwd_config("fp16", 128, "local")
    assert heuristics.bwd_with_options(wide, True, True, True).dkv.step < wide.dkv.step
    assert heuristics.bwd_with_options(wide, True, True).dkv.step == wide.dkv.step
    three, two = heuristics.sm90_configs("bf16", 128, False)
    assert three.q_in_regs > 0 and two.q_in_regs > 0
    assert heuristics.with_options(three, True, False).q_in_regs == 0
    assert heuristics.with_options(two, False, True).q_in_regs == two.q_in_regs
    assert heuristics.with_options(three, False, False) is three


def test_sequences_of_about_one_query_row_need_their_mask():
    length = typical_length(3, 3, 2)  # lengths 2, 1 and 0
    problem = dataclasses.replace(PROBLEM, causal=True, seqlen_q=length, seqlen_k=length)
    assert heuristics.choose_fwd(problem, (9, 0)).mask == "causal"
    assert heuristics.choose_bwd(problem, (9, 0)).mask == "causal"
    assert typical_length(3, 3, 1) == 1


def test_one_query_row_needs_no_mask():
    one = dataclasses.replace(PROBLEM, seqlen_q=1)
    assert heuristics.choose_fwd(one, (8, 0)).mask == "none"
    two = dataclasses.replace(PROBLEM, seqlen_q=2)
    assert heuristics.choose_fwd(two, (8, 0)).mask == "causal"


@pytest.mark.parametrize(
    ("seqlen_q", "h", "h_k", "packed"),
    [
        (1, 32, 8, True),
        (1, 71, 1, True),
        (1, 8, 8, False),  # no heads to share
        (4, 32, 8, True),
        (8, 40, 8, True),  # five heads take eight rows: 64 rows of 128
        (32, 40, 8, True),  # two tiles for five
        (32, 6, 2, True),
        (96, 32, 8, True),  # three tiles of packed rows for four of a head each
        (128, 32, 8, True),  # as many tiles, of which each spans fewer keys
        (129, 32, 8, True),  # 5 tiles for 8
        (4096, 32, 8, True),
        (4096, 28, 4, False),  # an eighth of the rows would be padding
        (4096, 40, 8, False),  # three eighths
    ],
)
def test_heads_are_packed_where_tiles_then_compute_less(seqlen_q, h, h_k, packed):
    problem = dataclasses.replace(PROBLEM, seqlen_q=seqlen_q, h=h, h_k=h_k)
    config = heuristics.fwd_config("bf16", 128, True, (9, 0))
    assert heuristics.packs_heads(problem, config) is packed


def test_heads_are_not_packed_where_that_saves_nothing():
    problem = dataclasses.replace(PROBLEM, causal=False, seqlen_q=3072, seqlen_k=3072, h=32, h_k=8)
    config = heuristics.choose_fwd(problem, (9, 0))
    assert not heuristics.packs_heads(problem, config)


def test_shipped_configurations_have_names_of_their_own():
    sm80, sm90 = heuristics.shipped_configs(80), heuristics.shipped_configs(90)
    assert len(sm80) == len({config.name for config in sm80}) == 24
    assert {config.name for config in sm90} == {c.name.replace("sm80", "sm90") for c in sm80}
    configs = heuristics.shipped_configs()
    assert configs == sm80 + sm90
    assert len({config.full_name for config in configs}) == len(configs)


def test_smaller_shared_memory_gets_a_tile_of_its_own():
    """Two CTAs of the tile for 9.0 fit into an SM of neither 8.0 nor 8.6."""
    found = [heuristics.fwd_config("bf16", 256, True, cc) for cc in ((9, 0), (8, 0), (8, 6))]
    assert len(set(found)) == 3
    assert heuristics.fwd_config("bf16", 256, True, (8, 7)) == found[1]


@pytest.mark.parametrize("capability", MAX_SMEM_BYTES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_forward_with_options_fits_every_gpu(head_dim, capability):
    """The CTAs that min_ctas promises fit into an SM's shared memory, over cache pages, too."""
    in_sm = MAX_SMEM_BYTES[capability] + 1024  # each CTA takes 1 KB more than it asks for
    flags = "softcap", "alibi", "dropout"
    for values in itertools.product((False, True), repeat=3):
        asked = dict(zip(flags, values, strict=True))
        for mask, seqlen_q, page_size in itertools.product(MASKS, (1, 2048), (0, 16)):
            problem = dataclasses.replace(
                PROBLEM,
                d=head_dim,
                seqlen_q=seqlen_q,
                causal=mask == "causal",
                window=(100, 0) if mask == "local" else None,
                cache=True,
                page_size=page_size,
                **asked,
            )
            config = heuristics.choose_fwd(problem, capability)
            assert {flag: getattr(config, flag) for flag in flags} == asked
            assert config.smem_bytes <= MAX_SMEM_BYTES[capability]
            assert config.min_ctas * (config.smem_bytes + 1024) <= in_sm, config.full_name


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_backward_fits_every_gpu(head_dim):
    for values in itertools.product((False, True), repeat=len(BWD_OPTIONS)):
        asked = dict(zip(BWD_OPTIONS, values, strict=True))
        plain = heuristics.bwd_config("bf16", head_dim, "local")
        config = heuristics.bwd_with_options(plain, **asked)
        assert (config.head_dim, config.mask) == (head_dim, "local")
        assert {option: getattr(config, option) for option in BWD_OPTIONS} == asked
        assert config.smem_bytes <= min(MAX_SMEM_BYTES.values())


@pytest.mark.parametrize("capability", MAX_SMEM_BYTES)
def test_backward_in_use_is_what_is_chosen(capability):
    for dtype, head_dim, causal in OF_HOPPER:
        problem = dataclasses.replace(PROBLEM, dtype=dtype, causal=causal, d=head_dim - 8)
        fastest = heuristics.choose_bwd(problem, capability)
        of_one_side = heuristics.choose_bwd(problem, capability, every=False)
        chosen = list(dict.fromkeys([fastest, of_one_side]))
        assert chosen == heuristics.bwd_configs_in_use(dtype, head_dim, causal, capability)
        for config in chosen:
            assert (config.dtype, config.head_dim) == (dtype, head_dim)
            assert config.mask == ("causal" if causal else "none")
        assert of_one_side.arch == fastest.arch == (90 if capability == (9, 0) else 80)


@pytest.mark.parametrize("capability", MAX_SMEM_BYTES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_one_kernel_computes_all_gradients_where_it_fits(head_dim, capability, monkeypatch):
    """The sm80 class does so with any options, but not if only some gradients are wanted."""
    monkeypatch.setenv("FLASHCUTE_ARCH", "80")
    fits = head_dim <= 128 or MAX_SMEM_BYTES[capability] >= 163 * 1024
    for values in itertools.product((False, True), repeat=len(BWD_OPTIONS)):
        asked = dict(zip(BWD_OPTIONS, values, strict=True))
        problem = dataclasses.replace(PROBLEM, d=head_dim, **asked)
        config = heuristics.choose_bwd(problem, capability)
        assert config.fused == fits and config.smem_bytes <= MAX_SMEM_BYTES[capability]
        assert {option: getattr(config, option) for option in BWD_OPTIONS} == asked
        assert not heuristics.choose_bwd(problem, capability, every=False).fused


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_fused_tiles_with_several_options(head_dim, varlen):
    """A ragged batch has the steps of a dense one, so that its results have the same bits."""
    config = heuristics.fused_bwd_config("bf16", head_dim)
    steps = {
        names: heuristics.bwd_with_options(config, **dict.fromkeys(names, True), varlen=varlen)
        for names in (("dropout",), ("softcap", "alibi"), ("alibi", "dropout"), BWD_OPTIONS[:3])
    }
    one, both, *with_dropout = (x.dkv.step for x in steps.values())
    assert one == both == (32 if head_dim == 128 else 64)
    assert with_dropout == [32, 32]


def test_gradients_of_one_side_on_hopper_are_of_its_own_class():
    capped = dataclasses.replace(PROBLEM, softcap=True, alibi=True)
    for problem, every in itertools.product((PROBLEM, capped), (False, True)):
        assert heuristics.choose_bwd(problem, (9, 0), every=every).arch == 90


def of_sm80(problem, *, fused=True, capability=(9, 0)):
    """Returns the sm80 kernel of a problem, without the problem's score changes and dropout."""
    mask = "local" if problem.window else "causal" if problem.causal else "none"
    if not fused:
        return heuristics.bwd_config(problem.dtype, problem.d, mask)
    return heuristics.fused_bwd_config(problem.dtype, problem.d, mask, capability)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("window", [None, (5, 9)], ids=str)
def test_backward_with_options(window, varlen, capability):
    plain = dataclasses.replace(PROBLEM, causal=window is None, window=window, varlen=varlen)
    for softcap, alibi, dropout in itertools.product((False, True), repeat=3):
        options = {"softcap": softcap, "alibi": alibi, "dropout": dropout}
        config = heuristics.choose_bwd(dataclasses.replace(plain, **options), capability)
        of_hopper = capability == (9, 0)
        mask = "causal" if window is None else "local"
        expected = (
            heuristics.sm90_bwd_config(plain.dtype, plain.d, mask)
            if of_hopper
            else of_sm80(plain, capability=capability)
        )
        assert config == heuristics.bwd_with_options(expected, **options, varlen=varlen)
        assert all(f"_{name}_" in config.name for name, asked in options.items() if asked)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_backward_of_a_ragged_batch(capability):
    """Short sequences go to the sm80 class: in the sm90 class they have more sums of dQ than rows.

    tests/host_binding.py tests how the binding says that sequences are short.
    """
    for d, window in itertools.product((64, 96, 128), (None, (5, 9))):
        plain = dataclasses.replace(PROBLEM, d=d, causal=window is None, window=window)
        for length, other, alibi in (
            (256, 4096, 0),
            (240, 4096, 0),
            (4096, 240, 0),
            (4096, 256, 1),
        ):
            problem = dataclasses.replace(
                plain, seqlen_q=length, seqlen_k=other, varlen=True, alibi=bool(alibi)
            )
            config = heuristics.choose_bwd(problem, capability)
            of_hopper = capability == (9, 0)
            assert config.arch == (90 if of_hopper and min(length, other) >= 256 else 80)
            assert config.varlen and config.alibi == bool(alibi)
            if config.arch == 90:
                continue
            assert config.fused == (min(length, other) >= 256)
            same = of_sm80(problem, fused=config.fused, capability=capability)
            assert config == heuristics.bwd_with_options(same, alibi=bool(alibi), varlen=True)


def test_short_sequences_of_more_than_one_row_keep_their_causal_mask():
    """The mean length of (2, 1, 0) is 1, but one of them has a row that must not see all keys."""
    length = typical_length(3, 3, 2)
    problem = dataclasses.replace(PROBLEM, causal=True, seqlen_q=length, seqlen_k=length)
    assert heuristics.choose_fwd(problem, (9, 0)).mask == "causal"
    assert heuristics.choose_bwd(problem, (9, 0)).mask == "causal"
    assert typical_length(3, 3, 1) == 1


def test_mask_of_the_backward_is_that_of_the_forward():
    for change in ({}, {"causal": False}, {"seqlen_q": 1}, {"causal": False, "window": (5, 9)}):
        problem = dataclasses.replace(PROBLEM, **change)
        forward = heuristics.choose_fwd(problem, (8, 0))
        assert heuristics.choose_bwd(problem, (8, 0)).mask == forward.mask


def test_backward_refuses_the_class_that_the_forward_refuses(monkeypatch):
    monkeypatch.setenv("FLASHCUTE_ARCH", "90")
    with pytest.raises(ValueError, match="expected FLASHCUTE_ARCH=80"):
        heuristics.choose_bwd(PROBLEM, (8, 0))
    assert heuristics.choose_bwd(PROBLEM, (9, 0)).arch == 90
    monkeypatch.setenv("FLASHCUTE_ARCH", "80")
    assert heuristics.choose_bwd(PROBLEM, (9, 0)).arch == 80


def test_shipped_backwards_have_names_of_their_own():
    configs = heuristics.shipped_bwd_configs(80)
    names = {config.name.replace("bwd", "fwd") for config in configs}
    forwards = {config.name for config in heuristics.shipped_configs(80)}
    assert names == forwards | {name.replace("sm80", "fused_sm80") for name in forwards}
    assert len(configs) == len(names) == 2 * 24
    of_hopper = heuristics.shipped_bwd_configs(90)
    assert len({config.name for config in of_hopper}) == len(of_hopper) == 6 * 2 * 2
    assert sorted(configs + of_hopper, key=str) == sorted(heuristics.shipped_bwd_configs(), key=str)


def test_names_are_unique_over_all_gpus():
    configs = {heuristics.fwd_config(*choice) for choice in ALL} | set(heuristics.shipped_configs())
    assert len({config.full_name for config in configs}) == len(configs)


def test_lengths_are_rounded_up_a_little_to_few() -> None:
    lengths = range(10_000)
    found = [rounded_length(length) for length in lengths]
    assert found == sorted(found) == [rounded_length(length) for length in found]
    assert all(x <= y <= max(x + 15, 1.0625 * x) for x, y in zip(lengths, found, strict=True))
    assert len(set(found)) < 130
    assert found[:17] == list(range(17))


def test_kernels_are_chosen_for_rounded_lengths() -> None:
    exact = dataclasses.replace(PROBLEM, causal=False, seqlen_q=1001, window=(130, 5000))
    problem = rounded(exact)
    assert (problem.seqlen_q, problem.seqlen_k, problem.window) == (1024, 512, (144, 1024))
    for d, h_k in itertools.product((32, 64, 128, 256), (1, 2, 8)):
        one, other = (dataclasses.replace(x, d=d, h_k=h_k) for x in (exact, problem))
        config = heuristics.choose_fwd(one, (9, 0))
        assert config == heuristics.choose_fwd(other, (9, 0))
        packs = [heuristics.packs_heads(problem, config) for problem in (one, other)]
        assert packs[0] is packs[1]
