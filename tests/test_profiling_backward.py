"""The kernels of a backward in the static profile, with their sizes and numbers of products."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest

from flashcute import __main__ as main
from flashcute import heuristics
from flashcute.config import HEAD_DIMS, BwdConfig
from flashcute.profiling import backward, command, disassembly, sass, static
from flashcute.profiling.disassembly import Binary

DATA = Path(__file__).parent / "data" / "sass"
PASSES = {"dq": 0, "dkv": 1, "dk": 2, "dv": 3, "all": 4}


def binary(name: str, excerpt: str | None = "flash_fwd_hdim32_fp16_sm80_loop") -> Binary:
    """Returns a kernel of this name with a forward's loop of 32 MMAs, or with no product."""
    code = sass.parse((DATA / f"{excerpt}.sass").read_text())[0].instructions if excerpt else ()
    return Binary("sm_80", sass.Function(name, code), 168, 1024, 0)


def binaries(config: BwdConfig) -> list[Binary]:
    """Returns kernels in the order of a shared object: the last pass first, then those without
    products."""
    if config.arch == 90:
        kernel = "_ZN5flash21flash_bwd_kernel_sm90INS_19KernelTraitsBwdSm90IXtlELb0ELb1EEELb"
        names = [f"{kernel}1EEEEEvNS_1P", f"{kernel}0EEEEEvNS_1P"]
        names.append("_ZN5flash33flash_bwd_postprocess_kernel_sm90INS_1KELb1EEEEEvNS_1P")
    else:
        wanted = ("dv", "dk", "dq") if config.split_dkv else ("dkv", "dq")
        kernel = "_ZN5flash21flash_bwd_kernel_sm80INS_19KernelTraitsBwdSm80ILb1ELNS_7BwdPassE"
        names = [f"{kernel}{PASSES[x]}EEELb0EEEvv" for x in wanted]
        if config.fused:
            names = [f"{kernel}{PASSES['all']}EEELb{ordered}EEEvv" for ordered in (1, 0)]
    made = [binary(name) for name in names]
    if config.arch == 90:
        made[2] = binary(names[2], None)
    return [*made, binary("_ZN5flash26flash_bwd_row_stats_kernel", None)]


def kernels(config: BwdConfig) -> dict[str, backward.BwdKernel]:
    return {kernel.computes: kernel for kernel, _ in backward.kernels(binaries(config), config)}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_kernels_of_the_sm80_class(head_dim):
    config = heuristics.bwd_config("bf16", head_dim)
    found = kernels(config)
    wanted = {"dq": 3, "dk": 3, "dv": 2} if head_dim > 128 else {"dq": 3, "dkv": 4}
    assert {name: kernel.products for name, kernel in found.items()} == wanted
    assert next(iter(found)) == "dq"
    # The configuration's shared memory is that of its largest kernel.
    assert max(kernel.smem_bytes for kernel in found.values()) == config.smem_bytes
    assert max(kernel.threads for kernel in found.values()) <= config.threads
    assert all(kernel.threads == 128 for kernel in found.values())
    if config.split_dkv:
        own = 2 * head_dim * config.dkv.rows  # V, which dv does not need
        assert found["dk"].smem_bytes - found["dv"].smem_bytes == own


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_one_kernel_of_the_sm80_class(head_dim):
    """It has two forms, one of which keeps the order of the sums of dQ."""
    config = heuristics.fused_bwd_config("bf16", head_dim)
    found = kernels(config)
    assert sorted(found) == ["all", "all in order"]
    for kernel in found.values():
        assert (kernel.products, kernel.threads) == (5, 32 * config.dkv.warps)
        assert kernel.smem_bytes == config.smem_bytes


@pytest.mark.parametrize(("head_dim", "products"), [(128, 5), (192, 2.5), (256, 2.5)])
def test_the_sm90_class_has_one_kernel_with_products(head_dim, products):
    """It has two forms, one of which stores the first sums of dQ.

    Above d = 128 each warpgroup has a loop with half of the products, for all scores.
    """
    config = heuristics.sm90_bwd_config("bf16", head_dim, "causal")
    found = kernels(config)
    assert list(found) == ["all", "all, first stored"]
    for name, kernel in found.items():
        assert (kernel.products, kernel.threads) == (products, 384)
        assert kernel.smem_bytes == config.smem_bytes
        assert kernel.full_name == f"{config.full_name} {name}"


@pytest.mark.parametrize(("computes", "products"), [("dq", 3), ("dkv", 4), ("dv", 2)])
def test_scores_are_counted_by_the_products_of_the_kernel(computes, products):
    config = heuristics.bwd_config("fp16", 32)
    kernel = backward.BwdKernel(config, computes, products)
    report = static.profile(binary("x"), (8, 0), 32, kernel)
    # The excerpt has 32 MMAs of 16 x 8 x 16. A product takes 32 multiply-adds a score.
    assert report["loop"]["score_elements_per_warp"] == 32 * 2048 / (32 * products)
    assert report["kernel"] == f"{config.full_name} {computes}"
    assert report["resources"]["smem_bytes"] == kernel.smem_bytes
    assert report["occupancy"]["ctas_per_sm"] >= 1
    json.dumps(report)


def profile(*arguments: object) -> int:
    return main.main(["profile", "--pass", "bwd", *map(str, arguments)])


@pytest.fixture
def built(monkeypatch):
    """Returns a list of each (configuration, target) asked for; nothing is compiled."""
    asked = []
    artefact = types.SimpleNamespace(path=Path("x.so"), meta={"spill_bytes": 0, "log": ""})

    def build(config, target):
        asked.append((config, target))
        return artefact

    monkeypatch.delenv("FLASHCUTE_ARCH", raising=False)
    monkeypatch.setattr(command, "_built", build)
    monkeypatch.setattr(disassembly, "find_cuobjdump", lambda: None)
    monkeypatch.setattr(disassembly, "read_binaries", lambda _: binaries(asked[-1][0]))
    return asked


@pytest.mark.parametrize(
    ("target", "head_dim", "names"),
    [
        ("80", 64, ["all", "all in order"]),
        ("86", 256, ["dq", "dk", "dv"]),
        ("90", 64, ["all", "all, first stored"]),
    ],
)
def test_each_kernel_has_a_report(built, tmp_path, capsys, target, head_dim, names):
    pytest.importorskip("matplotlib")
    saved = tmp_path / "a.json"
    arguments = ("--static", "--head-dim", head_dim, "--causal", "--target", target)
    assert profile(*arguments, "--json", saved, "--html", tmp_path / "a.html") == 0
    ((config, asked),) = built
    assert (config.kind, config.mask, asked) == ("bwd", "causal", target)
    assert config.arch == (90 if target == "90" else 80)
    made = json.loads(saved.read_text())
    wanted = [f"{config.full_name} {name}" for name in names]
    assert sorted(report["kernel"] for report in made["profiles"]) == sorted(wanted)
    assert made["profiles"][0]["kernel"] == wanted[0]
    printed, page = capsys.readouterr().out, (tmp_path / "a.html").read_text()
    assert all(f"kernel              {name}\n" in printed and name in page for name in wanted)


def test_fields_of_tiles_can_be_set(built):
    arguments = ("--static", "--head-dim", 256, "--target", 86)  # it has a kernel for each gradient
    assert profile(*arguments, "--set", "dkv.stages=2", "dkv.step=16") == 0
    config = built[0][0]
    assert (config.dkv.stages, config.dkv.step) == (2, 16)
    assert config.dq == heuristics.bwd_config("bf16", 256).dq


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--file", "x.so"), "expected --static with --file"),
        (("--static", "--file", "x.so"), "without --file"),
        (("--static", "--compare", "default", "default"), "and --compare"),
        (
            ("--static", "--set", "dkv=1"),
            "expected FIELD=VALUE with FIELD in alibi, arch, dkv.min_ctas",
        ),
        (("--static", "--target", "80", "--set", "dkv.step=7"), "expected step to be a multiple"),
    ],
)
def test_wrong_arguments(built, arguments, message, capsys):
    assert profile(*arguments) == 1
    assert message in capsys.readouterr().err
