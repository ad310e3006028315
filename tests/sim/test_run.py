"""Inputs that `run_fwd` rejects, and its reports on kernels that hang or do not compile."""

import mutants
import pytest
import torch

from flashcute import sim
from flashcute.jit import sources
from flashcute.jit.toolchain import BuildError
from flashcute.sim.build import companions, dynamic_smem

CONFIG = mutants.TWO_STAGES


def tensors(d=32, dtype=torch.float16, seqlen_q=3, h_k=1):
    q = torch.ones(1, seqlen_q, 2, d, dtype=dtype)
    return [q, *(torch.ones(1, 5, h_k, d, dtype=dtype) for _ in range(2))]


@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        (tensors(dtype=torch.bfloat16), {}, TypeError, r"q of dtype torch.float16.*got q.dtype="),
        (tensors(d=40), {}, ValueError, r"multiple of 8 up to 32, got 40"),
        (tensors(d=12), {}, ValueError, r"multiples of 8 elements, got q.stride"),
        (tensors(seqlen_q=0), {}, ValueError, r"at least one query"),
        (tensors(h_k=3), {}, ValueError, r"heads that divide those of q"),
        (tensors(), {"copy_mode": "never"}, ValueError, r"copy_mode in .*got 'never'"),
        (tensors(), {"checker": "valgrind"}, ValueError, r"checker in .*got 'valgrind'"),
        (tensors(), {"softmax_scale": 0.0}, ValueError, r"softmax_scale > 0, got 0.0"),
    ],
)
def test_refuses(inputs, options, error, message):
    with pytest.raises(error, match=message):
        sim.run_fwd(*inputs, CONFIG, **options)


def test_reports_a_kernel_that_never_ends(tmp_path):
    read_lengths = "    SeqlenInfo const seqlen(params);"
    endless = mutants.Mutant(
        name="endless loop",
        file="flash_fwd_kernel_sm80.h",
        old=read_lengths,
        new=f"    for (int volatile spin = 0;; spin = 1) {{}}\n{read_lengths}",
        finder="",
    )
    folder = mutants.plant(endless, sources.kernel_include_dir(), tmp_path / "endless")
    (path,) = sim.build_kernels([(CONFIG, "none")], kernel_dir=folder)
    result = sim.run_fwd(*tensors(), CONFIG, kernel=(path, CONFIG.full_name), timeout=2)
    assert result.verdict == "fail"
    assert "did not finish within 2 s" in result.message


def test_reports_what_does_not_compile(tmp_path):
    # A missing header stops the compiler at once; after other errors it continues for seconds.
    missing = '#include "broken_on_purpose.h"'
    broken = mutants.Mutant("broken", "flash.h", "#pragma once", missing, "")
    folder = mutants.plant(broken, sources.kernel_include_dir(), tmp_path / "broken")
    with pytest.raises(BuildError, match=r"broken_on_purpose\.h: No such file"):
        sim.build_kernels([(CONFIG, "none")], kernel_dir=folder)


def test_dynamic_shared_memory_must_be_one_array(tmp_path):
    (tmp_path / "a.h").write_text("extern __shared__ char one[];")
    assert dynamic_smem(tmp_path) == ("char", "one")
    (tmp_path / "b.h").write_text("extern __shared__ __align__(16) float two[];")
    with pytest.raises(BuildError, match="one `extern __shared__"):
        dynamic_smem(tmp_path)


def test_companions_share_a_head_dimension():
    from flashcute.heuristics import shipped_configs

    for config in shipped_configs():
        together = companions(config)
        assert config in together and len(together) >= 4
        assert {(c.arch, c.head_dim) for c in together} == {(config.arch, config.head_dim)}
    assert companions(CONFIG) == (CONFIG,)
