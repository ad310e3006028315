from __future__ import annotations

import dataclasses
import itertools

import pytest

from flashcute import heuristics
from flashcute.config import DTYPES, HEAD_DIMS, MAX_HEAD_DIM, MAX_SMEM_BYTES
from flashcute.heuristics import FwdProblem
from flashcute.jit import source_text, sources

ALL = list(itertools.product(DTYPES, HEAD_DIMS, (False, True), MAX_SMEM_BYTES))
PROBLEM = FwdProblem("bf16", True, b=2, seqlen_q=512, seqlen_k=512, h=8, h_k=2, d=128)


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
    config = heuristics.choose_fwd(PROBLEM, (9, 0))
    assert config == heuristics.fwd_config("bf16", 128, True, (9, 0))
    wider = dataclasses.replace(PROBLEM, d=136, dtype="fp16", causal=False)
    assert heuristics.choose_fwd(wider, (9, 0)) == heuristics.fwd_config("fp16", 192, False, (9, 0))


def test_one_query_row_needs_no_mask():
    one = dataclasses.replace(PROBLEM, seqlen_q=1)
    assert heuristics.choose_fwd(one, (8, 0)).mask == "none"
    two = dataclasses.replace(PROBLEM, seqlen_q=2)
    assert heuristics.choose_fwd(two, (8, 0)).mask == "causal"


def test_shipped_configurations_are_24_with_names_of_their_own():
    configs = heuristics.shipped_configs()
    assert len(configs) == 24
    assert len({config.name for config in configs}) == 24
    assert len({config.full_name for config in configs}) == 24


def test_smaller_shared_memory_gets_a_tile_of_its_own():
    """Two CTAs of the tile of 9.0 fit an SM neither of 8.0 nor of 8.6."""
    found = [heuristics.fwd_config("bf16", 256, True, cc) for cc in ((9, 0), (8, 0), (8, 6))]
    assert len(set(found)) == 3
    assert heuristics.fwd_config("bf16", 256, True, (8, 7)) == found[1]


def test_names_are_unique_over_all_gpus():
    configs = {heuristics.fwd_config(*choice) for choice in ALL}
    assert len({config.full_name for config in configs}) == len(configs)


def test_committed_files_are_the_generated_text():
    folder = sources.kernel_include_dir() / "instantiations"
    wanted = {f"{c.name}.cu": source_text(c) for c in heuristics.shipped_configs()}
    assert {path.name: path.read_text() for path in folder.iterdir()} == wanted
