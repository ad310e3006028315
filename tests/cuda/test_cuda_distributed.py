"""Attention over two GPUs and NCCL, compared with that of one GPU; the CPU tests do this over gloo.

The tests are reported as skipped where there are fewer than two GPUs.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.tensor.experimental import _attention as experimental

from flashcute import distributed as fd
from flashcute import enabled, testing
from flashcute.bench import command, ring
from flashcute.distributed import watch
from flashcute.distributed.zigzag import Layout
from flashcute.features import VECTOR
from flashcute.heuristics import FwdProblem, choose_bwd, choose_fwd

needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, got {torch.cuda.device_count()}"
)

WORLD = 2
SCHEMES = ("ring", "allgather")
# seqlen, heads, key heads, d, causal, window, order
CASES = [
    (1024, 4, 4, 128, True, (-1, -1), "zigzag"),
    (1000, 8, 2, 64, True, (-1, -1), "zigzag"),
    (768, 4, 1, 128, False, (-1, -1), "zigzag"),
    (1024, 4, 2, 128, True, (-1, -1), "contiguous"),
    (1024, 4, 2, 64, True, (200, -1), "zigzag"),
    (1024, 4, 2, 64, False, (100, 300), "contiguous"),
    (512, 2, 2, 40, True, (-1, -1), "zigzag"),
    (512, 2, 2, 20, True, (-1, -1), "zigzag"),
]


REPEATED = (4096, *CASES[1][1:])
PACKED = [(s, 4, 2, 64, True, (-1, -1), "zigzag") for s in (512, 1024)]
MEMORY = (32768, 8, 8, 64, True, (-1, -1), "zigzag")
LOST = (1024, 2, 2, 64, True, (-1, -1), "zigzag")
# seqlen, heads, key heads, d, causal, of context_parallel
TORCH_CASES = [(1024, 4, 4, 128, True), (512, 8, 2, 64, True), (768, 4, 4, 128, False)]


def test_calls_are_watched_while_a_graph_is_captured() -> None:
    """A CUDA call of one thread can break the graph capture of another thread."""
    ends = watch.Ends()
    found = watch.Watch(dist.HashStore(), 0, 1, 3600.0, ends)
    found.interval = 1e-3
    call = found.begin("ring", 0.0)
    thread = threading.Thread(target=watch._poll, args=(weakref.ref(found),), daemon=True)
    x, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    thread.start()
    with torch.cuda.graph(graph):
        x += 1
        before = found._beats
        time.sleep(0.5)
        after = found._beats
    graph.replay()
    assert after > before and x.tolist() == [1.0] * 8
    torch.cuda._sleep(10**9)  # in clock cycles: half a second
    ends.enqueue(call.number)
    call.left = True
    assert not ends(call.number)
    torch.cuda.synchronize()
    assert ends(call.number)
    del found
    thread.join(timeout=60.0)
    assert not thread.is_alive()


def _layout(case) -> Layout:
    s, _, _, _, causal, (left, right), order = case
    return Layout((s // WORLD,), order, WORLD, (left, 0 if causal else right))


def _problems() -> list[FwdProblem]:
    """Returns the problems of all cases' calls, from which their kernels are chosen."""
    cases = [*CASES, REPEATED, *PACKED, MEMORY, LOST]
    cases += [(*case, (-1, -1), "zigzag") for case in TORCH_CASES]
    found = []
    for case in cases:
        s, h, h_k, d, causal, _, _ = case
        like = FwdProblem("bf16", causal, 1, s, s, h, h_k, -(-d // VECTOR) * VECTOR)
        for b in (1, 2):
            found += ring.problems(_layout(case), dataclasses.replace(like, b=b))
    return found


@pytest.fixture(scope="module", autouse=True)
def _built_kernels() -> None:
    """Builds only the kernels of this file's cases, in place of the other files' fixture."""
    command.build(command.configs_for(_problems(), (choose_fwd, choose_bwd)))


def _start(rank: int, store: str, timeout: float | None = None) -> torch.device:
    torch.cuda.set_device(rank)
    options = {} if timeout is None else {"timeout": datetime.timedelta(seconds=timeout)}
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=WORLD, **options
    )
    return torch.device("cuda", rank)


def _part(x: torch.Tensor, rank: int, order: str) -> torch.Tensor:
    if order == "zigzag":
        return fd.zigzag_split(x, rank, WORLD)
    return x.chunk(WORLD, 1)[rank].contiguous()


def _whole(x: torch.Tensor, order: str) -> torch.Tensor:
    x = x.contiguous()  # else empty_like() makes parts that are not contiguous either
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x)
    return fd.zigzag_merge(parts) if order == "zigzag" else torch.cat(parts, 1)


def _compute(scheme: str, case, rank: int, tensors, deterministic: bool = False):
    """Returns this rank's out, lse as (b, s, h), dq, dk and dv."""
    _, _, _, _, causal, window, order = case
    q, k, v, dout, dlse = (_part(x, rank, order) for x in tensors)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = getattr(fd, f"{scheme}_flash_attn_func")(
        q, k, v, causal=causal, window_size=window, order=order, deterministic=deterministic,
        return_lse=True,
    )  # fmt: skip
    gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse.transpose(1, 2)))
    return [out.detach(), lse.detach().transpose(1, 2), *gradients]


def _inputs(case, device):
    s, h, h_k, d = case[:4]
    generator = torch.Generator(device).manual_seed(3)
    make = functools.partial(torch.randn, generator=generator, device=device)
    q, k, v, dout = (make((2, s, n, d), dtype=torch.bfloat16) for n in (h, h_k, h_k, h))
    return q, k, v, dout, make((2, s, h))


def _check_cases(rank: int, store: str) -> None:
    device = _start(rank, store)
    for scheme in SCHEMES:
        for case in CASES:
            tensors = _inputs(case, device)
            found = _compute(scheme, case, rank, tensors)
            out, lse, dq, dk, dv = (_whole(x, case[-1]) for x in found)
            q, k, v, dout, dlse = tensors
            options = {"causal": case[4], "window_size": case[5]}
            lse, dlse = lse.transpose(1, 2), dlse.transpose(1, 2)
            testing.check_forward(out, lse, q, k, v, **options)
            gradients = {"dq": dq, "dk": dk, "dv": dv}
            testing.check_backward(gradients, q, k, v, dout, dlse=dlse, **options)
    dist.destroy_process_group()


@needs_two_gpus
def test_it_is_attention_of_the_whole_sequence(tmp_path):
    mp.spawn(_check_cases, (str(tmp_path / "store"),), WORLD)


def _check_repeats(rank: int, store: str) -> None:
    device = _start(rank, store)
    for scheme in SCHEMES:
        tensors = _inputs(REPEATED, device)
        first = _compute(scheme, REPEATED, rank, tensors, True)
        for _ in range(5):
            # Other work runs at the same time, so that transfers end at other times.
            noise = torch.randn(4096, 4096, device=device)
            (noise @ noise).sum()
            again = _compute(scheme, REPEATED, rank, tensors, True)
            assert all(map(torch.equal, first, again)), scheme
    dist.destroy_process_group()


@needs_two_gpus
def test_deterministic_gradients_repeat_bit_for_bit(tmp_path):
    mp.spawn(_check_repeats, (str(tmp_path / "store"),), WORLD)


def _check_packed(rank: int, store: str) -> None:
    """Packed sequences give the bits of each sequence alone, as they make the same calls."""
    device = _start(rank, store)
    lengths = [case[0] for case in PACKED]
    ends = [0, lengths[0] // WORLD, sum(lengths) // WORLD]
    for scheme in SCHEMES:
        alone = []
        for i, case in enumerate(PACKED):
            tensors = [x[i : i + 1] for x in _inputs(case, device)]
            alone.append((tensors, _compute(scheme, case, rank, tensors, True)))
        parts = [[_part(x, rank, "zigzag")[0] for x in tensors] for tensors, _ in alone]
        q, k, v, dout, dlse = (torch.cat(x) for x in zip(*parts, strict=True))
        for x in (q, k, v):
            x.requires_grad_()
        out, lse = getattr(fd, f"{scheme}_flash_attn_varlen_func")(
            q, k, v, ends, causal=True, deterministic=True, return_lse=True
        )
        gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse.T))
        for whole, *each in zip((out, lse.T, *gradients), *(x for _, x in alone), strict=True):
            assert torch.equal(whole, torch.cat([x[0] for x in each])), scheme
    dist.destroy_process_group()


@needs_two_gpus
def test_packed_sequences(tmp_path):
    mp.spawn(_check_packed, (str(tmp_path / "store"),), WORLD)


def _count_kernels(profile: torch.profiler.profile) -> dict[str, int]:
    """Returns how many of our kernels and of PyTorch's attention kernels ran."""
    names = [event.name for event in profile.events()]
    ours = {way: f"flash::flash_{way}_kernel_sm" for way in ("fwd", "bwd")}
    found = {way: sum(part in name for name in names) for way, part in ours.items()}
    return found | {"pytorch": sum("pytorch_flash" in name for name in names)}


def _check_context_parallel(rank: int, store: str) -> None:
    """Each step of PyTorch's ring runs our kernels, and the result keeps the tolerance rule."""
    device = _start(rank, store)
    mesh = dist.device_mesh.init_device_mesh("cuda", (WORLD,))
    # A call that falls through to PyTorch's kernels warns, and is an error here.
    warnings.filterwarnings("error", "flashcute.enable")
    for method, case in itertools.product(("allgather", "alltoall"), TORCH_CASES):
        h, h_k, causal = case[1], case[2], case[4]
        *whole, _ = _inputs(case, device)
        buffers = [x.transpose(1, 2).contiguous() for x in whole]  # q, k, v, dout
        experimental.set_rotate_method(method)
        experimental._cp_options.enable_load_balance = causal
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
            enabled(),
            experimental.context_parallel(
                mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)
            ),
        ):
            *qkv, dout = (x.clone() for x in buffers)
            order = "zigzag" if causal else "contiguous"
            assert torch.equal(qkv[0].transpose(1, 2), _part(whole[0], rank, order))
            for x in qkv:
                x.requires_grad_()
            out = F.scaled_dot_product_attention(*qkv, is_causal=causal, enable_gqa=h != h_k)
            gradients = torch.autograd.grad(out, qkv, dout)
            torch.cuda.synchronize()
        counts = _count_kernels(profile)
        assert counts == {"fwd": WORLD, "bwd": WORLD, "pytorch": 0}, (method, case, counts)
        found = (x.detach().transpose(1, 2) for x in (out, *gradients))
        out, dq, dk, dv = (_whole(x, order) for x in found)
        q, k, v, dout = whole
        testing.check_forward(out, None, q, k, v, causal=causal)
        gradients = {"dq": dq, "dk": dk, "dv": dv}
        testing.check_backward(gradients, q, k, v, dout, causal=causal)
    dist.destroy_process_group()


@needs_two_gpus
def test_context_parallel_of_pytorch_runs_on_our_kernels(tmp_path):
    mp.spawn(_check_context_parallel, (str(tmp_path / "store"),), WORLD)


def _check_memory(rank: int, store: str) -> None:
    """With 32k tokens the scores of a single head would take 2 GiB in bf16."""
    device = _start(rank, store)
    s, h, _, d = MEMORY[:4]
    parts = [torch.randn(1, s // WORLD, h, d, dtype=torch.bfloat16, device=device) for _ in "qkv"]
    one = parts[0].numel() * 4  # bytes of one tensor of a rank in float32
    for scheme in SCHEMES:
        q, k, v = (x.clone().requires_grad_() for x in parts)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        getattr(fd, f"{scheme}_flash_attn_func")(q, k, v, causal=True).sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        assert peak < 40 * one, f"{scheme}: {peak / one:.1f} float32 tensors of a rank"
    dist.destroy_process_group()


@needs_two_gpus
def test_memory_is_linear(tmp_path):
    mp.spawn(_check_memory, (str(tmp_path / "store"),), WORLD)


def _check_refusal(rank: int, store: str) -> None:
    device = _start(rank, store)
    x = torch.zeros(1, 64 * (1 + rank), 2, 64, dtype=torch.bfloat16, device=device)
    for scheme in SCHEMES:
        with pytest.raises(ValueError, match="expected the same number of tokens on a rank"):
            getattr(fd, f"{scheme}_flash_attn_func")(x, x, x, causal=True)
    dist.barrier()
    dist.destroy_process_group()


@needs_two_gpus
def test_other_shapes_are_refused(tmp_path):
    mp.spawn(_check_refusal, (str(tmp_path / "store"),), WORLD)


TIMEOUT = 20.0


def lose(rank: int, store: str, when: str) -> None:
    """Rank 1 is killed before the first call, or between forward and backward."""
    device = _start(rank, store, TIMEOUT)
    s, h, _, d = LOST[:4]
    x = torch.randn(1, s // WORLD, h, d, dtype=torch.bfloat16, device=device, requires_grad=True)
    if rank == 1 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    out = fd.ring_flash_attn_func(x, x, x, causal=True)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    out.sum().backward()
    torch.cuda.synchronize()


@needs_two_gpus
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_killed_rank_is_named(tmp_path, when):
    program = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from test_cuda_distributed import lose
        lose(int(sys.argv[1]), sys.argv[2], {when!r})
    """)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        _, said = processes[0].communicate(timeout=10 * TIMEOUT)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[1].returncode == -signal.SIGKILL
    assert processes[0].returncode not in (0, None)
    assert "lost rank 1" in said, said
