from __future__ import annotations

import dataclasses
import subprocess

import pytest

from flashcute import config
from flashcute.config import FwdConfig
from flashcute.jit import sources, toolchain

GOOD = {
    "arch": 80,
    "dtype": "bf16",
    "head_dim": 128,
    "mask": "causal",
    "tile_m": 128,
    "tile_n": 64,
    "warps": 4,
    "stages": 1,
    "q_in_regs": False,
    "min_ctas": 2,
    "peel_masked": False,
}


def test_names():
    c = FwdConfig(**GOOD)
    assert c.name == "flash_fwd_hdim128_bf16_causal_sm80"
    assert c.variant == "128x64_w4_s1_c2"
    assert c.full_name == "flash_fwd_hdim128_bf16_causal_sm80_128x64_w4_s1_c2"
    other = dataclasses.replace(c, mask="none", q_in_regs=True, peel_masked=True)
    assert other.full_name == "flash_fwd_hdim128_bf16_sm80_128x64_w4_s1_qreg_c2_peel"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("arch", 70),
        ("dtype", "fp32"),
        ("dtype", "float16"),
        ("head_dim", 80),
        ("mask", "window"),
        ("tile_m", 32),
        ("tile_m", 0),
        ("tile_m", -64),
        ("tile_n", 40),
        ("tile_n", 0),
        ("tile_n", 272),
        ("warps", 6),
        ("stages", 3),
        ("q_in_regs", 1),
        ("min_ctas", 0),
        ("peel_masked", 1),
    ],
)
def test_wrong_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"expected {field} .*, got {field}={value!r}"):
        FwdConfig(**{**GOOD, field: value})


def test_every_field_changes_the_full_name():
    """Two configurations with one name would share a file."""
    c = FwdConfig(**GOOD)
    changes = {
        "dtype": "fp16",
        "head_dim": 64,
        "mask": "none",
        "tile_m": 64,
        "tile_n": 128,
        "warps": 8,
        "stages": 2,
        "q_in_regs": True,
        "min_ctas": 1,
        "peel_masked": True,
    }
    assert {*changes, "arch"} == {f.name for f in dataclasses.fields(FwdConfig)}
    names = {dataclasses.replace(c, **{field: value}).full_name for field, value in changes.items()}
    assert len(names | {c.full_name}) == len(changes) + 1


def test_initialiser_is_what_flash_h_understands(tmp_path):
    """g++ reads it back into the same values; -Wreorder and missing fields would fail it."""
    c = FwdConfig(**{**GOOD, "q_in_regs": True})
    checks = []
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        enums = {"dtype": "flash::DType::", "mask": "flash::MaskKind::"}
        text = enums.get(field.name, "") + str(value).lower()
        checks.append(f"static_assert(kConfig.{field.name} == {text});")
    source = tmp_path / "config.cpp"
    source.write_text(
        '#include "flash.h"\n'
        f"constexpr flash::FwdConfig kConfig{c.to_cpp()};\n"
        "template <flash::FwdConfig C> struct Kernel {};\n"
        "Kernel<kConfig> kernel;\n" + "\n".join(checks) + "\n"
    )
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    include = f"-I{sources.kernel_include_dir()}"
    compiler = toolchain.find_host_compiler().path
    subprocess.run([compiler, *flags, include, source], check=True)


def test_resources():
    c = FwdConfig(**GOOD)
    assert c.threads == 128
    assert c.smem_bytes == 2 * (128 * 128 + 2 * 64 * 128)
    two_stages = dataclasses.replace(c, stages=2)
    assert two_stages.smem_bytes - c.smem_bytes == 2 * 2 * 64 * 128


def test_max_head_dim():
    assert max(config.HEAD_DIMS) == config.MAX_HEAD_DIM
