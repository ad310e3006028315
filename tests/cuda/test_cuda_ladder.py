"""Every rung of examples/ladder on the GPU against the reference."""

from __future__ import annotations

import pytest
import torch
from ladder import RUNGS, launch, rungs

from flashcute import benchmarking as bm
from flashcute import jit, testing

SEQLENS_Q = (1, 16, 17, 64, 65, 130, 200, 257)
SEQLENS_K = (0, 1, 33, 64, 127, 256, 500)


@pytest.fixture(scope="module")
def wanted():
    """Returns the rungs that this GPU runs, after building all of them."""
    major, minor = torch.cuda.get_device_capability()
    found = [rung for rung in RUNGS if rung.runs_on(10 * major + minor)]
    for rung, result in launch.build_rungs(found, f"{major}{minor}").items():
        assert result.artefact is not None, (rung.name, result.error)
    return found


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("d", rungs.HEAD_DIMS)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=("fp16", "bf16"))
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_rung(wanted, rung, dtype, d, causal, poisoned_outputs, count_cases):
    if rung not in wanted:
        pytest.skip(f"{rung.name} does not run on {torch.cuda.get_device_name()}")
    for seqlen_q in SEQLENS_Q:
        for seqlen_k in SEQLENS_K:
            shape = bm.Shape(2, seqlen_q, seqlen_k, 4, 2, d, causal)
            q, k, v = bm.make_qkv(shape, dtype, "cuda", seed=seqlen_q)
            out, lse = launch.attention(rung.name, q, k, v, causal=causal)
            testing.check_forward(out, lse, q, k, v, causal=causal)
    count_cases("ladder", len(SEQLENS_Q) * len(SEQLENS_K))


def test_strides_and_scale(wanted, count_cases):
    for rung in wanted:
        packed = torch.randn(2, 70, 3, 4, 64, dtype=torch.float16, device="cuda")
        q, k, v = packed.unbind(2)
        out, lse = launch.attention(rung.name, q, k, v, causal=True, softmax_scale=0.3)
        testing.check_forward(out, lse, q, k, v, causal=True, softmax_scale=0.3)
        count_cases("ladder", 1)


def test_empty(wanted):
    q = torch.empty(0, 5, 2, 64, dtype=torch.float16, device="cuda")
    for rung in wanted:
        out, lse = launch.attention(rung.name, q, q, q)
        assert out.shape == q.shape and lse.shape == (0, 2, 5)


def test_a_missing_compiler_is_an_error_and_no_fallback(wanted, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    q = torch.randn(1, 4, 1, 64, dtype=torch.float16, device="cuda")
    launch.load.cache_clear()
    launch._library.cache_clear()
    with pytest.raises(jit.BuildError, match="expected nvcc"):
        launch.attention("8", q, q, q)
