"""The candidates that the search proposes to measure. Measuring itself needs a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path

import config_search
import pytest

from flashcute import heuristics, jit
from flashcute.bench.sweep import DTYPES as TORCH_DTYPES
from flashcute.config import DTYPES, HEAD_DIMS, KERNEL_CLASSES, MAX_SMEM_BYTES, FwdConfig

HOPPER = (9, 0)
EACH = list(itertools.product(HEAD_DIMS, (False, True)))
# Two kernels whose figures are computed by hand: d = 128 with a tile of 192 x 80 in the sm90 class,
# and d = 64 with a tile of 128 x 64 in the sm80 class.
(SM90,) = [c for c in heuristics.sm90_configs("bf16", 128, False) if c.tile_n == 80]
SM80 = heuristics.fwd_config("bf16", 64, False, HOPPER)
PROFILES = sorted((Path(__file__).parents[1] / "benchmarks/results/profile").glob("*.json"))
# Registers of a thread in an MMA warp, after the loading warpgroup has given up its own
# (setmaxnreg), by (warps, CTAs per SM).
SM90_REGISTERS = {(8, 1): 240, (12, 1): 160, (4, 2): 232, (4, 3): 136, (4, 4): 104}


def chosen(arch, head_dim, causal, variant=None, dtype="bf16"):
    args = argparse.Namespace(arch=arch, dtype=dtype, variant=variant)
    return config_search.chosen(head_dim, causal, HOPPER, args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "causal"), EACH)
def test_candidates_of_the_sm90_class_fit(head_dim, causal, dtype):
    found = config_search.candidates(90, dtype, head_dim, causal, HOPPER)
    for config in found:
        assert (config.arch, config.dtype, config.head_dim) == (90, dtype, head_dim)
        assert config.mask == ("causal" if causal else "none")
        assert config.smem_bytes <= MAX_SMEM_BYTES[HOPPER]
        # S and O in fp32, and P and the steps of Q kept in registers in 16 bits, are live at once.
        # 128 threads share 64 rows of them.
        registers = config.tile_n // 2 + config.tile_n // 4 + head_dim // 2 + 4 * config.q_in_regs
        assert registers < SM90_REGISTERS[config.warps, config.min_ctas]
    assert len({config.full_name for config in found}) == len(found)
    for field in ("tile_n", "q_in_regs", "ping_pong"):
        assert len({getattr(config, field) for config in found}) > 1, field


@pytest.mark.parametrize(
    ("head_dim", "tile_n", "warps", "steps"),
    # A step of Q takes 4 registers of those that S, P and O leave of 200 or 132, up to all of Q.
    [(128, 80, 12, 2), (128, 128, 8, 8), (192, 80, 8, 11), (192, 64, 8, 12), (256, 80, 8, 3)],
)
def test_as_much_of_q_in_registers_as_they_hold(head_dim, tile_n, warps, steps):
    found = config_search.candidates(90, "bf16", head_dim, False, HOPPER)
    tiles = {c for c in found if (c.tile_n, c.warps, c.stages) == (tile_n, warps, 2)}
    assert {c.q_in_regs for c in tiles if c.ping_pong} == {0, steps}


def test_a_candidate_more_would_not_fit():
    """The largest tiles proposed are bound by registers or shared memory, not by the search."""
    for head_dim, causal in EACH:
        found = config_search.candidates(90, "bf16", head_dim, causal, HOPPER)
        largest = max(config.tile_n for config in found if config.warps == 8)
        more = largest + 16
        registers = more // 2 + more // 4 + head_dim // 2
        smem = 2 * head_dim * (128 + 4 * more)
        assert more > 256 or registers > 190 or smem > MAX_SMEM_BYTES[HOPPER] - 2048


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", KERNEL_CLASSES)
@pytest.mark.parametrize(("head_dim", "causal"), EACH)
def test_what_is_in_use_is_measured_too(arch, head_dim, causal, dtype):
    in_use = [
        config
        for config in heuristics.shipped_configs(arch)
        if (config.dtype, config.head_dim) == (dtype, head_dim)
        and config.mask == ("causal" if causal else "none")
    ]
    assert config_search.in_use(arch, dtype, head_dim, causal, HOPPER) == in_use
    found = chosen(arch, head_dim, causal, dtype=dtype)
    assert set(in_use) <= set(found) and len(set(found)) == len(found)
    assert {config.dtype for config in found} == {dtype}


def test_named_variants_and_no_others():
    named = config_search.candidates(90, "bf16", 64, False, HOPPER)[3]
    found = chosen(90, 64, False, [named.variant])
    assert set(found) == {named, *config_search.in_use(90, "bf16", 64, False, HOPPER)}


def test_clocks_of_a_key_block_by_hand():
    # Each of three warpgroups has 8 steps of m64n80k16 and 5 of m64n128k16, of N / 2 clocks each.
    assert config_search.block_clocks(SM90, HOPPER) == {
        "tensor": 3 * (8 * 40 + 5 * 64),
        # At 128 bytes a clock A takes 16 clocks, except for two steps in registers, and B N / 4.
        "smem": 3 * (6 * 16 + 8 * 20 + 5 * 32),
        "mufu": 192 * 80 / 16,
        # 12 warps with 40 scores a thread issue four instructions a clock.
        "issue": pytest.approx(12 / 4 * (3.5 * 40 + 7.6 * 13)),
    }


def test_clocks_of_a_key_block_of_the_sm80_class_by_hand():
    # 512 m16n8k16 run at 63 % of one a clock. A warp's two m16 tiles share 256 bytes of B, and Q
    # stays in registers.
    assert SM80.variant == "128x64_w4_s2_qreg_c2"
    assert config_search.block_clocks(SM80, HOPPER) == {
        "tensor": pytest.approx(512 / 0.63),
        "smem": 512 + 2 * 64 * 64 * 2 / 128,
        "mufu": 128 * 64 / 16,
        # A warp has 64 scores a thread, 128 MMAs and 32 ldmatrix of 512 bytes.
        "issue": pytest.approx(4 / 4 * (3.5 * 64 + 128 + 32 + 65 + 0.55 * 64)),
    }
    assert config_search.block_clocks(SM80, (8, 0))["tensor"] == 1024


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_clocks_are_those_of_the_machine_code(path):
    profile = json.loads(path.read_text())
    names = {field.name for field in dataclasses.fields(FwdConfig)}
    config = FwdConfig(**{k: v for k, v in profile["config"].items() if k in names})
    clocks = config_search.block_clocks(config, HOPPER)
    # The profile's clocks are of one warp in each quarter of the SM.
    warp = profile["static"]["estimate"]["clocks"]
    for unit, tolerance in {"tensor": 0, "smem": 0, "issue": 0.06}.items():
        assert clocks[unit] == pytest.approx(config.warps / 4 * warp[unit], rel=tolerance), unit
    assert clocks["mufu"] == pytest.approx(config.warps / 4 * warp["mufu"], abs=0.1)


def test_the_profiles_that_clocks_are_compared_with_are_there():
    assert len(PROFILES) == 4


@pytest.mark.parametrize(
    ("config", "capability", "roof", "percent"),
    [
        (SM90, HOPPER, "tensor", 100.0),
        # 64 exponentials a thread take a warpgroup 64 * 8 clocks, its products take 256.
        (heuristics.sm90_configs("bf16", 32, False)[0], HOPPER, "mufu", 50.0),
        (SM80, HOPPER, "tensor", 63.0),
        (heuristics.fwd_config("bf16", 256, False, HOPPER), HOPPER, "smem", 36.4),
        (heuristics.fwd_config("bf16", 32, False, HOPPER), HOPPER, "mufu", 50.0),
    ],
    ids=lambda value: getattr(value, "full_name", None),
)
def test_the_tightest_roof(config, capability, roof, percent):
    found = config_search.roofline(config, capability)
    assert (found["roof"], found["tensor_peak_percent"]) == (roof, percent)
    assert max(found["block_clocks"], key=found["block_clocks"].get) == roof


def test_no_roof_without_rates():
    assert config_search.roofline(SM80, (12, 0)) == {
        "block_clocks": {},
        "roof": None,
        "tensor_peak_percent": None,
    }


@pytest.mark.parametrize(("head_dim", "causal"), EACH)
def test_roofs_cannot_tell_sm90_candidates_apart(head_dim, causal):
    """The search leaves no candidate out, as nearly all have the roof of those in use."""
    found = config_search.candidates(90, "bf16", head_dim, causal, HOPPER)
    shares = {c: config_search.roofline(c, HOPPER)["tensor_peak_percent"] for c in found}
    used = config_search.in_use(90, "bf16", head_dim, causal, HOPPER)
    assert {config_search.roofline(c, HOPPER)["tensor_peak_percent"] for c in used} == {
        max(shares.values())
    }
    assert min(shares.values()) > 0.968 * max(shares.values())
    assert sum(share == max(shares.values()) for share in shares.values()) > 0.9 * len(found)


def kernel(config):
    return jit.Kernel(config, "90", Path("k.so"), 0, config.threads, config.smem_bytes, 128, 24)


def test_a_row_says_what_was_built_and_its_roof():
    fp16 = dataclasses.replace(SM90, dtype="fp16", mask="causal")
    row = config_search.describe(kernel(fp16), True, HOPPER)
    assert row == {
        "dtype": "fp16",
        "head_dim": 128,
        "causal": True,
        "config": "flash_fwd_hdim128_fp16_causal_sm90_192x80_s2_qreg2_pp",
        "current": True,
        "registers": 128,
        "spill_bytes": 24,
        "smem_bytes": fp16.smem_bytes,
        "block_clocks": {"tensor": 1920.0, "smem": 1248.0, "mufu": 960.0, "issue": 716.4},
        "roof": "tensor",
        "tensor_peak_percent": 100.0,
        "tflops": {},
        "ratio": {},
    }


def test_the_line_that_is_printed():
    row = config_search.describe(kernel(SM90), False, HOPPER)
    row |= {"tflops": {512: 401.25, 2048: 612.0}, "ratio": {512: 0.9481, 2048: 1.0243}}
    row["geomean"] = 0.9854
    name = f"  {SM90.full_name:52s} 128 regs   24 spill | "
    assert config_search.line(row) == (
        name + "roof tensor 100 % |  401.2  612.0 | 0.948 1.024 | 0.985"
    )
    assert config_search.line(row | {"current": True}).startswith(f"* {SM90.full_name}")
    assert "| roof unknown      |" in config_search.line(row | {"roof": None})


def test_dtypes_are_those_of_configurations():
    assert set(TORCH_DTYPES) == set(DTYPES)


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(config_search.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["config_search.py", "--out", "search.json"])
    with pytest.raises(SystemExit) as refused:
        config_search.main()
    assert refused.value.code == 2
    assert "expected an NVIDIA GPU that torch can use, found none" in capsys.readouterr().err
