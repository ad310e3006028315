"""Wheels with and without kernels are made, installed in a clean environment and used there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest
import tiers
import torch
from test_setup import setup, tracked

from flashcute import shipped
from flashcute.jit import BuildError, cache, toolchain

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(
    not (ROOT / "third_party" / "cutlass").is_dir(),
    reason="CUTLASS's headers are not there: python third_party/fetch_cutlass.py",
)


class Clean:
    """A virtual environment with the wheel; torch and its dependencies come from this one."""

    def __init__(self, folder: Path, wheel: Path):
        venv.create(folder, with_pip=False)
        self.folder, self.python = folder, folder / "bin" / "python"
        (self.home,) = (folder / "lib").glob("python*/site-packages")
        pip = (sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check")
        status, _, said = self.run(*pip, "install", "--no-deps", "--no-index", wheel)
        assert status == 0, said
        (self.home / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))

    def run(self, *command, **variables) -> tuple[int, str, str]:
        """Runs a command in an empty home; returns its status, output and errors."""
        taken = ("FLASHCUTE_", "PYTHON", "XDG_", "CUDA_HOME", "CXX")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(taken)}
        done = subprocess.run(
            list(map(str, command)), cwd=self.folder, capture_output=True, text=True, check=False,
            env=environment | {"HOME": str(self.folder), **variables},
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr


USED = """
import torch, torch.nn.functional as F
import flashcute

q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
torch.testing.assert_close(flashcute.flash_attn_func(q, k, v), expected.transpose(1, 2))
with flashcute.enabled():
    pass
print(flashcute.__file__)
"""


def test_a_wheel_without_kernels_is_used(tmp_path):
    build = ("build", "--build-base", tmp_path / "build")
    setup("egg_info", "--egg-base", tmp_path, *build, "bdist_wheel", "--dist-dir", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl") and wheel.stat().st_size < 8 << 20
    clean = Clean(tmp_path / "clean", wheel)
    status, printed, said = clean.run(clean.python, "-c", USED)
    assert status == 0 and printed.strip() == str(clean.home / "flashcute" / "__init__.py"), said
    _, printed, said = clean.run(clean.python, "-m", "flashcute", "doctor")
    assert said == "" and "CUTLASS  CUTLASS 4" in printed


# By target, some of the kernels that `make wheel` builds; other tests compile them anyway.
FEW = {
    "80": {"flash_fwd_hdim64_bf16_causal_sm80_128x64_w4_s2_qreg_c2"},
    "90": {
        "flash_fwd_hdim32_bf16_causal_sm90_64x64_s2_c4",
        "flash_fwd_hdim64_bf16_causal_paged_sm90_64x128_s2_c2",
        "flash_bwd_hdim128_bf16_causal_sm90_128x64_s2",
    },
}

# Makes a process behave as if only the kernels of FEW shipped.
SHIP_FEW = f"""
from flashcute import shipped

def few(configs):
    return lambda capability: [
        c for c in configs(capability) if c.full_name in {FEW}["%d%d" % capability]
    ]

for name in ("dense_configs", "configs_of_calls"):
    setattr(shipped, name, few(getattr(shipped, name)))
"""


def test_few_kernels_are_some_that_tests_compile_anyway():
    covered = {c.full_name: c for c in shipped.instantiations().values() if tiers.compiles(c)}
    for target, names in FEW.items():
        capability = int(target[0]), int(target[1])
        ships = shipped.dense_configs(capability) + shipped.configs_of_calls(capability)
        assert names <= {c.full_name for c in ships} & set(covered)
    assert {covered[name].kind for name in FEW["90"]} == {"fwd", "bwd"}
    assert any(covered[name].kind == "fwd" and covered[name].paged for name in FEW["90"])


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory):
    """Returns a wheel of the committed files, made by ``make wheel`` with few kernels."""
    for name in ("make", "objdump"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not there")
    try:
        toolchain.find_nvcc()
        toolchain.find_host_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("prebuilt")
    checkout, first = folder / "checkout", folder / "first"
    for name in tracked():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name)
    (checkout / "third_party" / "cutlass").symlink_to(ROOT / "third_party" / "cutlass")
    first.mkdir()
    # Python runs sitecustomize first in each process, so the wheel's files stay as committed.
    build = textwrap.indent(SHIP_FEW, "    ")
    (first / "sitecustomize.py").write_text(f"import sys\nif '--all' in sys.orig_argv:\n{build}")
    done = subprocess.run(
        ["make", "wheel", f"PYTHON={sys.executable}"], cwd=checkout, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(first), "FLASHCUTE_CACHE_DIR": str(cache.cache_dir())},
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (checkout / "dist").glob("*.whl")
    assert f"{wheel.relative_to(checkout)}" in done.stdout  # its size follows
    return wheel


def objdump(path: Path, *what: str) -> str:
    command = ["objdump", *what, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# Libraries that PEP 600's policy allows and that each such system has. The binding also needs those
# of torch.
ALLOWED = {"libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0"}
ALLOWED |= {"libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
OF_TORCH = {"libtorch.so", "libtorch_cpu.so", "libc10.so"}


def test_what_is_in_a_wheel_with_kernels(prebuilt, tmp_path):
    tagged = re.fullmatch(r"flashcute-[\d.]+-py3-none-manylinux_2_(\d+)_(\w+)\.whl", prebuilt.name)
    assert tagged, prebuilt.name
    with zipfile.ZipFile(prebuilt) as wheel:
        wheel.extractall(tmp_path)
    objects = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*.so")}
    folder = Path("flashcute") / "prebuilt"
    expected = {folder / f"sm_{t}" / f"{n}.so" for t, names in FEW.items() for n in names}
    assert set(objects) == expected | {folder / "host" / "flash_api.so"}
    for name, path in objects.items():
        assert "no symbols" in objdump(path, "-t"), name  # except exported ones
        text = objdump(path, "-p", "-T")
        needed = set(re.findall(r"NEEDED +(\S+)", text))
        assert needed <= (ALLOWED | OF_TORCH if name.parent.name == "host" else ALLOWED), name
        versions = map(int, re.findall(r"\bGLIBC_2\.(\d+)", text))
        assert max(versions) <= int(tagged[1]), name
        record = json.loads(path.with_suffix(".json").read_text())
        assert record.get("spill_bytes", 0) == 0
        # The files must not contain the folder where they were built.
        for made in (path, path.with_suffix(".json")):
            assert str(ROOT).encode() not in made.read_bytes(), made
    (info,) = tmp_path.glob("*.dist-info")
    asks = re.findall(r"^Requires-Dist: (torch\b.*)$", (info / "METADATA").read_text(), re.M)
    assert asks == ["torch>=2.10"]
    assert "Root-Is-Purelib: false" in (info / "WHEEL").read_text()


@pytest.fixture(scope="module")
def clean(prebuilt, tmp_path_factory):
    return Clean(tmp_path_factory.mktemp("clean"), prebuilt)


@pytest.fixture
def bare(clean):
    """Returns the environment variables of a machine without compilers."""
    return {"CUDA_HOME": str(clean.folder), "CXX": "no-compiler"}


LOADED = f"""
import torch
from flashcute import jit, ops, shipped

ops.load()
q = torch.randn(1, 9, 2, 16)
torch.ops.flashcute.fwd(q, q, q, 0.25, True)
others = []
for target, names in {FEW}.items():
    capability = int(target[0]), int(target[1])
    for config in shipped.dense_configs(capability) + shipped.configs_of_calls(capability):
        if config.full_name not in names:
            others.append((config, target))
            continue
        kernel = jit.get_kernel(config, target)
        assert kernel.address and kernel.spill_bytes == 0
        print(kernel.path)
try:
    jit.get_kernel(*others[-1])
except jit.BuildError as error:
    print(error)
"""


def test_its_kernels_need_no_compiler_and_no_cache(clean, bare):
    status, printed, said = clean.run(clean.python, "-c", USED + LOADED, **bare)
    assert status == 0, said
    package, *paths, error = printed.splitlines()
    folder = clean.home / "flashcute" / "prebuilt"
    assert package == str(clean.home / "flashcute" / "__init__.py")
    named = {str(folder / f"sm_{t}" / f"{n}.so") for t, names in FEW.items() for n in names}
    assert set(paths) == named and len(paths) == len(named)
    assert "is neither among the package's prebuilt kernels nor in" in error
    assert "cannot be built: flashcute: expected nvcc" in error
    assert not (clean.folder / ".cache").exists()


def test_no_build_is_about_the_others_alone(clean):
    status, printed, said = clean.run(clean.python, "-c", LOADED, FLASHCUTE_NO_BUILD="1")
    assert status == 0, said
    *paths, error = printed.splitlines()
    assert len(paths) == sum(map(len, FEW.values()))
    assert f"to be built already, got none in {clean.home / 'flashcute' / 'prebuilt'}" in error
    assert "while FLASHCUTE_NO_BUILD=1; unset it, or run `python -m flashcute build --" in error


def test_what_it_says_of_its_kernels(clean, bare):
    info = clean.python, "-m", "flashcute", "info", "--all", "--target"
    for target, names in FEW.items():
        status, printed, said = clean.run(*info, target, **bare)
        assert status == 0, said
        rows = [line.split() for line in printed.splitlines() if f" sm_{target} " in line]
        assert {row[0] for row in rows if row[2] == "prebuilt"} == names
        rest = len(rows) - len(names)
        assert f"{len(rows)} kernels: {len(names)} prebuilt, 0 cache, {rest} not built" in printed
        objects = 1 + sum(map(len, FEW.values()))
        assert f"{clean.home / 'flashcute' / 'prebuilt'} ({objects} shared objects)" in printed


# Runs `python -m flashcute doctor` as if the machine had other GPUs, all in one process.
DOCTOR = f"""
import os, sys
from flashcute import __main__, doctor

def examine(*gpus):
    doctor._capabilities = lambda: dict(gpus)
    __main__.main(["doctor"])
    print("==")

h100, a100 = ((9, 0), "NVIDIA H100"), ((8, 0), "NVIDIA A100")
examine()
examine(h100, a100)
os.environ["FLASHCUTE_NO_BUILD"] = "1"
examine(h100)
{SHIP_FEW}
examine(h100)
"""


def test_what_the_doctor_says_of_it(clean, bare):
    status, printed, said = clean.run(clean.python, "-c", DOCTOR, **bare)
    assert status == 0 and said == ""
    without_gpu, with_both, without_builds, with_few, _ = printed.split("==\n")
    assert "of no GPU here; prebuilt: 1 for sm_80, 3 for sm_90; others: on first" in without_gpu
    counts = r"ok +kernels +sm_90: 3 prebuilt, 0 cache, \d+ not built; sm_80: 1 prebuilt, "
    assert re.search(counts, with_both)
    assert re.search(r"missing +nvcc +expected nvcc", with_both)
    refused = r"missing +kernels +expected all kernels to be built.*sm_90: 3 prebuilt"
    assert re.search(refused, without_builds)
    assert re.search(r"ok +kernels +sm_90: 3 prebuilt, 0 cache, 0 not built", with_few)
    for name in ("nvcc", r"C\+\+"):
        assert re.search(rf"limited +{name} ", with_few)
