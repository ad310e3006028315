"""Every bf16 kernel in use on this GPU under NVIDIA's compute-sanitizer: memcheck and synccheck.

    python tools/sanitize.py --out build/gpu

The backward's kernels run for every head dimension, for dense and for ragged batches, also with
softcap, ALiBi and dropout together, and on Hopper also those of other GPUs. Kernels that are
missing are built first. Then memcheck has to find a planted fault. Release 2025.3, of CUDA 13.0,
checks loads and stores of threads and reads of wgmma; TMA's copies are checked from release 2026.2
on. racecheck is optional: on kernels with mbarriers and warpgroups it has false positives up to
release 2026.3 (https://docs.nvidia.com/compute-sanitizer/ReleaseNotes), and of the asynchronous
copies it supports cp.async only. The simulator checks for races instead.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator

import check_gpu

sys.path.insert(0, str(check_gpu.ROOT))

SYSTEM = "/usr/local/cuda/bin/compute-sanitizer"
FOUND = "Invalid __global__ write"
DONE = "kernels launched, all right"


def find_sanitizer() -> str:
    """Finds compute-sanitizer on PATH, in ``CUDA_HOME`` or the toolkit's usual place."""
    home = os.environ.get("CUDA_HOME")
    places = ["compute-sanitizer", *([f"{home}/bin/compute-sanitizer"] if home else []), SYSTEM]
    for place in places:
        if found := shutil.which(place):
            return found
    raise SystemExit(f"sanitize: expected the CUDA toolkit's compute-sanitizer, none in {places}")


def command(sanitizer: str, tool: str, planted: bool) -> list[str]:
    # The compiler tells the tool the number of mbarriers, but without those of inline PTX.
    return [
        *(sanitizer, "--tool", tool, "--kernel-name", "kns=flash_"),
        *("--target-processes", "application-only", "--num-cuda-barriers", "32"),
        *("--error-exitcode", "3", "--print-limit", "20"),
        *(sys.executable, __file__, "--launch", *(["--planted"] if planted else [])),
    ]


def configs(capability: tuple[int, int]) -> tuple[list, list]:
    """Returns the forward's and the backward's configurations that are launched."""
    from flashcute import heuristics
    from flashcute.config import HEAD_DIMS

    forward, backward = [], []
    for head_dim, causal in itertools.product(HEAD_DIMS, (False, True)):
        forward += heuristics.configs_in_use("bf16", head_dim, causal, capability)
        kernels = heuristics.bwd_configs_in_use("bf16", head_dim, causal, capability)
        if heuristics.kernel_class(capability) == 90:  # kernels of other GPUs run here, too
            mask = "causal" if causal else "none"
            kernels.append(heuristics.fused_bwd_config("bf16", head_dim, mask, capability))
            kernels.append(heuristics.bwd_config("bf16", head_dim, mask))
        ragged = [heuristics.bwd_with_options(config, varlen=True) for config in kernels]
        backward += dict.fromkeys(kernels + ragged)
        for varlen in (False, True) if causal else ():
            backward.append(heuristics.bwd_with_options(kernels[0], True, True, True, varlen))
    return forward, backward


def build_missing() -> None:
    """Builds missing kernels in parallel; else each is compiled at its launch, one after the other.

    Raises:
        SystemExit: with the compiler's message.
    """
    import torch

    from flashcute import jit
    from flashcute.jit import kernels

    capability = torch.cuda.get_device_capability()
    target = "".join(map(str, capability))
    forward, backward = configs(capability)
    specs = [(config, target) for config in forward + backward]
    missing = [spec for spec in specs if kernels.find_built(*spec)[1] is None]
    for result in jit.build_kernels(missing) if missing else ():
        if result.error is not None:
            raise SystemExit(result.error)


@contextlib.contextmanager
def computed_by(config) -> Iterator[None]:
    """Makes this backward compute the gradients, whatever the heuristics choose.

    It has the mask that the call asks for.
    """
    from flashcute import heuristics, ops

    ops.load()
    choose, set_resolver = heuristics.choose_bwd, ops._keep_alive[0].flashcute_set_resolver

    def chosen(*args, **options):
        return dataclasses.replace(config, mask=choose(*args, **options).mask)

    heuristics.choose_bwd = chosen
    try:
        set_resolver(ops._resolve)  # the binding forgets what it chose
        yield
    finally:
        heuristics.choose_bwd = choose
        set_resolver(ops._resolve)


def planted_lse(b: int, h: int, seqlen_q: int):
    """Returns an LSE with shape and strides (b, h, seqlen_q), but memory for its first value only.

    Whatever a kernel writes to other values is out of bounds of the allocation.
    """
    import torch

    lse = torch.empty(b, h, seqlen_q).cuda()
    lse.untyped_storage().resize_(lse.element_size())
    return lse


def launch_all(planted: bool) -> None:
    """Launches each kernel once on a small problem with more tiles than SMs.

    A backward is launched a second time as a deterministic one. With ``planted``, only one kernel
    is launched, with memory for one value of its log-sum-exp.
    """
    import torch

    from flashcute import jit, oracles, testing
    from flashcute.jit import abi
    from flashcute.jit.launch import Call

    capability = torch.cuda.get_device_capability()
    heads = 2 * (torch.cuda.get_device_properties(0).multi_processor_count // 4 + 1)
    forward, backward = configs(capability)
    for config in forward:
        kernel = jit.get_kernel(config, "".join(map(str, capability)))
        entry = abi.FlashKernel.from_address(kernel.address)
        sizes = (1, config.tile_m + 1, 2 * config.tile_n + 1, heads, heads // 2, config.head_dim)
        # Inputs and checks on the CPU, so that no kernels of torch run under the sanitizer.
        q, k, v = oracles.make_qkv(oracles.Shape(*sizes), torch.bfloat16)
        inputs = [x.cuda() for x in (q, k, v)]
        if planted:
            b, seqlen_q, h, _ = inputs[0].shape
            outputs = torch.empty_like(inputs[0]), planted_lse(b, h, seqlen_q)
            Call(entry, *inputs, outputs=outputs)()
            torch.cuda.synchronize()
            return
        out, lse = (x.cpu() for x in Call(entry, *inputs)())
        last = (out[:, :, -4:], lse[:, -4:], q[:, :, -4:], k[:, :, -2:], v[:, :, -2:])
        testing.check_forward(*last, causal=config.mask == "causal")
    for config in backward:
        for deterministic in (False, True):
            launch_backward(config, deterministic)
    print(f"{len(forward) + len(backward)} {DONE}")


def launch_backward(config, deterministic: bool) -> None:
    """Makes one call with a single row or key in the last tiles, sinks and a gradient of the LSE.

    It calls the operator, which takes the workspace from the allocator as every call does.
    """
    import torch

    from flashcute import oracles, testing
    from flashcute.dropout import dropout_mask
    from flashcute.reference import attention_ref

    b, seqlen_q, seqlen_k, h, d = 1, config.dq.rows + 1, config.dkv.rows + 1, 4, config.head_dim
    causal = config.mask == "causal"
    shape = oracles.Shape(b, seqlen_q, seqlen_k, h, h // 2, d)
    q, k, v = oracles.make_qkv(shape, torch.bfloat16)
    dout = oracles.make_qkv(shape, torch.bfloat16, seed=1)[0]
    sinks, dlse = torch.ones(h), torch.ones(b, h, seqlen_q)
    asked, scored = {"causal": causal, "sinks": sinks}, [None, 0.0, 0.0, None]
    if config.dropout:  # dropout is combined with all else that changes scores
        p, cap, slopes, state = 0.25, 5.0, torch.arange(1, h + 1) / 8, torch.tensor([3, 4])
        mask = dropout_mask(state, b, h, seqlen_q, seqlen_k, p)
        asked |= {"softcap": cap, "alibi_slopes": slopes, "dropout_p": p, "dropout_mask": mask}
        scored = [state.cuda(), p, cap, slopes.cuda()]
    out, lse, _ = attention_ref(q, k, v, upcast=torch.float64, **asked)
    tensors = [x.cuda() for x in (dout, q, k, v, out.to(q.dtype), lse.float(), dlse)]
    options = d**-0.5, causal, -1, -1, sinks.cuda(), 15 | deterministic << 4, *scored
    with computed_by(config):
        if config.varlen:
            packed = [x[0] for x in tensors]
            cu = [torch.tensor([0, n], dtype=torch.int32).cuda() for n in (seqlen_q, seqlen_k)]
            lengths = *cu, None, None, seqlen_q, seqlen_k
            found = torch.ops.flashcute.bwd_varlen.default(*packed, *lengths, *options)
            found = [x[None] for x in found[:3]] + [found[3]]
        else:
            found = torch.ops.flashcute.bwd.default(*tensors, *options)
    gradients = {n: x.cpu() for n, x in zip(("dq", "dk", "dv", "dsinks"), found, strict=True)}
    testing.check_backward(gradients, q, k, v, dout, dlse=dlse, **asked)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tools = ("memcheck", "synccheck", "racecheck")
    parser.add_argument("--tools", nargs="+", choices=tools, default=tools[:2])
    parser.add_argument("--out", type=pathlib.Path, default=check_gpu.ROOT / "build" / "gpu")
    parser.add_argument("--time-limit", type=float, default=180, help="seconds for all tools")
    parser.add_argument("--launch", action="store_true", help="what runs under the sanitizer")
    parser.add_argument("--planted", action="store_true", help="with --launch: one with a fault")
    args = parser.parse_args(argv)
    if args.launch:
        launch_all(args.planted)
        return 0
    sanitizer = find_sanitizer()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.time_limit
    build_missing()
    # With torch's caching allocator the end of a tensor is not that of an allocation, so memcheck
    # would miss accesses beyond it.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    good = True
    runs = [("memcheck", True), *((tool, False) for tool in args.tools)]
    for left, (tool, planted) in zip(range(len(runs), 0, -1), runs, strict=True):
        name = f"{tool}, planted fault" if planted else tool
        log = args.out.resolve() / f"{tool}{'_planted' if planted else ''}.log"
        line = command(sanitizer, tool, planted)
        seconds = max(1.0, (end - time.monotonic()) / left)
        outcome, took = check_gpu.run_phase(line, log, seconds)
        text = log.read_text(errors="replace")
        right = FOUND in text if planted else outcome == "passed" and DONE in text
        good &= right
        verdict = "found" if planted else "no error"
        print(f"{name}: {verdict if right else f'NOT AS IT SHOULD BE: {outcome}'}, {took:.1f} s")
        if not right:
            print(text[-3000:])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
