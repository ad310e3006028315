"""The rungs in the simulator: the same headers, with the simulator's instructions."""

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
from .launch import Variant, half, source
from .rungs import Rung

SMEM_LIMIT = 227 * 1024


def companions(variant: Variant, checker: str) -> list[Variant]:
    """Returns the kernels compiled together with ``variant``: with a checker it is alone."""
    return half(variant) if checker == "none" else [variant]


def unit(variant: Variant, checker: str = "none") -> build.Unit:
    """Returns the unit of a kernel and its companions, each exported by a function of its name."""
    # The simulator's cuda_runtime.h comes first: it has to precede CUDA's headers to replace
    # functions.
    text = f"""\
#include <cuda_runtime.h>
{source(companions(variant, checker))}
"""
    folders = (rungs.KERNELS, rungs.KERNELS / "sim", sources.kernel_include_dir())
    return device_unit(f"ladder_{variant.rung.name}", text, folders, checker)


def build_kernels(specs: Sequence[tuple[Variant, str]]) -> list[Path]:
    """Builds missing shared objects of ``(kernel, checker)`` pairs; returns the path for each pair.

    Raises:
        BuildError: with the compiler's messages.
    """
    units = [unit(variant, checker) for variant, checker in specs]
    distinct = list(dict.fromkeys(units))
    results = build.build_many(distinct, toolchain.find_host_compiler())
    errors = [str(result.error) for result in results if result.artefact is None]
    if errors:
        raise BuildError("\n".join(errors))
    paths = {result.unit: result.artefact.path for result in results if result.artefact}
    return [paths[unit] for unit in units]


@functools.cache
def _programs(variant: Variant, checker: str) -> tuple[Path, Path]:
    (runner,) = sim.build_runners([checker])
    (kernel,) = build_kernels([(variant, checker)])
    return runner, kernel


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
    """Simulates one rung on CPU tensors; arguments as in :func:`flashcute.sim.run_fwd`.

    ``out`` has the dtype that the rung writes: float32 for an fp32 rung.
    """
    variant = Variant(rung, {torch.float16: "fp16"}.get(q.dtype, "bf16"), q.shape[3], causal)
    if rung.fp32:
        variant = Variant(rung, rungs.DTYPES[0], q.shape[3], causal)
        q, k, v = q.float(), k.float(), v.float()
    runner, kernel = _programs(variant, checker)
    settings = (seed, sim_run.COPY_MODES.index(copy_mode), SMEM_LIMIT, 2, 1, 0, 1 << 32, 0, 1)
    program = [str(runner), str(kernel), variant.name]
    inputs = {"q": q, "k": k, "v": v}
    return sim_run.run_fwd_program(program, inputs, q.shape[3] ** -0.5, settings, 300.0)
