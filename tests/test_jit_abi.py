"""The ctypes mirror of flash.h against a C++ compiler's view of it, and how tensors fill it."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch

from flashcute.jit import sources, toolchain
from flashcute.jit.abi import (
    ABI_VERSION,
    FlashBwdParams,
    FlashFwdParams,
    FlashKernel,
    Splits,
    bwd_params,
    dropout_bound,
    fwd_params,
    partial_rows,
    plan_capacity,
    plan_words,
    row_stats_rows,
    serving_params,
)

STRUCTS = {
    "Flash_fwd_params": FlashFwdParams,
    "Flash_bwd_params": FlashBwdParams,
    "Flash_kernel": FlashKernel,
    "Flash_bwd_kernel": FlashKernel,
}


def cpp_layout(folder) -> list[str]:
    """Returns the structs' sizes, and each field's name, offset and size, as g++ has them."""
    lines = ['printf("abi %d\\n", flash::kAbiVersion);']
    for name, mirror in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof(flash::{name}));')
        lines += [
            f'printf("{name}.{field[0]} %zu %zu\\n", offsetof(flash::{name}, {field[0]}), '
            f"sizeof(flash::{name}::{field[0]}));"
            for field in mirror._fields_
        ]
    return run_cpp(folder, "\n".join(lines))


def run_cpp(folder, body: str) -> list[str]:
    """Compiles and runs a program with flash.h; returns the lines that it prints."""
    source = folder / "program.cpp"
    source.write_text(
        '#include "flash.h"\n#include <cstddef>\n#include <cstdio>\nint main() {\n' + body + "\n}\n"
    )
    command = [toolchain.find_host_compiler().path, "-std=c++20", source, "-o", folder / "program"]
    subprocess.run([*command, f"-I{sources.kernel_include_dir()}"], check=True)
    done = subprocess.run([folder / "program"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


_WRONG_ROOM = """
using namespace flash;
for (int b = 0; b < 4; ++b)
    for (int total = 0; total < 600; ++total) {
        int64_t const room = row_stats_rows(total, b);
        printf("%d %d %lld\\n", total, b, (long long)room);
        for (int i = -1; i <= b; ++i)  // behind the last sequence i = b
            for (int row = 0; row <= total; ++row) {
                int const tiles = (total - row + kRowStatsMultiple - 1) / kRowStatsMultiple;
                if (row_stats_begin(row, i) < 0 ||
                    row_stats_begin(row, i) + tiles * kRowStatsMultiple > room) {
                    printf("sequence %d of %d at row %d of %d\\n", i, b, row, total);
                    return 1;
                }
            }
    }
"""


def test_statistics_of_every_row_have_room(tmp_path):
    """Rows of no sequence have room, too, as the tiles behind the last sequence read it."""
    for line in run_cpp(tmp_path, _WRONG_ROOM):
        total, b, room = map(int, line.split())
        assert row_stats_rows(total, b) == room


def test_mirror_has_the_layout_of_flash_h(tmp_path):
    expected = [f"abi {ABI_VERSION}"]
    for name, mirror in STRUCTS.items():
        expected.append(f"{name} {ctypes.sizeof(mirror)}")
        for field, *_ in mirror._fields_:
            descriptor = getattr(mirror, field)
            expected.append(f"{name}.{field} {descriptor.offset} {descriptor.size}")
    assert cpp_layout(tmp_path) == expected


# tests/test_jit_launch.py compares every field of the parameters.
def test_dimensions_of_size_1_have_no_stride():
    q = torch.empty(8).as_strided((1, 1, 1, 8), (3, 5, 7, 1))
    k = torch.empty(64).as_strided((1, 2, 1, 8), (3, 16, 7, 1))
    params = fwd_params({"q": q, "k": k}, 1.0)
    assert [getattr(params, f"q_{dim}_stride") for dim in ("batch", "row", "head")] == [0, 0, 0]
    assert [getattr(params, f"k_{dim}_stride") for dim in ("batch", "row", "head")] == [0, 16, 0]
    assert params.k_ptr == k.data_ptr() and params.v_ptr is None


def test_scores_have_the_softcap_as_their_unit():
    q, slopes = torch.empty(2, 1, 4, 8), torch.empty(2, 6)[:, :4]
    tensors = {"q": q, "k": q, "alibi_slopes": slopes}
    plain, capped = (fwd_params(tensors, 0.25, softcap=softcap) for softcap in (0.0, 32.0))
    names = "scale_softmax", "scale_softcap", "alibi_scale", "alibi_slopes_batch_stride"
    assert [getattr(plain, name) for name in names] == [0.25, 1.0, 4.0, 6]
    assert [getattr(capped, name) for name in names] == [0.25, 2**-7, 2**-5, 6]
    assert capped.scale_softmax_log2 == 128 * plain.scale_softmax_log2
    shared = fwd_params(tensors | {"alibi_slopes": slopes[0].expand(2, 4)}, 0.25)
    assert shared.alibi_slopes_batch_stride == 0


def test_probabilities_are_multiples_of_what_16_bits_tell_apart():
    q, state = torch.empty(2, 1, 4, 8), torch.tensor([1, 2])
    for dropout_p, threshold in ((0.5, 32768), (0.1, 6554), (2.0**-18, 0), (1 - 2.0**-16, 65535)):
        params = fwd_params({"q": q, "k": q, "rng_state": state}, 0.25, dropout_p=dropout_p)
        bound, flips = dropout_bound(threshold)
        assert (params.dropout_bound, params.dropout_flip) == (bound * 0x10001, -flips % 2**32)
        assert params.dropout_scale * (1 - threshold / 2**16) == pytest.approx(1, rel=1e-7)
        assert params.rng_state_ptr == state.data_ptr()


def test_bound_is_that_of_flash_h(tmp_path):
    lines = run_cpp(
        tmp_path,
        "for (unsigned i = 0; i < 65536; ++i) {"
        "    flash::DropoutBound const of(i);"
        '    std::printf("%x %x\\n", of.bound, of.flip);'
        "}",
    )
    for threshold, line in enumerate(lines):
        bound, flips = dropout_bound(threshold)
        assert [int(x, 16) for x in line.split()] == [bound * 0x10001, -flips % 2**32]
    assert len(lines) == 2**16


def test_backward_has_the_arguments_of_the_forward_and_its_own():
    q, k = torch.empty(2, 3, 4, 8), torch.empty(2, 5, 2, 8)
    tensors = {"q": q, "k": k, "do": q.mT.contiguous().mT, "dk": k, "dlse": torch.empty(2, 4, 3)}
    params = bwd_params({**tensors, "row_stats": torch.empty(2, 4, 128, 2)}, 0.5, (7, 9))
    forward = fwd_params({"q": q, "k": k}, 0.5, window_size=(7, 9))
    for name, *_ in FlashFwdParams._fields_:
        assert getattr(params, name) == getattr(forward, name), name
    assert params.seqlen_q_rounded == 128 and params.pack_shift == 0
    assert params.do_ptr == tensors["do"].data_ptr() and params.dv_ptr is None
    strides = [getattr(params, f"do_{dim}_stride") for dim in ("batch", "row", "head")]
    assert strides == list(tensors["do"].stride()[:3])
    assert [params.dlse_batch_stride, params.dlse_head_stride] == [12, 3]


def test_a_tensor_that_no_pointer_takes_is_refused():
    q = torch.empty(1, 1, 1, 8)
    with pytest.raises(AttributeError, match="out_ptr"):
        fwd_params({"q": q, "k": q, "out": q}, 1.0)


# total_rows, b, tile_m, num_splits, blocks, parts, grid_heads
SIZES = (
    (0, 0, 64, 1, 1, 0, 1),
    (64, 64, 64, 1, 1, 0, 8),
    (64, 64, 64, 8, 1, 0, 8),
    (4000, 10, 128, 256, 2, 792, 8),
    (16, 4, 64, 256, 2, 792, 8),
    (100_000, 3, 192, 2, 2, 10**6, 1),
)


def test_sizes_of_the_workspaces_are_those_of_flash_h(tmp_path):
    lines = []
    expected = []
    for rows, b, m, most, blocks, parts, heads in SIZES:
        splits = Splits(most, blocks, parts)
        capacity = plan_capacity(rows, b, m, splits, heads)
        expected.append(
            [capacity, plan_words(capacity, b, rows, most), partial_rows(rows, m, splits, heads)]
        )
        lines += [
            f"auto c = flash::plan_capacity({rows}, {b}, {m}, {most}, {parts}, {heads});",
            f"auto w = flash::plan_words(c, {b}, {rows}, {most});",
            f"auto p = flash::partial_rows({rows}, {m}, {most}, {parts}, {heads});",
        ]
        lines[-3:] = [
            "{",
            *lines[-3:],
            'std::printf("%ld %ld %ld\\n", long(c), long(w), long(p));',
            "}",
        ]
    source = tmp_path / "sizes.cpp"
    body = "\n".join(lines)
    source.write_text(f'#include "flash.h"\n#include <cstdio>\nint main() {{\n{body}\n}}\n')
    command = [toolchain.find_host_compiler().path, "-std=c++20", source, "-o", tmp_path / "sizes"]
    subprocess.run([*command, f"-I{sources.kernel_include_dir()}"], check=True)
    done = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True)
    assert [[int(x) for x in line.split()] for line in done.stdout.splitlines()] == expected


def test_a_cache_in_pages():
    q = torch.empty(7, 6, 64)
    k = torch.empty(30, 2, 16, 64).transpose(1, 2)
    tensors = {"q": q, "k": k, "v": k, "seqused_k": torch.empty(5, dtype=torch.int32)}
    tensors["block_table"] = torch.empty(8, 12, dtype=torch.int32)[:, :9]
    params = serving_params(tensors, 1.0, 3, 64, Splits(4, 2, 100), pack_heads=True)
    assert (params.b, params.total_q, params.seqlen_q, params.pack_shift) == (5, 7, 3, 2)
    assert (params.b_k, params.num_pages, params.page_size, params.seqlen_k) == (8, 30, 16, 144)
    assert (params.k_batch_stride, params.k_row_stride, params.k_head_stride) == (2048, 64, 1024)
    assert params.block_table_batch_stride == 12 and params.cu_seqlens_q_ptr is None
    assert (params.num_splits, params.split_blocks, params.split_ctas) == (4, 2, 100)
    del tensors["block_table"]
    params = serving_params(tensors, 1.0, 3, 64)
    assert (params.b_k, params.seqlen_k, params.num_splits, params.partial_rows) == (30, 16, 1, 0)
