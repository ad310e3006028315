"""Finding, building and checking kernels. No kernel is launched, so no GPU is needed."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import threading

import pytest
import torch

from flashcute import heuristics
from flashcute.jit import BuildError, binding, build, cache, get_kernel, kernels, sources, toolchain
from flashcute.jit.abi import FlashBwdParams, FlashFwdParams, FlashKernel

CONFIG = heuristics.fwd_config("fp16", 32, False, (8, 0))
BACKWARD = heuristics.bwd_config("fp16", 32)

# A stand-in for a kernel's shared object that satisfies the loader, compiled with g++. The {..} are
# what it claims of itself.
_FAKE = """\
#include "flash.h"
extern "C" const flash::{kernel_type} *{entry_point}() {{
    static const flash::{kernel_type} kernel{{
        {abi_version}, {params_size}, "{name}", {threads}, {smem_bytes}, {tile_m}, {dq_accum},
        [](const flash::{params} *, void *) -> int32_t {{ return 7; }}, nullptr,
        [](int32_t) {{ return "an error"; }},
    }};
    return &kernel;
}}
"""


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    """Makes tests start without prebuilt or loaded kernels and with an empty cache."""
    monkeypatch.setattr(sources, "prebuilt_dir", lambda: tmp_path / "prebuilt")
    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setenv("FLASHCUTE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHCUTE_NO_BUILD", raising=False)


@pytest.fixture
def no_nvcc(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-cuda"))


def fake_kernel(config=CONFIG, **claims) -> cache.Artefact:
    params = f"Flash_{config.kind}_params"
    values = {
        "kernel_type": sources.kernel_type(config),
        "entry_point": sources.entry_point(config),
        "params": params,
        "abi_version": "flash::kAbiVersion",
        "params_size": f"sizeof(flash::{params})",
        "name": config.full_name,
        "threads": config.threads,
        "smem_bytes": config.smem_bytes,
        "tile_m": config.tile_m,
        "dq_accum": config.dq_accum,
        **claims,
    }
    unit = build.Unit(
        name=config.full_name,
        target="host",
        source=_FAKE.format(**values),
        suffix=".cpp",
        flags=("-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden"),
        project_dirs=(sources.kernel_include_dir(),),
    )
    made = build.build(unit, toolchain.find_host_compiler()).artefact
    return cache.Artefact(made.path, {**made.meta, "registers": 128, "spill_bytes": 0})


def place_prebuilt(target: str, config=CONFIG) -> cache.Artefact:
    """Places a fake kernel as the package's prebuilt one for ``target``, with a fitting record."""
    made = fake_kernel(config)
    unit = kernels.kernel_unit(config, target)
    record = {**made.meta, "source_key": unit.source_key()}
    folder = sources.prebuilt_dir() / unit.target
    return cache.copy(cache.Artefact(made.path, record), folder, unit.name)


def test_load_reads_the_description():
    made = fake_kernel()
    kernel = kernels.load(made, CONFIG, "80")
    assert (kernel.config, kernel.target, kernel.path) == (CONFIG, "80", made.path)
    assert (kernel.threads, kernel.smem_bytes) == (CONFIG.threads, CONFIG.smem_bytes)
    assert (kernel.registers, kernel.spill_bytes) == (128, 0)
    description = FlashKernel.from_address(kernel.address)
    assert description.name.decode() == CONFIG.full_name
    assert description.launch(ctypes.byref(FlashFwdParams()), None) == 7
    assert description.error_string(7) == b"an error"


def test_load_of_a_backward():
    kernel = kernels.load(fake_kernel(BACKWARD), BACKWARD, "80")
    assert (kernel.threads, kernel.smem_bytes) == (BACKWARD.threads, BACKWARD.smem_bytes)
    description = FlashKernel.from_address(kernel.address)
    assert description.params_size == ctypes.sizeof(FlashBwdParams)
    with pytest.raises(BuildError, match="undefined symbol: flash_bwd_kernel"):
        kernels.load(fake_kernel(), BACKWARD, "80")


def test_missing_backward_says_a_way_out(monkeypatch):
    monkeypatch.setenv("FLASHCUTE_NO_BUILD", "1")
    with pytest.raises(
        BuildError, match=r"NO_BUILD=1; unset it, or run .*--pass bwd --head-dim 32"
    ):
        get_kernel(BACKWARD, "80")
    # The command cannot build kernels with a window, so the message does not name it.
    with pytest.raises(BuildError, match=r"while FLASHCUTE_NO_BUILD=1; unset it$"):
        get_kernel(dataclasses.replace(BACKWARD, mask="local"), "80")


@pytest.mark.parametrize("option", ["softcap", "alibi", "dropout"])
def test_no_command_builds_a_kernel_with_options(monkeypatch, option):
    monkeypatch.setenv("FLASHCUTE_NO_BUILD", "1")
    config = dataclasses.replace(heuristics.shipped_configs(80)[0], **{option: True})
    with pytest.raises(BuildError, match=r"while FLASHCUTE_NO_BUILD=1; unset it$"):
        get_kernel(config, "80")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("abi_version", 999),
        ("params_size", 8),
        ("name", "flash_fwd_hdim64_fp16_sm80"),
        ("threads", 64),
        ("smem_bytes", 1024),
        ("tile_m", 16),
        ("dq_accum", 64),
    ],
)
def test_a_stale_file_is_a_message(field, value):
    with pytest.raises(BuildError, match=f"expected {field}=.*got {field}=.*{value}.*remove"):
        kernels.load(fake_kernel(**{field: value}), CONFIG, "80")


def test_a_file_that_is_no_kernel_is_a_message(tmp_path):
    path = tmp_path / "x.so"
    path.write_bytes(b"no shared object")
    with pytest.raises(BuildError, match=r"expected a kernel in .*x\.so"):
        kernels.load(cache.Artefact(path, {}), CONFIG, "80")


CANNOT_MAP = "failed to map segment from shared object"


def test_a_folder_mounted_noexec_is_named(monkeypatch, tmp_path):
    def load(path, **_):
        raise OSError(f"{path}: {CANNOT_MAP}")

    made = cache.Artefact(tmp_path / "x.so", {})
    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(BuildError, match=r"noexec: set FLASHCUTE_CACHE_DIR"):
        kernels.load(made, CONFIG, "80")


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        (CANNOT_MAP, "noexec: set FLASHCUTE_CACHE_DIR"),
        ("cannot open shared object file", "remove the file, it is then built again"),
        ("undefined symbol: torch_call_dispatcher", "flashcute needs torch 2.10 or later"),
    ],
)
def test_torch_is_blamed_for_its_symbols_alone(monkeypatch, tmp_path, said, advice):
    def load(path):
        raise OSError(f"{path}: {said}")

    made = cache.Artefact(tmp_path / "x.so", {})
    monkeypatch.setattr(binding, "_find_or_build", lambda: made)
    monkeypatch.setattr(torch.ops, "load_library", load)
    with pytest.raises(BuildError, match=rf"cannot load the binding .*{said}; .*{advice}") as error:
        binding.load_binding.__wrapped__()
    assert ("torch 2.10" in str(error.value)) == ("symbol" in said)


def test_prebuilt_needs_no_compiler_and_loads_once(no_nvcc):
    placed = place_prebuilt("80")
    kernel = get_kernel(CONFIG, "80")
    assert kernel.path == placed.path
    assert get_kernel(CONFIG, "80") is kernel


@pytest.fixture
def loading(monkeypatch):
    """Starts a thread that is building another kernel until the test ends; returns its config."""
    started, go_on = threading.Event(), threading.Event()
    other = heuristics.fwd_config("bf16", 32, False, (8, 0))
    find_or_build = kernels._find_or_build

    def slow(config, target):
        if config != other or threading.current_thread() is not thread:
            return find_or_build(config, target)
        started.set()
        go_on.wait(60)
        raise BuildError("no compiler here")

    def load():
        with pytest.raises(BuildError):
            get_kernel(other, "80")

    monkeypatch.setattr(kernels, "_find_or_build", slow)
    thread = threading.Thread(target=load)
    thread.start()
    assert started.wait(60)
    yield other
    go_on.set()
    thread.join()


def test_a_prebuilt_kernel_does_not_wait_for_another_kernels_build(no_nvcc, loading):
    placed = place_prebuilt("80")
    found = []
    thread = threading.Thread(target=lambda: found.append(get_kernel(CONFIG, "80")), daemon=True)
    thread.start()
    thread.join(30)
    assert [kernel.path for kernel in found] == [placed.path]


def test_a_fork_during_a_load_leaves_the_child_free_to_load(no_nvcc, loading):
    placed = place_prebuilt("80", loading)
    child = os.fork()
    if child == 0:  # the child must not run pytest's code
        signal.alarm(30)
        os._exit(0 if get_kernel(loading, "80").path == placed.path else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_prebuilt_serves_later_gpus_of_its_generation(no_nvcc):
    placed = place_prebuilt("80")
    assert get_kernel(CONFIG, "89").path == placed.path
    for target in ("87", "90"):
        with pytest.raises(BuildError, match="neither among the package's prebuilt kernels nor in"):
            get_kernel(CONFIG, target)


def test_compatible_targets():
    assert kernels.compatible_targets("80") == ["80"]
    assert kernels.compatible_targets("89") == ["89", "86", "80"]
    assert kernels.compatible_targets("87") == ["87"]
    assert kernels.compatible_targets("90") == ["90"]
    assert kernels.compatible_targets("121") == ["121", "120"]


def test_prebuilt_of_other_sources_is_not_used(no_nvcc):
    placed = place_prebuilt("80")
    record = placed.path.with_suffix(".json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "source_key": "0" * 64}))
    with pytest.raises(BuildError, match="cannot be built: flashcute: expected nvcc"):
        get_kernel(CONFIG, "80")


def of_no_compiler(name: str):
    def find():
        raise BuildError(f"flashcute: expected {name}, got none; install it")

    return find


def test_a_kernel_in_the_cache_needs_no_compiler(monkeypatch, tmp_path):
    """It may be built after `module load cuda` and used without, or in an image without nvcc."""
    unit = kernels.kernel_unit(CONFIG, "80")
    made = fake_kernel()
    meta = {**made.meta, "source_key": unit.source_key(), "key": "1" * 64}
    copied = cache.copy(
        cache.Artefact(made.path, meta), tmp_path / "cache", f"{unit.name}-sm_80-{'1' * 32}"
    )
    monkeypatch.setattr(toolchain, "find_nvcc", of_no_compiler("nvcc"))
    assert kernels.find_built(CONFIG, "80")[0] == "cache"
    assert get_kernel(CONFIG, "80").path == copied.path
    assert kernels.find_built(CONFIG, "86")[0] == "not built"
    # A cached kernel counts only if it is intact and was built from these sources.
    copied.path.unlink()  # the file is mapped: truncating it would end this process by SIGBUS
    copied.path.write_bytes(b"damaged")
    assert kernels.find_built(CONFIG, "80")[0] == "not built"
    cache.copy(made, tmp_path / "cache", copied.path.stem)
    assert kernels.find_built(CONFIG, "80")[0] == "not built"


def test_the_binding_in_the_cache_needs_no_compiler(monkeypatch, tmp_path):
    unit = dataclasses.replace(
        binding.binding_unit("flashcute"), source="int x;", libraries=(), external_dirs=()
    )
    made = build.build(unit, toolchain.find_host_compiler()).artefact
    monkeypatch.setattr(binding, "binding_unit", lambda namespace: unit)
    monkeypatch.setattr(toolchain, "find_host_compiler", of_no_compiler("g++"))
    assert binding._find_or_build().path == made.path
    made.path.unlink()
    with pytest.raises(BuildError, match=r"expected g\+\+, got none"):
        binding._find_or_build()


OF_HOPPER = heuristics.shipped_configs(90)[0]


@pytest.mark.parametrize("target", [target for target in kernels.TARGETS if target != "90"])
def test_kernel_of_the_sm90_class_is_for_hopper_alone(target):
    """wgmma is in the code of compute capability 9.0 only, not even in that of 10.0."""
    for ask in (kernels.kernel_unit, get_kernel, kernels.find_built):
        with pytest.raises(ValueError, match=f"expected target '90' .*, got target='{target}'"):
            ask(OF_HOPPER, target)


def test_each_class_is_compiled_for_the_code_it_needs():
    assert "-gencode=arch=compute_90a,code=sm_90a" in kernels.kernel_unit(OF_HOPPER, "90").flags
    assert "-gencode=arch=compute_90,code=sm_90" in kernels.kernel_unit(CONFIG, "90").flags


def test_prebuilt_kernel_of_the_sm90_class_is_found(no_nvcc):
    place_prebuilt("90", OF_HOPPER)
    kernel = get_kernel(OF_HOPPER, "90")
    assert (kernel.threads, kernel.smem_bytes) == (OF_HOPPER.threads, OF_HOPPER.smem_bytes)


@pytest.mark.parametrize("target", ["75", "sm_90", "9.0", "", "90a", "88"])
def test_unknown_target(target):
    with pytest.raises(ValueError, match=f"expected target to be one of 80, .*target='{target}'"):
        get_kernel(CONFIG, target)


def test_no_build_turns_a_build_into_an_error(monkeypatch, tmp_path):
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n[ $1 = --version ] && echo 1 || touch $0.ran\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("FLASHCUTE_NO_BUILD", "1")
    with pytest.raises(BuildError, match=r"FLASHCUTE_NO_BUILD=1.*build --pass fwd --head-dim 32"):
        get_kernel(CONFIG, "80")
    assert not nvcc.with_name("nvcc.ran").exists()
    assert not (tmp_path / "cache").exists()


def test_wrong_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("FLASHCUTE_NOBUILD", "1")
    with pytest.raises(ValueError, match="got FLASHCUTE_NOBUILD; unset it"):
        get_kernel(CONFIG, "80")


def test_missing_cutlass_names_the_script(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "cutlass_include_dir", lambda: tmp_path)
    with pytest.raises(BuildError, match=r"run `python third_party/fetch_cutlass.py`"):
        kernels.build_kernels([(CONFIG, "80")])


def test_a_real_kernel_builds_loads_and_is_found_again(monkeypatch):
    """The test uses the user's cache, so only the first run on changed sources takes 20 seconds."""
    monkeypatch.delenv("FLASHCUTE_CACHE_DIR")
    try:
        (result,) = kernels.build_kernels([(CONFIG, "80")])
    except BuildError as error:
        pytest.skip(str(error))
    assert result.error is None
    kernel = get_kernel(CONFIG, "80")
    assert kernel.path == result.artefact.path
    assert 0 < kernel.registers <= 255
    assert kernel.spill_bytes == 0
    assert kernels.find_built(CONFIG, "80")[0] == "cache"
    assert kernels.find_built(CONFIG, "89")[0] == "not built"
