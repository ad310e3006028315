"""Occupancy against NVIDIA's own calculator, cuda_occupancy.h of the toolkit, run on the host."""

from __future__ import annotations

import itertools
import subprocess

import pytest

from flashcute.config import MAX_SMEM_BYTES
from flashcute.jit import BuildError, toolchain
from flashcute.occupancy import ctas_per_sm, warps_per_sm

THREADS = (32, 128, 160, 256, 384, 1024)
REGISTERS = (16, 40, 64, 128, 168, 200, 254, 255)
SMEM = (0, 1, 16 << 10, 48 << 10, (48 << 10) + 1, 64 << 10, 81 << 10, 96 << 10, 99 << 10)

_PROGRAM = """\
#include <cstddef>
#include <cstdio>
#include "cuda_occupancy.h"
int main() {
    int major, minor, threads, registers, smem, per_sm, per_cta, warps;
    while (scanf("%d %d %d %d %d %d %d %d", &major, &minor, &threads, &registers, &smem, &per_sm,
                 &per_cta, &warps) == 8) {
        cudaOccDeviceProp p;
        p.computeMajor = major;
        p.computeMinor = minor;
        p.maxThreadsPerBlock = 1024;
        p.maxThreadsPerMultiprocessor = 32 * warps;
        p.regsPerBlock = p.regsPerMultiprocessor = 65536;
        p.warpSize = 32;
        p.sharedMemPerBlock = 48 << 10;
        p.sharedMemPerMultiprocessor = per_sm;
        p.numSms = 1;
        p.sharedMemPerBlockOptin = per_cta;
        p.reservedSharedMemPerBlock = 1024;
        cudaOccFuncAttributes f;
        f.maxThreadsPerBlock = 1024;
        f.numRegs = registers;
        f.sharedSizeBytes = 0;
        f.partitionedGCConfig = PARTITIONED_GC_OFF;
        f.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        f.maxDynamicSharedSizeBytes = per_cta;
        f.numBlockBarriers = 1;
        cudaOccDeviceState state;
        state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
        cudaOccResult result;
        int const error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &p, &f, &state,
                                                                  threads, smem);
        printf("%d\\n", error ? -error : result.activeBlocksPerMultiprocessor);
    }
}
"""


def test_same_as_nvidias_calculator(tmp_path):
    try:
        include = toolchain.find_nvcc().path.resolve().parents[1] / "include"
    except BuildError as error:
        pytest.skip(str(error))
    if not (include / "cuda_occupancy.h").is_file():
        include = toolchain.SYSTEM_CUDA / "include"
    if not (include / "cuda_occupancy.h").is_file():
        pytest.skip("the toolkit has no cuda_occupancy.h")
    (tmp_path / "program.cpp").write_text(_PROGRAM)
    compiler = toolchain.find_host_compiler().path
    command = [compiler, "-w", f"-I{include}", tmp_path / "program.cpp", "-o", tmp_path / "program"]
    subprocess.run(command, check=True)
    cases = [
        (capability, *resources)
        for capability, *resources in itertools.product(MAX_SMEM_BYTES, THREADS, REGISTERS, SMEM)
    ]
    lines = []
    for (major, minor), threads, registers, smem in cases:
        per_cta = MAX_SMEM_BYTES[major, minor]
        warps = 64 if (major, minor) in ((8, 0), (9, 0), (10, 0), (10, 3)) else 48
        values = (major, minor, threads, registers, smem, per_cta + 1024, per_cta, warps)
        lines.append(" ".join(map(str, values)))
    done = subprocess.run(
        [tmp_path / "program"], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    expected = [int(line) for line in done.stdout.split()]
    got = [ctas_per_sm(t, r, s, capability).ctas for capability, t, r, s in cases]
    wrong = [(c, g, e) for c, g, e in zip(cases, got, expected, strict=True) if g != e]
    assert wrong == []


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ((128, 254, 48 << 10, (9, 0)), (2, "registers")),
        ((128, 128, 64 << 10, (9, 0)), (3, "shared memory")),
        ((256, 32, 0, (8, 6)), (6, "warps")),
        ((32, 16, 0, (8, 6)), (16, "CTAs")),
        ((256, 128, 128 << 10, (8, 6)), (0, "shared memory")),
    ],
)
def test_limit(kernel, expected):
    found = ctas_per_sm(*kernel)
    assert (found.ctas, found.limit) == expected


@pytest.mark.parametrize(("capability", "warps"), [((8, 0), 64), ((8, 9), 48), ((9, 0), 64)])
def test_resident_warps_are_2048_or_1536_threads(capability, warps):
    assert warps_per_sm(capability) == warps
