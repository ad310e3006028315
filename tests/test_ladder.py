"""Every rung of examples/ladder is right in the simulator, compiles, and does what it claims."""

from __future__ import annotations

import itertools

import pytest
import tiers
import torch
from ladder import RUNGS, counters, launch, report, rungs, simulate
from machine_code import without_host_code

from flashcute import jit, sim, testing
from flashcute.jit import build, toolchain

# (seqlen_q, seqlen_k): whole tiles, one past their edges, rows that see no key, no keys.
LENGTHS = ((64, 128), (65, 129), (17, 200), (100, 33), (1, 1), (5, 0))
CHECKERS = ("memcheck", "racecheck")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def make_qkv(seqlen_q, seqlen_k, d, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((2, seqlen_q, 2, d), (2, seqlen_k, 1, d), (2, seqlen_k, 1, d))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


@pytest.fixture(scope="module")
def built():
    """Compiles the rungs for the simulator, in parallel."""
    sim.build_runners(["none"])
    return simulate.build_kernels(
        [(kernel, "none") for rung in RUNGS for kernel in kernels_of(rung)]
    )


def test_every_file_is_a_rung():
    files = sorted(path.stem for path in rungs.KERNELS.glob("rung_*.h"))
    assert files == [rung.stem for rung in RUNGS]
    assert [rung.number for rung in RUNGS] == list(range(1, len(RUNGS) + 1))
    assert all(rung.counter in counters.COUNTERS and rung.lines <= 250 for rung in RUNGS)


def test_find():
    assert rungs.find("8") is rungs.find("08_swizzle") is rungs.find("rung_08_swizzle")
    with pytest.raises(ValueError, match=r"expected a rung, one of 01_naive.*got '99'"):
        rungs.find("99")


def kernels_of(rung):
    """Returns the kernels of a rung that this run covers: without ``--all`` half of them.

    These have all values of each argument and every pair of values of two arguments.
    """
    return launch.variants(rung) if tiers.everything else launch.half(launch.variants(rung)[0])


@pytest.mark.parametrize(
    "kernel", [kernel for rung in RUNGS for kernel in kernels_of(rung)], ids=lambda k: k.name
)
def test_right_in_the_simulator(built, kernel):
    d, causal = kernel.head_dim, kernel.causal
    for seed, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        q, k, v = make_qkv(seqlen_q, seqlen_k, d, DTYPES[kernel.dtype], seed)
        copy_mode = sim.COPY_MODES[seed % len(sim.COPY_MODES)]
        options = {"causal": causal, "seed": seed, "copy_mode": copy_mode}
        result = simulate.attention(kernel.rung, q, k, v, **options)
        assert result.verdict == "pass", result.message
        testing.check_forward(result.out.to(q.dtype), result.lse, q, k, v, causal=causal)


@pytest.fixture(scope="module")
def checked():
    """Compiles the kernels of :func:`masks_of` with both checkers, in parallel."""
    sim.build_runners(CHECKERS)
    variants = [launch.Variant(rung, "fp16", 64, mask) for rung in RUNGS for mask in masks_of(rung)]
    return simulate.build_kernels([(v, checker) for v in variants for checker in CHECKERS])


def masks_of(rung):
    """Returns the values of ``causal`` to test: without ``--all`` one, which alternates by rung."""
    return (False, True) if tiers.everything else (rung.number % 2 == 0,)


@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_no_race_and_no_access_out_of_bounds(checked, rung, checker):
    for causal, (seqlen_q, seqlen_k) in itertools.product(masks_of(rung), ((65, 129), (20, 0))):
        q, k, v = make_qkv(seqlen_q, seqlen_k, 64, torch.float16)
        options = {"causal": causal, "seed": seqlen_k, "copy_mode": "random", "checker": checker}
        result = simulate.attention(rung, q, k, v, **options)
        assert result.verdict == "pass", result.message


def test_what_a_rung_claims_shows_in_the_counters(built):
    q, k, v = make_qkv(128, 256, 128, torch.bfloat16)
    seen = {
        rung.number: simulate.attention(rung, q, k, v, causal=False).counters
        for rung in RUNGS
        if rung.number >= 4
    }
    blocks = 2 * 2 * 128 // 64
    assert seen[4]["blocks"] == 4 * seen[5]["blocks"] == 4 * blocks
    # Rung 6 has barriers of the block only around K and V, two for each 64 keys, and a last one.
    assert seen[6]["block_barriers"] == blocks * (2 * 256 // 64 + 1) < seen[5]["block_barriers"]
    # Rung 8 has no bank conflicts. Rung 7 has seven wavefronts too many for each 8 x 8 matrix.
    assert seen[7]["ldmatrix_conflicts"] == 7 * 4 * seen[7]["ldmatrix"]
    assert seen[8]["ldmatrix"] == seen[7]["ldmatrix"] and seen[8]["ldmatrix_conflicts"] == 0
    # Rung 9 loads Q's 8 fragments once per warp instead of once per block of keys.
    once = blocks * 4 * 8
    assert seen[8]["ldmatrix"] - seen[9]["ldmatrix"] == once * (256 // 64 - 1)
    # Rung 10 loads all of Q, K and V by cp.async.
    assert seen[9]["cp_async_bytes"] == 0
    assert seen[10]["cp_async_bytes"] == blocks * (64 + 2 * 256) * 128 * 2
    # Rung 11 has as many instructions of each kind as rung 10.
    for counter in ("mma", "ldmatrix", "cp_async_bytes", "block_barriers"):
        assert seen[11][counter] == seen[10][counter], counter
    assert seen[11]["ldmatrix_conflicts"] == seen[12]["ldmatrix_conflicts"] == 0
    # Rung 12 has 64 ldmatrix for 48 keys and 32 rows, 16 of them for Q. Rung 11 has 64 for 64 keys
    # and 16 rows.
    assert seen[12]["ldmatrix"] == blocks // 2 * 4 * 64 * -(-256 // 48)
    assert len({seen[n]["mma"] for n in range(4, 12)}) == 1


@pytest.fixture(scope="module")
def compiled():
    """Compiles kernels for an H100/H200, in parallel.

    With ``--all`` these are all kernels; without, each rung's machine code with d = 128 and a
    causal mask, which needs many registers.
    """
    try:
        toolchain.find_nvcc()
    except jit.BuildError as error:
        pytest.skip(f"no CUDA compiler: {error}")
    units = []
    for rung in RUNGS:
        wanted = [
            k for k in kernels_of(rung) if tiers.everything or (k.causal and k.head_dim == 128)
        ]
        unit = launch.unit(rung, "90", wanted)
        units.append(unit if tiers.everything else without_host_code(unit))
    return dict(zip(RUNGS, build.build_many(units, toolchain.find_nvcc()), strict=True))


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_compiles_without_spills(compiled, rung):
    result = compiled[rung]
    assert result.error is None, result.error
    assert result.artefact.meta["spill_bytes"] == 0


def test_refuses_what_no_rung_takes():
    q, k, v = make_qkv(4, 4, 64, torch.float32)
    with pytest.raises(TypeError, match=r"float16 or all in bfloat16, got q.dtype=torch.float32"):
        launch.attention("8", q, k, v)
    q, k, v = make_qkv(4, 4, 64, torch.float16)
    with pytest.raises(ValueError, match=r"tensors on one GPU, got q on cpu"):
        launch.attention("8", q, k, v)


def test_counters_are_read_from_what_ncu_prints():
    metric = counters.COUNTERS["l2_bytes"].metric
    rows = ['"ID","Kernel Name","' + metric + '"', '"","","byte"', '"0","k","201,326,592"']
    text = "\n".join(["==PROF== Connected", *rows, '"1","l","n/a"'])
    assert counters.parse(text, ["a", "b"]) == {"a": {"l2_bytes": 2.0}, "b": {}}
    assert counters.parse(text, ["a"]) == {}
    assert counters.parse("==ERROR== no permission", ["a"]) == {}


def result_file():
    """Returns a file of `python -m examples.ladder` in which each rung is twice as fast as the one
    before, and the first one is too slow for the longest sequence."""
    names = [rung.name for rung in RUNGS]
    rows = []
    for seqlen, known in ((512, names), (2048, names), (4096, names[1:])):
        for causal in (False, True):
            tflops = {name: 0.25 * 2.0 ** names.index(name) for name in known}
            us = {name: 1e6 / value for name, value in tflops.items()}
            rows.append({"seqlen_q": seqlen, "causal": causal, "us": us, "tflops": tflops})
    records = {name: {"errors": [], "counters": {"warps": 1.5}} for name in names}
    machine = {"gpu": "NVIDIA H200", "driver": "1", "torch": "2", "date": "2026-01-02T03:04:05"}
    machine["commit"] = "0123456789abcdef"
    return {"machine": machine, "rungs": records, "rows": rows}


def test_the_table_comes_from_the_result():
    result = result_file()
    second = next(line for line in report.table(result).splitlines() if "rung_02" in line)
    cells = [cell.strip() for cell in second.split("|")[1:-1]]
    assert cells[3:8] == ["2000", "0.5", "0.051", "10", "2"]
    assert cells[8] == "% of warp slots busy: 1.5 to 1.5"
    assert "all are right" in report.text(result)
    assert "2026-01-02, at commit 0123456:" in report.text(result)
    result["rungs"][RUNGS[3].name]["errors"].append("a wrong row")
    assert f"NOT RIGHT: {RUNGS[3].name}" in report.text(result)


def test_the_readme_is_what_the_result_file_says():
    assert report.main(["--check"]) == 0
    document = report.README.read_text(encoding="utf-8")
    assert report.replaced(document, "other") != document


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    report.draw(result_file(), tmp_path / "ladder.svg")
    drawn = (tmp_path / "ladder.svg").read_text(encoding="utf-8")
    assert all(f"<!-- {rung.name.replace('_', ' ')} -->" in drawn for rung in RUNGS)
