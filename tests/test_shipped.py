"""The kernels of the commonest calls are prebuilt, and every prebuilt kernel has its file."""

from __future__ import annotations

import dataclasses

import pytest

from flashcute import heuristics, shipped
from flashcute.jit import kernels, source_text, sources
from flashcute.support import CAPABILITIES


@pytest.fixture(autouse=True)
def _newest_class(monkeypatch):
    monkeypatch.delenv("FLASHCUTE_ARCH", raising=False)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_calls_of_public_models_build_nothing(capability):
    prebuilt = {*shipped.dense_configs(capability), *shipped.configs_of_calls(capability)}
    assert len(shipped.CALLS) >= 20
    for name, calls in shipped.CALLS.items():
        for call in calls:
            for sms in (108, 114, 132):
                assert call.config(capability, sms) in prebuilt, (name, call.problem, sms)


def test_a_call_chooses_as_the_operators_do():
    call = shipped.CALLS["llama-3-8b, packed training"][0]
    assert call.config((9, 0)) == heuristics.choose_bwd(call.problem, (9, 0))
    forward = dataclasses.replace(call, backward=False)
    assert forward.config((9, 0)) == heuristics.choose_fwd(call.problem, (9, 0))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_kernels_of_calls_are_beside_the_dense_ones(capability):
    configs = shipped.configs_of_calls(capability)
    dense = shipped.dense_configs(capability)
    assert configs and len(set(configs)) == len(configs) and set(configs).isdisjoint(dense)
    assert {config.kind for config in configs} == {"fwd", "bwd"}
    assert any(config.mask == "local" for config in configs)
    for option in ("softcap", "paged", "varlen"):
        assert any(getattr(config, option, False) for config in configs), option


def test_instantiations_are_what_ships():
    found = shipped.instantiations()
    of_calls = {*shipped.configs_of_calls((9, 0)), *shipped.configs_of_calls((8, 0))}
    dense = {*heuristics.shipped_configs(), *heuristics.shipped_bwd_configs()}
    assert set(found.values()) == dense | of_calls and len(found) == len(dense | of_calls)
    for stem, config in found.items():
        if config.kind == "bwd":
            assert stem == config.name
            continue
        tile = f"{config.name}_{config.tile_m}x{config.tile_n}"
        assert stem in (config.name, tile, f"{tile}_s{config.stages}")
        if config.arch == 90 and config in dense:
            first = heuristics.sm90_configs(config.dtype, config.head_dim, config.mask == "causal")
            assert (stem == config.name) == (config == first[0])


def test_committed_files_are_the_generated_text():
    folder = sources.kernel_include_dir() / "instantiations"
    wanted = {f"{stem}.cu": source_text(c) for stem, c in shipped.instantiations().items()}
    assert {path.name: path.read_text() for path in folder.iterdir()} == wanted


def test_the_command_that_builds_a_kernel():
    of_calls = shipped.configs_of_calls((9, 0))[0]
    assert kernels.build_arguments(of_calls, "90") == "--all --target 90"
    dense = heuristics.sm90_configs("fp16", 64, True)[0]
    chosen = "--pass fwd --head-dim 64 --dtype fp16 --causal yes --target 90"
    assert kernels.build_arguments(dense, "90") == chosen
    # This kernel does not ship; it is built when it is first used.
    other = dataclasses.replace(of_calls, dtype="fp16")
    assert kernels.build_arguments(other, "90") == ""
