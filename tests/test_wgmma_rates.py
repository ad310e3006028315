"""What can be said of the rates of wgmma without a GPU: the bounds, and that the kernels hold the
instructions whose clocks are counted."""

from __future__ import annotations

import collections
import re
import subprocess

import pytest
import torch
import wgmma_rates
from wgmma_rates import Loop, Rate

from flashcute import jit
from flashcute.jit import build, toolchain
from flashcute.profiling import disassembly, sass

RATES = (
    Rate("bf16", 80, "ss"),
    Rate("fp16", 112, "rs"),
    Rate("bf16", 256, "rs"),
    Rate("bf16", 64, "rs_transposed"),
)
LOOPS = tuple(Loop(64, 128, 3, part) for part in wgmma_rates.PARTS)


@pytest.mark.parametrize(
    ("n", "tensor", "ss", "rs"), [(64, 32, 32, 16), (80, 40, 36, 20), (256, 128, 80, 64)]
)
def test_bounds_of_one_instruction(n, tensor, ss, rs):
    assert Rate("bf16", n, "ss").tensor_clocks == Rate("fp16", n, "rs").tensor_clocks == tensor
    assert Rate("bf16", n, "ss").port_clocks == ss
    assert Rate("bf16", n, "rs").port_clocks == rs


def test_bounds_of_a_block():
    """Head dimension 64 needs the tensor cores for as long as the MUFU; 128 for twice as long."""
    loop = Loop(64, 128, 3, "both")
    assert loop.tensor_clocks == loop.mufu_clocks == 1536
    assert loop.issue_clocks == 3.5 * 192
    assert Loop(64, 128, 3, "eager").issue_clocks == 4.5 * 192
    assert loop.port_clocks == 3 * (4 * 48 + 8 * 16)
    assert Loop(128, 80, 3, "both").tensor_clocks == 2 * Loop(128, 80, 3, "both").mufu_clocks


def test_every_kernel_has_a_place_of_its_own():
    kernels = [kernel for group in wgmma_rates.units() for kernel in group]
    assert len({kernel.name for kernel in kernels}) == len(kernels)
    assert {k.n for k in kernels if isinstance(k, Rate)} == set(wgmma_rates.WIDTHS)
    assert {(k.d, k.n, k.warpgroups) for k in kernels if isinstance(k, Loop)} == set(
        wgmma_rates.SHAPES
    )


def test_tables():
    rate = {"dtype": "fp16", "n": 80, "operands": "ss", "warpgroups": 2, "tensor_share": 0.954}
    lines = wgmma_rates.rates_table([rate]).splitlines()
    (line,) = (line for line in lines if "95.4" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["ss", "80", "40.0", "36.0", "-", "-", "-", "-", "95.4", "-"]
    loop = {"d": 64, "n": 128, "warpgroups": 3, "clocks": 2048.0}
    products = {**loop, "part": "products", "tensor_share": 0.75, "mufu_share": 0}
    softmax = {**loop, "part": "softmax", "tensor_share": 0, "mufu_share": 0.8}
    line = wgmma_rates.loops_table([products, softmax]).splitlines()[2]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:7] == ["64", "128", "3", "1536", "1536", "672", "960"]
    assert cells[7:] == ["2048 (75.0)", "2048 (80.0)", *["-"] * 3]


def test_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert wgmma_rates.main([]) == 1
    assert "expected a GPU of compute capability 9.0" in capsys.readouterr().err


def test_refuses_a_wrong_result():
    right = torch.ones(2, 2, dtype=torch.float64)
    wgmma_rates.require_close("x", right.float() + 1e-4, right, 1e-3)
    for wrong in (right.float() + 1e-2, right.float() * float("nan")):
        with pytest.raises(RuntimeError, match="expected x within"):
            wgmma_rates.require_close("x", wrong, right, 1e-3)


def test_refuses_what_ptxas_gave_up():
    meta = {"name": "x", "spill_bytes": 0, "log": "ptxas info    : Used 90 registers"}
    wgmma_rates.check_log(meta)
    serialised = "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions"
    for wrong in ({"spill_bytes": 4}, {"log": serialised}):
        with pytest.raises(RuntimeError, match="expected no spills"):
            wgmma_rates.check_log({**meta, **wrong})


@pytest.fixture(scope="module")
def code():
    """The instructions of each kernel's only loop with MMAs, or all where there is none."""
    try:
        compiler = toolchain.find_nvcc()
    except jit.BuildError as error:
        pytest.skip(f"no CUDA compiler: {error}")
    found = {}
    for kernels in (RATES, LOOPS):
        artefact = build.build(wgmma_rates.unit(kernels), compiler).artefact
        wgmma_rates.check_log(artefact.meta)
        text = subprocess.run(
            [disassembly.find_cuobjdump(), "--dump-sass", artefact.path],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        functions = {function.name: function for function in sass.parse(text)}
        assert len(functions) == len(kernels)
        for kernel in kernels:
            (name,) = (name for name in functions if _is(kernel, name))
            found[kernel] = functions[name]
    return found


def _is(kernel, mangled):
    """Whether a mangled name is that of the kernel: enumerators are numbers in it."""
    if isinstance(kernel, Rate):
        place = list(wgmma_rates.OPERANDS).index(kernel.operands)
        element = kernel.dtype.replace("fp16", "half").replace("bf16", "bfloat16")
        return re.search(rf"{element}_tELi{kernel.n}E.*OperandsE{place}E", mangled)
    part = ("products", "softmax", "both", "turns", "eager").index(kernel.part)
    return re.search(rf"PartE{part}E", mangled)


@pytest.mark.parametrize("kernel", RATES, ids=lambda kernel: kernel.name)
def test_only_the_intended_products_are_timed(code, kernel):
    (loop,) = code[kernel].mma_loops
    place = "smem" if kernel.operands == "ss" else "registers"
    dtype = {"bf16": "BF16", "fp16": "F16"}[kernel.dtype]
    ((shape, count),) = loop.mma_shapes().items()
    assert shape.startswith(f"HGMMA.64x{kernel.n}x16.F32") and shape.endswith(f"A in {place}")
    assert (".BF16" in shape) == (dtype == "BF16")
    assert count == wgmma_rates.GROUPS * wgmma_rates.DEPTH // 16
    assert not loop.sometimes


@pytest.mark.parametrize("kernel", LOOPS, ids=lambda kernel: kernel.name)
def test_the_main_loop_s_mix_is_timed(code, kernel):
    function = code[kernel]
    if kernel.part == "softmax":
        assert not function.mma_loops
        names = collections.Counter(x.name for x in function.instructions)
    else:
        (loop,) = function.mma_loops
        products = {shape.split(".F32")[0]: n for shape, n in loop.mma_shapes().items()}
        assert products == {
            f"HGMMA.64x{kernel.n}x16": kernel.d // 16,
            f"HGMMA.64x{kernel.d}x16": kernel.n // 16,
        }
        names = loop.mix()
    scores = kernel.n // 2  # of a thread
    expected = 0 if kernel.part == "products" else scores
    if kernel.part in ("softmax", "eager"):  # the blocks before the loop, or the rows' factors
        assert names["MUFU"] >= expected
    else:
        assert names.get("MUFU", 0) == expected
    if kernel.part != "products":
        for name in ("FFMA", "FADD"):
            assert names[name] >= scores
        assert names["F2FP"] >= scores // 2
    if kernel.part in ("both", "turns"):  # no maximum is sought until a sum asks for it
        assert "FMNMX" not in names
        assert names["FMUL"] < 8  # S times the scale is part of the FFMA, and not kept for later
        assert sum(x.name == "FMNMX" for x in loop.sometimes) >= scores
    elif kernel.part == "eager":
        assert names["FMNMX"] >= scores
    assert ("BAR" in names) == (kernel.part in ("turns", "eager", "softmax"))
