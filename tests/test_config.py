from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import subprocess
from typing import get_type_hints

import pytest

from flashcute import config
from flashcute.config import DTYPES, KERNEL_CLASSES, MASKS, BwdConfig, BwdTile, FwdConfig
from flashcute.heuristics import sm90_bwd_config
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
    "q_in_regs": 0,
    "min_ctas": 2,
}
GOOD_SM90 = {
    **GOOD,
    "arch": 90,
    "tile_n": 128,
    "warps": 8,
    "stages": 2,
    "min_ctas": 1,
    "ping_pong": True,
}

GOOD_BWD = {
    "arch": 80,
    "dtype": "bf16",
    "head_dim": 128,
    "mask": "causal",
    "dq": BwdTile(128, 32, 4, 1, 2),
    "dkv": BwdTile(64, 64, 4, 2, 1),
}
_TILE = BwdTile(64, 64, 4, 1, 2, 2)
GOOD_BWD_FUSED = {**GOOD_BWD, "dq": _TILE, "dkv": _TILE, "fused": True}
GOOD_BWD_SM90 = {
    **GOOD_BWD,
    "fused": True,
    "arch": 90,
    "dq": BwdTile(128, 64, 8, 2, 1),
    "dkv": BwdTile(128, 64, 8, 2, 1),
}


def test_names():
    c = FwdConfig(**GOOD)
    assert c.name == "flash_fwd_hdim128_bf16_causal_sm80"
    assert c.variant == "128x64_w4_s1_c2"
    assert c.full_name == "flash_fwd_hdim128_bf16_causal_sm80_128x64_w4_s1_c2"
    other = dataclasses.replace(c, mask="none", q_in_regs=8)
    assert other.full_name == "flash_fwd_hdim128_bf16_sm80_128x64_w4_s1_qreg_c2"
    other = dataclasses.replace(c, softcap=True, alibi=True, dropout=True)
    assert other.name == "flash_fwd_hdim128_bf16_causal_softcap_alibi_dropout_sm80"


def test_names_of_the_sm90_class():
    c = FwdConfig(**GOOD_SM90)
    assert c.name == "flash_fwd_hdim128_bf16_causal_sm90"
    assert c.full_name == "flash_fwd_hdim128_bf16_causal_sm90_128x128_s2_pp"
    other = dataclasses.replace(c, tile_m=192, warps=12, q_in_regs=3, ping_pong=False)
    assert other.variant == "192x128_s2_qreg3"


def test_blocks_over_pages_are_at_most_128_keys():
    paged = FwdConfig(**GOOD_SM90 | {"paged": True, "tile_n": 128})
    with pytest.raises(
        ValueError, match="expected tile_n to be at most 128 with paged, got tile_n=144"
    ):
        dataclasses.replace(paged, tile_n=144)
    dataclasses.replace(paged, paged=False, tile_n=144)


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
        ("q_in_regs", 16),
        ("q_in_regs", True),
        ("q_in_regs", 8.0),
        ("min_ctas", 0),
        ("ping_pong", True),
        ("softcap", 30.0),
        ("alibi", 1),
        ("dropout", 0.1),
    ],
)
def test_wrong_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"expected {field} .*, got {field}={value!r}"):
        FwdConfig(**{**GOOD, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "fp8"),
        ("head_dim", 160),
        ("mask", "window"),
        ("tile_m", 64),
        ("tile_m", 192),
        ("tile_n", 16),
        ("tile_n", 72),
        ("tile_n", 272),
        ("warps", 2),
        ("warps", 16),
        ("stages", 1),
        ("stages", 3),
        ("stages", 5),
        ("q_in_regs", -1),
        ("q_in_regs", 9),
        ("q_in_regs", True),
        ("q_in_regs", 2.0),
        ("min_ctas", 2),
        ("ping_pong", 0),
    ],
)
def test_wrong_field_of_the_sm90_class_is_named(field, value):
    FwdConfig(**GOOD_SM90)
    with pytest.raises(ValueError, match=f"expected {field} .*, got {field}={value!r}"):
        FwdConfig(**{**GOOD_SM90, field: value})


def test_every_field_changes_the_full_name():
    """Two configurations with one name would share a file."""
    values = {
        "arch": KERNEL_CLASSES,
        "dtype": DTYPES,
        "head_dim": (32, 64),
        "mask": MASKS,
        "tile_m": (64, 128, 192),
        "tile_n": (32, 48),
        "warps": (4, 8, 12),
        "stages": (1, 2, 3),
        "q_in_regs": (0, 1, 2, 4),
        "min_ctas": (1, 2),
    }
    for name, kind in get_type_hints(FwdConfig).items():
        if kind is bool:
            values[name] = (False, True)
    valid = []
    for choice in itertools.product(*values.values()):
        with contextlib.suppress(ValueError):
            valid.append(FwdConfig(**dict(zip(values, choice, strict=True))))
    assert len({config.full_name for config in valid}) == len(valid)
    for field in dataclasses.fields(FwdConfig):
        assert len({getattr(config, field.name) for config in valid}) > 1, field.name


@pytest.mark.parametrize(
    "c",
    [
        FwdConfig(**{**GOOD, "q_in_regs": 8}),
        FwdConfig(**GOOD_SM90),
        BwdConfig(**GOOD_BWD),
        BwdConfig(**GOOD_BWD_FUSED),
        BwdConfig(**GOOD_BWD_SM90),
    ],
    ids=["sm80", "sm90", "bwd", "bwd-fused", "bwd-sm90"],
)
def test_initialiser_is_what_flash_h_understands(tmp_path, c):
    """g++ reads it back into the same values; -Wreorder and missing fields would fail it."""
    checks = []

    def compare(value, place):
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name)
            if dataclasses.is_dataclass(inner):
                compare(inner, f"{place}.{field.name}")
                continue
            enums = {"dtype": "flash::DType::", "mask": "flash::MaskKind::"}
            text = enums.get(field.name, "") + str(inner).lower()
            checks.append(f"static_assert({place}.{field.name} == {text});")

    compare(c, "kConfig")
    kind = type(c).__name__
    source = tmp_path / "config.cpp"
    source.write_text(
        '#include "flash.h"\n'
        f"constexpr flash::{kind} kConfig{c.to_cpp()};\n"
        f"template <flash::{kind} C> struct Kernel {{}};\n"
        "Kernel<kConfig> kernel;\n" + "\n".join(checks) + "\n"
    )
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    include = f"-I{sources.kernel_include_dir()}"
    compiler = toolchain.find_host_compiler().path
    subprocess.run([compiler, *flags, include, source], check=True)


def test_names_of_a_backward():
    c = BwdConfig(**GOOD_BWD)
    assert c.name == "flash_bwd_hdim128_bf16_causal_sm80"
    assert c.full_name == f"{c.name}_dq128x32_w4_s1_c2_dkv64x64_w4_s2_c1"
    assert dataclasses.replace(c, split_dkv=True).full_name == f"{c.full_name}_split"
    dropped = dataclasses.replace(c, dropout=True)
    assert dropped.name == "flash_bwd_hdim128_bf16_causal_dropout_sm80"
    for field in ("dq", "dkv"):
        for change in ({"rows": 64}, {"step": 16}, {"stages": 1}, {"stages": 2}, {"min_ctas": 3}):
            tile = dataclasses.replace(getattr(c, field), **change)
            other = dataclasses.replace(c, **{field: tile})
            assert (other.full_name == c.full_name) == (other == c)
    fused = BwdConfig(**GOOD_BWD_FUSED)
    assert fused.full_name == "flash_bwd_hdim128_bf16_causal_fused_sm80_64x64_w4x2_s1_c2"
    assert dataclasses.replace(fused, alibi=True).name.endswith("_causal_alibi_fused_sm80")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("arch", 70), ("dtype", "fp32"), ("head_dim", 80), ("mask", "window")),
        *(("split_dkv", 1), ("dropout", 0.1), ("dkv", BwdTile(64, 48, 4, 1, 1))),
        *(("dq", BwdTile(64, 32, 8, 1, 1)), ("dkv", BwdTile(64, 32, 8, 1, 1))),
        *(("fused", 1), ("dkv", BwdTile(64, 32, 4, 1, 1, 2))),
    ],
    ids=str,
)
def test_wrong_field_of_a_backward_is_named(field, value):
    with pytest.raises(ValueError, match=f"BwdConfig: expected {field} "):
        BwdConfig(**{**GOOD_BWD, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("split_dkv", True), ("fused", False), ("dq", BwdTile(64, 32, 4, 1, 2, 2))),
        *(("head_dim", 32), ("dkv", BwdTile(64, 32, 4, 1, 2, 2))),
    ],
    ids=str,
)
def test_wrong_field_of_a_fused_backward_is_named(field, value):
    other = {"fused": "dq", "head_dim": "dkv"}.get(field, field)
    good = GOOD_BWD_FUSED
    if field == "head_dim":  # four warps divide its columns
        tile = BwdTile(64, 64, 8, 1, 1, 4)
        good = {**good, "dq": tile, "dkv": tile}
    if field == "dkv":
        other = "dq"
    with pytest.raises(ValueError, match=f"BwdConfig: expected {other} "):
        BwdConfig(**{**good, field: value})


@pytest.mark.parametrize("step", [16, 48])
def test_step_of_a_fused_backward_is_whole(step):
    tile = BwdTile(64, step, 4, 1, 2)
    with pytest.raises(ValueError, match="BwdConfig: expected dkv "):
        BwdConfig(**{**GOOD_BWD_FUSED, "dq": tile, "dkv": tile})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("head_dim", 80), ("mask", "window"), ("split_dkv", True), ("dropout", 0.1)),
        *(("softcap", 30.0), ("alibi", None), ("varlen", 1), ("fused", False)),
        *(("dq", BwdTile(128, 128, 8, 2, 1)), ("dkv", BwdTile(128, 128, 8, 2, 1))),
    ],
    ids=str,
)
def test_wrong_field_of_a_backward_of_the_sm90_class_is_named(field, value):
    with pytest.raises(ValueError, match=f"BwdConfig: expected {field} "):
        BwdConfig(**{**GOOD_BWD_SM90, field: value})


@pytest.mark.parametrize("options", [("alibi",), ("softcap", "alibi", "dropout")], ids=str)
def test_backward_of_the_sm90_class_names_its_options(options):
    """Its name also says whether the batch is ragged."""
    config = BwdConfig(**{**GOOD_BWD_SM90, **dict.fromkeys((*options, "varlen"), True)})
    names = "_".join(options)
    assert config.full_name == f"flash_bwd_hdim128_bf16_causal_{names}_varlen_sm90_128x64_s2"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("rows", 32), ("rows", 192), ("step", 24), ("step", 144), ("warps", 2), ("stages", 3)),
        ("warps_step", 3),
    ],
)
def test_wrong_field_of_a_tile_is_named(field, value):
    with pytest.raises(ValueError, match=f"BwdTile: expected {field} .*, got {field}={value}"):
        dataclasses.replace(GOOD_BWD["dq"], **{field: value})


def test_resources():
    c = FwdConfig(**GOOD)
    assert c.threads == 128
    assert c.smem_bytes == 2 * (128 * 128 + 2 * 64 * 128)
    two_stages = dataclasses.replace(c, stages=2)
    assert two_stages.smem_bytes - c.smem_bytes == 2 * 2 * 64 * 128


def test_resources_of_a_backward():
    c = BwdConfig(**GOOD_BWD)
    assert c.threads == 256
    of_dkv = 2 * 128 * (2 * 64 + 2 * 2 * 64) + 2 * 64 * 8  # K, V; two stages of Q, dO, statistics
    assert c.smem_bytes == of_dkv
    large = dataclasses.replace(c, dq=BwdTile(128, 128, 8, 2, 1))
    assert large.smem_bytes == 2 * 128 * (2 * 128 + 2 * 2 * 128)


def test_resources_of_a_fused_backward():
    c = BwdConfig(**GOOD_BWD_FUSED)
    assert (c.threads, c.tile_m, c.dq_accum) == (256, 64, 128)
    # Shared memory holds K and V, one stage of Q, dO and statistics, dS and P.
    assert c.smem_bytes == 2 * 128 * (2 * 64 + 2 * 64) + 64 * 8 + 2 * 2 * 64 * 64
    tile = dataclasses.replace(c.dkv, warps_step=1)
    one = dataclasses.replace(c, dq=tile, dkv=tile)
    assert c.smem_bytes - one.smem_bytes == 2 * 64 * 64  # P stays in registers
    assert one.repeatable_keys == 2 * 64


def test_resources_of_a_backward_of_the_sm90_class():
    c = BwdConfig(**GOOD_BWD_SM90)
    assert c.full_name == "flash_bwd_hdim128_bf16_causal_sm90_128x64_s2"
    assert (c.threads, c.tile_m) == (128 + 2 * 128, 64)
    # Shared memory holds K and V, two stages of Q, dO and statistics, two buffers of dS, and dQ.
    tiles = 2 * 128 * (2 * 128 + 2 * 2 * 64) + 2 * 64 * 8 + 2 * 2 * 64 * 128 + 4 * 64 * 128
    assert tiles < c.smem_bytes <= tiles + 1024
    ragged = dataclasses.replace(c, varlen=True)
    assert ragged.full_name == "flash_bwd_hdim128_bf16_causal_varlen_sm90_128x64_s2"
    assert (ragged.threads, ragged.smem_bytes) == (c.threads, c.smem_bytes)
    tile = BwdTile(128, 128, 8, 2, 1)
    half = dataclasses.replace(c, head_dim=64, dq=tile, dkv=tile)
    tiles = 2 * 64 * (2 * 128 + 2 * 2 * 128) + 2 * 128 * 8 + 2 * 2 * 128 * 128 + 4 * 128 * 64
    assert tiles < half.smem_bytes <= tiles + 1024
    # A page of 32 columns of zeros lies behind K.
    uneven = dataclasses.replace(c, head_dim=96)
    tiles = 2 * 96 * (2 * 128 + 2 * 2 * 64) + 2 * 64 * 8 + 2 * 2 * 64 * 128 + 4 * 64 * 96
    assert tiles < uneven.smem_bytes - 2 * 32 * 128 <= tiles + 1024


@pytest.mark.parametrize("head_dim", [192, 256])
def test_resources_of_a_backward_of_wide_heads(head_dim):
    tile = BwdTile(64, 64, 8, 2, 1)
    c = BwdConfig(**{**GOOD_BWD_SM90, "head_dim": head_dim, "dq": tile, "dkv": tile})
    assert c.full_name == f"flash_bwd_hdim{head_dim}_bf16_causal_sm90_64x64_s2"
    assert (c.threads, c.tile_m, c.dq_accum) == (128 + 2 * 128, 64, head_dim)
    # Shared memory holds K and V, two stages of Q, dO and statistics (at d = 256 one of dO), two
    # buffers of dS, P in fp32, and of the cluster's other CTA half of K's columns and dS.
    tiles = 2 * head_dim * (2 * 64 + 2 * 2 * 64) + 2 * 64 * 8 + 2 * 2 * 64 * 64 + 4 * 64 * 64
    tiles += head_dim * 64 + 2 * 2 * 64 * 64
    tiles -= {192: 0, 256: 2 * 64 * 256}[head_dim]
    assert tiles < c.smem_bytes <= tiles + 1024


def test_keys_of_which_the_sums_of_a_backward_have_one_order():
    assert BwdConfig(**GOOD_BWD).repeatable_keys == math.inf
    found = {d: sm90_bwd_config("bf16", d).repeatable_keys for d in config.HEAD_DIMS}
    assert found == {32: 256, 64: 256, 96: 256, 128: 256, 192: 256, 256: 256}


def test_resources_of_the_sm90_class():
    c = FwdConfig(**GOOD_SM90)
    assert c.threads == 128 + 2 * 128  # a warpgroup loads, two compute
    three = dataclasses.replace(c, tile_m=192, warps=12)
    assert three.threads == 128 + 3 * 128
    # smem_bytes, which the kernel asks for, keeps the alignment that TMA's 128-byte swizzle needs.
    for other in (c, three, dataclasses.replace(c, stages=4, tile_n=64, head_dim=96)):
        tiles = 2 * other.head_dim * (other.tile_m + 2 * other.stages * other.tile_n)
        assert other.smem_bytes % 1024 == 0
        assert 0 < other.smem_bytes - tiles <= 2048


def test_max_head_dim():
    assert max(config.HEAD_DIMS) == config.MAX_HEAD_DIM
