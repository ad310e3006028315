"""The rungs in the simulator: the same headers, with what stands for their instructions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from flashcute import sim
from flashcute.jit import build, sources, toolchain
from flashcute.jit.toolchain import BuildError
from flashcute.sim import run as sim_run
from flashcute.sim.build import device_unit

from . import rungs
from .launch import Variant, source
from .rungs import Rung

SMEM_LIMIT = 227 * 1024
_POISON = 0x7FBF


def unit(rung: Rung, checker: str = "none") -> build.Unit:
    """A shared object with all kernels of a rung, each behind a function of its name."""
    # The simulator's cuda_runtime.h replaces functions; that works only ahead of CUDA's headers.
    text = f"""\
#include <cuda_runtime.h>
{source(rung)}
namespace ladder {{
alignas(1024) thread_local char smem[sim::kMaxSmemBytes];
}}
extern "C" void *sim_dynamic_smem() {{ return ladder::smem; }}
"""
    folders = (rungs.KERNELS, rungs.KERNELS / "sim", sources.kernel_include_dir())
    return device_unit(f"ladder_{rung.name}", text, folders, checker)


def build_rungs(wanted: Sequence[Rung], checker: str = "none") -> dict[Rung, Path]:
    """The shared objects of rungs, built where they are not cached.

    Raises:
        BuildError: with the compiler's messages.
    """
    compiler = toolchain.find_host_compiler()
    results = build.build_many([unit(rung, checker) for rung in wanted], compiler)
    errors = [str(result.error) for result in results if result.artefact is None]
    if errors:
        raise BuildError("\n".join(errors))
    return {rung: r.artefact.path for rung, r in zip(wanted, results, strict=True) if r.artefact}


@functools.cache
def _programs(rung: Rung, checker: str) -> tuple[Path, Path]:
    (runner,) = sim.build_runners([checker])
    return runner, build_rungs([rung], checker)[rung]


def attention(
    rung: Rung,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    seed: int = 0,
    copy_mode: str = "late",
    checker: str = "none",
) -> sim.SimResult:
    """One rung on CPU tensors; arguments as in :func:`flashcute.sim.run_fwd`.

    ``out`` has the dtype that the rung writes: float32 for one in fp32.
    """
    variant = Variant(rung, {torch.float16: "fp16"}.get(q.dtype, "bf16"), q.shape[3], causal)
    if rung.fp32:
        variant = Variant(rung, rungs.DTYPES[0], q.shape[3], causal)
        q, k, v = q.float(), k.float(), v.float()
    words = q.element_size() // 2
    out = torch.full((*q.shape[:3], words * q.shape[3]), _POISON, dtype=torch.int16).view(q.dtype)
    runner, kernel = _programs(rung, checker)
    settings = (seed, sim_run.COPY_MODES.index(copy_mode), SMEM_LIMIT, 2, 1, 0, 1 << 32)
    program = [str(runner), str(kernel), variant.name]
    return sim_run.run_program(program, (q, k, v, out), q.shape[3] ** -0.5, settings, 300.0)
