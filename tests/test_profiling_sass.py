"""Reading machine code.

The recordings are `cuobjdump --dump-sass` of our own kernels without the encodings: a loop of the
sm80 class, and all of tests/data/sass/wgmma_loop.cu.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from flashcute.profiling import sass

DATA = Path(__file__).parent / "data" / "sass"


def recorded(name):
    (function,) = sass.parse((DATA / f"{name}.sass").read_text())
    return function


def code(*lines):
    """Returns a function of these instructions, 16 bytes each from address 0."""
    text = "\n".join(f"        /*{16 * i:04x}*/   {line} ;" for i, line in enumerate(lines))
    (function,) = sass.parse(f"\t\tFunction : f\n{text}")
    return function


MMA = "HMMA.16816.F32.BF16 R4, R8, R12, R4"


def test_the_loop_of_an_sm80_kernel():
    loop = recorded("flash_fwd_hdim32_fp16_sm80_loop").main_loop()
    assert loop.mma_shapes() == {"HMMA.16816.F32": 32}
    # A warp owns 32 of 128 rows, a block has 32 keys, and a score takes 32 + 32 multiply-adds.
    assert loop.warp_macs == 32 * 32 * (32 + 32)
    mix = loop.mix()
    assert mix["MUFU"] == 32 * 32 / 32  # one exp2 a score
    assert mix["LDSM"] == 12
    assert next(iter(mix)) == "FMNMX"
    # 128 threads copy 16 bytes each of the next block's K and V, 4 KB. Only the last iteration does
    # not.
    assert mix["LDGSTS"] == 2
    # A branch skips the rescale of O, 32 rows x 32 columns a warp, and of the row sums.
    sometimes = [x.name for x in loop.sometimes]
    assert sometimes.count("FMUL") >= 32
    assert "HMMA" not in sometimes


def test_the_loop_of_a_wgmma_kernel():
    function = recorded("wgmma_loop")
    assert function.register_pools() == {"claimed": 240, "released": 24}
    (loop,) = function.mma_loops  # the producer's loop has no MMA
    assert loop.mma_shapes() == {
        "HGMMA.64x64x16.F32.BF16 A in smem": 4,
        "HGMMA.64x64x16.F32.BF16 A in registers": 4,
    }
    # A warp of the four owns 16 of the 64 rows.
    assert loop.warp_macs == 16 * 64 * (64 + 64)
    assert loop.mix()["MUFU"] == 32
    # The first try of a barrier is always issued; the loop that waits lies out of line.
    tries = [x for x in loop.always if "TRYWAIT" in x.opcode]
    assert len(tries) == 1
    assert any("TRYWAIT" in x.opcode for x in loop.sometimes)
    assert any(x.name == "UTMALDG" for x in function.instructions)


def test_instructions_are_taken_apart():
    function = code("@!P0 FADD.FTZ R3, R4, R5", "WARPGROUP.ARRIVE", "EXIT")
    guarded, arrive, _ = function.instructions
    assert (guarded.guard, guarded.name, guarded.operands) == ("!P0", "FADD", "R3, R4, R5")
    assert (arrive.address, arrive.opcode, arrive.operands) == (16, "WARPGROUP.ARRIVE", "")


def test_lines_of_encoding_are_skipped():
    text = (
        "\t\tFunction : f\n"
        "        /*0000*/                   MOV R1, c[0x0][0x28] ;     /* 0x00000a0000017a02 */\n"
        "                                                              /* 0x000fe20000000f00 */\n"
    )
    (function,) = sass.parse(text)
    assert [x.opcode for x in function.instructions] == ["MOV"]


@pytest.mark.parametrize(
    ("opcode", "operands", "shape", "macs"),
    [
        ("HMMA.16816.F32.BF16", "R4, R8, R12, R4", (16, 8, 16), 2048),
        ("HMMA.1688.F32", "R4, R8, R12, R4", (16, 8, 8), 1024),
        ("HGMMA.64x256x16.F32", "R24, gdesc[UR16], R24", (64, 256, 16), 65536),
        ("FFMA", "R4, R8, R12, R4", None, 0),
    ],
)
def test_matrix_instructions(opcode, operands, shape, macs):
    x = sass.Instruction(0, "", opcode, operands)
    assert (x.mma_shape, x.warp_macs) == (shape, macs)


def test_the_innermost_loop_counts():
    function = code(
        "MOV R0, RZ",
        MMA,  # 0x10: of the outer loop only
        MMA,  # 0x20: the inner loop
        "FADD R1, R1, R2",
        "@P0 BRA 0x20",
        "@P1 BRA 0x10",
        "EXIT",
    )
    (loop,) = function.mma_loops
    assert (loop.address, len(loop.always), loop.sometimes) == (0x20, 3, ())


def test_a_branch_that_skips_is_not_always_taken():
    function = code(
        MMA,
        "BSSY B0, 0x50",
        "@P0 BRA 0x40",
        "FMUL R1, R1, R2",
        "BSYNC B0",
        "@P1 BRA 0x0",
        "EXIT",
    )
    (loop,) = function.mma_loops
    assert [x.name for x in loop.sometimes] == ["FMUL"]


def test_copies_of_the_next_block_count_although_the_last_iteration_skips_them():
    function = code(
        MMA,
        "@P0 BRA 0x40",
        "IADD3 R1, R1, 0x80, RZ",
        "LDGSTS.E.BYPASS.LTC128B.128 [R1], [R2.64]",
        "@P1 BRA 0x0",
        "EXIT",
    )
    (loop,) = function.mma_loops
    assert (len(loop.always), loop.sometimes) == (5, ())


def test_blocks_out_of_line_belong_to_the_loop():
    function = code(
        MMA,
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R3",
        "@!P0 BRA 0x60",
        "MUFU.EX2 R0, R1",
        "@P1 BRA 0x0",
        "EXIT",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R3",
        "@!P0 BRA 0x60",
        "BRA 0x30",
    )
    (loop,) = function.mma_loops
    assert [x.address for x in loop.sometimes] == [0x60, 0x70, 0x80]


def test_iterations_that_skip_all_mmas_do_not_count():
    function = code(
        "IADD3 R1, R1, 0x80, RZ",
        "@P0 BRA 0x70",
        MMA,
        "@P1 BRA 0x50",
        "FMUL R1, R1, R2",
        MMA,  # 0x50: behind a branch of its own
        "MUFU.EX2 R0, R1",
        "BAR.SYNC 0x0",  # 0x70: of all warps
        "@P2 BRA 0x0",
        "EXIT",
    )
    (loop,) = function.mma_loops
    assert [x.address for x in loop.sometimes] == [0x40]
    assert (loop.address, len(loop.always)) == (0x0, 8)


def test_two_products_that_are_skipped_one_by_one_count_both():
    function = code(
        "@P0 BRA 0x20",
        MMA,
        "BAR.SYNC 0x0",  # 0x20: of all warps
        "@P0 BRA 0x60",
        "@P1 BRA 0x70",
        MMA,
        "BRA 0x80",  # 0x60
        MMA,  # 0x70: another copy of the second
        "@P2 BRA 0x0",  # 0x80
        "@P3 BRA 0x0",  # 0x90: a second latch
        "EXIT",
    )
    (loop,) = function.mma_loops
    assert sum(x.mma_shape is not None for x in loop.always) == 2
    assert [x.address for x in loop.sometimes if x.mma_shape] == [0x70]


def test_the_leanest_copy_is_the_main_loop():
    function = code(
        MMA,
        "FSEL R1, R1, R2, P0",
        "@P0 BRA 0x0",
        MMA,
        "@P0 BRA 0x30",
        "EXIT",
    )
    assert [loop.address for loop in function.mma_loops] == [0x0, 0x30]
    assert function.main_loop().address == 0x30


def test_code_without_a_loop():
    assert code(MMA, "EXIT", "BRA 0x20").main_loop() is None


def test_text_without_instructions_is_an_error():
    with pytest.raises(ValueError, match=r"sass\.parse: expected the output of"):
        sass.parse("Fatbin elf code:\n")
