"""The kernels that a run without ``--all`` leaves out are covered by those that it keeps."""

from __future__ import annotations

import dataclasses

import pytest
import tiers
from test_shipped_kernels import KERNELS

from flashcute import heuristics, shipped
from flashcute.config import FwdConfig


@pytest.fixture(autouse=True)
def usual(monkeypatch):
    monkeypatch.setattr(tiers, "everything", False)


@pytest.mark.parametrize("arch", [80, 90])
def test_every_value_of_every_field_is_covered(arch):
    configs, covered = heuristics.shipped_configs(arch), tiers.shipped_configs(arch)
    for field in dataclasses.fields(FwdConfig):
        wanted, found = ({getattr(c, field.name) for c in group} for group in (configs, covered))
        assert found == wanted, field.name
    assert {(c.dtype, c.mask) for c in covered} == {(c.dtype, c.mask) for c in configs}


def test_what_is_left_out_is_covered_in_bf16():
    covered = set(tiers.shipped_configs())
    left = set(heuristics.shipped_configs()) - covered
    assert left and all(dataclasses.replace(c, dtype="bf16") in covered for c in left)


def test_what_nvcc_leaves_out_of_it_has_a_causal_twin_in_bf16():
    shipped = heuristics.shipped_configs()
    compiled = {config for config in shipped if tiers.compiles(config)}
    left = [config for config in shipped if tiers.covers(config) and config not in compiled]
    left = [c for c in left if c.arch == 90 or c.head_dim in tiers._NVCC_SM80]
    assert left and all(c.mask == "none" or c.dtype == "fp16" for c in left)
    assert all(dataclasses.replace(c, dtype="bf16", mask="causal") in compiled for c in left)
    assert {c.head_dim for c in compiled if c.arch == 80} == set(tiers._NVCC_SM80)
    for arch in (80, 90):
        of_class = [config for config in compiled if config.arch == arch]
        assert {config.mask for config in of_class} == {"none", "causal"}
        assert {config.dtype for config in of_class} == {"bf16", "fp16"}
        tiles = {dataclasses.replace(c, dtype="bf16", mask="none") for c in of_class}
        wanted = {dataclasses.replace(c, dtype="bf16", mask="none") for c in shipped}
        wanted = {c for c in wanted if c.arch == 90 or c.head_dim in tiers._NVCC_SM80}
        assert tiles == {config for config in wanted if config.arch == arch}


def test_kernels_of_calls_that_are_covered_ship():
    of_calls = [c for c in shipped.configs_of_calls((9, 0)) if tiers.covers(c)]
    assert {c.full_name for c in of_calls if c.kind == "bwd" or not c.paged} == tiers._OF_CALLS


def test_every_forward_over_pages_in_the_sm90_class_is_covered():
    """Pages cost registers: five of these kernels once spilled unseen."""
    forwards = [c for c in shipped.instantiations().values() if c.kind == "fwd"]
    over_pages = [c for c in forwards if c.arch == 90 and c.paged]
    assert over_pages and all(map(tiers.covers, over_pages))
    left = [config for config in over_pages if not tiers.compiles(config)]
    assert all(config.mask == "none" for config in left)
    assert all(tiers.compiles(dataclasses.replace(config, mask="causal")) for config in left)


def test_of_backwards_that_do_not_ship_each_main_loop_is_covered():
    """These are backwards of ragged batches, and backwards with options."""
    covered = [config for config in KERNELS.values() if tiers.covers(config)]
    covered = [config for config in covered if config not in shipped.instantiations().values()]
    assert {config.full_name for config in covered} == tiers._UNSHIPPED
    ragged = [config for config in covered if config.varlen]
    assert {config.head_dim > 128 for config in ragged} == {False, True}
    scored = [config for config in covered if not config.varlen]
    assert {min(config.head_dim // 64, 3) for config in scored} == {1, 2, 3}
    for option in ("softcap", "alibi", "dropout"):
        assert any(getattr(config, option) for config in scored), option


def test_all_is_all(monkeypatch):
    monkeypatch.setattr(tiers, "everything", True)
    assert tiers.shipped_configs() == heuristics.shipped_configs()
    assert all(map(tiers.compiles, heuristics.shipped_configs()))
    assert all(map(tiers.covers, heuristics.shipped_bwd_configs()))


def test_backwards_covered_differ_in_all_but_the_head_dimension():
    shipped = heuristics.shipped_bwd_configs()
    covered = [config for config in shipped if tiers.covers(config)]
    assert 0 < len(covered) <= 9
    for field in ("arch", "dtype", "mask", "split_dkv", "fused"):
        wanted, found = ({getattr(c, field) for c in group} for group in (shipped, covered))
        assert found == wanted, field
