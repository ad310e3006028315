"""Every kernel that ships compiles for an H100/H200, as it is committed, without a spill."""

from __future__ import annotations

import pytest

from flashcute import heuristics, jit
from flashcute.config import MAX_SMEM_BYTES
from flashcute.jit import toolchain
from flashcute.jit.sources import kernel_include_dir

TARGET = "90"
CONFIGS = heuristics.shipped_configs()


@pytest.fixture(scope="module")
def built():
    """All kernels, compiled side by side; the cache keeps what has not changed."""
    try:
        toolchain.find_nvcc()
    except jit.BuildError as error:
        pytest.skip(f"no CUDA compiler: {error}")
    results = jit.build_kernels([(config, TARGET) for config in CONFIGS])
    return {config.name: result for config, result in zip(CONFIGS, results, strict=True)}


def test_the_shipped_set():
    assert len(CONFIGS) == len({config.name for config in CONFIGS}) == 24


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_compiles_without_spills(built, config):
    result = built[config.name]
    assert result.error is None, result.error
    assert result.artefact.meta["spill_bytes"] == 0
    # What the configuration promises must hold at once: so many CTAs' registers in one SM's file.
    registers = result.artefact.meta["registers"]
    assert 0 < registers * config.threads * config.min_ctas <= 65536
    assert config.smem_bytes * config.min_ctas <= MAX_SMEM_BYTES[9, 0]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_the_committed_file_is_what_is_compiled(config):
    committed = kernel_include_dir() / "instantiations" / f"{config.name}.cu"
    assert committed.read_text(encoding="utf-8") == jit.source_text(config)
