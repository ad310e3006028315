"""What the search proposes to measure. It measures on a GPU only."""

from __future__ import annotations

import argparse
import itertools

import config_search
import pytest

from flashcute import heuristics
from flashcute.config import HEAD_DIMS, KERNEL_CLASSES, MAX_SMEM_BYTES

HOPPER = (9, 0)
EACH = list(itertools.product(HEAD_DIMS, (False, True)))
# Of a thread in an MMA warp, once the loading warpgroup has given up its own (setmaxnreg).
SM90_REGISTERS = {8: 240, 12: 160}


def chosen(arch, head_dim, causal, variant=None):
    args = argparse.Namespace(arch=arch, variant=variant)
    return config_search.chosen(head_dim, causal, HOPPER, args)


@pytest.mark.parametrize(("head_dim", "causal"), EACH)
def test_candidates_of_the_sm90_class_fit(head_dim, causal):
    found = config_search.candidates(90, head_dim, causal, HOPPER)
    for config in found:
        assert (config.arch, config.dtype, config.head_dim) == (90, "bf16", head_dim)
        assert config.mask == ("causal" if causal else "none")
        assert config.smem_bytes <= MAX_SMEM_BYTES[HOPPER]
        # S and O in fp32 and P in 16 bits live at once, 64 rows over 128 threads.
        registers = config.tile_n // 2 + config.tile_n // 4 + head_dim // 2
        assert registers < SM90_REGISTERS[config.warps]
    assert len({config.full_name for config in found}) == len(found)
    for field in ("tile_n", "lazy_rescale", "ping_pong"):
        assert len({getattr(config, field) for config in found}) > 1, field


def test_a_candidate_more_would_not_fit():
    """The largest tiles proposed are bound by registers or shared memory, not by the search."""
    for head_dim, causal in EACH:
        found = config_search.candidates(90, head_dim, causal, HOPPER)
        largest = max(config.tile_n for config in found if config.warps == 8)
        more = largest + 16
        registers = more // 2 + more // 4 + head_dim // 2
        smem = 2 * head_dim * (128 + 4 * more)
        assert more > 256 or registers > 190 or smem > MAX_SMEM_BYTES[HOPPER] - 2048


@pytest.mark.parametrize("arch", KERNEL_CLASSES)
@pytest.mark.parametrize(("head_dim", "causal"), EACH)
def test_what_is_in_use_is_measured_too(arch, head_dim, causal):
    in_use = [
        config
        for config in heuristics.shipped_configs(arch)
        if (config.dtype, config.head_dim) == ("bf16", head_dim)
        and config.mask == ("causal" if causal else "none")
    ]
    assert config_search.in_use(arch, head_dim, causal, HOPPER) == in_use
    found = chosen(arch, head_dim, causal)
    assert set(in_use) <= set(found) and len(set(found)) == len(found)


def test_named_variants_and_no_others():
    named = config_search.candidates(90, 64, False, HOPPER)[3]
    found = chosen(90, 64, False, [named.variant])
    assert set(found) == {named, *config_search.in_use(90, 64, False, HOPPER)}
