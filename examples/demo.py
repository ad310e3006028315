"""The main job, on whatever this machine has: attention on real input.

python examples/demo.py     # CPU, a simulated kernel; with a GPU kernels, speed and the model, too

Exits with 1 when a result is not as exact as promised.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
import sys
import time

import minilm
import torch
import torch.nn.functional as F
from tqdm import tqdm

import flashcute
from flashcute import benchmarking as bm
from flashcute import heuristics, jit, ops, sim, testing
from flashcute.arguments import output_file
from flashcute.config import DTYPES, HEAD_DIMS
from flashcute.jit.progress import Progress
from flashcute.sim import tiles

# Least cosine similarity to PyTorch's attention, by the dtype the model runs in.
COSINE = {torch.float32: 0.99999, torch.float16: 0.999}
# Largest error allowed against float64 on normal inputs: a few roundings of O in each dtype.
CPU_ERROR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
GPU_ERROR = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
GPU_SEQLEN = 4096
PICTURE = pathlib.Path("build/demo.svg")


def exact_attention(q, k, v, causal):
    """Computes softmax(Q K^T / sqrt(d)) V with PyTorch in float64, without this package."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


def title(text: str) -> None:
    print(f"\n== {text}\n")


def attention_on_cpu() -> tuple[list[list], bool]:
    """Returns rows of (dtype, mask, largest error against float64, bound), and whether all pass."""
    shape = bm.Shape(b=2, seqlen_q=384, seqlen_k=384, h=8, h_k=2, d=64, causal=False)
    rows, good = [], True
    for dtype, bound in CPU_ERROR.items():
        q, k, v = bm.make_qkv(shape, dtype, "cpu")
        for causal in (False, True):
            out = flashcute.flash_attn_func(q, k, v, causal=causal)
            error = (out - exact_attention(q, k, v, causal)).abs().max().item()
            good &= error <= bound
            name = str(dtype).removeprefix("torch.")
            rows.append([name, "causal" if causal else "full", f"{error:.1e}", f"{bound:.0e}"])
    return rows, good


def operator_on_cpu() -> bool:
    """Builds the torch binding if it is missing; returns whether its operator agrees."""
    start = time.perf_counter()
    ops.load()
    seconds = time.perf_counter() - start
    shape = bm.Shape(b=2, seqlen_q=100, seqlen_k=130, h=4, h_k=2, d=40, causal=True)
    q, k, v = bm.make_qkv(shape, torch.bfloat16, "cpu")
    out, lse = ops.fwd(q, k, v, shape.d**-0.5, shape.causal)
    expected, expected_lse, _ = flashcute.flash_attn_func(
        q, k, v, causal=True, return_attn_probs=True
    )
    same = torch.equal(out, expected) and torch.equal(lse, expected_lse)
    print(f"torch.ops.flashcute.fwd, ready in {seconds:.1f} s: {'the same' if same else 'DIFFERS'}")
    return same


def build_kernels(capability: tuple[int, int]) -> None:
    """Builds the missing forward kernels without options, with a progress bar."""
    target = "".join(map(str, capability))
    specs = [
        (config, target)
        for dtype, head_dim, causal in itertools.product(DTYPES, HEAD_DIMS, (False, True))
        for config in heuristics.configs_in_use(dtype, head_dim, causal, capability)
    ]
    with tqdm(total=len(specs), desc="kernels", unit="kernel") as bar:
        results = jit.build_kernels(specs, progress=lambda _: bar.update())
    failed = [result.error for result in results if result.error]
    if failed:
        raise SystemExit("\n".join(failed))


@torch.no_grad()
def attention_on_gpu() -> tuple[list[list], bool]:
    """Returns rows of (dtype, d, mask, error, TFLOP/s of both, speed-up), and whether all pass."""
    rows, good = [], True
    for dtype, bound in GPU_ERROR.items():
        for d in (32, 64, 96, 128, 192, 256):
            for causal in (False, True):
                small = bm.Shape(2, 500, 500, 4, 2, d, causal)
                q, k, v = bm.make_qkv(small, dtype, "cuda")
                out = flashcute.flash_attn_func(q, k, v, causal=causal)
                error = (out - exact_attention(q, k, v, causal)).abs().max().item()
                good &= error <= bound

                shape = bm.sweep_shape(d, GPU_SEQLEN, causal)
                us = speed_beside_sdpa(shape, dtype)
                tflops = [f"{shape.flops / us[name] / 1e6:.0f}" for name in ("flashcute", "sdpa")]
                mask = "causal" if causal else "full"
                name = str(dtype).removeprefix("torch.")
                ratio = f"{us['sdpa'] / us['flashcute']:.2f}x"
                rows.append([name, d, mask, f"{error:.1e}", *tflops, ratio])
    return rows, good


def speed_beside_sdpa(shape: bm.Shape, dtype: torch.dtype) -> dict[str, float]:
    q, k, v = bm.make_qkv(shape, dtype, "cuda")
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    calls = {
        "flashcute": lambda: flashcute.flash_attn_func(q, k, v, causal=shape.causal),
        "sdpa": lambda: F.scaled_dot_product_attention(*heads_first, is_causal=shape.causal),
    }
    times = bm.time_interleaved(calls)
    return {name: statistics.median(values) for name, values in times.items()}


def search(folder: pathlib.Path, device: str, dtype: torch.dtype) -> tuple[dict, bool]:
    """Embeds the shipped sentences, compares them with PyTorch's attention, answers the queries."""
    ours, theirs, embedder, us = minilm.compare(folder, device, dtype)
    cosine = (ours * theirs).sum(dim=1).min().item()
    same = torch.equal(minilm.nearest(ours), minilm.nearest(theirs))
    sentences = minilm.read_sentences()
    similarity = embedder.embed(minilm.QUERIES) @ ours.T
    for query, row in zip(minilm.QUERIES, similarity, strict=True):
        best = row.argmax().item()
        print(f"  {query!r:36} -> {row[best]:.2f}  {sentences[best]}")
    print(
        f"\n{len(sentences)} sentences: least cosine to PyTorch's attention {cosine:.7f} "
        f"(promised {COSINE[dtype]}), nearest neighbours {'the same' if same else 'DIFFER'}\n"
        f"one padded batch: flashcute {us['flashcute'] / 1e3:.2f} ms, SDPA with a mask "
        f"{us['sdpa'] / 1e3:.2f} ms, {us['sdpa'] / us['flashcute']:.2f}x"
    )
    result = {"sentences": len(sentences), "least_cosine": cosine, "same_neighbours": same}
    return result | {"us": us}, same and cosine >= COSINE[dtype]


def hopper_in_the_simulator(folder: pathlib.Path, picture: pathlib.Path) -> tuple[dict, bool]:
    """Simulates on the CPU the kernel that an H100 or H200 would run on the model's first layer.

    The simulator runs the kernel's source with each of its threads and instructions. Prints the
    error, the counters and the path of the picture of the visited tiles.
    """
    text = " ".join(minilm.read_sentences())
    q, k, v = minilm.Embedder(folder, "cute_attn").inputs_of_attention(text)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    _, length, heads, d = q.shape
    problem = heuristics.FwdProblem("bf16", False, 1, length, length, heads, heads, d)
    config = heuristics.choose_fwd(problem, (9, 0))
    with Progress(2) as shown:
        options = {"progress": shown.finished, "watch": shown.running}
        sim.build_kernels([(config, "none")], **options)
        sim.build_runners(["none"], **options)
    # One CTA per tile: the picture assumes that each CTA computes exactly one tile.
    ctas = heads * -(-length // config.tile_m)
    found = sim.run_fwd(q, k, v, config, sms=ctas, trace=True)
    if found.verdict != "pass":
        print(f"{config.full_name}: {found.message}")
        return {"kernel": config.full_name, "verdict": found.verdict}, False
    report = testing.compare_forward(found.out, found.lse, q, k, v)
    print(f"{config.full_name}: {length} tokens, {heads} heads of {d}, {found.seconds:.1f} s\n")
    print(report)
    counters = {name: count for name, count in found.counters.items() if count}
    print("\n" + bm.format_table(["counter", "exact count"], list(counters.items())))
    seen = tiles.tile_map(found.trace, q, k, config)
    picture.parent.mkdir(parents=True, exist_ok=True)
    tiles.write_svg(seen, picture, f"{config.full_name}, head 0")
    print(f"\npicture of the tiles of a head: {picture}")
    result = {"kernel": config.full_name, "verdict": found.verdict, "counters": counters}
    return result | {"largest_error": report.max.error}, report.ok


WITH_A_GPU = """
A GPU would add: the forward kernels of every head dimension compiled for it, their error against
float64, their speed beside PyTorch's SDPA, and the search in float16 on it. The simulator counts
exactly, and knows no time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--out", type=output_file, help="JSON file to write")
    parser.add_argument(
        "--picture", type=output_file, default=PICTURE, help="of the simulated kernel, an .svg"
    )
    args = parser.parse_args()
    folder = args.model or minilm.model_folder()
    start = time.perf_counter()
    result: dict[str, object] = {"machine": bm.machine_info()}

    title("attention on the CPU against float64")
    rows, good = attention_on_cpu()
    result["cpu"] = rows
    print(bm.format_table(["dtype", "mask", "largest error", "allowed"], rows))

    title("the same as a torch operator")
    good &= operator_on_cpu()

    title("search with all-MiniLM-L6-v2, float32 on the CPU")
    result["model_cpu"], passed = search(folder, "cpu", torch.float32)
    good &= passed

    title("a kernel for Hopper on the model's first layer, simulated on the CPU")
    try:
        result["simulated"], passed = hopper_in_the_simulator(folder, args.picture)
        good &= passed
    except jit.BuildError as error:  # the only part that needs CUDA's headers
        print(f"left out: {error}")

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        title(f"kernels for {name}")
        build_kernels(torch.cuda.get_device_capability())
        title(f"attention on {name}, b x s = 16k, s = {GPU_SEQLEN}, against float64 and SDPA")
        rows, passed = attention_on_gpu()
        good &= passed
        header = ["dtype", "d", "mask", "error", "TFLOP/s", "SDPA TFLOP/s", "speed"]
        print(bm.format_table(header, rows))
        result["gpu"] = rows
        title(f"search with all-MiniLM-L6-v2, float16 on {name}")
        result["model_gpu"], passed = search(folder, "cuda", torch.float16)
        good &= passed
    else:
        print(WITH_A_GPU)

    print(f"\n{'passed' if good else 'FAILED'} in {time.perf_counter() - start:.0f} s")
    if args.out:
        bm.write_json(args.out, result | {"passed": good})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
