from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from flashcute import heuristics
from flashcute.config import DTYPES, HEAD_DIMS, MAX_HEAD_DIM, MAX_SMEM_BYTES
from flashcute.heuristics import FwdProblem
from flashcute.jit import source_text, sources

ALL = list(itertools.product(DTYPES, HEAD_DIMS, (False, True), MAX_SMEM_BYTES))
PROBLEM = FwdProblem("bf16", True, b=2, seqlen_q=512, seqlen_k=512, h=8, h_k=2, d=128)
OF_HOPPER = list(itertools.product(DTYPES, HEAD_DIMS, (False, True)))
# Without one of Hopper's class.
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
    # An SM has 1 KB more than one CTA may ask for, and reserves 1 KB for each CTA. Where it has
    # 100 KB only, shared memory may allow fewer CTAs than the registers do.
    in_sm = MAX_SMEM_BYTES[capability] + 1024
    if in_sm > 100 * 1024:
        assert config.min_ctas * (config.smem_bytes + 1024) <= in_sm


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
    for config, _ in found:
        assert (config.arch, config.dtype, config.head_dim) == (90, dtype, head_dim)
        assert config.mask == ("causal" if causal else "none")
        assert config.smem_bytes <= MAX_SMEM_BYTES[9, 0]
        # O, S and P as 16-bit words live at once in a thread of the MMA warps, of which at most 240
        # or 160 registers are its own.
        registers = {8: 240, 12: 160}[config.warps]
        assert config.head_dim // 2 + config.tile_n // 2 + config.tile_n // 4 < registers
    limits = [limit for _, limit in found]
    assert limits == sorted(set(limits)), "shortest sequences first, none twice"
    assert limits[-1] == math.inf, "no sequence is too long"
    assert all(isinstance(limit, int) and limit > 0 for limit in limits[:-1])
    assert len({config for config, _ in found}) == len(found)


@pytest.mark.parametrize(("dtype", "head_dim", "causal"), OF_HOPPER)
def test_choice_follows_the_number_of_keys(dtype, head_dim, causal):
    problem = dataclasses.replace(PROBLEM, dtype=dtype, causal=causal, d=head_dim)
    shortest = 0
    for config, limit in heuristics.sm90_configs(dtype, head_dim, causal):
        longest = limit if limit < math.inf else 2**31 - 1024
        for seqlen_k in (shortest, longest):
            of_length = dataclasses.replace(problem, seqlen_k=seqlen_k)
            assert heuristics.choose_fwd(of_length, (9, 0)) == config
        shortest = longest + 1


def test_queries_that_one_tile_holds_take_the_smallest():
    found = [
        heuristics.choose_fwd(dataclasses.replace(PROBLEM, seqlen_q=n, seqlen_k=10**6), (9, 0))
        for n in (2, 128, 129)
    ]
    assert [config.tile_m for config in found] == [128, 128, 192]
    # Where there is none of 128 rows, as for many keys.
    one = dataclasses.replace(PROBLEM, d=64, seqlen_q=1)
    assert heuristics.choose_fwd(one, (9, 0)).tile_m == 192


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
    """What is built ahead is what a call then asks for."""
    lengths = [2**i + extra for i in range(16) for extra in (0, 1)]
    for dtype, head_dim, causal in OF_HOPPER:
        problem = dataclasses.replace(PROBLEM, dtype=dtype, causal=causal, d=head_dim)
        chosen = {
            heuristics.choose_fwd(dataclasses.replace(problem, seqlen_k=n), capability)
            for n in lengths
        }
        assert chosen == set(heuristics.configs_in_use(dtype, head_dim, causal, capability))


def test_one_query_row_needs_no_mask():
    one = dataclasses.replace(PROBLEM, seqlen_q=1)
    assert heuristics.choose_fwd(one, (8, 0)).mask == "none"
    two = dataclasses.replace(PROBLEM, seqlen_q=2)
    assert heuristics.choose_fwd(two, (8, 0)).mask == "causal"


def test_shipped_configurations_have_names_of_their_own():
    sm80, sm90 = heuristics.shipped_configs(80), heuristics.shipped_configs(90)
    assert len(sm80) == len({config.name for config in sm80}) == 24
    assert {config.name for config in sm90} == {c.name.replace("sm80", "sm90") for c in sm80}
    configs = heuristics.shipped_configs()
    assert configs == sm80 + sm90
    assert len({config.full_name for config in configs}) == len(configs)


def test_instantiations_are_the_shipped_configurations():
    found = heuristics.instantiations()
    assert sorted(found.values(), key=str) == sorted(heuristics.shipped_configs(), key=str)
    for stem, config in found.items():
        name, _, limit = stem.partition("_upto")
        assert name == config.name
        if config.arch == 90:
            limits = heuristics.sm90_configs(config.dtype, config.head_dim, config.mask == "causal")
            assert (config, int(limit) if limit else math.inf) in limits


def test_smaller_shared_memory_gets_a_tile_of_its_own():
    """Two CTAs of the tile of 9.0 fit an SM neither of 8.0 nor of 8.6."""
    found = [heuristics.fwd_config("bf16", 256, True, cc) for cc in ((9, 0), (8, 0), (8, 6))]
    assert len(set(found)) == 3
    assert heuristics.fwd_config("bf16", 256, True, (8, 7)) == found[1]


def test_names_are_unique_over_all_gpus():
    configs = {heuristics.fwd_config(*choice) for choice in ALL} | set(heuristics.shipped_configs())
    assert len({config.full_name for config in configs}) == len(configs)


def test_committed_files_are_the_generated_text():
    folder = sources.kernel_include_dir() / "instantiations"
    wanted = {f"{stem}.cu": source_text(c) for stem, c in heuristics.instantiations().items()}
    assert {path.name: path.read_text() for path in folder.iterdir()} == wanted
