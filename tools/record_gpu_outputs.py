"""Records outputs of a GPU, with which tests compare the simulator on machines without one.

    python tools/record_gpu_outputs.py --out tests/sim/data

One .npz file for each configuration of :data:`RECORDED`: the inputs and outputs of one launch as
bit patterns, and the machine that made them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import flashcute
from flashcute import benchmarking
from flashcute.benchmarking import Shape
from flashcute.heuristics import FwdProblem, choose_fwd

# Kernel class, dtype and problem.
# sm80: both dtypes, both masks, one and two stages, with and without Q in registers, tile edges,
# GQA and a padded head dimension. sm90: the same, two and three consumers, none, some and all steps
# of Q in registers, with and without ping-pong.
RECORDED = (
    (80, "bf16", Shape(1, 130, 193, 2, 1, 64, False)),
    (80, "fp16", Shape(1, 129, 200, 2, 2, 128, True)),
    (80, "bf16", Shape(1, 100, 161, 2, 1, 88, True)),
    (80, "fp16", Shape(1, 70, 130, 1, 1, 192, False)),
    (90, "bf16", Shape(1, 200, 300, 2, 1, 64, False)),
    (90, "fp16", Shape(1, 129, 260, 2, 2, 128, True)),
    (90, "bf16", Shape(1, 140, 1100, 2, 1, 88, True)),
    (90, "bf16", Shape(1, 150, 1050, 1, 1, 128, False)),
    (90, "fp16", Shape(1, 130, 200, 1, 1, 256, False)),
)
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def bits(x: torch.Tensor) -> np.ndarray:
    """Returns the 16-bit patterns of a tensor, as NumPy has no bfloat16."""
    return x.contiguous().cpu().view(torch.int16).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    machine = json.dumps(benchmarking.machine_info())
    for arch, dtype, shape in RECORDED:
        os.environ["FLASHCUTE_ARCH"] = str(arch)
        q, k, v = benchmarking.make_qkv(shape, TORCH_DTYPES[dtype], "cuda", seed=shape.d)
        out, lse, _ = flashcute.flash_attn_func(
            q, k, v, causal=shape.causal, return_attn_probs=True
        )
        config = choose_fwd(
            FwdProblem(dtype=dtype, **dataclasses.asdict(shape)), torch.cuda.get_device_capability()
        )
        np.savez_compressed(
            args.out / f"{config.name}_d{shape.d}.npz",
            q=bits(q),
            k=bits(k),
            v=bits(v),
            out=bits(out),
            lse=lse.cpu().numpy(),
            config=config.full_name,
            machine=machine,
        )
        print(f"{config.full_name}: {shape}")


if __name__ == "__main__":
    main()
