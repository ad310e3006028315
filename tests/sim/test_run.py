"""What `run_fwd` refuses, what it reports of broken kernels, and kernels with other parameters."""

import ctypes
from dataclasses import replace

import mutants
import pytest
import torch

from flashcute import sim
from flashcute.jit import build, sources, toolchain
from flashcute.jit.toolchain import BuildError
from flashcute.sim import build as sim_build
from flashcute.sim import run as sim_run
from flashcute.sim.build import companions, device_unit

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


@pytest.mark.parametrize(
    "slopes", [torch.ones(3), torch.ones(1, 2), torch.ones(2, 2, 1), torch.ones(2).half()], ids=str
)
def test_refuses_slopes_that_are_not_one_for_each_head(slopes):
    sloped = replace(CONFIG, alibi=True)
    expected = r"alibi_slopes of float32 and of shape \(2,\) or \(2, 2\), got torch.float"
    q, k, v = (x.expand(2, -1, -1, -1) for x in tensors())
    with pytest.raises(ValueError, match=rf"^sim.run_fwd: expected {expected}"):
        sim.run_fwd(q, k, v, sloped, alibi_slopes=slopes)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"^sim.run_fwd: expected {expected}"):
        sim.run_varlen(*packed, cu, cu, sloped, max_seqlen_q=3, alibi_slopes=slopes)


def test_slopes_of_heads_alone_are_those_of_each_entry(monkeypatch):
    given = {}
    monkeypatch.setattr(sim_run, "run_fwd_program", lambda _, inputs, *args: given.update(inputs))
    monkeypatch.setattr(sim_run, "_runner", lambda checker: "runner")
    q, k, v = (x.expand(2, -1, -1, -1) for x in tensors())
    slopes, kernel = torch.tensor([0.5, 0.25]), ("kernel.so", "function")
    sim.run_fwd(q, k, v, replace(CONFIG, alibi=True), alibi_slopes=slopes, kernel=kernel)
    assert torch.equal(given["alibi_slopes"], slopes.expand(2, 2))


def test_reports_a_kernel_that_never_ends(tmp_path):
    first_step = "    typename Mainloop::SoftmaxT softmax("
    endless = mutants.Mutant(
        name="endless loop",
        file="flash_fwd_kernel_sm80.h",
        old=first_step,
        new=f"    for (int volatile spin = 0;; spin = 1) {{}}\n{first_step}",
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


def test_shared_memory_that_is_not_dynamic_does_not_compile():
    """Blocks that run at the same time would share it."""
    text = "#include <cuda_runtime.h>\n__global__ void kernel() { __shared__ float sums[8]; }"
    (result,) = build.build_many([device_unit("static", text, ())], toolchain.find_host_compiler())
    assert "has_to_be_dynamic_smem" in result.error


def test_companions_share_a_head_dimension(monkeypatch):
    from flashcute.heuristics import shipped_configs

    monkeypatch.setattr(sim_build, "_together", {})
    for config in shipped_configs():
        together = companions(config)
        assert config in together and len(together) >= 4
        assert {(c.arch, c.head_dim) for c in together} == {(config.arch, config.head_dim)}
    alone = replace(CONFIG, softcap=True)
    assert companions(alone) == (alone,)


def test_what_is_compiled_together_is_said_for_each_checker(monkeypatch):
    monkeypatch.setattr(sim_build, "_together", {})
    local = replace(CONFIG, mask="local")
    sim.compile_together((CONFIG, local), ("none", "memcheck"))
    (unit,) = {sim_build.kernel_unit(config, "memcheck") for config in (CONFIG, local)}
    assert all(f"{config.full_name}()" in unit.source for config in (CONFIG, local))
    assert companions(local) == (CONFIG, local)
    assert companions(CONFIG, "racecheck") == (CONFIG,)
    with pytest.raises(ValueError, match=r"compile_together: expected configs of one pass.*64"):
        sim.compile_together((CONFIG, mutants.ONE_STAGE))


class SumParams(ctypes.Structure):
    """The struct ``Params`` of :data:`SUM`."""

    _fields_ = [
        ("n", ctypes.c_int64),
        ("terms_ptr", ctypes.c_void_p),
        ("unused_ptr", ctypes.c_void_p),
        ("total_ptr", ctypes.c_void_p),
        ("at", ctypes.c_int64),
    ]


class LongerParams(ctypes.Structure):
    _fields_ = [*SumParams._fields_, ("more", ctypes.c_int64)]


# A kernel that adds `terms` to total[at] and ends with an error if a pointer is not as expected.
SUM = """
#include "flash.h"
struct Params { int64_t n; int32_t *terms, *unused, *total; int64_t at; };
int32_t add(flash::Flash_fwd_params const *raw, void *) {
    auto const &p = *reinterpret_cast<Params const *>(raw);
    if (p.unused || !p.terms || uint64_t(p.terms) % 256 || uint64_t(p.total) % 256) {
        return 1;
    }
    for (int64_t i = 0; i < p.n; ++i) {
        p.total[p.at] += p.terms[i];
    }
    return 0;
}
extern "C" flash::Flash_kernel const *sum() {
    static flash::Flash_kernel const kernel{
        .abi_version = flash::kAbiVersion, .params_size = sizeof(Params), .launch = add};
    return &kernel;
}
"""


@pytest.fixture(scope="module")
def run_sum():
    """Returns a function that runs :data:`SUM` twice on 1 + 2 + 3 and a total of 10."""
    unit = build.Unit(
        name="sum",
        target="sim-test",
        source=SUM,
        suffix=".cpp",
        flags=("-std=c++20", "-fPIC", "-shared"),
        project_dirs=(sources.kernel_include_dir(),),
    )
    path = build.build(unit, toolchain.find_host_compiler()).artefact.path
    (runner,) = sim.build_runners(["none"])

    def run(params):
        inputs = {"terms": torch.arange(1, 4, dtype=torch.int32)}
        outputs = {"total": torch.full((1,), 10, dtype=torch.int32)}
        program, settings = [str(runner), str(path), "sum"], (0, 0, 0, 1, 2, 0, 1, 0, 1)
        return sim_run.run_program(program, params, inputs, outputs, settings, 60.0)

    return run


def test_a_kernel_with_parameters_of_its_own(run_sum):
    result = run_sum(SumParams(n=3))
    assert result.verdict == "pass", result.message
    assert {name: x.tolist() for name, x in result.outputs.items()} == {"total": [16]}
    assert result.out is None and result.lse is None


def test_a_write_outside_of_any_buffer_names_it(run_sum):
    result = run_sum(SumParams(n=3, at=1))
    assert result.verdict == "fail" and not result.outputs
    assert result.message == "the kernel wrote outside of total, at byte 4 of 4"


def test_parameters_of_another_size_are_refused(run_sum):
    result = run_sum(LongerParams(n=3))
    assert result.verdict == "fail"
    assert "the kernel was built against another flash.h" in result.message
